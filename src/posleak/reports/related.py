"""Metrics of other papers, and how they agree with the leakage and its parts in ranking heads and layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posleak.analyses.trace.trace import Trace
from posleak.arrays import Array
from posleak.axes import LAYER, PROMPT
from posleak.leakage import MIN_PROMPTS, Jackknife
from posleak.metrics.agreement import LEAKAGE, Agreement, Family, MetricAlignment, agreement, alignments
from posleak.metrics.catalogue import BY_ID, Level, Looks
from posleak.metrics.table import MetricRow, Metrics
from posleak.runs.run import Run

Values = dict[str, Array]

TWICE = ("sink_rate_repeated",)
"""Metrics computed from the array of another metric: they would rank the same heads a second time."""

STATES = ("largest_times", "spectrum_entropy", "probe_error")
"""Metrics of states that are ranked over layers: each layer has those of the states that it reads."""

OVER = ("heads", "layers")


@dataclass(frozen=True)
class RelatedMetrics:
    """The metrics of one run, and their rank agreement over heads and over layers where it is defined."""

    metrics: Metrics
    agreements: dict[str, Agreement]

    @classmethod
    def of(cls, run: Run, trace: Trace | None = None) -> RelatedMetrics | None:
        """Compute the agreement; return None for a run without metrics."""
        return None if run.metrics is None else cls(run.metrics, agreements(run, trace))

    @property
    def by_looks(self) -> list[tuple[str, list[MetricRow]]]:
        """Rows of the table, grouped by what the metrics look at."""
        groups = ((looks.value, [row for row in self.metrics.rows if row.metric.looks is looks]) for looks in Looks)
        return [(title, rows) for title, rows in groups if rows]

    @property
    def families(self) -> list[tuple[str, list[MetricAlignment]]]:
        """Ranked metrics by what they agree with most; strongest agreement first."""
        aligned = [metric for ranking in self.agreements.values() for metric in alignments(ranking)]
        aligned.sort(key=lambda metric: -abs(metric.most.rho) if metric.most is not None else 0.0)
        return [(family.value, [metric for metric in aligned if metric.family is family]) for family in Family]


def agreements(run: Run, trace: Trace | None = None) -> dict[str, Agreement]:
    """Compute the rank agreement of metrics with the leakage and its parts, over heads and over layers.

    Metrics of every second prompt are ranked against the leakage of the others, and vice versa. The result is empty
    for a run without metrics or with fewer than MIN_PROMPTS prompts.

    run         a run with metrics
    trace       its trace, to rank the sources too
    """
    if run.metrics is None or run.prompts < MIN_PROMPTS:
        return {}
    halves = [_half(run, trace, first) for first in (0, 1)]
    ranked = {}
    for over in OVER:
        metrics, leakage = ([half[kind][over] for half in halves] for kind in ("metrics", "leakage"))
        first, second = (_defined(some, powers["total"]) for some, powers in zip(metrics, leakage, strict=True))
        if names := [name for name in first if name in second]:
            ranked[over] = agreement([{name: half[name] for name in names} for half in metrics], leakage, over)
    return ranked


def _half(run: Run, trace: Trace | None, first: int) -> dict[str, dict[str, Values]]:
    """Compute metrics and powers, by head and by layer, of every second prompt."""
    some = Run(run.record, run.data.isel({PROMPT: slice(first, None, 2)}))
    prompts, metrics, products = Jackknife(some.prompts), some.metrics, dict(some.products["all"].own)
    assert metrics is not None, "a run with metrics has them for every prompt"
    if trace is not None:
        branches = Run(trace.branches.record, trace.branches.data.isel({PROMPT: slice(first, None, 2)}))
        products |= Trace(some, branches).products["all"].own
    powers = {name: products[name] for name in LEAKAGE if name in products}
    return {
        "metrics": {
            "heads": {name: cells.value for name, cells in metrics.heads.items() if name not in TWICE},
            "layers": _of_layers(metrics, some.data[LAYER].values.tolist()),
        },
        "leakage": {
            "heads": {name: prompts.inner(sums).value for name, sums in powers.items()},
            "layers": {name: prompts.inner(np.nanmean(sums, axis=1)).value for name, sums in powers.items()},
        },
    }


def _of_layers(metrics: Metrics, layer_ids: list[int]) -> Values:
    """Return metrics of layers, and of the states that layers read: layer ℓ reads those of depth ℓ."""
    layers = {name: cells.value for name, cells in metrics.layers.items() if BY_ID[name].level is Level.LAYER}
    states = {name: metrics.depths[name].value for name in STATES if name in metrics.depths}
    return layers | {name: x[layer_ids] for name, x in states.items() if max(layer_ids) < len(x)}


def _defined(metrics: Values, total: Array) -> Values:
    """Return metrics with a value for at least half of the ranked heads or layers, ordered by what they look at.

    A head is ranked only if it has all values, so a metric with few of them would remove the others.
    """
    ranked = np.isfinite(total)
    chosen = {name: x for name, x in metrics.items() if 2 * (np.isfinite(x) & ranked).sum() >= max(ranked.sum(), 1)}
    order = list(Looks)
    return dict(sorted(chosen.items(), key=lambda item: order.index(BY_ID[item[0]].looks)))
