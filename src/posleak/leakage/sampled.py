"""Jackknife intervals: a statistic, its replicates without one prompt and without two, and the interval from them.

A power is a mean over pairs of prompts, and near zero almost all of its variance comes from the pairs. So the variance
has a term for single prompts and a pair term. All statistics of one result leave out the same prompts, so that sums,
differences and ratios are paired. Nothing is drawn at random.

    jackknife = Jackknife(prompts)
    after, before = jackknife.inner(products_after), jackknife.inner(products_before)
    removed = 1 - after.over(before).estimate      # value, low, high, n

With v the statistic of n prompts, v_i without prompt i, and v_ij without i and j:

    d_i  = (n − 1) (mean of v_i − v_i)                        contribution of one prompt
    e_ij = (n − 3)/2 · [(n − 2)(v_ij − v) + d_i + d_j]        contribution of a pair beyond both
    pairs = 2 mean(e²) / (n (n − 3)),   ones = Σ d² / (n (n − 1)) − 2 pairs (n − 1)/(n − 2), at least 0
    se²  = ones + pairs

The interval is v ± t·se, with Student's t of n − 1 degrees of freedom, and is extended on the side to which v is skewed
(`_half_width`). docs/definitions.md states its coverage, which benchmarks/coverage.py measures.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

from posleak.arrays import Array
from posleak.axes import MIN_PROMPTS as MIN_PROMPTS

from .power import prompt_pairs, unbiased

LEVEL = 0.95
"""Default confidence level."""

ROUNDING = 1e-7
"""Replicates whose range relative to the value is at most this differ only by rounding: the prompts are equal."""

POWER_UNIT, SHARE_UNIT = "nats²", "1"

if TYPE_CHECKING:
    Cells = Array
else:  # numpy returns a scalar, not an array, where there is one cell
    Cells = Annotated[Float64[np.ndarray | np.float64, "*cells"] | float, *get_args(Array)[1:]]


@dataclass(frozen=True)
class Estimate:
    """A value per cell with its interval, from n prompts: arrays for several cells, Python floats for one.

    `low` and `high` are NaN if n < MIN_PROMPTS, or if the prompts do not differ.
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
        """Return constant − x; the ends of the interval are exchanged."""
        return Estimate(constant - self.value, constant - self.high, constant - self.low, self.n)

    def __truediv__(self, positive: float | int) -> Estimate:
        return Estimate(self.value / positive, self.low / positive, self.high / positive, self.n)

    def minus_independent(self, other: Estimate) -> Estimate:
        """Return the difference from an estimate of other prompts; half-widths are combined in quadrature."""
        value = self.value - other.value
        down = np.hypot(self.value - self.low, other.high - other.value)
        up = np.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, value - down, value + up, min(self.n, other.n))

    @classmethod
    def average(cls, parts: Sequence[Estimate]) -> Estimate:
        """Return the mean of estimates of different prompts; half-widths are combined in quadrature."""
        value = np.mean([part.value for part in parts], axis=0)
        down = np.sqrt(np.sum([np.square(part.value - part.low) for part in parts], axis=0)) / len(parts)
        up = np.sqrt(np.sum([np.square(part.high - part.value) for part in parts], axis=0)) / len(parts)
        return cls(value, value - down, value + up, sum(part.n for part in parts))

    @classmethod
    def concatenate(cls, parts: list[Estimate]) -> Estimate:
        """Concatenate along the first axis."""
        value, low, high = (np.concatenate([getattr(part, end) for part in parts]) for end in ("value", "low", "high"))
        return cls(value, low, high, parts[0].n)


