"""Agreement of metrics with leakage: Spearman's rank correlation over heads, or over layers for metrics of layers.

Heads of one layer are not independent, so the interval is a jackknife over layers, of artanh ρ with Student's t,
transformed back. It describes how much the layers of this model agree. Metrics are computed on one half of the prompts
and leakage on the other, so that noise of the prompts can only attenuate ρ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit
from scipy.stats import rankdata

from posleak.arrays import Array
from posleak.leakage.contrast import MAX_CORRELATION

from .catalogue import BY_ID, Looks

LEAKAGE = ("total", "mask", "drift", "sink", "residual", "here", "earlier", "origin")
"""Powers of the leakage that metrics are compared with: by part, and by source."""

MIN_LAYERS = 4
"""Minimum number of layers for an interval."""


@dataclass(frozen=True)
class Agreement:
    """ρ of every metric (row) with every power and every metric (column), with intervals; n: heads or layers ranked."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    rho: Float64[np.ndarray, "rows columns"]
    low: Float64[np.ndarray, "rows columns"]
    high: Float64[np.ndarray, "rows columns"]
    n: int
    over: str

    def cell(self, row: int, column: str) -> RankAgreement:
        """Return ρ of one row with one column."""
        at = self.columns.index(column)
        return RankAgreement(column, *(float(x[row, at]) for x in (self.rho, self.low, self.high)))


Table = Mapping[str, Array]
"""Values by name: arrays [L] or [L, H]."""


def agreement(metrics: Sequence[Table], leakage: Sequence[Table], over: str) -> Agreement:
    """Return the rank correlation of each metric with each power of the leakage and with each metric.

    ρ is the mean of the two correlations between a metric of one half and the values of the other, so that noise which
    a half's values share does not count as agreement. A metric's ρ with itself is therefore below 1, and smaller the
    noisier it is. Only heads (or layers) with all values are ranked.

    metrics, leakage   values by name, for each half of the prompts
    over               what is ranked: `heads` or `layers`
    """
    first, second = (_stacked({**powers, **own}) for powers, own in zip(leakage, metrics, strict=True))
    complete = np.asarray(np.isfinite(first).all(-1) & np.isfinite(second).all(-1))
    layer = np.arange(len(complete))[:, None].repeat(complete.shape[1], 1)[complete]
    names, rows = (*leakage[0], *metrics[0]), slice(len(leakage[0]), None)
    x, y = first[complete], second[complete]
    rho = _spearman(x, y)[rows]
    low, high = _interval(rho, [_spearman(x[layer != left], y[layer != left])[rows] for left in np.unique(layer)])
    return Agreement(tuple(metrics[0]), names, rho, low, high, int(complete.sum()), over)


def _stacked(columns: Table) -> Array:
    """Return the values of all columns, [L, H or 1, columns]."""
    return np.stack([np.asarray(x, dtype=np.float64).reshape(len(x), -1) for x in columns.values()], axis=-1)


def _spearman(x: Array, y: Array) -> Array:
    """Return the rank correlation of every column of one half with every column of the other, mean over both orders.
    NaN for a constant column."""
    a, b = _ranked(x), _ranked(y)
    return np.asarray(np.clip(np.mean([a.T @ b, b.T @ a], axis=0), -1.0, 1.0))


def _ranked(x: Array) -> Array:
    """Return the ranks of every column, centred and scaled to norm 1."""
    if len(x) < 3:
        return np.full(x.shape, np.nan)
    ranks = rankdata(x, axis=0)
    ranks = ranks - ranks.mean(0)
    size = np.sqrt((ranks**2).sum(0))
    return np.asarray(ranks / np.where(size > 0, size, np.nan))


def _interval(rho: Array, without: Sequence[Array]) -> tuple[Array, Array]:
    """Return the ends of the jackknife interval, given ρ without each layer; NaN for fewer than MIN_LAYERS layers."""
    n = len(without)
    if n < MIN_LAYERS:
        return np.full(rho.shape, np.nan), np.full(rho.shape, np.nan)
    z, replicates = (np.arctanh(np.clip(x, -MAX_CORRELATION, MAX_CORRELATION)) for x in (rho, np.stack(without)))
    error = np.sqrt((n - 1) / n * ((replicates - replicates.mean(0)) ** 2).sum(0))
    half_width = stdtrit(n - 1, 0.975) * error
    return np.tanh(z - half_width), np.tanh(z + half_width)


class Family(Enum):
    """What a metric agrees with: leakage by the layer's own mask, leakage through the residual stream, or neither."""

    MASK = "the mask"
    STREAM = "the residual stream"
    NEITHER = "neither"


FAMILIES = {Family.MASK: ("mask", "here"), Family.STREAM: ("drift", "sink", "residual", "earlier", "origin")}
"""Powers of the leakage by family. The total contains both, and belongs to none."""

SAME_MASK = ("shift_bfloat16", "shift_own")
"""Metrics that compare two passes with the same mask: they use attention, but the mask cancels."""


@dataclass(frozen=True)
class RankAgreement:
    """ρ of one metric with one power of the leakage, or with another metric, and its interval."""

    name: str
    rho: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class MetricAlignment:
    """Which powers of the leakage a metric ranks heads or layers like.

    sees_mask   whether the layer's own mask can affect the metric, by its definition
    strongest   by family, the largest |ρ| whose interval excludes 0; the mask's only if the metric sees it
    over        what is ranked: heads or layers
    """

    metric: str
    sees_mask: bool
    strongest: dict[Family, RankAgreement]
    over: str

    @property
    def family(self) -> Family:
        """The family with the largest |ρ|."""
        return max(self.strongest, key=lambda family: abs(self.strongest[family].rho), default=Family.NEITHER)

    @property
    def most(self) -> RankAgreement | None:
        """The largest |ρ| of all families; None if no interval excludes 0."""
        return self.strongest.get(self.family)

    @property
    def words(self) -> str:
        """A description, with the reason if the mask cannot affect the metric."""
        if self.most is None:
            text = "no clear agreement"
        else:
            text = f"ranks {self.over} {_like(self.most)}"
            other = next((cell for family, cell in self.strongest.items() if family is not self.family), None)
            text += "" if other is None else f"; less strongly {_like(other)}"
        if self.sees_mask:
            return text
        return f"{text}; {'its two passes have the same mask' if self.metric in SAME_MASK else 'the mask acts later'}"


def _like(cell: RankAgreement) -> str:
    return f"like {cell.name}" if cell.rho > 0 else f"in reverse order of {cell.name}"


def can_see_mask(name: str) -> bool:
    """Return whether the layer's own mask affects a metric: only through attention, since it acts in the softmax.

    Metrics that are not in the catalogue are assumed to use attention.
    """
    looks = BY_ID[name].looks if name in BY_ID else Looks.ATTENTION
    return looks is Looks.ATTENTION and name not in SAME_MASK


def alignments(table: Agreement) -> tuple[MetricAlignment, ...]:
    """Return the alignment of every metric.

    If a metric cannot see the mask, its agreement with the mask is ignored: both then depend on something else, such as
    the depth.
    """
    by_metric = []
    for row, metric in enumerate(table.rows):
        sees_mask, strongest = can_see_mask(metric), {}
        for family, names in FAMILIES.items():
            clear = [cell for name in names if name in table.columns and (cell := table.cell(row, name)).clear]
            if clear and (sees_mask or family is not Family.MASK):
                strongest[family] = max(clear, key=lambda cell: abs(cell.rho))
        by_metric.append(MetricAlignment(metric, sees_mask, strongest, table.over))
    return tuple(by_metric)
