"""Effects of variants with intervals over models, from a table of variants and seeds.

Two seeds are too few to estimate the variance within one variant. But all variants of a seed share initial weights and
data, and all variants have the same seeds: a randomised block design. The residuals of

    y[v, s] = mean + variant[v] + seed[s] + residual[v, s]

estimate the variance of one value from all models together:

    σ² = Σ residual² / ((V − 1)(S − 1))
    mean of a variant             ±  t · σ √(1 / S)
    difference of two variants    ±  t · σ √(2 / S)

with Student's t of (V − 1)(S − 1) degrees of freedom. Means are conditional on these seeds: the effect of a seed that
all variants share is not in the intervals, and cancels in differences. The variance is assumed to be equal in all
variants. It includes the variance over prompts, because models of different seeds are measured on different prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy import stats

from posleak.leakage import Estimate

LEVEL = 0.95
"""Confidence level."""
MIN_RELATIVE_SIGMA = 1e-12
"""Relative residuals below this value are rounding errors; there is no interval then."""


@dataclass(frozen=True)
class Layout:
    """Values of V variants and S seeds; the first variant is the baseline."""

    values: Float64[np.ndarray, "V S"]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or not np.isfinite(self.values).all():
            raise ValueError(f"a layout needs a finite value for each variant and seed, got shape {self.values.shape}")

    @property
    def models(self) -> int:
        return int(self.values.size)

    @property
    def freedom(self) -> int:
        """Degrees of freedom."""
        V, S = self.values.shape
        return int((V - 1) * (S - 1))

    @property
    def sigma(self) -> float:
        """Residual standard deviation; NaN if it is not defined: one seed, one variant, no residuals."""
        if self.freedom < 1:
            return float("nan")
        means, blocks = self.values.mean(1, keepdims=True), self.values.mean(0)
        residuals = self.values - means - blocks + self.values.mean()
        sigma = float(np.sqrt((residuals**2).sum() / self.freedom))
        return sigma if sigma > MIN_RELATIVE_SIGMA * float(np.abs(self.values).max()) else float("nan")

    @property
    def means(self) -> Estimate:
        """Mean of each variant [V] over the seeds."""
        return self._around(self.values.mean(1), 1)

    @property
    def differences(self) -> Estimate:
        """Difference of each variant from the baseline [V]; that of the baseline is 0 without an interval."""
        means = self.values.mean(1)
        differences = self._around(means - means[0], 2)
        differences.low[0] = differences.high[0] = np.nan
        return differences

    def _around(self, value: Float64[np.ndarray, "V"], terms: int) -> Estimate:
        half_width = (
            stats.t.ppf(0.5 + LEVEL / 2, max(self.freedom, 1)) * self.sigma * np.sqrt(terms / self.values.shape[1])
        )
        return Estimate(value, value - half_width, value + half_width, self.models)
