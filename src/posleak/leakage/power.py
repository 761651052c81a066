"""From prompts to numbers: unbiased powers, shares that add up to one, and intervals.

The expectation is over prompts. With x_b(i, δ) one component of prompt b,

    ⟨x, y⟩ = mean over (i, δ) of E[x] E[y],  estimated by  [ (Σ_b x_b)(Σ_b y_b) − Σ_b x_b y_b ] / (B (B − 1))

so that no prompt is multiplied with itself: the plain estimate E[x]² carries the noise of x as a bias that is larger
than many effects. power(x) = ⟨x, x⟩ in nats²; share(x) = ⟨x, total⟩ / ⟨total, total⟩. Everything is a function of the
Gram matrix G[b, b'] = mean over (i, δ) of x_b y_b', of which the diagonal is never used.

The bootstrap resamples prompts with weights w_b and takes Σ_{b≠b'} w_b w_b' G / Σ_{b≠b'} w_b w_b'. A prompt that is
drawn twice is not multiplied with itself either; the naive resample would put the bias back into every interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number per cell with its interval: value, low, high [...]; n prompts. Intervals are NaN for n < 2."""

    value: Array
    low: Array
    high: Array
    n: int

    def __getitem__(self, index: Any) -> Estimate:
        return Estimate(self.value[index], self.low[index], self.high[index], self.n)

    def as_dict(self) -> dict[str, Any]:
        """value, low, high and n; `plain` makes JSON of it."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True)
class Bootstrap:
    """Seeded resampling weights over prompts, [S, B]. One set serves all numbers of a result: they are paired."""

    weights: Array
    level: float = LEVEL

    @classmethod
    def of(cls, prompts: int, seed: int, resamples: int = RESAMPLES, level: float = LEVEL) -> Bootstrap:
        """Resamples with fewer than two different prompts have no pairs, and are drawn again."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, prompts, 0xB007])))
        drawn = generator.integers(prompts, size=(resamples, prompts))
        while prompts > 1 and (single := (drawn == drawn[:, :1]).all(1)).any():
            drawn[single] = generator.integers(prompts, size=(int(single.sum()), prompts))
        weights = np.stack([np.bincount(row, minlength=prompts) for row in drawn]).astype(float)
        return cls(weights, level)

    @property
    def prompts(self) -> int:
        return self.weights.shape[1]

    def interval(self, samples: Array) -> tuple[Array, Array]:
        """Percentiles over the first axis of samples [S, ...]; NaN for one prompt, which has no spread."""
        if self.prompts < 2:
            samples = np.full_like(samples, np.nan)
        tail = (1 - self.level) / 2
        low, high = np.quantile(samples, [tail, 1 - tail], axis=0)
        return low, high

    def inner(self, gram: Array) -> Array:
        """⟨x, y⟩ of every resample, [S, ...] from gram [..., B, B]."""
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

    def mean(self, x: Array) -> Estimate:
        """The plain mean over prompts of x [B, ...]."""
        samples = np.tensordot(self.weights / self.weights.sum(1, keepdims=True), x, axes=(1, 0))
        return Estimate(x.mean(0), *self.interval(samples), n=self.prompts)

    def inner_product(self, gram: Array) -> Estimate:
        return Estimate(unbiased(gram), *self.interval(self.inner(gram)), n=self.prompts)

    def ratio(self, above: Array, below: Array) -> Estimate:
        """⟨x, y⟩ / ⟨u, v⟩, resampled together. Where the denominator is not clearly positive the ratio is NaN."""
        bottom = self.inner(below)
        with np.errstate(invalid="ignore", divide="ignore"):
            value, samples = unbiased(above) / unbiased(below), self.inner(above) / bottom
        clear = (self.interval(bottom)[0] > 0) if self.prompts > 1 else np.zeros(value.shape, bool)
        low, high = self.interval(np.where(np.isfinite(samples), samples, 0.0))
        value, low, high = (np.where(clear, x, np.nan) for x in (value, low, high))
        return Estimate(value, low, high, self.prompts)


def gram_matrix(x: Array, y: Array) -> Array:
    """x, y [B, ..., P] with NaN at pairs that do not exist -> mean over pairs of x_b y_b', [..., B, B]."""
    there = np.isfinite(x[0]) & np.isfinite(y[0])
    count = there.sum(-1)[..., None, None]
    x, y = np.where(there, x, 0.0), np.where(there, y, 0.0)
    with np.errstate(invalid="ignore"):
        return np.moveaxis(x, 0, -2) @ np.moveaxis(y, 0, -1) / count


def unbiased(gram: Array) -> Array:
    """[(Σx)(Σy) − Σxy] / (B (B − 1)) from gram [..., B, B]; NaN for one prompt: its noise looks like signal."""
    B = gram.shape[-1]
    if B < 2:
        return np.full(gram.shape[:-2], np.nan)
    return off_diagonal(gram).sum((-1, -2)) / (B * (B - 1))


def off_diagonal(gram: Array) -> Array:
    return gram * (1 - np.eye(gram.shape[-1]))
