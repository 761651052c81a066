"""Ridge regression in closed form, for many fits on overlapping groups of rows.

    w = argmin  mean (y − x·w − b)² + λ ‖s ⊙ w‖²        s: standard deviations of the columns in the training rows

so λ is relative to columns of variance 1. Where there are at least as many rows as columns, the primal form keeps
moments of each group (n, Σx, Σxxᵀ, Σy, Σxyᵀ), which are added for any training set; else the dual form solves a system
with one equation per row. Directions are projected out of the rows first: x − (x·B) Bᵀ. float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

LAMBDAS = (1e-3, 3e-2, 1.0, 30.0)
GROUPS = 4
"""Number of groups of prompts in cross-validation."""

FLAT = 1e-7
"""A column whose standard deviation is at most this share of the largest one is constant, and gets weight 0."""


@dataclass(frozen=True)
class Fit:
    """y = x · weights + bias, for every λ."""

    weights: Float64[Tensor, "λ W Y"]
    bias: Float64[Tensor, "λ Y"]

    def __call__(self, x: Float64[Tensor, "n W"]) -> Float64[Tensor, "λ n Y"]:
        return x @ self.weights + self.bias[:, None]


def ridge_problem(x: Sequence[Float64[Tensor, "_n W"]], y: Sequence[Float64[Tensor, "_n Y"]]) -> RidgeProblem:
    """Return the regression of targets y on rows x, by group: dual if there are fewer rows than columns."""
    if x[0].shape[1] > sum(len(group) for group in x):
        return DualRidge(tuple(x), tuple(y))
    sums = (Moments(len(a), a.sum(0), b.sum(0), a.mT @ a, a.mT @ b) for a, b in zip(x, y, strict=True))
    return PrimalRidge(tuple(sums))


class Moments(NamedTuple):
    """Sums over the n rows of one group: Σx, Σy, Σxxᵀ, Σxyᵀ."""

    n: int
    x: Float64[Tensor, "W"]
    y: Float64[Tensor, "Y"]
    xx: Float64[Tensor, "W W"]
    xy: Float64[Tensor, "W Y"]

    def without(self, basis: Float64[Tensor, "W k"]) -> Moments:
        """Return the sums of the rows with the orthonormal columns of basis projected out."""
        xx = self.xx - basis @ (basis.mT @ self.xx)
        return Moments(
            self.n, self.x - basis @ (basis.mT @ self.x), self.y,
            xx - (xx @ basis) @ basis.mT, self.xy - basis @ (basis.mT @ self.xy),
        )  # fmt: skip


@dataclass(frozen=True)
class PrimalRidge:
    """The primal form, from the moments of each group.

    without(basis)        the same regression with the orthonormal columns of basis projected out of the rows
    fit(groups, lambdas)  the solutions on the rows of these groups, for every λ
    """

    groups: tuple[Moments, ...]

    def without(self, basis: Float64[Tensor, "W k"]) -> PrimalRidge:
        return PrimalRidge(tuple(group.without(basis) for group in self.groups))

    def fit(self, groups: Sequence[int], lambdas: Sequence[float]) -> Fit:
        m = Moments(*(reduce(add, sums) for sums in zip(*(self.groups[g] for g in groups), strict=True)))
        mean, target = m.x / m.n, m.y / m.n
        covariance = m.xx / m.n - mean[:, None] * mean
        s, flat = _deviations(covariance.diagonal())
        system = (covariance / s / s[:, None]).masked_fill(flat | flat[:, None], 0)
        right = ((m.xy / m.n - mean[:, None] * target) / s[:, None]).masked_fill(flat[:, None], 0)
        w = _solve(system, right, lambdas) / s[:, None]
        return Fit(w, target - mean @ w)


@dataclass(frozen=True)
class DualRidge:
    """The dual form, w = Xᵀ (XXᵀ/n + λ)⁻¹ y / n, with the methods of PrimalRidge."""

    x: tuple[Float64[Tensor, "_n W"], ...]
    y: tuple[Float64[Tensor, "_n Y"], ...]

    def without(self, basis: Float64[Tensor, "W k"]) -> DualRidge:
        return DualRidge(tuple(group - (group @ basis) @ basis.mT for group in self.x), self.y)

    def fit(self, groups: Sequence[int], lambdas: Sequence[float]) -> Fit:
        x, y = torch.cat([self.x[g] for g in groups]), torch.cat([self.y[g] for g in groups])
        mean, target, n = x.mean(0), y.mean(0), len(x)
        s, flat = _deviations((x - mean).square().mean(0))
        z = ((x - mean) / s).masked_fill(flat, 0)
        w = z.mT @ _solve(z @ z.mT / n, (y - target) / n, lambdas) / s[:, None]
        return Fit(w, target - mean @ w)


RidgeProblem = PrimalRidge | DualRidge


def _deviations(variance: Float64[Tensor, "W"]) -> tuple[Float64[Tensor, "W"], Bool[Tensor, "W"]]:
    s = variance.clamp(min=0).sqrt()
    flat = s <= FLAT * s.max()
    return s.masked_fill(flat, 1.0), flat


def _solve(
    system: Float64[Tensor, "n n"], right: Float64[Tensor, "n Y"], lambdas: Sequence[float]
) -> Float64[Tensor, "λ={len(lambdas)} n Y"]:
    """Return (system + λ)⁻¹ right for every λ."""
    ridge = system.new_tensor(lambdas)[:, None, None] * torch.eye(len(system)).to(system)
    return torch.cholesky_solve(right.expand(len(lambdas), -1, -1), torch.linalg.cholesky(system + ridge))


def cross_predict(
    problem: RidgeProblem, rows: Sequence[Float64[Tensor, "_n W"]], y: Sequence[Float64[Tensor, "_n Y"]]
) -> list[Float64[Tensor, "_n Y"]]:
    """Predict each group from the others; λ is selected for each target on the next group."""
    predictions = []
    for g in range(len(rows)):
        inner = (g + 1) % len(rows)
        train = [other for other in range(len(rows)) if other != g]
        trial = problem.fit([other for other in train if other != inner], LAMBDAS)(rows[inner])
        best = (trial - y[inner]).square().mean(1).argmin(0)  # [Y]
        chosen = sorted({int(at) for at in best})
        guess = problem.fit(train, [LAMBDAS[at] for at in chosen])(rows[g])
        predictions.append(torch.stack([guess[chosen.index(int(at)), :, k] for k, at in enumerate(best)], dim=-1))
    return predictions


def rescaled(x: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows W"]:
    """Return x / rms(x): states as a layer reads them."""
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
