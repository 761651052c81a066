"""A number, and the same number without one prompt and without two: what intervals are made of.

The jackknife asks how the number changes when one prompt is left out, and how much of what two prompts do is done by
the two together: a power is a mean over pairs of prompts, and where it is near zero the pairs make nearly all of its
noise. Numbers of one result leave out the same prompts, so that sums, differences and ratios are paired. Nothing is
drawn at random.

    jackknife = Jackknife(prompts)
    after, before = jackknife.inner(products_after), jackknife.inner(products_before)
    removed = 1 - after.over(before).estimate      # value, low, high, n

With v the number, v_i without prompt i and v_ij without i and j, of n prompts:

    d_i  = (n − 1) (mean of v_i − v_i)                        what one prompt does
    e_ij = (n − 3)/2 · [(n − 2)(v_ij − v) + d_i + d_j]        what two do together
    pairs = 2 mean(e²) / (n (n − 3)),   ones = Σ d² / (n (n − 1)) − 2 pairs (n − 1)/(n − 2), at least 0
    se²  = ones + pairs

The interval is v ± t·se, with Student's t of n − 1 degrees of freedom, and longer on the side to which v is skewed
(`_reach`). docs/definitions.md says how often it covers, and benchmarks/coverage.py measures it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

from posleak.arrays import Array

from .power import pairs, unbiased

LEVEL = 0.95

FEWEST = 4
"""Prompts below which there is no interval: with three, what two do together cannot be told."""

ALIKE = 1e-7
"""Replicates that differ by so little, beside their number, differ by rounding: so do the prompts."""

if TYPE_CHECKING:
    Cells = Array
else:  # numpy gives a number, and no array, where there is one cell
    Cells = Annotated[Float64[np.ndarray | np.float64, "*cells"] | float, *get_args(Array)[1:]]


@dataclass(frozen=True)
class Estimate:
    """A number per cell with its interval; n prompts. No interval, NaN: n < FEWEST, or prompts that do not differ.

    Arrays where there are several cells, Python's floats where there is one.
    """

    value: Cells
    low: Cells
    high: Cells
    n: int

    def __post_init__(self) -> None:
        for end in ("value", "low", "high"):
            if np.ndim(cells := getattr(self, end)) == 0:
                object.__setattr__(self, end, float(cells))

    def __getitem__(self, index: Any) -> Estimate:
        value, low, high = (np.asarray(end)[index] for end in (self.value, self.low, self.high))
        return Estimate(value, low, high, self.n)

    def __rsub__(self, constant: float | int) -> Estimate:
        """constant − x: the ends of the interval change places."""
        return Estimate(constant - self.value, constant - self.high, constant - self.low, self.n)

    def __truediv__(self, positive: float | int) -> Estimate:
        return Estimate(self.value / positive, self.low / positive, self.high / positive, self.n)

    def minus_other(self, other: Estimate) -> Estimate:
        """The difference from a number of other prompts: each side's distances to its ends add up in squares."""
        value = self.value - other.value
        down = np.hypot(self.value - self.low, other.high - other.value)
        up = np.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, value - down, value + up, min(self.n, other.n))

    def widened(self, other: Estimate) -> Estimate:
        """The same number with the spread of another mean of it, over other draws, added in squares."""
        low = self.value - np.hypot(self.value - self.low, other.value - other.low)
        high = self.value + np.hypot(self.high - self.value, other.high - other.value)
        return Estimate(self.value, low, high, self.n)

    @classmethod
    def average(cls, parts: Sequence[Estimate]) -> Estimate:
        """The mean of numbers of different prompts: each side's distances to its ends add up in squares."""
        value = np.mean([part.value for part in parts], axis=0)
        down = np.sqrt(np.sum([np.square(part.value - part.low) for part in parts], axis=0)) / len(parts)
        up = np.sqrt(np.sum([np.square(part.high - part.value) for part in parts], axis=0)) / len(parts)
        return cls(value, value - down, value + up, sum(part.n for part in parts))

    @classmethod
    def concatenate(cls, parts: list[Estimate]) -> Estimate:
        """Along the first axis."""
        value, low, high = (np.concatenate([getattr(part, end) for part in parts]) for end in ("value", "low", "high"))
        return cls(value, low, high, parts[0].n)


