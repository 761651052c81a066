"""A number and the same number of every resample: what intervals are made of.

The bootstrap resamples prompts with weights w_b. Of an inner product it takes Σ_{b≠b'} w_b w_b' G / Σ_{b≠b'} w_b w_b':
a prompt that is drawn twice is not multiplied with itself, or the bias that the unbiased estimate avoids would be back
in every interval. Numbers of one result share their weights, so that sums, differences and ratios are paired.

    bootstrap = Bootstrap.of(prompts, seed)
    after, before = bootstrap.inner(gram_after), bootstrap.inner(gram_before)
    removed = 1 - after.over(before).estimate      # value, low, high, n
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from jaxtyping import Float64

from posleak.arrays import Array

from .power import unbiased

RESAMPLES = 1000
LEVEL = 0.95

if TYPE_CHECKING:
    Cells = Array
else:  # numpy gives a number, and no array, where there is one cell
    Cells = Annotated[Float64[np.ndarray | np.float64, "*cells"], *get_args(Array)[1:]]


@dataclass(frozen=True)
class Estimate:
    """A number per cell with its interval; n prompts. Intervals are NaN for n < 2."""

    value: Cells
    low: Cells
    high: Cells
    n: int

    def __getitem__(self, index: Any) -> Estimate:
        return Estimate(self.value[index], self.low[index], self.high[index], self.n)

    def __rsub__(self, constant: float | int) -> Estimate:
        """constant − x: the ends of the interval change places."""
        return Estimate(constant - self.value, constant - self.high, constant - self.low, self.n)

    def __truediv__(self, positive: float | int) -> Estimate:
        return Estimate(self.value / positive, self.low / positive, self.high / positive, self.n)

    @classmethod
    def concatenate(cls, parts: list[Estimate]) -> Estimate:
        """Along the first axis."""
        value, low, high = (np.concatenate([getattr(part, end) for part in parts]) for end in ("value", "low", "high"))
        return cls(value, low, high, parts[0].n)


@dataclass(frozen=True)
class Sampled:
    """A number per cell and its resamples, of n prompts; arithmetic acts on both, so that results are resampled too."""

    value: Cells
    samples: Float64[np.ndarray, "S *cells"]
    n: int
    level: float = LEVEL

    @cached_property
    def interval(self) -> tuple[Cells, Cells]:
        """Percentiles over the resamples; NaN for one prompt, which has no spread."""
        if self.n < 2:
            return np.full(self.value.shape, np.nan), np.full(self.value.shape, np.nan)
        tail = (1 - self.level) / 2
        low, high = np.quantile(self.samples, [tail, 1 - tail], axis=0)
        return low, high

    @property
    def estimate(self) -> Estimate:
        return Estimate(np.asarray(self.value), *self.interval, n=self.n)

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
        """The ratio, NaN where the denominator is not clearly above 0: there it would be noise divided by noise."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self / below
        clear = below.interval[0] > 0 if below.n > 1 else np.zeros(np.shape(below.value), bool)
        samples = np.where(np.isfinite(ratio.samples), ratio.samples, 0.0)
        return replace(ratio, value=np.where(clear, ratio.value, np.nan), samples=np.where(clear, samples, np.nan))


def combined(function: Callable[..., Any], *numbers: Sampled | float | int) -> Sampled:
    """function(…) of the values, and of every resample: it must act on the last axes only."""
    sampled = [number for number in numbers if isinstance(number, Sampled)]
    value = function(*(number.value if isinstance(number, Sampled) else number for number in numbers))
    samples = function(*(number.samples if isinstance(number, Sampled) else number for number in numbers))
    return Sampled(np.asarray(value), samples, min(number.n for number in sampled), sampled[0].level)


@dataclass(frozen=True)
class Bootstrap:
    """Seeded resampling weights over prompts. One set serves all numbers of a result: they are paired."""

    weights: Float64[np.ndarray, "S B"]

    @classmethod
    def of(cls, prompts: int, seed: int, resamples: int = RESAMPLES) -> Bootstrap:
        """Resamples with fewer than two different prompts have no pairs, and are drawn again."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, prompts, 0xB007])))
        drawn = generator.integers(prompts, size=(resamples, prompts))
        while prompts > 1 and (single := (drawn == drawn[:, :1]).all(1)).any():
            drawn[single] = generator.integers(prompts, size=(int(single.sum()), prompts))
        return cls(np.stack([np.bincount(row, minlength=prompts) for row in drawn]).astype(float))

    @property
    def prompts(self) -> int:
        return int(self.weights.shape[1])

    @cached_property
    def relative(self) -> Float64[np.ndarray, "S B"]:
        """The weights of each resample, adding up to 1."""
        return np.asarray(self.weights / self.weights.sum(1, keepdims=True))

    def mean(self, x: Float64[np.ndarray, "B *cells"]) -> Sampled:
        """The plain mean over prompts."""
        return Sampled(x.mean(0), np.tensordot(self.relative, x, axes=(1, 0)), self.prompts)

    def inner(self, gram: Float64[np.ndarray, "*cells B B"]) -> Sampled:
        """⟨x, y⟩ from the Gram matrices of x and y."""
        return Sampled(unbiased(gram), self._inner_samples(gram), self.prompts)

    def _inner_samples(self, gram: Float64[np.ndarray, "*cells B B"]) -> Float64[np.ndarray, "S *cells"]:
        if self.prompts < 2:
            return np.full((len(self.weights), *gram.shape[:-2]), np.nan)
        first, second = np.triu_indices(self.prompts, k=1)
        off = (gram + np.swapaxes(gram, -1, -2))[..., first, second]  # [..., pairs b < b']
        flat, cells = off.reshape(-1, off.shape[-1]).T, gram.shape[:-2]
        blocks = (self.weights[start : start + 100] for start in range(0, len(self.weights), 100))
        with np.errstate(invalid="ignore", divide="ignore"):
            sums = [
                (w := block[:, first] * block[:, second]) @ flat / (2 * w.sum(1, keepdims=True)) for block in blocks
            ]
        return np.concatenate(sums).reshape(len(self.weights), *cells)
