"""Comparison of a quantity with its baseline, and statistics across heads or layers, with intervals.

Two measurements of the same prompts are paired: the contrast is computed in every jackknife replicate, so that what the
prompts have in common cancels. Measurements of different prompts are independent: the half-widths of their intervals
are combined in quadrature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from posleak.arrays import Array

from .sampled import Cells, Estimate, Jackknife, Sampled, combined

MAX_CORRELATION = 1 - 1e-12
"""Correlations are clipped to this size, because artanh 1 is infinite."""


@dataclass(frozen=True)
class Contrast:
    """A quantity `after` a change and its baseline `before`; paired: both are measured on the same prompts."""

    after: Sampled
    before: Sampled
    paired: bool = True

    def at(self, level: float) -> Contrast:
        """Return the same contrast with intervals of another confidence level."""
        return replace(self, after=self.after.at(level), before=self.before.at(level))

    @property
    def difference(self) -> Estimate:
        """after − before."""
        if self.paired:
            return (self.after - self.before).estimate
        return self.after.estimate.minus_independent(self.before.estimate)

    @property
    def ratio(self) -> Sampled:
        """after / before, with its replicates; NaN where `before` is not significantly above zero."""
        if not self.paired:
            raise ValueError("a ratio has replicates only if both quantities are measured on the same prompts")
        return self.after.over(self.before)

    @property
    def relative(self) -> Estimate:
        """after / before − 1."""
        return (self.ratio - 1.0).estimate

    @property
    def removed(self) -> Estimate:
        """1 − after / before."""
        return 1 - self.ratio.estimate


def correlation(x: Float64[np.ndarray, "*cells K"], y: Float64[np.ndarray, "*cells K"]) -> Cells:
    """Return Pearson's correlation over the last axis; NaN where x or y is constant."""
    a, b = (values - values.mean(-1, keepdims=True) for values in (x, y))
    spread = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        r: Array = np.where(spread > 0, (a * b).sum(-1) / spread, np.nan)
    return r


def correlated(
    jackknife: Jackknife, x: Float64[np.ndarray, "B *cells K"], y: Float64[np.ndarray, "B *cells K"]
) -> Estimate:
    """Estimate the correlation of two means over prompts.

    The interval is computed for Fisher's z = artanh r and transformed back, so it stays within ±1.
    """

    def fisher_z(x: Array, y: Array) -> Array:
        return np.asarray(np.arctanh(np.clip(correlation(x, y), -MAX_CORRELATION, MAX_CORRELATION)))

    z = jackknife.of_means(fisher_z, x, y).estimate
    return Estimate(np.tanh(z.value), np.tanh(z.low), np.tanh(z.high), z.n)


def mean_difference(x: Float64[np.ndarray, "*cells K"]) -> Cells:
    """Return Gini's mean difference: the mean of |x_g − x_h| over all pairs g ≠ h.

    In increasing order, the k-th of K values is the larger one in k − 1 pairs and the smaller one in K − k.
    """
    count = x.shape[-1]
    difference: Array = np.sort(x, axis=-1) @ (2.0 * np.arange(count) - (count - 1)) / (count * (count - 1) / 2)
    return difference


def octave_cosines(energy: Float64[np.ndarray, "*cells K S"]) -> tuple[Cells, Cells]:
    """Return two mean cosines: of each head with itself at twice the scale, and of different heads at the same scale.

    energy: shares of K heads over S scales, each twice as coarse as the one before. At twice the scale, a head has on
    each scale what it has now on the next coarser one. With f_h its shares on scales 1 … S−1 and c_h those on scales
    2 … S, the results are the means of cos(c_h, f_h) over heads and of cos(f_g, f_h) over pairs of different heads.
    """
    count = energy.shape[-2]
    coarse, fine = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (energy[..., 1:], energy[..., :-1]))
    all_pairs = (fine.sum(-2) ** 2).sum(-1)  # Σ over g and h of f_g · f_h, in which each head with itself gives 1
    return (coarse * fine).sum((-1, -2)) / count, (all_pairs - count) / (count * (count - 1))


def depth_slope(powers: Sampled, layers: Sequence[int] | None = None) -> tuple[Sampled, Sampled]:
    """Return the least-squares slope of powers [L] over relative depth, and the same divided by their mean.

    Relative depth is 0 at the first layer and 1 at the last, so that the slope is in nats². layers: the indices of the
    layers that are used; None means all.
    """
    count = powers.value.shape[-1]
    chosen = np.arange(count) if layers is None else np.asarray(layers)
    depth, some = chosen / (count - 1), powers if layers is None else powers[chosen]
    plain = combined(lambda y: slope(y, depth), some)
    return plain, plain / combined(lambda y: y.mean(-1), some)


def slope(y: Float64[np.ndarray, "*cells L"], x: Float64[np.ndarray, "L"]) -> Cells:
    """Return the least-squares slope of y over x."""
    centred = x - x.mean()
    ratio: Array = (y @ centred) / (centred @ centred)
    return ratio
