"""What others measure, as the page shows it: the table, the reference frames, curves by depth, and the agreement of
every metric with the leakage and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.axes import LAYER, PROMPT
from posleak.leakage import MIN_PROMPTS, Estimate, Jackknife
from posleak.metrics.agreement import LEAKAGE, Agreement, Family, MetricAlignment, agreement, alignments
from posleak.metrics.catalogue import BY_ID, Level, Looks
from posleak.metrics.table import FrameVerdict, MetricRow, Metrics
from posleak.runs.run import Run

Values = NDArray[np.float64]

TWICE = ("sink_rate_repeated",)
"""Metrics that are made of another one's array: heads are ranked by it once."""

STATES = ("largest_times", "spectrum_entropy", "probe_error")
"""Metrics of depths that are ranked over layers: each layer with the states that it reads."""

OVER = ("heads", "layers")


@dataclass(frozen=True)
class RelatedMetrics:
    """The metrics of one run. `agreements`: over heads and over layers; one that cannot be made is not there."""

    rows: tuple[MetricRow, ...]
    frame: FrameVerdict | None
    frames: tuple[FrameVerdict, ...]
    depths: dict[str, Estimate]
    agreements: dict[str, Agreement]

    @classmethod
    def of(cls, run: Run, trace: Trace | None = None) -> RelatedMetrics | None:
        """None if the run was measured without metrics."""
        found = run.metrics
        if found is None:
            return None
        return cls(found.rows, found.frame, found.frames, found.depths, agreements(run, trace))

    @property
    def by_looks(self) -> list[tuple[str, list[MetricRow]]]:
        """The table in groups, by what metrics look at."""
        return [
            (looks.value, rows) for looks in Looks if (rows := [row for row in self.rows if row.metric.looks is looks])
        ]

    @property
    def families(self) -> list[tuple[str, list[MetricAlignment]]]:
        """Every metric that was ranked, by what it sees; the strongest agreement first."""
        every = [each for found in self.agreements.values() for each in alignments(found)]
        every.sort(key=lambda each: -abs(each.most.rho) if each.most is not None else 0.0)
        return [(family.value, [each for each in every if each.family is family]) for family in Family]


def agreements(run: Run, trace: Trace | None = None) -> dict[str, Agreement]:
    """How metrics rank heads, and layers, beside the leakage and its parts; with a trace also beside its sources.

    Metrics are of every second prompt, the leakage is of the others, and both the other way round; nothing is found
    with fewer than four prompts.

    run         measured with metrics; without, nothing is found
    trace       where its leakage comes from, or None
    """
    if run.metrics is None or run.prompts < MIN_PROMPTS:
        return {}
    halves = [_every_second(run, trace, first) for first in (0, 1)]
    found = {}
    for over in OVER:
        metrics, leakage = ([half[kind][over] for half in halves] for kind in ("metrics", "leakage"))
        there = [_defined(each, powers["total"]) for each, powers in zip(metrics, leakage, strict=True)]
        both = [name for name in there[0] if name in there[1]]
        if both:
            found[over] = agreement([{name: half[name] for name in both} for half in metrics], leakage, over)
    return found


def _every_second(run: Run, trace: Trace | None, first: int) -> dict[str, dict[str, dict[str, Values]]]:
    """Metrics and powers, by heads and by layers, of every second prompt."""
    some = Run(run.record, run.data.isel({PROMPT: slice(first, None, 2)}))
    prompts = Jackknife(some.prompts)
    products = dict(some.products["all"].own)
    if trace is not None:
        traced = Trace(some, Run(trace.borrowed.record, trace.borrowed.data.isel({PROMPT: slice(first, None, 2)})))
        products |= {name: traced.products["all"].own[name] for name in SOURCES}
    powers = {name: products[name] for name in LEAKAGE if name in products}
    metrics = some.metrics
    if metrics is None:
        raise AssertionError("a run with metrics has them for every prompt")
    return {
        "metrics": {
            "heads": _of_heads(metrics),
            "layers": _of_layers(metrics, tuple(some.data[LAYER].values.tolist())),
        },
        "leakage": {
            "heads": {name: prompts.inner(sums).value for name, sums in powers.items()},
            "layers": {name: prompts.inner(np.nanmean(sums, axis=1)).value for name, sums in powers.items()},
        },
    }


def _of_heads(found: Metrics) -> dict[str, Values]:
    return {name: _values(cell) for name, cell in found.heads.items() if name not in TWICE}


def _of_layers(found: Metrics, numbers: tuple[int, ...]) -> dict[str, Values]:
    """Metrics of layers, and of the states that layers read: layer ℓ reads those of depth ℓ."""
    layers = {name: _values(cell) for name, cell in found.layers.items() if BY_ID[name].level is Level.LAYER}
    states = {name: _values(found.depths[name]) for name in STATES if name in found.depths}
    return layers | {name: x[list(numbers)] for name, x in states.items() if max(numbers) < len(x)}


def _values(found: Estimate) -> Values:
    return np.asarray(found.value, dtype=np.float64)


def _defined(metrics: Mapping[str, Values], total: Values) -> dict[str, Values]:
    """Metrics that are there for at least half of what is ranked; in the order of what they look at.

    Only heads with all numbers are ranked: a metric that few of them have would take the others away.
    """
    there = np.isfinite(total)
    chosen = {name: x for name, x in metrics.items() if 2 * (np.isfinite(x) & there).sum() >= max(there.sum(), 1)}
    order = list(Looks)
    return dict(sorted(chosen.items(), key=lambda item: order.index(BY_ID[item[0]].looks)))
