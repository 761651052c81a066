"""Directions of vectors: unit vectors, mean cosines with intervals, orthonormal bases.

    c = mean over pairs of different directions of u_a · u_b = ( ‖Σ_a u_a‖² − n ) / ( n (n − 1) )

The mean cosine c is 1 if all directions are equal and has expectation 0 for random directions. It is the unbiased
counterpart of the resultant length R = ‖mean u‖ (R² is 1/n too large for random directions), and it is computed
without the n × n matrix of cosines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posleak.leakage import Estimate, Jackknife, Sampled, combined
from posleak.leakage.power import NEIGHBOURS, prompt_pairs


def unit(x: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return x / ‖x‖ along the last axis; a zero vector stays zero."""
    x = x.double()
    norm: Tensor = x.norm(dim=-1, keepdim=True)
    return x / norm.clamp(min=torch.finfo(torch.float64).tiny)


def _directions(x: Float[Tensor, "n W"]) -> Float64[Tensor, "n W"]:
    """Return the unit rows of x, or NaN everywhere if a row is zero."""
    u = unit(x)
    return torch.full_like(u, torch.nan) if bool((u.square().sum(-1) < 0.5).any()) else u


def mean_cosine(x: Float[Tensor, "n W"]) -> float:
    """Return the mean cosine over pairs of different rows; NaN if a row is zero."""
    u, n = _directions(x), len(x)
    return (float(u.sum(0).square().sum()) - n) / (n * (n - 1)) if n > 1 else float("nan")


def resultant(x: Float[Tensor, "n W"]) -> float:
    """Return R = ‖mean of the unit rows‖."""
    return float(unit(x).mean(0).norm())


def pair_cosine(x: Float[Tensor, "n W"], jackknife: Jackknife) -> Sampled:
    """Return the mean cosine over pairs of different rows, with jackknife replicates; NaN if a row is zero."""
    u = _directions(x)
    with_others = 2 * (u @ u.sum(0) - u.square().sum(-1))
    sides = (torch.from_numpy(side).chunk(NEIGHBOURS) for side in prompt_pairs(jackknife.prompts))
    together = torch.cat([2 * (u[first] * u[second]).sum(-1) for first, second in zip(*sides, strict=True)])
    return jackknife.of_sums(np.array(mean_cosine(u)), with_others.numpy(), together.numpy())


def pair_cosines(x: Sequence[Float[Tensor, "n _W"]], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """Return the mean cosine among the rows of each x, and the paired mean over all x."""
    return joined_cosines([pair_cosine(rows, jackknife) for rows in x], jackknife)


def joined_cosines(cosines: Sequence[Sampled], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """Return mean cosines as one estimate with a cell for each, and their paired mean."""
    if not cosines:
        empty, nan = np.zeros(0), np.array(np.nan)
        return Estimate(empty, empty, empty, jackknife.prompts), Estimate(nan, nan, nan, jackknife.prompts)
    stacked = combined(lambda *values: np.stack(values, axis=-1), *cosines)
    with np.errstate(invalid="ignore"):  # with fewer than FEWEST rows, replicates are infinite and there is no interval
        return stacked.estimate, combined(lambda values: values.mean(-1), stacked).estimate


def orthonormal(directions: Float[Tensor, "n W"], rounding: float = 1e-5) -> Float64[Tensor, "W k"]:
    """Return orthonormal columns that span the rows; linearly dependent rows, up to rounding, add no column."""
    if not len(directions):
        return directions.mT.double()
    _, values, vectors = torch.linalg.svd(unit(directions), full_matrices=False)
    basis: Tensor = vectors[values > rounding * values[0]]
    return basis.mT


def random_basis(width: int, rank: int, seed: int) -> Float64[Tensor, "{width} {rank}"]:
    """Return uniformly random orthonormal columns; reproducible across machines up to rounding."""
    normal = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, width, rank]))).standard_normal
    basis: Tensor = torch.linalg.qr(torch.from_numpy(normal((width, rank)))).Q
    return basis


def written_basis(
    directions: Sequence[Float[Tensor, "_k W"]], layers: Sequence[int], depths: int, width: int
) -> list[Float64[Tensor, "{width} _k"]]:
    """Return, for each depth d, an orthonormal basis of the directions written by layers before d.

    directions   those of each attention call;  layers: the layer of each call
    """
    return [
        orthonormal(torch.cat([torch.zeros(0, width), *(x for x, at in zip(directions, layers) if at < d)]))
        for d in range(depths)
    ]
