"""Decompose leakage by source, from the prompt alone and from three branches of it after a donor document.

    T_fresh   leakage of the prompt alone
    T, T'     branch A, in which no layer lends keys: rows without and with the donor's keys
    D, O      branch B, in which all layers lend keys: rows without and with them
    Z         branch C, in which position 0 also stands at one distance from every query: rows with them

    state   = T_fresh − T                     what a state tells that is carried outside attention; else 0 to rounding
    earlier = ½ [(T − D) + (T' − O)]          masks of earlier layers, carried here by the residual stream
    here    = ½ [(D − O) + (T − T')]          this layer's own mask
    origin  = O − Z                           position 0: what its distance tells
    left    = Z                               what remains: a check, expected to be 0 within its interval
    order   = (T − D) − (T' − O)              difference between the two orders of removing masks; not part of the sum

The first five are an exact additive decomposition of T_fresh. The branches are the condition `context=branches`
(edits/context.py). Further runs that borrow keys up to layer K only, for several K, show which layers write position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from posleak.axes import LEFT, PARTS, SCALING
from posleak.defaults import DONORS, TRACED
from posleak.edits import parse_edits
from posleak.edits.context import BORROWED, Branches, branches_of
from posleak.errors import InputError, RunError
from posleak.inputs import Inputs
from posleak.leakage import Estimate, Jackknife, component
from posleak.leakage.summary import LEADING, ORDER, Decomposition, Products
from posleak.metrics import parse_metrics
from posleak.models import AnyModel, exclusive
from posleak.probe import Edit
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.rounding import AGREE
from posleak.runs.conditions import Conditions, condition_folder
from posleak.runs.folder import RECORD_FILE
from posleak.runs.record import is_finished
from posleak.runs.run import Run, describe_run, flat_numbers
from posleak.show.notebook import compact_html
from posleak.show.numbers import estimate, excludes_zero
from posleak.signatures import checked
from posleak.typed import plain

if TYPE_CHECKING:
    from posleak.show.plots import Picture

CAUSES = ("state", "earlier", "here", "origin")
"""Sources of the leakage of a layer. With what is `left`, their sum is its total."""

SOURCES = (*CAUSES, LEFT)
"""All parts of the decomposition by source."""


@dataclass(frozen=True)
class Ladder:
    """Leakage that remains if the context is borrowed up to layer K only, for several K.

    upto   K of each row, −1 for no layer
    left   power that remains in every layer [K, L] in nats²;  mean: its mean over all layers but the first [K]
    """

    upto: tuple[int, ...]
    left: Estimate
    mean: Estimate

    @classmethod
    def of(cls, ordinary: Run, runs: dict[int, Run]) -> Ladder:
        runs = {-1: ordinary, **runs}
        upto = tuple(sorted(runs))
        owns = [runs[k].weighted_by(ordinary)["all"].own for k in upto]
        sums = np.stack([np.nanmean(own[LEFT if LEFT in own else "total"], axis=1) for own in owns])  # [K, L, sums]
        prompts = Jackknife(runs[upto[0]].prompts)
        return cls(upto, prompts.inner(sums).estimate, prompts.inner(sums[:, 1:].mean(1)).estimate)


@dataclass(frozen=True, repr=False)
class Trace:
    """A trace: `ordinary` and `branches` are runs on the same prompts; `steps[K]` borrows up to layer K only."""

    ordinary: Run
    branches: Run
    steps: dict[int, Run] = field(default_factory=dict)

    @classmethod
    def of(cls, conditions: Conditions, upto: Iterable[int] = (), *, long_donor: bool = False) -> Trace:
        """Measure the runs under these conditions, or load them; `upto`: layers K of further runs."""
        ordinary = conditions.run()
        branches = conditions.run(branches_edit(conditions, long_donor=long_donor))
        return cls(ordinary, branches, {k: conditions.run(_step(k)) for k in upto})

    @classmethod
    def load(cls, path: str | Path, ordinary: Run | None = None) -> Trace | None:
        """Load what `posleak trace` or `posleak claims` wrote into a folder; None if it has no branches.

        ordinary: the folder's ordinary run, if it is loaded already.
        """
        folder = Path(path)
        stored = (
            condition_folder(folder, Branches(apart, long).text) for long in (False, True) for apart in (False, True)
        )
        second = next((at for at in stored if (at / RECORD_FILE).is_file()), None)
        if second is None:
            return None
        if not is_finished(second):
            raise RunError("the run of the branches is not finished", where=str(second),
                           remedy="run the same command again to resume it")  # fmt: skip
        ordinary, branches = ordinary or Run.load(folder), Run.load(second)
        if not ordinary.record.inputs.same_tokens(branches.record.inputs):
            raise RunError("the two runs of the trace read different prompts", where=str(folder),
                           remedy="run the same command again with --fresh")  # fmt: skip
        steps = {k: condition_folder(folder, _step(k)) for k in ordinary.record.calibration.numbers}
        return cls(ordinary, branches, {k: Run.load(at) for k, at in steps.items() if is_finished(at)})

    def plot(self) -> Picture:
        """Plot powers by layer with their intervals: sources above, parts of the ordinary run below."""
        from posleak.show.plots import Picture, both, drawn

        run, read = self.ordinary, self.ordinary.summary.layers["all"]
        parts = [name for name in (*PARTS, SCALING) if name in read.share]
        title = f"{run.name}, n = {run.prompts}, {run.record.spec.length} tokens"
        above, below = (self.layers["all"].power, (*self.sources, LEFT)), (read.power, parts)
        return Picture(drawn(lambda figure: both(figure, above, below, run.summary.places, title)), title)

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {estimate(self.model['all'].share[name], 'share')}" for name in self.sources)
        return f"Trace({describe_run(self.ordinary)}; {shares})"

    def _repr_html_(self) -> str:
        """Return a compact table of shares with intervals, for notebooks."""
        return compact_html(self.ordinary.name, self.ordinary.record.facts, self.model, self.sources)

    @cached_property
    def components(self) -> dict[str, xr.DataArray]:
        """Return total, the parts, order and direct (D) at every pair: (prompt, layer, head, query, offset)."""
        data, fresh = self.branches.data, component(self.ordinary.data, "total")
        own, direct, lent = component(data, "total_a"), component(data, "total"), component(data, LEFT)
        own_lent, left = own - data["lent_a"], component(data, "total_c")
        return {
            "total": fresh, "state": fresh - own, "earlier": ((own - direct) + (own_lent - lent)) / 2,
            "here": ((direct - lent) + (own - own_lent)) / 2, "origin": lent - left, LEFT: left,
            ORDER: (own - direct) - (own_lent - lent), "direct": direct,
        }  # fmt: skip

    @cached_property
    def remainder(self) -> float:
        """Return the largest |sum of the parts − total|, or the largest remainder of the two runs, in nats."""
        x = self.components
        gap = float(np.nanmax(np.abs((sum(x[name] for name in SOURCES) - x["total"]).values)))
        return max(gap, self.ordinary.remainder, self.branches.remainder)

    @cached_property
    def products(self) -> dict[str, Products]:
        """Return the products of prompts, for early and for all queries, weighted by the ordinary run's attention."""
        return Products.by_queries(self.components, self.ordinary.data["weight"], (*SOURCES, ORDER))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The sources that this model has: `state` only if it exceeds the rounding of shifted positions."""
        state, total = (float(np.nanmean(self.components[name].values ** 2)) for name in ("state", "total"))
        rounding = max(AGREE.of(self.ordinary.record.identity.dtype), AGREE.float32)
        return CAUSES if state > rounding**2 * total else CAUSES[1:]

    @property
    def checks(self) -> tuple[str, str]:
        """Return a sentence about `order` and one about `left`, for all queries of the whole model."""
        numbers = self.model["all"]
        order, left = numbers.ratios[ORDER], numbers.share[LEFT]
        if math.isnan(order.value):
            undefined = "the total leakage is not significantly above 0"
            return f"the difference between the two orders has no share: {undefined}", f"nothing is left: {undefined}"
        differ = f"the two orders of removing masks differ by {estimate(order, 'share')} of the leakage"
        remains = f"{estimate(left, 'share')} of the leakage"
        return (
            differ if excludes_zero(order) else f"{differ}, which is not significant",
            f"{remains} is left without a source" if excludes_zero(left) else f"nothing significant is left: {remains}",
        )

    @cached_property
    def layers(self) -> dict[str, Decomposition]:
        """Return powers and shares by layer [L], means over heads, for early and for all queries."""
        return self._averaged((1,))

    @cached_property
    def heads(self) -> dict[str, Decomposition]:
        """Return powers and shares by layer and head [L, H], for early and for all queries."""
        return self._averaged(())

    @cached_property
    def model(self) -> dict[str, Decomposition]:
        """Return powers and shares of the whole model, for early and for all queries."""
        return self._averaged((0, 1))

    def _averaged(self, axes: tuple[int, ...]) -> dict[str, Decomposition]:
        return {
            queries: Decomposition.of(products.averaged(axes), Jackknife(self.ordinary.prompts))
            for queries, products in self.products.items()
        }

    @cached_property
    def attention(self) -> dict[str, Estimate]:
        """Return the mean attention of references to the origin by layer [L], alone and in branch B, without donor
        keys."""
        m, prompts = self.ordinary.record.plan.origin, Jackknife(self.ordinary.prompts)
        return {
            name: prompts.mean(np.nanmean(run.data["profile"].values[..., :m].sum(-1), axis=2)).estimate
            for name, run in (("ordinary", self.ordinary), ("borrowed", self.branches))
        }

    @cached_property
    def ladder(self) -> Ladder | None:
        """Return the leakage that remains by K; None if the trace has no `steps`."""
        if not self.steps:
            return None
        last = max(self.ordinary.record.calibration.numbers)
        return Ladder.of(self.ordinary, {**self.steps, last: self.branches})

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak trace --json` (docs/json.md)."""
        run, record, ladder = self.ordinary, self.ordinary.record, self.ladder
        fields: dict[str, Any] = plain(
            {
                "model": run.name, "identity": record.identity, "positions": record.positions,
                "inputs": record.inputs, "length": record.spec.length,
                "prompts": record.spec.prompts, "seed": record.spec.seed, "norm": LEADING,
                "edits": record.spec.edit_texts, "definitions": record.definitions_version,
                "donor": self.branches.record.inputs.context,
                "origin": record.plan.origin, "remainder": self.remainder, "calibration": record.calibration,
                "layers": [self._layer(layer) for layer in range(run.data.sizes["layer"])],
                "early": self.model["early"], "all": self.model["all"], "checks": self.checks,
                "attention_to_origin": self.attention,
                "metrics": None if run.metrics is None else run.metrics.as_dict(),
                "by_layer": None if ladder is None else {
                    "lent_up_to": ladder.upto, "left": ladder.left, "later_layers": ladder.mean,
                },
                "units": {"power": "nats²", "share": "1", "remainder": "nats", "attention_to_origin": "1"},
                "warnings": record.warnings, "run": None if run.path is None else str(run.path),
            }
        )  # fmt: skip
        return fields

    def _layer(self, layer: int) -> dict[str, Any]:
        return {
            "layer": self.ordinary.summary.layer_ids[layer], "call": layer,
            **flat_numbers(self.layers["all"][layer]),
        }  # fmt: skip


