"""Values of the metrics of a run with intervals: one per metric, and by head, layer or depth.

Intervals are over prompts, by the same jackknife as for the leakage. Means over heads, layers or depths are computed
for each prompt before they are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from posleak.arrays import Array
from posleak.axes import BAND, HEAD, LAYER, OFFSET, POSITION, PROMPT, QUERY, SCALE, SCALING, THRESHOLD
from posleak.leakage import Estimate, Jackknife, Sampled, combined
from posleak.leakage.contrast import correlated
from posleak.leakage.power import products
from posleak.leakage.sampled import MIN_PROMPTS, LabelledEstimate
from posleak.leakage.summary import HEAD_COLUMNS, finite_mean

from .catalogue import BY_ID, CATALOGUE, Level, Metric

SINK_THRESHOLD = 0.3
"""Gu's ε: a head is a sink if its mean attention to position 0 is above this."""

EDGE_THRESHOLD = 0.1
"""Attention above which the graph has an edge, in the table; the run's dataset has other thresholds too."""

FRAMES = ("centralized", "distributed", "bidirectional", "no_frame")

MIN_POINTS = 3
"""Minimum number of points for a correlation."""


@dataclass(frozen=True)
class MetricRow:
    """A metric and its value in the table. at: the depth of the value, if the definition selects one."""

    metric: Metric
    value: Estimate
    at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `metrics.table` in `posleak measure --json`."""
        m = self.metric
        row = LabelledEstimate(self.value, {"id": m.id, "title": m.title}).as_row()
        return row | {
            "unit": m.unit, "at": self.at, "definition": m.definition, "source": m.source, "looks": m.looks.value,
            "blind": m.blind, "published": m.published,
        }  # fmt: skip


@dataclass(frozen=True)
class FrameVerdict:
    """The type of reference frame with the largest share, of a layer or the model; margin: its lead over the next."""

    kind: str
    margin: Estimate
    shares: dict[str, Estimate]

    @property
    def clear(self) -> bool:
        """Whether the margin is significantly above 0. If all prompts have only this type, there is no interval."""
        unanimous = self.margin.value == 1 and self.margin.n >= MIN_PROMPTS
        return bool(self.margin.low > 0 or unanimous)

    @property
    def words(self) -> str:
        """The type in words, with a remark if it is not clear."""
        name = "no frame" if self.kind == "no_frame" else self.kind
        return name if self.clear else f"{name}, not clearly"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of `metrics.frames` in `posleak measure --json`."""
        return {"kind": self.kind, "clear": self.clear, "margin": self.margin, "shares": self.shares}


