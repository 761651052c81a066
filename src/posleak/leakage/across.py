"""Numbers about a whole set of heads or layers: do two properties go together, how far apart are heads, how alike."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from posleak.arrays import Array

from .sampled import Cells, Estimate, Jackknife

CLOSE = 1 - 1e-12
"""Correlations nearer to ±1 are taken as this: artanh 1 is infinite."""


def correlation(x: Float64[np.ndarray, "*cells K"], y: Float64[np.ndarray, "*cells K"]) -> Cells:
    """Pearson's correlation over the last axis; NaN where one of them does not vary."""
    a, b = (each - each.mean(-1, keepdims=True) for each in (x, y))
    spread = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = np.where(spread > 0, (a * b).sum(-1) / spread, np.nan)
    return found


def correlated(
    jackknife: Jackknife, x: Float64[np.ndarray, "B *cells K"], y: Float64[np.ndarray, "B *cells K"]
) -> Estimate:
    """The correlation of two means over prompts. Its interval is made for artanh r, Fisher's z, and stays within ±1."""

    def z(x: Array, y: Array) -> Array:
        return np.asarray(np.arctanh(np.clip(correlation(x, y), -CLOSE, CLOSE)))

    found = jackknife.of_means(z, x, y).estimate
    return Estimate(np.tanh(found.value), np.tanh(found.low), np.tanh(found.high), found.n)


def mean_difference(x: Float64[np.ndarray, "*cells K"]) -> Cells:
    """Mean of |x_g − x_h| over all pairs of different ones (Gini's mean difference).

    In order of size, the k-th of K is the larger one in k − 1 pairs, and the smaller one in K − k.
    """
    count = x.shape[-1]
    found: Array = np.sort(x, axis=-1) @ (2.0 * np.arange(count) - (count - 1)) / (count * (count - 1) / 2)
    return found


def octave_cosines(energy: Float64[np.ndarray, "*cells K S"]) -> tuple[Cells, Cells]:
    """How alike a head is to itself when it is seen from twice as far, and to another head as it is: mean cosines.

    energy: shares of K heads over S scales, each twice as coarse as the one before. Seen from twice as far, a head has
    on each scale what it has now on the next coarser one. With f_h its shares on scales 1 … S−1 and c_h those on scales
    2 … S, these are the means of cos(c_h, f_h) over heads, and of cos(f_g, f_h) over pairs of different heads.
    """
    count = energy.shape[-2]
    coarse, fine = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (energy[..., 1:], energy[..., :-1]))
    everyone = (fine.sum(-2) ** 2).sum(-1)  # Σ over g and h of f_g · f_h: 1 for each head with itself
    return (coarse * fine).sum((-1, -2)) / count, (everyone - count) / (count * (count - 1))
