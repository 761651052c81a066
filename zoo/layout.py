"""Models in a table of variants and seeds: what a variant does, with an interval over models.

Two seeds are too few to say by themselves how much models of one variant differ. But all variants of a seed share first
weights and data, and all variants have the same seeds: randomised blocks. What remains of

    y[v, s] = mean + variant[v] + seed[s] + rest[v, s]

after variants and seeds are taken out says how much chance there is in one number, from all models together:

    σ² = Σ rest² / ((V − 1)(S − 1))
    mean of a variant             ±  t · σ √(1 / S)
    difference of two variants    ±  t · σ √(2 / S)

with Student's t of (V − 1)(S − 1) degrees of freedom. Means are those of these seeds: what all variants of a seed have
in common is not in their intervals, and cancels in differences. It is assumed that chance is about equally large in all
variants. Noise of prompts is part of it: models of different seeds are measured on different prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy import stats

from posleak.leakage import Estimate

LEVEL = 0.95
ALIKE = 1e-12
"""Rests that are so small beside the numbers are rounding: models do not differ by chance, and there is no interval."""


@dataclass(frozen=True)
class Layout:
    """Numbers of V variants and S seeds; the first variant is the one that others are compared with."""

    values: Float64[np.ndarray, "V S"]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or not np.isfinite(self.values).all():
            raise ValueError(f"a layout needs a number for each variant and seed, got shape {self.values.shape}")

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
        """How much one number owes to chance; NaN where that cannot be told: one seed, one variant, no difference."""
        if self.freedom < 1:
            return float("nan")
        means, blocks = self.values.mean(1, keepdims=True), self.values.mean(0)
        rest = self.values - means - blocks + self.values.mean()
        found = float(np.sqrt((rest**2).sum() / self.freedom))
        return found if found > ALIKE * float(np.abs(self.values).max()) else float("nan")

    @property
    def means(self) -> Estimate:
        """Of each variant [V], over these seeds."""
        return self._around(self.values.mean(1), 1)

    @property
    def differences(self) -> Estimate:
        """Of each variant from the first [V]; that of the first is 0, and has no interval."""
        means = self.values.mean(1)
        found = self._around(means - means[0], 2)
        found.low[0] = found.high[0] = np.nan
        return found

    def _around(self, value: Float64[np.ndarray, "V"], terms: int) -> Estimate:
        reach = stats.t.ppf(0.5 + LEVEL / 2, max(self.freedom, 1)) * self.sigma * np.sqrt(terms / self.values.shape[1])
        return Estimate(value, value - reach, value + reach, self.models)
