"""The position probe: how well a ridge regression reads a token's position off its state, depth by depth.

After Haviv et al. (2022): decode the absolute position, and report the error in tokens, on prompts that were not
trained on. Here with R² beside it, with log₂(position) as a second target, and three times over:

    plain      the states as they are
    projected  without the directions W_h v_0 that sink-reading heads of earlier layers have written
    control    without as many random directions: what removing any subspace of that rank would cost

States are taken as a layer reads them, x / rms(x): a few body tokens have massive norms, and would swing a linear
readout beyond all bounds. Prompts are dealt into groups; each group is predicted from the others, and λ is chosen
inside those, on one of them that is held out in turn. Position 0 is left out: its state is another kind of thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posleak.errors import InputError
from posleak.leakage import Estimate, Jackknife
from posleak.metrics.ridge import GROUPS, LAMBDAS, cross_predict, rescaled, ridge_problem

VARIANTS = ("plain", "projected", "control")


@dataclass(frozen=True)
class Decoded:
    """Errors of held-out prompts by depth [J], means and intervals over prompts.

    error   mean |predicted − true position|, in tokens;  r2, r2_log: of position and of log₂ position
    """

    error: Estimate
    r2: Estimate
    r2_log: Estimate


@dataclass(frozen=True)
class PositionProbe:
    """Three variants at depths 0 … L.

    cost     [J]  error of projected − error of control, in tokens, paired: what those directions know beyond any others
    overall  the mean of cost over the depths where something was taken out
    rank     [J]  how many directions that was;  chance: the error of always saying the mean position
    curves   mean predicted position at each position
    """

    positions: Int64[np.ndarray, "P"]
    plain: Decoded
    projected: Decoded
    control: Decoded
    cost: Estimate
    overall: Estimate
    rank: tuple[int, ...]
    chance: float
    curves: Float64[np.ndarray, "variants=3 J P"]
    groups: int

    def as_dict(self) -> dict[str, Any]:
        variants = {name: getattr(self, name) for name in VARIANTS}
        return {
            "chance": self.chance, "positions": len(self.positions), "groups": self.groups, "lambdas": list(LAMBDAS),
            "rank": list(self.rank), "cost": self.cost, "overall": self.overall, **variants,
        }  # fmt: skip


def position_probe(
    states: Sequence[Float[Tensor, "B P _W"]],
    positions: Int64[np.ndarray, "P"],
    bases: Sequence[Float[Tensor, "_W _k"]],
    *,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> PositionProbe:
    """states at every depth, at `positions`; bases: for each depth the orthonormal columns to take out.

    `device` is where the systems are solved, in float64; None: where the states are.
    """
    B = len(states[0])
    if B < 3:
        raise InputError(
            "the position probe needs prompts to train on, to choose its ridge on, and to be judged on",
            where="origin", got=f"{B} prompts", expected="3 or more", remedy="use --prompts 3 or more",
        )  # fmt: skip
    fold = np.arange(B) % min(GROUPS, B)
    y = torch.from_numpy(positions).double()
    targets = torch.stack([y, y.log2()], dim=-1)
    predicted = np.empty((len(VARIANTS), len(states), B, len(positions), 2))
    for d, (x, basis) in enumerate(zip(states, bases, strict=True)):
        progress(d, len(states))
        predicted[:, d] = _depth(x.to(device), basis.to(device), targets.to(device), fold, seed + d)
    true = targets.numpy()
    jackknife, rank = Jackknife(B), tuple(basis.shape[1] for basis in bases)
    results = [_judged(guess, true, jackknife) for guess in predicted]
    _, projected, control = (np.abs(guess[..., 0] - true[:, 0]).mean(-1).T for guess in predicted)  # [B, J]
    taken = (projected - control)[:, np.array(rank) > 0]
    return PositionProbe(
        positions, results[0], results[1], results[2],
        cost=jackknife.mean(projected - control).estimate,
        overall=jackknife.mean(taken.mean(1) if taken.size else np.full(B, np.nan)).estimate,
        rank=rank,
        chance=float(np.abs(true[:, 0] - true[:, 0].mean()).mean()),
        curves=predicted[..., 0].mean(2),
        groups=int(fold.max()) + 1,
    )  # fmt: skip


def _depth(
    x: Float[Tensor, "B P W"],
    basis: Float[Tensor, "W k"],
    targets: Float64[Tensor, "P Y=2"],
    fold: Int64[np.ndarray, "B"],
    seed: int,
) -> Float64[np.ndarray, "variants=3 B P Y=2"]:
    """Held-out predictions from the states of one depth."""
    x = rescaled(x.double())
    x = x - x.flatten(0, 1).mean(0)  # only the origin of the sums: fits do not depend on it
    groups = [np.flatnonzero(fold == g) for g in range(fold.max() + 1)]
    rows = [x[group].flatten(0, 1) for group in groups]
    y = [targets.repeat(len(group), 1) for group in groups]
    whole = ridge_problem(rows, y)
    none = basis.new_zeros(x.shape[-1], 0).double()
    out = np.empty((len(VARIANTS), *x.shape[:2], 2))
    for variant, taken in enumerate((none, basis.double(), random_basis(x.shape[-1], basis.shape[1], seed).to(x))):
        if variant and not taken.shape[1]:
            out[variant] = out[0]
            continue
        part = whole.without(taken) if variant else whole
        seen = [row - (row @ taken) @ taken.mT for row in rows] if variant else rows
        for g, guess in enumerate(cross_predict(part, seen, y)):
            out[variant, groups[g]] = guess.view(len(groups[g]), -1, 2).cpu().numpy()
    return out


def _judged(
    guess: Float64[np.ndarray, "J B P Y=2"], true: Float64[np.ndarray, "P Y=2"], jackknife: Jackknife
) -> Decoded:
    per_prompt = np.moveaxis(guess, 1, 0)  # [B, J, P, 2]
    wrong = ((per_prompt - true) ** 2).mean(-2) / true.var(0)
    error = np.abs(per_prompt[..., 0] - true[:, 0]).mean(-1)
    return Decoded(*(jackknife.mean(x).estimate for x in (error, 1 - wrong[..., 0], 1 - wrong[..., 1])))


def written_basis(
    directions: Sequence[Float[Tensor, "_k W"]], layers: Sequence[int], depths: int, width: int
) -> list[Float64[Tensor, "{width} _k"]]:
    """For each depth d the orthonormal basis of what layers before d have written.

    directions: for each attention call; layers: the layer that each call is part of.
    """
    return [
        orthonormal(torch.cat([torch.zeros(0, width), *(x for x, at in zip(directions, layers) if at < d)]))
        for d in range(depths)
    ]


def orthonormal(directions: Float[Tensor, "n W"], rounding: float = 1e-5) -> Float64[Tensor, "W k"]:
    """Columns that span the rows of directions; ones that others span already, to rounding, add nothing."""
    if not len(directions):
        return directions.mT.double()
    x = directions.double()
    x = x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    _, values, vectors = torch.linalg.svd(x, full_matrices=False)
    basis: Tensor = vectors[values > rounding * values[0]]
    return basis.mT


def random_basis(width: int, rank: int, seed: int) -> Float64[Tensor, "{width} {rank}"]:
    """Orthonormal columns, uniformly drawn; the same on every machine up to rounding."""
    normal = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, width, rank]))).standard_normal
    basis: Tensor = torch.linalg.qr(torch.from_numpy(normal((width, rank)))).Q
    return basis
