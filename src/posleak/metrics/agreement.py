"""Do two metrics rank heads alike? Spearman's rank correlation over heads, or over layers for metrics of layers.

Heads of one layer are no independent draws, so the interval leaves out one layer after the other: the jackknife of
atanh ρ with Student's t, turned back. It says how much the layers of this model agree with each other; noise of the
prompts makes ρ smaller, and is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import rankdata

from .catalogue import BY_ID, Level, Looks

LEAKAGE = ("total", "mask", "drift", "sink", "residual", "here", "earlier", "origin")
"""Powers of the leakage that metrics are compared with: where it is read, and where it comes from."""

FEWEST = 4
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

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def agreement(
    metrics: Mapping[str, NDArray[np.float64]], leakage: Mapping[str, NDArray[np.float64]], over: str
) -> Agreement:
    """Each metric with each other one and with each power of the leakage; arrays by layer [L], or by layer and head
    [L, H]. Only heads (or layers) that have all numbers are ranked."""
    columns = {**leakage, **metrics}
    table = np.stack([np.asarray(x, dtype=np.float64).reshape(len(x), -1) for x in columns.values()], axis=-1)
    layers, there = np.arange(len(table))[:, None].repeat(table.shape[1], 1), np.isfinite(table).all(-1)
    x, layer = table[there], layers[there]
    rho = _spearman(x)
    names, rows = tuple(columns), [list(columns).index(name) for name in metrics]
    without = [_spearman(x[layer != left]) for left in np.unique(layer)]
    low, high = _interval(rho, without)
    return Agreement(tuple(metrics), names, rho[rows], low[rows], high[rows], int(there.sum()), over)


def _spearman(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlation of every column with every other one; NaN for a column that does not vary."""
    if len(x) < 3:
        return np.full((x.shape[1], x.shape[1]), np.nan)
    ranks = rankdata(x, axis=0)
    ranks = ranks - ranks.mean(0)
    size = np.sqrt((ranks**2).sum(0))
    ranks = ranks / np.where(size > 0, size, np.nan)
    return np.asarray(np.clip(ranks.T @ ranks, -1.0, 1.0))


def _interval(
    rho: NDArray[np.float64], without: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    n = len(without)
    if n < FEWEST:
        return np.full(rho.shape, np.nan), np.full(rho.shape, np.nan)
    most = 1 - 1e-12  # a metric agrees with itself completely, and atanh of that is infinite
    z, left = np.arctanh(np.clip(rho, -most, most)), np.arctanh(np.clip(np.stack(without), -most, most))
    error = np.sqrt((n - 1) / n * ((left - left.mean(0)) ** 2).sum(0))
    reach = stdtrit(n - 1, 0.975) * error
    return np.tanh(z - reach), np.tanh(z + reach)


@dataclass(frozen=True)
class Sees:
    """What a metric can see of leakage by what it looks at, and what it agrees with on this model.

    mask      "no" where it looks at logits: the mask acts after them
    most      the power that it agrees with most, of those whose interval does not contain 0; None if there is none
    """

    metric: str
    mask: str
    most: str | None
    rho: float


def sees(found: Agreement) -> tuple[Sees, ...]:
    """One for each metric that has a definition in the catalogue."""
    rows = []
    for at, name in enumerate(found.rows):
        parts = [found.columns.index(part) for part in LEAKAGE if part in found.columns and part != "total"]
        clear = [c for c in parts if found.low[at, c] > 0 or found.high[at, c] < 0]
        best = max(clear, key=lambda c: abs(found.rho[at, c]), default=None)
        looks = BY_ID[name].looks if name in BY_ID else Looks.ATTENTION
        most, rho = (None, math.nan) if best is None else (found.columns[best], float(found.rho[at, best]))
        rows.append(Sees(name, "no" if looks is Looks.LOGITS else "yes", most, rho))
    return tuple(rows)


def by_level(names: Sequence[str], level: Level) -> list[str]:
    """Those of the metrics that are of this level."""
    return [name for name in names if name in BY_ID and BY_ID[name].level is level]
