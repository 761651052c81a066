"""Comparison of a quantity with its baseline: difference, ratio, relative change, with intervals.

Two measurements of the same prompts are paired: the contrast is computed in every jackknife replicate, so that what the
prompts have in common cancels. Measurements of different prompts are independent: the half-widths of their intervals
are combined in quadrature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from .sampled import Estimate, Jackknife, Sampled
from .summary import Products

QUERIES = ("all", "early")

PowerKey = tuple[str, str]
"""(queries, component): names one power of a model, such as ("all", "mask")."""

Sums = Float64[np.ndarray, "*cells sums"]


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


def contrasts(
    after: Mapping[PowerKey, Sums], before: Mapping[PowerKey, Sums], prompts: int
) -> dict[PowerKey, Contrast]:
    """Return the paired contrast of every power that both have, from their products (power.py) of the same prompts."""
    jackknife = Jackknife(prompts)
    return {
        key: Contrast(jackknife.inner(sums), jackknife.inner(before[key]))
        for key, sums in after.items()
        if key in before
    }


def model_products(products: Mapping[str, Products]) -> dict[PowerKey, Sums]:
    """Return the products of the whole model, means over layers and heads, of all and of early queries."""
    return {
        (queries, component): sums
        for queries in QUERIES
        for component, sums in products[queries].averaged((0, 1)).own.items()
    }
