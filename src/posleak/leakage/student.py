"""Quantiles of Student's t, for whole degrees of freedom."""

from __future__ import annotations

import math
from functools import cache


@cache
def quantile(probability: float, freedom: int) -> float:
    """The t that is not exceeded with this probability, by bisection."""
    if probability < 0.5:
        return -quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while cumulative(high, freedom) < probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if cumulative(middle, freedom) < probability else (low, middle)
    return high


def cumulative(t: float, freedom: int) -> float:
    """Probability of a smaller value: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 + inside) / 2
