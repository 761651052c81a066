"""Decompose leakage by source, with two runs on the same prompts: with and without a borrowed context.

    T  leakage in the ordinary run
    D  leakage in the borrowed run, rows without donor keys: only this layer's own mask hides keys
    O  leakage in the borrowed run, rows with donor keys: no layer's mask hides keys

    earlier = T − D     masks of earlier layers, carried here by the residual stream
    here    = D − O     this layer's own mask
    origin  = O         position 0, when every query sees equally many keys

This is an exact additive decomposition of T. The borrowed run is the condition `context=borrowed` (edits/context.py).
Further runs that borrow up to layer K only, for several K, show which layers write position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from posleak.axes import LEFT, PARTS, SCALING
from posleak.defaults import TRACED
from posleak.errors import RunError
from posleak.inputs import Inputs
from posleak.leakage import Estimate, Jackknife, component
from posleak.leakage.summary import Decomposition, Products
from posleak.metrics import parse_metrics
from posleak.models import AnyModel
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.conditions import Conditions, condition_folder
from posleak.runs.folder import RECORD_FILE
from posleak.runs.record import is_finished
from posleak.runs.run import Run, describe_run
from posleak.show.numbers import estimate
from posleak.show.words import compact_html
from posleak.signatures import checked
from posleak.typed import plain

if TYPE_CHECKING:
    from posleak.show.plots import Picture

BORROWED = "context=borrowed"
"""The edit of the second run."""

SOURCES = ("earlier", "here", "origin")
"""Sources of the leakage of a layer; their sum is its total."""


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
    def of(cls, runs: dict[int, Run]) -> Ladder:
        upto = tuple(sorted(runs))
        owns = [runs[k].products["all"].own for k in upto]
        sums = np.stack([np.nanmean(own[LEFT if LEFT in own else "total"], axis=1) for own in owns])  # [K, L, sums]
        prompts = Jackknife(runs[upto[0]].prompts)
        return cls(upto, prompts.inner(sums).estimate, prompts.inner(sums[:, 1:].mean(1)).estimate)


@dataclass(frozen=True, repr=False)
class Trace:
    """A trace: `ordinary` and `borrowed` are runs on the same prompts; `steps[K]` borrows up to layer K only."""

    ordinary: Run
    borrowed: Run
    steps: dict[int, Run] = field(default_factory=dict)

    @classmethod
    def of(cls, conditions: Conditions, upto: Iterable[int] = ()) -> Trace:
        """Measure the runs under these conditions, or load them; `upto`: layers K of further runs."""
        ordinary, borrowed = conditions.run(), conditions.run(BORROWED)
        return cls(ordinary, borrowed, {k: conditions.run(_step(k)) for k in upto})

    @classmethod
    def load(cls, path: str | Path, ordinary: Run | None = None) -> Trace | None:
        """Load what `posleak trace` or `posleak claims` wrote into a folder; None if it has no borrowed run.

        ordinary: the folder's ordinary run, if it is loaded already.
        """
        folder = Path(path)
        second = condition_folder(folder, BORROWED)
        if not (second / RECORD_FILE).is_file():
            return None
        if not is_finished(second):
            raise RunError("the run with a borrowed context is not finished", where=str(second),
                           remedy="run the same `posleak trace` or `posleak claims` again to resume it")  # fmt: skip
        ordinary, borrowed = ordinary or Run.load(folder), Run.load(second)
        if not ordinary.record.inputs.same_tokens(borrowed.record.inputs):
            raise RunError("the two runs of the trace read different prompts", where=str(folder),
                           remedy="run `posleak trace` again with --fresh")  # fmt: skip
        steps = {k: condition_folder(folder, _step(k)) for k in ordinary.record.calibration.numbers}
        return cls(ordinary, borrowed, {k: Run.load(at) for k, at in steps.items() if is_finished(at)})

    def plot(self) -> Picture:
        """Plot powers by layer with their intervals: sources above, parts of the ordinary run below."""
        from posleak.show.plots import Picture, both, drawn

        run, read = self.ordinary, self.ordinary.summary.layers["all"]
        parts = [name for name in (*PARTS, SCALING) if name in read.share]
        title = f"{run.name}, n = {run.prompts}, {run.record.spec.length} tokens"
        above, below = (self.layers["all"].power, SOURCES), (read.power, parts)
        return Picture(drawn(lambda figure: both(figure, above, below, run.summary.places, title)), title)

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {estimate(self.model['all'].share[name], 'share')}" for name in SOURCES)
        return f"Trace({describe_run(self.ordinary)}; {shares})"

    def _repr_html_(self) -> str:
        """Return a compact table of shares with intervals, for notebooks."""
        return compact_html(self.ordinary.name, self.ordinary.record.facts, self.model)

    @cached_property
    def components(self) -> dict[str, xr.DataArray]:
        """Return total, earlier, here, origin and direct (D) at every pair: (prompt, layer, head, query, offset)."""
        total, direct = component(self.ordinary.data, "total"), component(self.borrowed.data, "total")
        left = component(self.borrowed.data, LEFT)
        return {"total": total, "earlier": total - direct, "here": direct - left, "origin": left, "direct": direct}

    @cached_property
    def remainder(self) -> float:
        """Return the largest |earlier + here + origin − total|, or the largest remainder of the two runs, in nats."""
        x = self.components
        gap = float(np.nanmax(np.abs((x["earlier"] + x["here"] + x["origin"] - x["total"]).values)))
        return max(gap, self.ordinary.remainder, self.borrowed.remainder)

    @cached_property
    def products(self) -> dict[str, Products]:
        """Return the products of prompts, for early and for all queries."""
        return Products.by_queries(self.components, SOURCES)

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
            queries: Decomposition.of(products.averaged(axes) if axes else products, Jackknife(self.ordinary.prompts))
            for queries, products in self.products.items()
        }

    @cached_property
    def attention(self) -> dict[str, Estimate]:
        """Return the mean attention of reference queries to the origin by layer [L] in both runs, without donor
        keys."""
        m, prompts = self.ordinary.record.plan.origin, Jackknife(self.ordinary.prompts)
        return {
            name: prompts.mean(np.nanmean(run.data["profile"].values[..., :m].sum(-1), axis=2)).estimate
            for name, run in (("ordinary", self.ordinary), ("borrowed", self.borrowed))
        }

    @cached_property
    def ladder(self) -> Ladder | None:
        """Return the leakage that remains by K; None if the trace has no `steps`."""
        if not self.steps:
            return None
        last = max(self.ordinary.record.calibration.numbers)
        return Ladder.of({-1: self.ordinary, **self.steps, last: self.borrowed})

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak trace --json` (docs/json.md)."""
        run, record, ladder = self.ordinary, self.ordinary.record, self.ladder
        fields: dict[str, Any] = plain(
            {
                "model": run.name, "identity": record.identity, "positions": record.positions,
                "inputs": record.inputs, "length": record.spec.length,
                "prompts": record.spec.prompts, "seed": record.spec.seed, "definitions": record.definitions_version,
                "origin": record.plan.origin, "remainder": self.remainder, "calibration": record.calibration,
                "layers": [self._layer(layer) for layer in range(run.data.sizes["layer"])],
                "early": _numbers(self.model["early"]), "all": _numbers(self.model["all"]),
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
        numbers = self.layers["all"]
        powers = {name: power[layer] for name, power in numbers.power.items()} | {LEFT: numbers.power["origin"][layer]}
        shares = {name: share[layer] for name, share in numbers.share.items()}
        return {
            "layer": self.ordinary.summary.layer_ids[layer], "call": layer,
            **{name: power.value for name, power in powers.items()},
            "share": {name: share.value for name, share in shares.items()},
            "ci": {name: [power.low, power.high] for name, power in powers.items()}
            | {"share": {name: [share.low, share.high] for name, share in shares.items()}},
        }  # fmt: skip


def _numbers(numbers: Decomposition) -> dict[str, Any]:
    return {"power": numbers.power | {LEFT: numbers.power["origin"]}, "share": numbers.share}


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
    metrics: str | Iterable[str] = (),
    out: str | Path | None = None,
    root: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Trace:
    """Decompose a subject's leakage by source (here, earlier, origin), with a second run over a borrowed context.

    subject     a Subject, a transformers model, or anything that `load` accepts
    inputs      source of the prompts, or your own prompts, as in `measure`
    length      tokens per prompt (default 256); your own prompts are truncated to `length`, as in `measure`
    prompts     number of prompts to use (default 16, or all of your own prompts)
    seed        random seed for the prompts
    bos         token at position 0, as in `measure`
    origin      number of leading tokens treated as the origin
    by_layer    also borrow the context up to layer K only, for K = 0, 1, 2, 4, …; one more run for each K
    metrics     metrics of other papers in the ordinary run, as in `measure`: `trace.ordinary.metrics`
    out         folder for the ordinary run, with the other runs below it; finished runs in it are loaded
    root        parent of the folder if `out` is not given, as in `measure`
    fresh       discard results in the folder and measure again
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.trace("smollm2-135m").model["all"].share["here"]`
    """
    conditions = Conditions.of(
        subject, inputs, length=length, prompts=prompts, default_length=TRACED, seed=seed, bos=bos, origin=origin,
        metrics=parse_metrics(metrics), out=out, root=root, fresh=fresh, max_memory=max_memory, progress=progress,
    )  # fmt: skip
    return traced(conditions, by_layer=by_layer)


def traced(conditions: Conditions, *, by_layer: bool = False) -> Trace:
    """Return the trace; raise UnsupportedError before measuring if the model does not support a borrowed context."""
    with conditions.writing():
        if conditions.folder is None or not is_finished(conditions.folder):
            conditions.require_supported(BORROWED)
        layer_ids = conditions.run().record.calibration.numbers
        return Trace.of(conditions, rungs(layer_ids) if by_layer else ())
