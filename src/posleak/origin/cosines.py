"""Cosines among many directions, with intervals: one number for how far they all point one way.

    c = mean over pairs of different directions of u_a · u_b = ( ‖Σ_a u_a‖² − n ) / ( n (n − 1) )

1: all alike; 0: as in random directions. It is the resultant length R = ‖mean u‖ without its bias (R² is 1/n too
large for random directions), and never needs the n × n matrix. A direction that is drawn twice by the bootstrap is not
multiplied with itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from posleak.leakage import Bootstrap, Estimate
from posleak.leakage.power import Array

from .states import unit


def pair_cosines(x: Sequence[Tensor], bootstrap: Bootstrap) -> tuple[Estimate, Estimate]:
    """The mean cosine among the rows of each x [n, W], and the mean of them all, resampled together.

    NaN where a row has no direction.
    """
    if not x:
        none, nan = np.zeros(0), np.array(np.nan)
        return Estimate(none, none, none, bootstrap.prompts), Estimate(nan, nan, nan, bootstrap.prompts)
    each = [_pair_cosine(one, bootstrap) for one in x]
    values, samples = np.array([value for value, _ in each]), np.stack([sample for _, sample in each], axis=-1)
    whole = Estimate(values.mean(), *bootstrap.interval(samples.mean(-1)), n=bootstrap.prompts)
    return Estimate(values, *bootstrap.interval(samples), n=bootstrap.prompts), whole


def mean_cosine(x: Tensor) -> float:
    """The mean cosine over pairs of different rows of x [n, W]."""
    u, n = unit(x), len(x)
    return (float(u.sum(0).square().sum()) - n) / (n * (n - 1)) if n > 1 else float("nan")


def resultant(x: Tensor) -> float:
    """R = ‖mean of the unit rows of x [n, W]‖."""
    return float(unit(x).mean(0).norm())


def _pair_cosine(x: Tensor, bootstrap: Bootstrap) -> tuple[float, Array]:
    u = unit(x).to(torch.float32)
    n = len(u)
    if n < 2 or bool((u.square().sum(-1) < 0.5).any()):
        return float("nan"), np.full(len(bootstrap.weights), np.nan)
    w = torch.from_numpy(bootstrap.weights).to(torch.float32)
    own = w.square().sum(1).double()
    sums = (w @ u).double().square().sum(1)
    return mean_cosine(x), ((sums - own) / (w.sum(1).double().square() - own)).numpy()
