"""Where position comes from, over the layers: two runs on the same prompts, with and without a borrowed context.

    T  leakage in the ordinary pass
    D  leakage in the borrowed pass, rows without the lent keys: earlier layers could not tell, this one can
    O  leakage in the borrowed pass, rows with the lent keys: no layer can tell by counting

    earlier = T − D     masks of earlier layers, carried here by the residual stream
    here    = D − O     this layer's own mask
    origin  = O         what position 0 does when nothing is hidden

They add up to T exactly. Both runs are ordinary ones, in one folder: the borrowed pass is the condition
`context=borrowed` (edits/context.py). Lending up to layer K only, for several K, says which layers write position.
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
from posleak.errors import RunError
from posleak.inputs import Inputs
from posleak.leakage import Estimate, Jackknife, component
from posleak.leakage.summary import Decomposition, Products
from posleak.metrics.names import parse_metrics
from posleak.models import AnyModel
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.conditions import Conditions, condition_folder
from posleak.runs.folder import RECORD_FILE
from posleak.runs.loop import placements_of
from posleak.runs.record import is_finished
from posleak.runs.request import resolve_request
from posleak.runs.run import Run, said
from posleak.runs.spec import PROMPTS, TRACED
from posleak.show.notebook import compact_html
from posleak.show.numbers import estimate
from posleak.signatures import checked
from posleak.typed import plain

if TYPE_CHECKING:
    from posleak.show.plots import Picture

BORROWED = "context=borrowed"
"""The edit of the second pass."""

SOURCES = ("earlier", "here", "origin")
"""What the leakage of a layer comes from; they add up to it."""


@dataclass(frozen=True)
class Ladder:
    """Contexts lent up to layer K, for several K: leakage that is left in every layer.

    upto   K of each row, −1 for no layer;  left: powers [K, L] in nats², and their mean over the later layers [K]
    """

    upto: tuple[int, ...]
    left: Estimate
    mean: Estimate

    @classmethod
    def of(cls, runs: dict[int, Run]) -> Ladder:
        upto = tuple(sorted(runs))
        sums = np.stack([np.nanmean(_left(runs[k]), axis=1) for k in upto])  # [K, L, sums]
        prompts = Jackknife(runs[upto[0]].prompts)
        return cls(upto, prompts.inner(sums).estimate, prompts.inner(sums[:, 1:].mean(1)).estimate)


def _left(run: Run) -> Any:
    own = run.products["all"].own
    return own[LEFT] if LEFT in own else own["total"]


@dataclass(frozen=True, repr=False)
class Trace:
    """Where position comes from: `ordinary` and `borrowed` are runs on the same prompts, `steps` those by layer."""

    ordinary: Run
    borrowed: Run
    steps: dict[int, Run] = field(default_factory=dict)

    @classmethod
    def of(cls, conditions: Conditions, upto: Iterable[int] = ()) -> Trace:
        """Measured under these conditions, or read back; `upto`: layers K up to which a context is lent besides."""
        ordinary, borrowed = conditions.run(), conditions.run(BORROWED)
        return cls(ordinary, borrowed, {k: conditions.run(_step(k)) for k in upto})

    @classmethod
    def load(cls, path: str | Path, ordinary: Run | None = None) -> Trace | None:
        """What `posleak trace` or `posleak claims` wrote into a folder; None if it has no borrowed pass.

        ordinary: the folder's ordinary run, if it is loaded already.
        """
        folder = Path(path)
        second = condition_folder(folder, BORROWED)
        if not (second / RECORD_FILE).is_file():
            return None
        if not is_finished(second):
            raise RunError("the pass over a borrowed context is not finished", where=str(second),
                           remedy="start the same `posleak trace` or `posleak claims` again: it resumes")  # fmt: skip
        ordinary, borrowed = ordinary or Run.load(folder), Run.load(second)
        if not ordinary.record.inputs.same_tokens(borrowed.record.inputs):
            raise RunError("the two passes of the trace read different prompts", where=str(folder),
                           remedy="start `posleak trace` again with --fresh")  # fmt: skip
        kept = {k: condition_folder(folder, _step(k)) for k in ordinary.record.calibration.numbers}
        return cls(ordinary, borrowed, {k: Run.load(at) for k, at in kept.items() if is_finished(at)})

    def plot(self) -> Picture:
        """Powers by layer with their intervals: above where position comes from, below where it is read."""
        from posleak.show.plots import Picture, both, drawn

        run, read = self.ordinary, self.ordinary.summary.layers["all"]
        parts = [name for name in (*PARTS, SCALING) if name in read.share]
        title = f"{run.name}, n = {run.prompts}, {run.record.spec.length} tokens"
        above, below = (self.layers["all"].power, SOURCES), (read.power, parts)
        return Picture(drawn(lambda figure: both(figure, above, below, run.summary.places, title)), title)

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {estimate(self.model['all'].share[name], 'share')}" for name in SOURCES)
        return f"Trace({said(self.ordinary)}; {shares})"

    def _repr_html_(self) -> str:
        """In a notebook: shares with intervals, compactly."""
        return compact_html(self.ordinary.name, self.ordinary.record.facts, self.model)

    @cached_property
    def components(self) -> dict[str, xr.DataArray]:
        """total, earlier, here, origin, direct (D) at every pair and prompt: (prompt, layer, head, query, offset)."""
        total, direct = component(self.ordinary.data, "total"), component(self.borrowed.data, "total")
        left = component(self.borrowed.data, LEFT)
        return {"total": total, "earlier": total - direct, "here": direct - left, "origin": left, "direct": direct}

    @cached_property
    def remainder(self) -> float:
        """The largest |earlier + here + origin − total|, and of the two runs' own parts, in nats."""
        found = self.components
        gap = float(np.nanmax(np.abs((found["earlier"] + found["here"] + found["origin"] - found["total"]).values)))
        return max(gap, self.ordinary.remainder, self.borrowed.remainder)

    @cached_property
    def products(self) -> dict[str, Products]:
        """Products of prompts, of early and of all queries."""
        return Products.by_queries(self.components, SOURCES)

    @cached_property
    def layers(self) -> dict[str, Decomposition]:
        """Powers and shares by layer [L], means over heads; of early and of all queries."""
        return {
            queries: Decomposition.of(found.averaged((1,)), self._prompts) for queries, found in self.products.items()
        }

    @cached_property
    def heads(self) -> dict[str, Decomposition]:
        """The same by layer and head [L, H]."""
        return {queries: Decomposition.of(found, self._prompts) for queries, found in self.products.items()}

    @cached_property
    def model(self) -> dict[str, Decomposition]:
        """The same of the whole model."""
        return {
            queries: Decomposition.of(found.averaged((0, 1)), self._prompts) for queries, found in self.products.items()
        }

    @cached_property
    def attention(self) -> dict[str, Estimate]:
        """Mean attention of the reference queries to the origin, by layer [L], in both passes, without lent keys."""
        m = self.ordinary.record.plan.origin
        return {
            name: self._prompts.mean(np.nanmean(run.data["profile"].values[..., :m].sum(-1), axis=2)).estimate
            for name, run in (("ordinary", self.ordinary), ("borrowed", self.borrowed))
        }

    @cached_property
    def ladder(self) -> Ladder | None:
        """None if nothing was lent to some layers only."""
        if not self.steps:
            return None
        last = max(self.ordinary.record.calibration.numbers)
        return Ladder.of({-1: self.ordinary, **self.steps, last: self.borrowed})

    @property
    def _prompts(self) -> Jackknife:
        return Jackknife(self.ordinary.prompts)

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak trace --json` (docs/json.md)."""
        run, record, ladder = self.ordinary, self.ordinary.record, self.ladder
        found: dict[str, Any] = plain(
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
        return found

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
    """The edit that lends a context up to this layer."""
    return f"{BORROWED}@0-{upto}" if upto else f"{BORROWED}@0"


def rungs(numbers: Sequence[int]) -> list[int]:
    """The first, second, third, fifth, ninth … layer with attention, but not the last: that is the borrowed pass."""
    layers = sorted(set(numbers))
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
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Trace:
    """Where a subject's sense of position comes from: here, earlier and origin, by a pass over a borrowed context.

    subject     a Subject, a model of transformers, or what `load` takes
    inputs      what it reads, as in `measure`: a source, or prompts that you have
    length      tokens per prompt: 256; prompts that you have are cut to it, or must be equally long
    prompts     how many: 16; of prompts that you have the first ones, or all
    seed        of the tokens
    bos         position 0, as in `measure`
    origin      width of the origin: how many first tokens count as it
    by_layer    lend up to layer K, too, for K = 0, 1, 2, 4, …: one more pass for each
    metrics     what others measure, in the ordinary pass, as in `measure`: `trace.ordinary.metrics`
    out         a folder: the ordinary run, and the others below it; what is there already is not measured again
    fresh       measure again what is in `out`
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    found = resolve_request(
        subject, inputs, length=length, prompts=prompts, default=(TRACED, PROMPTS), seed=seed, bos=bos, origin=origin,
        metrics=parse_metrics(metrics),
    )  # fmt: skip
    folder, say = None if out is None else Path(out), progress or (lambda what: None)
    return traced(
        Conditions(found.subject, found.spec, folder, fresh, max_memory, say, found.given), by_layer=by_layer
    )  # fmt: skip


def traced(conditions: Conditions, *, by_layer: bool = False) -> Trace:
    """The trace under these conditions; a model for which it is not defined is refused before anything is measured."""
    with conditions.writing():
        if conditions.folder is None or not is_finished(conditions.folder):
            placements_of(conditions.subject.model, conditions.tokens.after_donors().batch([0]), conditions.plan)
        numbers = conditions.run().record.calibration.numbers
        return Trace.of(conditions, rungs(numbers) if by_layer else ())