@dataclass(frozen=True)
class Sampled:
    """A number per cell of n prompts, and its replicates: first without each prompt, then without each of `pairs(n)`.

    Arithmetic acts on all of them, so that results have replicates too.
    """

    value: Cells
    samples: Float64[np.ndarray, "S *cells"]
    n: int
    level: float = LEVEL

    @cached_property
    def interval(self) -> tuple[Cells, Cells]:
        """NaN below FEWEST prompts, and where prompts do not differ."""
        n, value = self.n, np.asarray(self.value)
        if n < FEWEST:
            return np.full(value.shape, np.nan), np.full(value.shape, np.nan)
        with np.errstate(invalid="ignore", over="ignore"):  # a replicate may be infinite: there is no interval then
            return self._interval(value)

    def _interval(self, value: Array) -> tuple[Cells, Cells]:
        n = self.n
        (first, second), without = pairs(n), self.samples[:n]
        one = (n - 1) * (without.mean(0) - without)
        two = (n - 3) / 2 * ((n - 2) * (self.samples[n:] - value) + one[first] + one[second])
        by_pairs = 2 * (two**2).mean(0) / (n * (n - 3))
        by_ones = (one**2).sum(0) / (n * (n - 1)) - 2 * by_pairs * (n - 1) / (n - 2)
        error = np.sqrt(np.maximum(by_ones, 0) + by_pairs)
        scale = np.where(error > 0, n * error**2, 1.0) ** 1.5
        skew = (one**3).mean(0) / scale, 2 * (one[first] * one[second] * two).mean(0) / scale
        t = float(stdtrit(n - 1, (1 + self.level) / 2))
        down, up = np.maximum(t, _reach(t, *skew, n)), np.maximum(t, -_reach(-t, *skew, n))
        return value - error * down, value + error * up

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, *self.interval, n=self.n)

    def at(self, level: float) -> Sampled:
        """The same with intervals of another level."""
        return replace(self, level=level)

    def __getitem__(self, index: Any) -> Sampled:
        inner = index if isinstance(index, tuple) else (index,)
        return replace(self, value=self.value[index], samples=self.samples[(slice(None), *inner)])

    def __add__(self, other: Sampled | float) -> Sampled:
        return combined(operator.add, self, other)

    def __sub__(self, other: Sampled | float) -> Sampled:
        return combined(operator.sub, self, other)

    def __truediv__(self, other: Sampled | float) -> Sampled:
        return combined(operator.truediv, self, other)

    def over(self, below: Sampled) -> Sampled:
        """The ratio, NaN where the denominator is not clearly above 0: there it would be noise divided by noise.

        A denominator without an interval is taken at its value; the ratio has no interval then.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self / below
        clear = (below.value > 0) & ~(below.interval[0] <= 0)
        value, samples = (np.where(clear, x, np.nan) for x in (ratio.value, ratio.samples))
        return replace(ratio, value=value, samples=samples)


def _reach(t: float, ones: Cells, twos: Cells, n: int) -> Cells:
    """How many standard errors below a skewed number the truth lies at the t-quantile of a number that is not skewed.

    ones, twos: third moments of what one prompt does and of what two do together, over se³ n^{3/2}. The first term of
    Helmers' expansion of a studentised U-statistic, inverted in Hall's monotone form.
    """
    bend, shift = (ones / 3 + twos / 2) / np.sqrt(n), (ones / 6 + twos / 2) / np.sqrt(n)
    bend = np.where(np.abs(bend) < 1e-6, 1e-6, bend)
    found: Array = (np.cbrt(1 + 3 * bend * (t - shift)) - 1) / bend
    return found


def combined(function: Callable[..., Any], *numbers: Sampled | float | int) -> Sampled:
    """function(…) of the values, and of every replicate: it must be smooth, and act on the last axes only."""
    sampled = [number for number in numbers if isinstance(number, Sampled)]
    value = function(*(number.value if isinstance(number, Sampled) else number for number in numbers))
    samples = function(*(number.samples if isinstance(number, Sampled) else number for number in numbers))
    return Sampled(np.asarray(value), samples, sampled[0].n, sampled[0].level)


@dataclass(frozen=True)
class Jackknife:
    """Leaves out prompts. What is made from as many prompts is paired, prompt by prompt."""

    prompts: int

    def mean(self, x: Float64[np.ndarray, "B *cells"]) -> Sampled:
        """The plain mean over prompts."""
        (first, second), n, total = pairs(self.prompts), self.prompts, x.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._replicated(x.mean(0), (total - x) / (n - 1), (total - x[first] - x[second]) / (n - 2))

    def of_means(self, function: Callable[..., Any], *x: Float64[np.ndarray, "B ..."]) -> Sampled:
        """function(mean over prompts of each x), which must be smooth: for what is not a sum over heads or layers.

        One replicate is made after the other: the means of all of them together may need more memory than there is.
        """
        (first, second), n, totals = pairs(self.prompts), self.prompts, [each.sum(0) for each in x]
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.asarray(function(*(total / n for total in totals)))
            without = [[total - each[i] for total, each in zip(totals, x, strict=True)] for i in range(n)]
            one = [function(*(left / (n - 1) for left in without[i])) for i in range(n)]
            two = [
                function(*((left - each[j]) / (n - 2) for left, each in zip(without[i], x, strict=True)))
                for i, j in zip(first, second, strict=True)
            ]
            shaped = (np.asarray(found, dtype=float).reshape(-1, *value.shape) for found in (one, two))
            return self._replicated(value, *shaped)

    def inner(self, sums: Float64[np.ndarray, "*cells sums"]) -> Sampled:
        """⟨x, y⟩ from the products of x and y (power.py)."""
        n, found = self.prompts, np.moveaxis(sums, -1, 0)
        return self.of_sums(unbiased(sums, n), found[:n], found[n:])

    def of_sums(
        self,
        value: Cells,
        with_others: Float64[np.ndarray, "B *cells"],
        together: Float64[np.ndarray, "pairs *cells"],
    ) -> Sampled:
        """A mean over pairs, both ways round, from the sum over each prompt's pairs, and from those of `pairs(n)`."""
        (first, second), n, total = pairs(self.prompts), self.prompts, with_others.sum(0) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            one = (total - with_others) / ((n - 1) * (n - 2))
            two = (total - with_others[first] - with_others[second] + together) / ((n - 2) * (n - 3))
            return self._replicated(value, one, two)

    def _replicated(
        self, value: Cells, one: Float64[np.ndarray, "B *cells"], two: Float64[np.ndarray, "pairs *cells"]
    ) -> Sampled:
        """Replicates are NaN where prompts do not differ: one prompt many times says nothing about others.

        A number that is 0 in every prompt stays: it is exactly 0, as the mask's is behind a window.
        """
        samples = np.concatenate([one, two])
        alike = (np.ptp(samples, axis=0) <= ALIKE * np.abs(value)) & (value != 0)
        return Sampled(value, np.where(alike, np.nan, samples), self.prompts)
