"""Ridge regression in closed form, for many fits on overlapping groups of rows.

    w = argmin  mean (y − x·w − b)² + λ ‖s ⊙ w‖²        s: standard deviations of the columns in the training rows

so λ is relative to columns of variance 1. Where there are at least as many rows as columns, groups are kept as sums
(n, Σx, Σxxᵀ, Σy, Σxyᵀ) that add up to any training set; else the dual form solves a system of the rows' number.
Directions are projected out of the rows before anything else, x − (x·B) Bᵀ. float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

FLAT = 1e-7
"""A column whose deviation is below this share of the largest one is constant, and gets no weight."""


@dataclass(frozen=True)
class Fit:
    """y = x · weights + bias: weights [λ, W, Y], bias [λ, Y]."""

    weights: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, W] -> [λ, n, Y]"""
        return x @ self.weights + self.bias[:, None]


class Design(Protocol):
    """Rows in groups, which can be fitted on any of them."""

    def without(self, basis: Tensor) -> Design:
        """The same rows, with the orthonormal columns of basis [W, k] projected out."""
        ...

    def fit(self, groups: Sequence[int], lambdas: Sequence[float]) -> Fit: ...


def design(x: Sequence[Tensor], y: Sequence[Tensor]) -> Design:
    """Rows x [n_g, W] and targets y [n_g, Y] of each group g: sums where columns are fewer, else the rows."""
    rows = sum(len(group) for group in x)
    return Sums.of(x, y) if x[0].shape[1] <= rows else Rows(tuple(x), tuple(y))


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of one group: n, Σx [W], Σy [Y], Σxxᵀ [W, W], Σxyᵀ [W, Y]."""

    n: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Moments:
        return cls(len(x), x.sum(0), y.sum(0), x.mT @ x, x.mT @ y)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.n + other.n, self.x + other.x, self.y + other.y, self.xx + other.xx, self.xy + other.xy
        )  # fmt: skip

    def without(self, basis: Tensor) -> Moments:
        """Of the rows with the orthonormal columns of basis [W, k] projected out."""
        xx = self.xx - basis @ (basis.mT @ self.xx)
        return Moments(
            self.n, self.x - basis @ (basis.mT @ self.x), self.y,
            xx - (xx @ basis) @ basis.mT, self.xy - basis @ (basis.mT @ self.xy),
        )  # fmt: skip


@dataclass(frozen=True)
class Sums:
    """The primal form."""

    groups: tuple[Moments, ...]

    @classmethod
    def of(cls, x: Sequence[Tensor], y: Sequence[Tensor]) -> Sums:
        return cls(tuple(Moments.of(a, b) for a, b in zip(x, y, strict=True)))

    def without(self, basis: Tensor) -> Sums:
        return Sums(tuple(group.without(basis) for group in self.groups))

    def fit(self, groups: Sequence[int], lambdas: Sequence[float]) -> Fit:
        m = reduce(Moments.__add__, (self.groups[g] for g in groups))
        mean, target = m.x / m.n, m.y / m.n
        covariance = m.xx / m.n - mean[:, None] * mean
        s, flat = _deviations(covariance.diagonal())
        system = (covariance / s / s[:, None]).masked_fill(flat | flat[:, None], 0)
        right = ((m.xy / m.n - mean[:, None] * target) / s[:, None]).masked_fill(flat[:, None], 0)
        w = _solve(system, right, lambdas) / s[:, None]
        return Fit(w, target - mean @ w)


@dataclass(frozen=True)
class Rows:
    """The dual form: w = Xᵀ (XXᵀ/n + λ)⁻¹ y / n."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]

    def without(self, basis: Tensor) -> Rows:
        return Rows(tuple(group - (group @ basis) @ basis.mT for group in self.x), self.y)

    def fit(self, groups: Sequence[int], lambdas: Sequence[float]) -> Fit:
        x, y = torch.cat([self.x[g] for g in groups]), torch.cat([self.y[g] for g in groups])
        mean, target, n = x.mean(0), y.mean(0), len(x)
        s, flat = _deviations((x - mean).square().mean(0))
        z = ((x - mean) / s).masked_fill(flat, 0)
        w = z.mT @ _solve(z @ z.mT / n, (y - target) / n, lambdas) / s[:, None]
        return Fit(w, target - mean @ w)


def _deviations(variance: Tensor) -> tuple[Tensor, Tensor]:
    s = variance.clamp(min=0).sqrt()
    flat = s <= FLAT * s.max()
    return s.masked_fill(flat, 1.0), flat


def _solve(system: Tensor, right: Tensor, lambdas: Sequence[float]) -> Tensor:
    """(system + λ)⁻¹ right for every λ: [λ, n, Y]."""
    ridge = torch.tensor(lambdas, dtype=system.dtype, device=system.device)[:, None, None] * torch.eye(
        len(system), dtype=system.dtype, device=system.device
    )
    return torch.cholesky_solve(right.expand(len(lambdas), -1, -1), torch.linalg.cholesky(system + ridge))
