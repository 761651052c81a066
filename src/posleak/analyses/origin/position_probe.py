"""The position probe: ridge regression of a token's position on its state, at every depth.

After Haviv et al. (2022): predict the absolute position and report the error in tokens on held-out prompts. In
addition, R² is reported, log₂(position) is a second target, and there are three variants:

    plain      the states themselves
    projected  without the directions W_h v_0 written by sink-reading heads of earlier layers
    control    without as many random directions: the cost of removing any subspace of that rank

States are rescaled to x / rms(x), as a layer reads them: a few body tokens have massive norms, which would dominate a
linear regression. Prompts are split into groups; each group is predicted from the others, and λ is chosen among those
by cross-validation. Position 0 is excluded, because its state differs in kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posleak.leakage import Estimate, Jackknife
from posleak.metrics.ridge import GROUPS, LAMBDAS, cross_predict, rescaled, ridge_problem

from .portrait import unit

VARIANTS = ("plain", "projected", "control")

DEPENDENT = 1e-5
"""Singular values below this share of the largest are rounding."""


@dataclass(frozen=True)
class Decoded:
    """Accuracy on held-out prompts by depth [J], with intervals over prompts.

    error        mean |predicted − true position|, in tokens
    r2, r2_log   R² of position and of log₂ position
    """

    error: Estimate
    r2: Estimate
    r2_log: Estimate


@dataclass(frozen=True)
class PositionProbe:
    """Three variants at depths 0 … L.

    chance      error of predicting the mean position
    positions   number of positions P
    rank        [J]  number of directions removed
    cost        [J]  error of projected − error of control, in tokens, paired: position information specific to those
                directions
    overall     mean of cost over the depths where directions were removed
    """

    chance: float
    positions: int
    groups: int
    lambdas: tuple[float, ...]
    rank: tuple[int, ...]
    cost: Estimate
    overall: Estimate
    plain: Decoded
    projected: Decoded
    control: Decoded


def position_probe(
    states: Sequence[Float[Tensor, "B P _W"]],
    positions: Int64[np.ndarray, "P"],
    bases: Sequence[Float[Tensor, "_W _k"]],
    *,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> PositionProbe:
    """Fit and evaluate the probe on three or more prompts: for training, for choosing λ, and for evaluation.

    states     at every depth, at `positions`
    bases      orthonormal columns to remove, for each depth
    seed       random seed of the control directions
    device     where the linear systems are solved, in float64; None: the device of the states
    progress   callback that receives (depths done, depths in all)
    """
    B = len(states[0])
    fold = np.arange(B) % min(GROUPS, B)
    y = torch.from_numpy(positions).double()
    targets = torch.stack([y, y.log2()], dim=-1)
    predicted = np.empty((len(VARIANTS), len(states), B, len(positions), 2))
    for d, (x, basis) in enumerate(zip(states, bases, strict=True)):
        progress(d, len(states))
        predicted[:, d] = _depth(x.to(device), basis.to(device), targets.to(device), fold, seed + d)
    true = targets.numpy()
    jackknife, rank = Jackknife(B), tuple(basis.shape[1] for basis in bases)
    variants = {name: _evaluated(guess, true, jackknife) for name, guess in zip(VARIANTS, predicted, strict=True)}
    _, projected, control = (np.abs(guess[..., 0] - true[:, 0]).mean(-1).T for guess in predicted)  # [B, J]
    removed = (projected - control)[:, np.array(rank) > 0]
    return PositionProbe(
        chance=float(np.abs(true[:, 0] - true[:, 0].mean()).mean()), positions=len(positions),
        groups=int(fold.max()) + 1, lambdas=tuple(LAMBDAS), rank=rank,
        cost=jackknife.mean(projected - control).estimate,
        overall=jackknife.mean(removed.mean(1) if removed.size else np.full(B, np.nan)).estimate,
        **variants,
    )  # fmt: skip


def _depth(
    x: Float[Tensor, "B P W"],
    basis: Float[Tensor, "W k"],
    targets: Float64[Tensor, "P Y=2"],
    fold: Int64[np.ndarray, "B"],
    seed: int,
) -> Float64[np.ndarray, "variants=3 B P Y=2"]:
    """Return held-out predictions from the states of one depth."""
    x = rescaled(x.double())
    x = x - x.flatten(0, 1).mean(0)  # for numerical accuracy of the sums: fits do not depend on it
    groups = [np.flatnonzero(fold == g) for g in range(fold.max() + 1)]
    rows = [x[group].flatten(0, 1) for group in groups]
    y = [targets.repeat(len(group), 1) for group in groups]
    whole = ridge_problem(rows, y)
    none = basis.new_zeros(x.shape[-1], 0).double()
    out = np.empty((len(VARIANTS), *x.shape[:2], 2))
    for variant, removed in enumerate((none, basis.double(), random_basis(x.shape[-1], basis.shape[1], seed).to(x))):
        if variant and not removed.shape[1]:  # the same as plain
            out[variant] = out[0]
            continue
        kept = [row - (row @ removed) @ removed.mT for row in rows]
        for g, guess in enumerate(cross_predict(whole.without(removed), kept, y)):
            out[variant, groups[g]] = guess.view(len(groups[g]), -1, 2).cpu().numpy()
    return out


def _evaluated(
    guess: Float64[np.ndarray, "J B P Y=2"], true: Float64[np.ndarray, "P Y=2"], jackknife: Jackknife
) -> Decoded:
    per_prompt = np.moveaxis(guess, 1, 0)  # [B, J, P, 2]
    unexplained = ((per_prompt - true) ** 2).mean(-2) / true.var(0)
    error = np.abs(per_prompt[..., 0] - true[:, 0]).mean(-1)
    return Decoded(*(jackknife.mean(x).estimate for x in (error, 1 - unexplained[..., 0], 1 - unexplained[..., 1])))


def orthonormal(directions: Float[Tensor, "n W"]) -> Float64[Tensor, "W k"]:
    """Return orthonormal columns that span the rows; linearly dependent rows, up to rounding, add no column."""
    if not len(directions):
        return directions.mT.double()
    _, values, vectors = torch.linalg.svd(unit(directions), full_matrices=False)
    basis: Tensor = vectors[values > DEPENDENT * values[0]]
    return basis.mT


def random_basis(width: int, rank: int, seed: int) -> Float64[Tensor, "{width} {rank}"]:
    """Return uniformly random orthonormal columns; reproducible across machines up to rounding."""
    normal = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, width, rank]))).standard_normal
    basis: Tensor = torch.linalg.qr(torch.from_numpy(normal((width, rank)))).Q
    return basis


def written_basis(
    directions: Sequence[tuple[int, Float[Tensor, "_k W"]]], depths: int, width: int
) -> list[Float64[Tensor, "{width} _k"]]:
    """Return, for each depth d, an orthonormal basis of the directions written by layers before d.

    directions   (layer, directions) of each attention call that writes some
    """
    return [
        orthonormal(torch.cat([torch.zeros(0, width), *(x for layer, x in directions if layer < d)]))
        for d in range(depths)
    ]
