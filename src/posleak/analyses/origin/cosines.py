"""Cosines among many directions, with intervals: one number for how far they all point one way.

    c = mean over pairs of different directions of u_a · u_b = ( ‖Σ_a u_a‖² − n ) / ( n (n − 1) )

1: all alike; 0: as in random directions. It is the resultant length R = ‖mean u‖ without its bias (R² is 1/n too
large for random directions), and never needs the n × n matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posleak.leakage import Estimate, Jackknife, Sampled, combined
from posleak.leakage.power import NEIGHBOURS, prompt_pairs

from .states import unit


def pair_cosines(x: Sequence[Float[Tensor, "n _W"]], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """The mean cosine among the rows of each x, and the mean of them all, paired.

    NaN where a row has no direction.
    """
    return joined_cosines([pair_cosine(one, jackknife) for one in x], jackknife)


def joined_cosines(each: Sequence[Sampled], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """Of mean cosines one by one: all of them, and their mean, paired."""
    if not each:
        nothing, nan = np.zeros(0), np.array(np.nan)
        return Estimate(nothing, nothing, nothing, jackknife.prompts), Estimate(nan, nan, nan, jackknife.prompts)
    found = combined(lambda *every: np.stack(every, axis=-1), *each)
    with np.errstate(invalid="ignore"):  # below FEWEST rows, replicates are infinite, and there is no interval
        return found.estimate, combined(lambda every: every.mean(-1), found).estimate


def mean_cosine(x: Float[Tensor, "n W"]) -> float:
    """The mean cosine over pairs of different rows; NaN where a row has no direction."""
    u, n = _directions(x), len(x)
    return (float(u.sum(0).square().sum()) - n) / (n * (n - 1)) if n > 1 else float("nan")


def resultant(x: Float[Tensor, "n W"]) -> float:
    """R = ‖mean of the unit rows‖."""
    return float(unit(x).mean(0).norm())


def pair_cosine(x: Float[Tensor, "n W"], jackknife: Jackknife) -> Sampled:
    """The mean cosine among the rows of x; NaN where a row has no direction."""
    u = _directions(x)
    with_others = 2 * (u @ u.sum(0) - u.square().sum(-1))
    sides = (torch.from_numpy(side).chunk(NEIGHBOURS) for side in prompt_pairs(jackknife.prompts))
    together = torch.cat([2 * (u[first] * u[second]).sum(-1) for first, second in zip(*sides, strict=True)])
    return jackknife.of_sums(np.array(mean_cosine(u)), with_others.numpy(), together.numpy())


def _directions(x: Float[Tensor, "n W"]) -> Float64[Tensor, "n W"]:
    """Return the unit rows of x; NaN, all of them, where a row is zero."""
    u = unit(x)
    return torch.full_like(u, torch.nan) if bool((u.square().sum(-1) < 0.5).any()) else u
