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
from numpy.typing import NDArray
from torch import Tensor

from posleak.errors import InputError
from posleak.leakage import Bootstrap, Estimate
from posleak.plain import plain

from .ridge import Design, design

Array = NDArray[np.float64]

LAMBDAS = (1e-3, 3e-2, 1.0, 30.0)
GROUPS = 4
VARIANTS = ("plain", "projected", "control")


@dataclass(frozen=True)
class Decoded:
    """Errors of held-out prompts by depth [D], means and intervals over prompts.

    error   mean |predicted − true position|, in tokens;  r2, r2_log: of position and of log₂ position
    """

    error: Estimate
    r2: Estimate
    r2_log: Estimate

    def as_dict(self) -> dict[str, Any]:
        return {"error": plain(self.error), "r2": plain(self.r2), "r2_log": plain(self.r2_log)}


@dataclass(frozen=True)
class PositionProbe:
    """Three variants at depths 0 … L.

    cost     [D]  error of projected − error of control, in tokens, paired: what those directions know beyond any others
    overall  the mean of cost over the depths where something was taken out
    rank     [D]  how many directions that was;  chance: the error of always saying the mean position
    curves   [variant, D, P]  mean predicted position at each position
    """

    positions: NDArray[np.int64]
    plain: Decoded
    projected: Decoded
    control: Decoded
    cost: Estimate
    overall: Estimate
    rank: tuple[int, ...]
    chance: float
    curves: Array
    groups: int

    def as_dict(self) -> dict[str, Any]:
        variants = {name: getattr(self, name).as_dict() for name in VARIANTS}
        return {
            "chance": self.chance, "positions": len(self.positions), "groups": self.groups, "lambdas": list(LAMBDAS),
            "rank": list(self.rank), "cost": plain(self.cost), "overall": plain(self.overall), **variants,
        }  # fmt: skip


def position_probe(
    states: Sequence[Tensor],
    positions: NDArray[np.int64],
    bases: Sequence[Tensor],
    *,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> PositionProbe:
    """states [B, P, W] at every depth, at `positions` [P]; bases: for each depth the orthonormal [W, k] to take out.

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
    bootstrap, rank = Bootstrap.of(B, seed), tuple(basis.shape[1] for basis in bases)
    results = [_judged(guess, true, bootstrap) for guess in predicted]
    _, projected, control = (np.abs(guess[..., 0] - true[:, 0]).mean(-1).T for guess in predicted)  # [B, D]
    taken = (projected - control)[:, np.array(rank) > 0]
    return PositionProbe(
        positions, results[0], results[1], results[2],
        cost=bootstrap.mean(projected - control),
        overall=bootstrap.mean(taken.mean(1) if taken.size else np.full(B, np.nan)),
        rank=rank,
        chance=float(np.abs(true[:, 0] - true[:, 0].mean()).mean()),
        curves=predicted[..., 0].mean(2),
        groups=int(fold.max()) + 1,
    )  # fmt: skip


def _depth(x: Tensor, basis: Tensor, targets: Tensor, fold: NDArray[np.int64], seed: int) -> Array:
    """Held-out predictions [variant, B, P, 2] from states x [B, P, W] of one depth."""
    x = x.double()
    x = x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    x = x - x.flatten(0, 1).mean(0)  # only the origin of the sums: fits do not depend on it
    groups = [np.flatnonzero(fold == g) for g in range(fold.max() + 1)]
    rows = [x[group].flatten(0, 1) for group in groups]
    y = [targets.repeat(len(group), 1) for group in groups]
    whole = design(rows, y)
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


def cross_predict(part: Design, rows: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
    """Predictions for each group from the others; λ is the best, target by target, on the group after it."""
    found = []
    for g in range(len(rows)):
        inner = (g + 1) % len(rows)
        train = [other for other in range(len(rows)) if other != g]
        trial = part.fit([other for other in train if other != inner], LAMBDAS)(rows[inner])
        best = (trial - y[inner]).square().mean(1).argmin(0)  # [Y]
        chosen = sorted({int(at) for at in best})
        guess = part.fit(train, [LAMBDAS[at] for at in chosen])(rows[g])
        found.append(torch.stack([guess[chosen.index(int(at)), :, k] for k, at in enumerate(best)], dim=-1))
    return found


def _judged(guess: Array, true: Array, bootstrap: Bootstrap) -> Decoded:
    """guess [D, B, P, 2], true [P, 2]."""
    per_prompt = np.moveaxis(guess, 1, 0)  # [B, D, P, 2]
    wrong = ((per_prompt - true) ** 2).mean(-2) / true.var(0)
    error = np.abs(per_prompt[..., 0] - true[:, 0]).mean(-1)
    return Decoded(bootstrap.mean(error), bootstrap.mean(1 - wrong[..., 0]), bootstrap.mean(1 - wrong[..., 1]))


def written_basis(directions: Sequence[Tensor], layers: Sequence[int], depths: int, width: int) -> list[Tensor]:
    """For each depth d the orthonormal basis [W, k] of what layers before d have written.

    directions: for each attention call [k, W]; layers: the layer that each call is part of.
    """
    return [
        orthonormal(torch.cat([torch.zeros(0, width), *(x for x, at in zip(directions, layers) if at < d)]))
        for d in range(depths)
    ]


def orthonormal(directions: Tensor, rounding: float = 1e-5) -> Tensor:
    """[W, k] spanning the rows of directions; ones that others span already, to rounding, add nothing."""
    if not len(directions):
        return directions.mT.double()
    x = directions.double()
    x = x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    _, values, vectors = torch.linalg.svd(x, full_matrices=False)
    return vectors[values > rounding * values[0]].mT


def random_basis(width: int, rank: int, seed: int) -> Tensor:
    """Orthonormal [W, k], uniformly drawn; the same on every machine up to rounding."""
    normal = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, width, rank]))).standard_normal
    return torch.linalg.qr(torch.from_numpy(normal((width, rank)))).Q