def _step(upto: int) -> str:
    """Return the edit that borrows a context up to this layer."""
    return f"{BORROWED}@0-{upto}" if upto else f"{BORROWED}@0"


def rungs(layer_ids: Sequence[int]) -> list[int]:
    """Return the 1st, 2nd, 3rd, 5th, 9th, … layer with attention, except the last, which is the borrowed run."""
    layers = sorted(set(layer_ids))
    return [layers[k] for k in (0, *(2**power for power in range(16))) if k < len(layers) - 1]


@checked
def trace(
    subject: AnyModel,
    inputs: Inputs = "random",
    *,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    origin: int = DEFAULT_ORIGIN,
    by_layer: bool = False,
    donor: str = "plain",
    edits: Iterable[str | Edit] | str | Edit = (),
    metrics: str | Iterable[str] = (),
    out: str | Path | None = None,
    root: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Trace:
    """Decompose a subject's leakage by source (earlier, here, origin), with a second run over three branches.

    subject     a Subject, a transformers model, or anything that `load` accepts
    inputs      source of the prompts, or your own prompts, as in `measure`
    length      tokens per prompt (default 256); your own prompts are truncated to `length`, as in `measure`
    prompts     number of prompts to use (default 16, or all of your own prompts)
    seed        random seed for the prompts
    bos         token at position 0, as in `measure`
    origin      number of leading tokens treated as the origin
    by_layer    also borrow the context up to layer K only, for K = 0, 1, 2, 4, …; one more run for each K
    donor       `plain`: a document of length + 64 tokens; `long`: of 3 × length, whose queries see `length` keys each
    edits       edits of all runs, as in `measure`; those that `context` cannot be combined with are rejected
    metrics     metrics of other papers in the ordinary run, as in `measure`: `trace.ordinary.metrics`
    out         folder for the ordinary run, with the other runs below it; finished runs in it are loaded
    root        parent of the folder if `out` is not given, as in `measure`
    fresh       discard results in the folder and measure again
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.trace("smollm2-135m").model["all"].share["here"]`
    """
    if donor not in DONORS:
        raise InputError("unknown donor", where="--donor", got=donor, expected=" or ".join(DONORS))
    parse_edits([*(named := parse_edits(edits)), BORROWED])  # raises before the model is loaded
    conditions = Conditions.of(
        subject, inputs, length=length, prompts=prompts, default_length=TRACED, seed=seed, bos=bos, origin=origin,
        edits=named, metrics=parse_metrics(metrics), out=out, root=root, fresh=fresh, max_memory=max_memory,
        progress=progress,
    )  # fmt: skip
    with conditions.writing():
        return traced(conditions, by_layer=by_layer, long_donor=donor == "long")


def traced(conditions: Conditions, *, by_layer: bool = False, long_donor: bool = False) -> Trace:
    """Return the trace; raise UnsupportedError before measuring if the model does not support a borrowed context.

    Call it inside `conditions.writing()`.
    """
    if conditions.folder is None or not is_finished(conditions.folder):
        conditions.require_supported(BORROWED)
    layer_ids = conditions.run().record.calibration.numbers
    return Trace.of(conditions, rungs(layer_ids) if by_layer else (), long_donor=long_donor)


def branches_edit(conditions: Conditions, *, long_donor: bool = False) -> str:
    """Return the edit under which a trace measures the branches: in one sequence where the model allows it."""
    for edit in (Branches(False, long_donor), Branches(True, long_donor)):
        if conditions.folder is not None and is_finished(condition_folder(conditions.folder, edit.text)):
            return edit.text
    subject = conditions.baseline.subject
    with exclusive(subject.model):
        edit = branches_of(subject.model, long=long_donor)
    biased = any(bias is not None for bias in conditions.run().record.calibration.biases)
    return Branches(edit.apart or biased, long_donor).text
