"""The numbers of a run that has metrics: a value with its interval for every metric, and the same by head, layer or
depth.

Intervals are over prompts, by the same jackknife as those of the leakage. What is a mean over heads, layers or depths
is made prompt by prompt, and then averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from posleak.axes import BAND, HEAD, LAYER, OFFSET, POSITION, PROMPT, QUERY, SCALE, SCALING, THRESHOLD
from posleak.leakage import Estimate, Jackknife, Sampled, combined
from posleak.leakage.across import correlated
from posleak.leakage.number import LabelledEstimate
from posleak.leakage.power import products
from posleak.leakage.sampled import MIN_PROMPTS
from posleak.leakage.summary import HEAD_COLUMNS

from .catalogue import BY_ID, CATALOGUE, Level, Metric

SINK_THRESHOLD = 0.3
"""Gu's ε: a head is a sink if it gives position 0 more than this, on average."""

EDGE_THRESHOLD = 0.1
"""Attention above which a graph has an edge, in the table; the run's dataset has other thresholds too."""

FRAMES = ("centralized", "distributed", "bidirectional", "no_frame")

MIN_POINTS = 3
"""Points without which there is no correlation."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class MetricRow:
    """A metric and its value; `at`: of which layer or depth it is, where the definition chooses one."""

    metric: Metric
    value: Estimate
    at: int | None = None

    def as_dict(self) -> dict[str, Any]:
        m = self.metric
        row = LabelledEstimate.of(self.value, id=m.id, title=m.title).as_row()
        return row | {
            "unit": m.unit, "at": self.at, "definition": m.definition, "source": m.source, "looks": m.looks.value,
            "blind": m.blind, "published": m.published,
        }  # fmt: skip


@dataclass(frozen=True)
class FrameVerdict:
    """Which type of reference frame a layer has, or the model in the mean over layers; margin: the share of that type
    minus the next one's."""

    kind: str
    margin: Estimate
    shares: dict[str, Estimate]

    @property
    def clear(self) -> bool:
        """The margin's interval lies above 0; or there is none since every prompt has this type and no other."""
        every = self.margin.value == 1 and self.margin.n >= MIN_PROMPTS
        return bool(self.margin.low > 0 or every)

    @property
    def words(self) -> str:
        name = "no frame" if self.kind == "no_frame" else self.kind
        return name if self.clear else f"{name}, not clearly"