@dataclass(frozen=True)
class LabelledEstimate:
    """A table row: an estimate of one cell or of many, and its labels in the order of the columns.

    Every table that is written or shown has rows of this form. Usual labels:

        quantity, component   what is estimated: power, share, …; and of which component
        unit
        queries               all, early or reference
        layer, call, head     the model's layer id, the index of the attention call, the head
    """

    estimate: Estimate
    labels: dict[str, Any] = field(default_factory=dict)

    def cells(self, *axes: str) -> Iterator[LabelledEstimate]:
        """Yield one labelled estimate per cell; its indices, named by `axes`, come before the other labels."""
        for index in np.ndindex(np.shape(self.estimate.value)):
            yield LabelledEstimate(self.estimate[index], dict(zip(axes, index, strict=True)) | self.labels)

    def as_row(self, columns: Sequence[str] | None = None, **labels: Any) -> dict[str, Any]:
        """Return labels, value, low, high and n as one row.

        columns: the names and the order of the columns; absent labels are None. labels: added in front.
        """
        cell = self.estimate
        ends = {"value": float(cell.value), "low": float(cell.low), "high": float(cell.high), "n": cell.n}
        row = {**labels, **self.labels, **ends}
        return row if columns is None else {name: row.get(name) for name in columns}

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> LabelledEstimate:
        """Read a row that `as_row` returned, or its JSON, in which null stands for NaN."""
        value, low, high = (np.asarray(row[end], dtype=np.float64) for end in ("value", "low", "high"))
        labels = {name: label for name, label in row.items() if name not in ("value", "low", "high", "n")}
        return cls(Estimate(value, low, high, int(row["n"])), labels)