@dataclass(frozen=True)
class Metrics:
    """All metrics of one run; data: the run's dataset."""

    data: xr.Dataset

    @classmethod
    def of(cls, data: xr.Dataset) -> Metrics | None:
        """Return the metrics; None if the run was measured without any."""
        return cls(data) if any(name in data for name in METRIC_ARRAYS) else None

    @cached_property
    def rows(self) -> tuple[MetricRow, ...]:
        """The table: one row for every available metric."""
        return tuple(MetricRow(metric, *self._value(metric)) for metric in self.available)

    @cached_property
    def available(self) -> tuple[Metric, ...]:
        """The metrics that this run has. The Toeplitz deviation is not defined if queries are scaled by position."""
        return tuple(
            metric for metric in CATALOGUE
            if metric.array in self.data and not (metric.id == "toeplitz" and SCALING in self.data)
        )  # fmt: skip

    @cached_property
    def heads(self) -> dict[str, Estimate]:
        """Values by layer and head [L, H]; for sink rates, the attention that is compared with SINK_THRESHOLD."""
        return {metric.id: self._estimate(metric) for metric in self.available if metric.level is Level.HEAD}

    @cached_property
    def layers(self) -> dict[str, Estimate]:
        """Values by layer [L], means over heads."""
        means: dict[Level, Callable[[Array], Array]] = {Level.HEAD: finite_mean, Level.LAYER: lambda x: x}
        return {
            metric.id: self._estimate(metric, means[metric.level]) for metric in self.available if metric.level in means
        }

    @cached_property
    def depths(self) -> dict[str, Estimate]:
        """Arrays by depth [J]; 0 is the embedding."""
        return {name: averaged(self.array(name)).estimate for name in DEPTH_ARRAYS if name in self.data}

    @cached_property
    def frames(self) -> tuple[FrameVerdict, ...]:
        """The reference frame of every layer; empty if the run was measured without frames."""
        if "centralized" not in self.data:
            return ()
        shares = {name: averaged(self.array(name)) for name in FRAMES}
        return tuple(
            _verdict({name: share[layer] for name, share in shares.items()})
            for layer in range(self.data.sizes[LAYER])
        )  # fmt: skip

    @cached_property
    def frame(self) -> FrameVerdict | None:
        """The reference frame of the model: shares averaged over layers."""
        if "centralized" not in self.data:
            return None
        return _verdict({name: averaged(finite_mean(_flat(self.array(name)))) for name in FRAMES})

    def array(self, name: str) -> Array:
        """Return one array of the dataset as float64."""
        return np.asarray(self.data[name].values, dtype=np.float64)

    def cells(self, metric: Metric) -> Array:
        """Return the metric for each prompt: [B, L, H], [B, L] or [B, J]; NaN where it is not defined."""
        array = self.data[metric.array]
        if metric.id == "sink_attention":
            array = self.data["profile"].isel({POSITION: 0})
        elif THRESHOLD in array.dims:
            array = array.sel({THRESHOLD: EDGE_THRESHOLD})
        elif BAND in array.dims:
            array = array.sel({BAND: metric.id.removeprefix("band_")})
        elif SCALE in array.dims:
            array = array.mean(SCALE, skipna=False)
        x = np.asarray(array.values, dtype=np.float64)
        return np.where(np.isfinite(x), x, np.nan)

    def _estimate(self, metric: Metric, reduce: Callable[[Array], Array] = lambda x: x) -> Estimate:
        """Return the metric by cell, or reduced over its last axes: for each prompt, before prompts are averaged."""
        if metric.id == "toeplitz":
            return _root(combined(reduce, self._deviation))
        return averaged(reduce(self.cells(metric))).estimate

    def _value(self, metric: Metric) -> tuple[Estimate, int | None]:
        """Return the value in the table, and its depth if the definition selects one."""
        if metric.level is not Level.DEPTH or metric.id == "massive_first":
            return self._aggregated(metric), None
        by_depth = averaged(self.cells(metric))
        select = np.nanargmax if metric.id == "largest_times" else np.nanargmin
        if not np.isfinite(by_depth.value[1:]).any():
            return by_depth[0].estimate, None
        at = 1 + int(select(by_depth.value[1:]))  # selected on all prompts, the same in every replicate
        return by_depth[at].estimate, at

    def _aggregated(self, metric: Metric) -> Estimate:
        """Return the mean of a metric over all cells, or another statistic if its definition says so."""
        if metric.id == "toeplitz":
            finite = np.isfinite(self._deviation.value)
            with np.errstate(invalid="ignore"):  # replicates are infinite if there are too few prompts
                return _root(combined(lambda x: x[..., finite].mean(-1), self._deviation))
        if metric.id == "massive_first":  # all depths together: a single depth may have no massive activation
            first, every = (averaged(self.array(name).sum(1)) for name in ("massive_first", "massive"))
            share = first.over(every).estimate
            return Estimate(share.value, np.maximum(share.low, 0.0), np.minimum(share.high, 1.0), share.n)
        if metric.id == "valley":
            return _correlated(self.array("spectrum_entropy"), np.log(self.array("norm_0")))
        if metric.id == "uncertainty":
            return _correlated(_flat(self.array("entropy_position")), _flat(self.array("entropy_spectrum")))
        x = _flat(self.cells(metric))
        if metric.id == "rollout":
            return averaged(x[:, -1]).estimate
        if metric.id == "selectivity":
            defined = np.isfinite(x).all(0)
            return averaged(np.median(x[:, defined], axis=-1) if defined.any() else np.full(len(x), np.nan)).estimate
        if metric.id.startswith("sink_rate"):
            x = np.where(np.isnan(x), np.nan, x > SINK_THRESHOLD)
        return averaged(finite_mean(x)).estimate

    @cached_property
    def _deviation(self) -> Sampled:
        """Power of the logits' deviation from the mean of their diagonal [L, H], in nats²."""
        logits = self.data["drift"] + self.data["renormalisation"] + self.data["logit"]
        x = (logits - self.data["diagonal"]).where(self.data["pairs"]).transpose(PROMPT, LAYER, HEAD, QUERY, OFFSET)
        flat = x.values.reshape(*x.shape[:3], -1)
        return Jackknife(len(flat)).inner(products(flat, flat))

    def as_dict(self) -> dict[str, Any]:
        """Return `metrics` of `posleak measure --json`."""
        return {
            "table": [row.as_dict() for row in self.rows], "frame": self.frame, "frames": self.frames,
            "layers": self.layers, "depths": self.depths,
        }  # fmt: skip

    def tidy(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of heads.parquet (HEAD_COLUMNS) of every metric that has a finite value per head."""
        layer_ids = self.data[LAYER].values.tolist()
        for name, estimate in self.heads.items():
            labels = {"queries": "all", "quantity": "metric", "component": name, "unit": BY_ID[name].unit}
            for cell in LabelledEstimate(estimate, labels).cells("call", "head"):
                if np.isfinite(cell.estimate.value):
                    yield cell.as_row(HEAD_COLUMNS, layer=layer_ids[cell.labels["call"]])


def averaged(x: Array) -> Sampled:
    """Return the mean over the first axis, prompts or the short samples that some metrics read, with its replicates."""
    return Jackknife(len(x)).mean(x)


def _flat(x: Array) -> Array:
    """Flatten all axes but the first."""
    return x.reshape(len(x), -1)


def _verdict(shares: dict[str, Sampled]) -> FrameVerdict:
    order = sorted(shares, key=lambda name: -float(shares[name].value))
    margin = shares[order[0]] - shares[order[1]]
    return FrameVerdict(order[0], margin.estimate, {name: share.estimate for name, share in shares.items()})


def _root(power: Sampled) -> Estimate:
    """Return the root of a power and of the ends of its interval; negative values are set to 0."""
    square = power.estimate
    value, low, high = (np.sqrt(np.maximum(x, 0.0)) for x in (square.value, square.low, square.high))
    return Estimate(value, low, high, square.n)


def _correlated(x: Array, y: Array) -> Estimate:
    """Estimate the correlation of the means over prompts of x and y [B, cells], over cells where both are finite."""
    finite = np.isfinite(x).all(0) & np.isfinite(y).all(0)
    if finite.sum() < MIN_POINTS:
        return averaged(np.full(len(x), np.nan)).estimate
    return correlated(Jackknife(len(x)), x[:, finite], y[:, finite])


METRIC_ARRAYS = tuple(dict.fromkeys(metric.array for metric in CATALOGUE))
"""Arrays of which a run with metrics has at least one."""

DEPTH_ARRAYS = (
    "largest", "largest_times", "massive", "massive_first", "spectrum_entropy", "norm_0", "norm_body", "probe_error",
)  # fmt: skip
"""Arrays by depth."""