@dataclass(frozen=True)
class Metrics:
    """All metrics of one run. `data` is the run's dataset."""

    data: xr.Dataset

    @classmethod
    def of(cls, data: xr.Dataset) -> Metrics | None:
        """None if the run was measured without metrics."""
        found = cls(data)
        return found if any(name in data for name in METRIC_ARRAYS) else None

    @cached_property
    def rows(self) -> tuple[MetricRow, ...]:
        """The table; metrics that this run does not have are left out."""
        return tuple(MetricRow(metric, *self._value(metric)) for metric in self.available)

    @cached_property
    def available(self) -> tuple[Metric, ...]:
        """The metrics that this run has. Scaled queries have logits at two temperatures: their map is not defined."""
        return tuple(
            metric for metric in CATALOGUE
            if metric.array in self.data and not (metric.id == "toeplitz" and SCALING in self.data)
        )  # fmt: skip

    @cached_property
    def heads(self) -> dict[str, Estimate]:
        """By layer and head [L, H]; of the sink rate, the attention that is compared with 0.3."""
        return {
            metric.id: _root(self._deviation) if metric.id == "toeplitz" else averaged(self.cells(metric)).estimate
            for metric in self.available
            if metric.level is Level.HEAD
        }

    @cached_property
    def layers(self) -> dict[str, Estimate]:
        """By layer [L]; of metrics of heads, the mean over heads."""
        found = {}
        for metric in self.available:
            if metric.id == "toeplitz":
                found[metric.id] = _root(combined(_mean_of_heads, self._deviation))
            elif metric.level in (Level.HEAD, Level.LAYER):
                cells = self.cells(metric)
                found[metric.id] = averaged(cells if metric.level is Level.LAYER else _mean_of_heads(cells)).estimate
        return found

    @cached_property
    def depths(self) -> dict[str, Estimate]:
        """By depth [J]: 0 is the embedding."""
        names = [name for name in DEPTH_ARRAYS if name in self.data]
        return {name: self.mean(name).estimate for name in names}

    @cached_property
    def frames(self) -> tuple[FrameVerdict, ...]:
        """The reference frame of every layer; empty if frames were not asked for."""
        if "centralized" not in self.data:
            return ()
        shares = {name: self.mean(name) for name in FRAMES}
        return tuple(
            _verdict({name: share[layer] for name, share in shares.items()})
            for layer in range(self.data.sizes[LAYER])
        )  # fmt: skip

    @cached_property
    def frame(self) -> FrameVerdict | None:
        """The reference frame of the model: shares averaged over layers."""
        return (
            None
            if "centralized" not in self.data
            else _verdict({name: averaged(_nanmean(self.array(name))) for name in FRAMES})
        )

    # -- from arrays to numbers ---------------------------------------------------------------------------------------

    def array(self, name: str) -> Values:
        return np.asarray(self.data[name].values, dtype=np.float64)

    def mean(self, name: str) -> Sampled:
        """Over prompts, or over the samples that the array has instead."""
        return averaged(self.array(name))

    def cells(self, metric: Metric) -> Values:
        """The metric prompt by prompt: [B, L, H], [B, L] or [B, J]; NaN where there is no such head, or no number."""
        found = self.data[metric.array]
        if metric.id == "sink_attention":
            found = self.data["profile"].isel({POSITION: 0})
        elif THRESHOLD in found.dims:
            found = found.sel({THRESHOLD: EDGE_THRESHOLD})
        elif BAND in found.dims:
            found = found.sel({BAND: metric.id.removeprefix("band_")})
        elif SCALE in found.dims:
            found = found.mean(SCALE, skipna=False)
        x = np.asarray(found.values, dtype=np.float64)
        return np.where(np.isfinite(x), x, np.nan)

    def _value(self, metric: Metric) -> tuple[Estimate, int | None]:
        """The number in the table, and the depth that it is of, if one was chosen."""
        if metric.id in AGGREGATIONS:
            return AGGREGATIONS[metric.id](self, metric), None
        if metric.level is Level.DEPTH:
            found = averaged(self.cells(metric))
            choose = np.nanargmax if metric.id == "largest_times" else np.nanargmin
            if not np.isfinite(found.value[1:]).any():
                return found[0].estimate, None
            at = 1 + int(choose(found.value[1:]))  # chosen once, on all prompts; not the embedding
            return found[at].estimate, at
        return averaged(_nanmean(self.cells(metric))).estimate, None

    @cached_property
    def _deviation(self) -> Sampled:
        """Power of what logits differ from the mean of their diagonal, by layer and head [L, H], in nats²."""
        logits = self.data["drift"] + self.data["renormalisation"] + self.data["logit"]
        x = (logits - self.data["diagonal"]).where(self.data["pairs"]).transpose(PROMPT, LAYER, HEAD, QUERY, OFFSET)
        flat = x.values.reshape(*x.shape[:3], -1)
        return Jackknife(len(flat)).inner(products(flat, flat))

    def as_dict(self) -> dict[str, Any]:
        """`metrics` of `posleak measure --json`."""
        frame = self.frame
        return {
            "table": [row.as_dict() for row in self.rows],
            "frame": None if frame is None else _frame_dict(frame),
            "frames": [_frame_dict(found) for found in self.frames],
            "layers": self.layers,
            "depths": self.depths,
        }  # fmt: skip

    def tidy(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of heads.parquet (HEAD_COLUMNS) of every metric that has a finite value per head."""
        layer_ids = self.data[LAYER].values.tolist()
        for name, estimate in self.heads.items():
            labels = {"queries": "all", "quantity": "metric", "component": name, "unit": BY_ID[name].unit}
            for cell in LabelledEstimate(estimate, labels).cells("call", "head"):
                if np.isfinite(cell.estimate.value):
                    yield cell.as_row(HEAD_COLUMNS, layer=layer_ids[cell.labels["call"]])


def _frame_dict(found: FrameVerdict) -> dict[str, Any]:
    return {"kind": found.kind, "clear": found.clear, "margin": found.margin, "shares": found.shares}


def averaged(x: Values) -> Sampled:
    """The mean over the first axis, with its replicates."""
    return Jackknife(len(x)).mean(x)


def _nanmean(x: Values) -> Values:
    """Over all axes but the first, of what is there; NaN where nothing is."""
    flat = x.reshape(len(x), -1)
    there = np.isfinite(flat)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, flat, 0.0).sum(-1) / there.sum(-1))


def _mean_of_heads(x: Values) -> Values:
    """Along the last axis, of the heads that exist."""
    return _nanmean(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


def _verdict(shares: dict[str, Sampled]) -> FrameVerdict:
    order = sorted(shares, key=lambda name: -float(shares[name].value))
    margin = shares[order[0]] - shares[order[1]]
    return FrameVerdict(order[0], margin.estimate, {name: share.estimate for name, share in shares.items()})


def _root(power: Sampled) -> Estimate:
    """A power as a root mean square: the ends of its interval are roots too, and a negative one is 0."""
    found = power.estimate
    value, low, high = (np.sqrt(np.maximum(x, 0.0)) for x in (found.value, found.low, found.high))
    return Estimate(value, low, high, found.n)


def _correlated(x: Values, y: Values) -> Estimate:
    """Of the means over prompts of x and y [B, cells], over the cells where both are."""
    there = np.isfinite(x).all(0) & np.isfinite(y).all(0)
    if there.sum() < MIN_POINTS:
        return averaged(np.full(len(x), np.nan)).estimate
    return correlated(Jackknife(len(x)), x[:, there], y[:, there])


# -- metrics whose number in the table is no mean ---------------------------------------------------------------------


def _rate(metrics: Metrics, metric: Metric) -> Estimate:
    """Share of heads above SINK_THRESHOLD."""
    x = metrics.cells(metric)
    return averaged(_nanmean(np.where(np.isnan(x), np.nan, x > SINK_THRESHOLD))).estimate


def _last_layer(metrics: Metrics, metric: Metric) -> Estimate:
    return averaged(metrics.cells(metric)[:, -1]).estimate


def _rms(metrics: Metrics, metric: Metric) -> Estimate:
    power, there = metrics._deviation, np.isfinite(metrics._deviation.value)
    with np.errstate(invalid="ignore"):  # too few prompts have infinite replicates
        return _root(combined(lambda x: x[..., there].mean(-1), power))


def _at_first(metrics: Metrics, metric: Metric) -> Estimate:
    """Of all depths together: a depth may have no massive activation."""
    first, every = (averaged(metrics.array(name).sum(1)) for name in ("massive_first", "massive"))
    found = first.over(every).estimate
    return Estimate(found.value, np.maximum(found.low, 0.0), np.minimum(found.high, 1.0), found.n)


def _entropy_and_norm(metrics: Metrics, metric: Metric) -> Estimate:
    return _correlated(metrics.array("spectrum_entropy"), np.log(metrics.array("norm_0")))


def _two_entropies(metrics: Metrics, metric: Metric) -> Estimate:
    x, y = (metrics.array(name) for name in ("entropy_position", "entropy_spectrum"))
    return _correlated(x.reshape(len(x), -1), y.reshape(len(y), -1))


def _median_head(metrics: Metrics, metric: Metric) -> Estimate:
    x = metrics.cells(metric)
    flat = x.reshape(len(x), -1)
    there = np.isfinite(flat).all(0)
    return averaged(np.median(flat[:, there], axis=-1) if there.any() else np.full(len(x), np.nan)).estimate


AGGREGATIONS: dict[str, Callable[[Metrics, Metric], Estimate]] = {
    **dict.fromkeys(("sink_rate", "sink_rate_natural", "sink_rate_repeated"), _rate),
    "rollout": _last_layer,
    "toeplitz": _rms,
    "massive_first": _at_first,
    "valley": _entropy_and_norm,
    "uncertainty": _two_entropies,
    "selectivity": _median_head,
}
"""The definition in the catalogue says how."""

METRIC_ARRAYS = tuple(dict.fromkeys(metric.array for metric in CATALOGUE))
"""A run that has one of these has metrics."""

DEPTH_ARRAYS = (
    "largest", "largest_times", "massive", "massive_first", "spectrum_entropy", "norm_0", "norm_body", "probe_error",
)  # fmt: skip
"""Arrays by depth."""