@dataclass(frozen=True)
class Sampled:
    """A value per cell from n prompts, with replicates: without each prompt, then without each of `prompt_pairs(n)`.

    Arithmetic applies to the value and to every replicate, so that results have replicates too.
    """

    value: Cells
    samples: Float64[np.ndarray, "S *cells"]
    n: int
    level: float = LEVEL

    @cached_property
    def interval(self) -> tuple[Cells, Cells]:
        """The ends (low, high); NaN below MIN_PROMPTS prompts, and where the prompts do not differ."""
        n, value = self.n, np.asarray(self.value)
        if n < MIN_PROMPTS:
            return np.full(value.shape, np.nan), np.full(value.shape, np.nan)
        (first, second), without = prompt_pairs(n), self.samples[:n]
        t = float(stdtrit(n - 1, (1 + self.level) / 2))
        with np.errstate(invalid="ignore", over="ignore"):  # NaN if a replicate is infinite
            one = (n - 1) * (without.mean(0) - without)
            two = (n - 3) / 2 * ((n - 2) * (self.samples[n:] - value) + one[first] + one[second])
            by_pairs = 2 * (two**2).mean(0) / (n * (n - 3))
            by_ones = (one**2).sum(0) / (n * (n - 1)) - 2 * by_pairs * (n - 1) / (n - 2)
            error = np.sqrt(np.maximum(by_ones, 0) + by_pairs)
            scale = np.where(error > 0, n * error**2, 1.0) ** 1.5
            skew = (one**3).mean(0) / scale, 2 * (one[first] * one[second] * two).mean(0) / scale
            down, up = np.maximum(t, _half_width(t, *skew, n)), np.maximum(t, -_half_width(-t, *skew, n))
            return value - error * down, value + error * up

    @property
    def estimate(self) -> Estimate:
        """The value with its interval."""
        return Estimate(self.value, *self.interval, n=self.n)

    def at(self, level: float) -> Sampled:
        """Return the same with intervals of another confidence level."""
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

    def over(self, denominator: Sampled) -> Sampled:
        """Return the ratio; NaN where the denominator is not significantly above zero.

        Of a denominator without an interval only the value must be positive; the ratio then has no interval either.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self / denominator
        positive = (denominator.value > 0) & ~(denominator.interval[0] <= 0)
        value, samples = (np.where(positive, x, np.nan) for x in (ratio.value, ratio.samples))
        return replace(ratio, value=value, samples=samples)


def _half_width(t: float, ones: Cells, twos: Cells, n: int) -> Cells:
    """Return the lower half-width in standard errors that replaces the quantile t if the statistic is skewed.

    It inverts the first term of Helmers' expansion of a studentised U-statistic, in Hall's monotone form.

    ones, twos: third moments of the contributions of single prompts and of pairs, divided by se³ n^{3/2}
    """
    bend, shift = (ones / 3 + twos / 2) / np.sqrt(n), (ones / 6 + twos / 2) / np.sqrt(n)
    bend = np.where(np.abs(bend) < 1e-6, 1e-6, bend)
    width: Array = (np.cbrt(1 + 3 * bend * (t - shift)) - 1) / bend
    return width


def combined(function: Callable[..., Any], *arguments: Sampled | float | int) -> Sampled:
    """Apply a smooth function to the values and to every replicate; it must act on the last axes only."""
    sampled = [x for x in arguments if isinstance(x, Sampled)]
    value = function(*(x.value if isinstance(x, Sampled) else x for x in arguments))
    samples = function(*(x.samples if isinstance(x, Sampled) else x for x in arguments))
    return Sampled(np.asarray(value), samples, sampled[0].n, sampled[0].level)


@dataclass(frozen=True)
class Jackknife:
    """Statistics of prompts, with jackknife replicates. Statistics of the same prompts are paired, prompt by prompt.

    prompts: number of prompts, which is the length of the first axis of all arrays

        jackknife = Jackknife(prompts=len(x))
        jackknife.mean(x).estimate                            # value, low, high, n
        (jackknife.mean(x) - jackknife.mean(y)).estimate      # a paired difference
    """

    prompts: int

    def mean(self, x: Float64[np.ndarray, "B *cells"]) -> Sampled:
        """Return the mean over prompts."""
        (first, second), n, total = prompt_pairs(self.prompts), self.prompts, x.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._replicated(x.mean(0), (total - x) / (n - 1), (total - x[first] - x[second]) / (n - 2))

    def of_means(self, function: Callable[..., Any], *x: Float64[np.ndarray, "B ..."]) -> Sampled:
        """Return a smooth function of the means over prompts of its arguments.

        Replicates are computed one by one, because the means of all of them may not fit in memory.
        """
        (first, second), n, totals = prompt_pairs(self.prompts), self.prompts, [array.sum(0) for array in x]
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.asarray(function(*(total / n for total in totals)))
            without = [[total - array[i] for total, array in zip(totals, x, strict=True)] for i in range(n)]
            one = [function(*(left / (n - 1) for left in without[i])) for i in range(n)]
            two = [
                function(*((left - array[j]) / (n - 2) for left, array in zip(without[i], x, strict=True)))
                for i, j in zip(first, second, strict=True)
            ]
            shaped = (np.asarray(part, dtype=float).reshape(-1, *value.shape) for part in (one, two))
            return self._replicated(value, *shaped)

    def inner(self, sums: Float64[np.ndarray, "*cells sums"]) -> Sampled:
        """Return ⟨x, y⟩ from the products of x and y (power.py)."""
        n, first = self.prompts, np.moveaxis(sums, -1, 0)
        return self.of_sums(unbiased(sums, n), first[:n], first[n:])

    def of_sums(
        self,
        value: Cells,
        with_others: Float64[np.ndarray, "B *cells"],
        together: Float64[np.ndarray, "pairs *cells"],
    ) -> Sampled:
        """Return a symmetrised mean over pairs of prompts.

        with_others: the sum over each prompt's pairs; together: the terms of `prompt_pairs(n)`
        """
        (first, second), n, total = prompt_pairs(self.prompts), self.prompts, with_others.sum(0) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            one = (total - with_others) / ((n - 1) * (n - 2))
            two = (total - with_others[first] - with_others[second] + together) / ((n - 2) * (n - 3))
            return self._replicated(value, one, two)

    def _replicated(
        self, value: Cells, one: Float64[np.ndarray, "B *cells"], two: Float64[np.ndarray, "pairs *cells"]
    ) -> Sampled:
        """Set replicates to NaN where the prompts do not differ: copies of one prompt have no sampling error.

        A value of exactly 0 in every prompt keeps its replicates, such as the mask part of a query beyond the window.
        """
        samples = np.concatenate([one, two])
        equal = (np.ptp(samples, axis=0) <= ROUNDING * np.abs(value)) & (value != 0)
        return Sampled(value, np.where(equal, np.nan, samples), self.prompts)
