"""Do two metrics rank heads alike? Spearman's rank correlation over heads, or over layers for metrics of layers.

Heads of one layer are no independent draws, so the interval leaves out one layer after the other: the jackknife of
atanh ρ with Student's t, turned back. It says how much the layers of this model agree with each other. Metrics are of
one half of the prompts and leakage of the other, so that noise of the prompts makes ρ smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import rankdata

from .catalogue import BY_ID, Looks

LEAKAGE = ("total", "mask", "drift", "sink", "residual", "here", "earlier", "origin")
"""Powers of the leakage that metrics are compared with: where it is read, and where it comes from."""

MIN_LAYERS = 4
"""Layers without which there is no interval."""


@dataclass(frozen=True)
class Agreement:
    """ρ of every row with every column, with its interval; `n`: heads or layers that were ranked."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    rho: Float64[np.ndarray, "rows columns"]
    low: Float64[np.ndarray, "rows columns"]
    high: Float64[np.ndarray, "rows columns"]
    n: int
    over: str

    def cell(self, row: int, column: str) -> RankAgreement:
        """One cell."""
        at = self.columns.index(column)
        return RankAgreement(column, *(float(x[row, at]) for x in (self.rho, self.low, self.high)))

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


Table = Mapping[str, NDArray[np.float64]]
"""Numbers by name: arrays by layer [L], or by layer and head [L, H]."""


def agreement(metrics: Sequence[Table], leakage: Sequence[Table], over: str) -> Agreement:
    """Each metric with each other one and with each power of the leakage.

    Both are given once for each half of the prompts. A metric of one half is ranked beside the other half's numbers,
    and the two ρ are averaged: noise of prompts, which both would share, cannot make them agree. So a metric does not
    agree with itself completely, and less the noisier it is. Only heads (or layers) that have all numbers are ranked.
    """
    halves = [_stacked({**powers, **found}) for powers, found in zip(leakage, metrics, strict=True)]
    there = np.logical_and.reduce([np.isfinite(half).all(-1) for half in halves])
    layer = np.arange(len(there))[:, None].repeat(there.shape[1], 1)[there]
    names, rows = (*leakage[0], *metrics[0]), slice(len(leakage[0]), None)
    x = [half[there] for half in halves]
    rho = _spearman(x)[rows]
    low, high = _interval(rho, [_spearman([half[layer != left] for half in x])[rows] for left in np.unique(layer)])
    return Agreement(tuple(metrics[0]), names, rho, low, high, int(there.sum()), over)


def _stacked(columns: Table) -> NDArray[np.float64]:
    """[L, H or 1, columns]"""
    return np.stack([np.asarray(x, dtype=np.float64).reshape(len(x), -1) for x in columns.values()], axis=-1)


def _spearman(halves: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Rank correlation of every column of one half with every column of the other, mean of both ways; of one table, of
    its columns with each other. NaN for a column that does not vary."""
    ranked = [_ranked(half) for half in halves]
    crossed = [(a, b) for k, a in enumerate(ranked) for m, b in enumerate(ranked) if m != k or len(ranked) == 1]
    return np.asarray(np.clip(np.mean([a.T @ b for a, b in crossed], axis=0), -1.0, 1.0))


def _ranked(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks of every column, centred, with length 1."""
    if len(x) < 3:
        return np.full(x.shape, np.nan)
    ranks = rankdata(x, axis=0)
    ranks = ranks - ranks.mean(0)
    size = np.sqrt((ranks**2).sum(0))
    return np.asarray(ranks / np.where(size > 0, size, np.nan))


def _interval(
    rho: NDArray[np.float64], without: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    n = len(without)
    if n < MIN_LAYERS:
        return np.full(rho.shape, np.nan), np.full(rho.shape, np.nan)
    most = 1 - 1e-12  # a metric agrees with itself completely, and atanh of that is infinite
    z, left = np.arctanh(np.clip(rho, -most, most)), np.arctanh(np.clip(np.stack(without), -most, most))
    error = np.sqrt((n - 1) / n * ((left - left.mean(0)) ** 2).sum(0))
    reach = stdtrit(n - 1, 0.975) * error
    return np.tanh(z - reach), np.tanh(z + reach)


class Family(Enum):
    """Where a metric stands by what it ranks alike: a layer's own mask, what came through the stream, or neither."""

    MASK = "the mask"
    STREAM = "what came through the stream"
    NEITHER = "neither"


FAMILIES = {
    Family.MASK: ("mask", "here"),
    Family.STREAM: ("drift", "sink", "residual", "earlier", "origin"),
}  # fmt: skip
"""Powers of the leakage by family. The total has all of them, and is in none."""

SAME_MASK = ("shift_bfloat16", "shift_own")
"""Metrics that compare two passes with the same mask: they look behind the softmax, and cannot see the mask either."""


@dataclass(frozen=True)
class RankAgreement:
    """A power of the leakage, and how a metric's ranking agrees with its own."""

    name: str
    rho: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """The interval leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class MetricAlignment:
    """What a metric can see of a layer's own mask, and what it ranks as this model's leakage does.

    can      by its definition: False where it looks at what is there before the layer's mask acts
    parts    of each family the power that it agrees with most, if that is clear; the mask only if it can see it
    over     what was ranked: heads or layers
    """

    metric: str
    can: bool
    parts: dict[Family, RankAgreement]
    over: str

    @property
    def family(self) -> Family:
        """That of the strongest agreement, in either direction."""
        return max(self.parts, key=lambda family: abs(self.parts[family].rho), default=Family.NEITHER)

    @property
    def most(self) -> RankAgreement | None:
        return self.parts.get(self.family)

    @property
    def words(self) -> str:
        """As in `ranks heads as drift does`, and why it cannot see the mask, if it cannot."""
        if self.most is None:
            found = "no clear agreement"
        else:
            found = f"ranks {self.over} {_alike(self.most)}"
            other = next((part for family, part in self.parts.items() if family is not self.family), None)
            found += "" if other is None else f"; less strongly {_alike(other)}"
        if self.can:
            return found
        why = (
            "its two passes have the same mask" if self.metric in SAME_MASK else "the mask acts after what it looks at"
        )
        return f"{found}; {why}"


def _alike(part: RankAgreement) -> str:
    return f"as {part.name} does" if part.rho > 0 else f"the other way round than {part.name} does"


def can_see_mask(name: str) -> bool:
    """Logits and states are there before the softmax, in whose denominator the mask acts; what is not in the catalogue
    is taken to look at attention."""
    looks = BY_ID[name].looks if name in BY_ID else Looks.ATTENTION
    return looks is Looks.ATTENTION and name not in SAME_MASK


def alignments(found: Agreement) -> tuple[MetricAlignment, ...]:
    """One for each metric. An agreement with the mask of a metric that cannot see it is left out: both then go with
    something else, such as the depth."""
    return tuple(_alignment(found, at) for at in range(len(found.rows)))


def _alignment(found: Agreement, at: int) -> MetricAlignment:
    can, parts = can_see_mask(found.rows[at]), {}
    for family, names in FAMILIES.items():
        each = [found.cell(at, name) for name in names if name in found.columns]
        clear = [part for part in each if part.clear]
        if clear and (can or family is not Family.MASK):
            parts[family] = max(clear, key=lambda part: abs(part.rho))
    return MetricAlignment(found.rows[at], can, parts, found.over)
