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
from jaxtyping import Float
from torch import Tensor

from posleak.leakage import Bootstrap, Estimate, Sampled, combined

from .states import unit


def pair_cosines(x: Sequence[Float[Tensor, "n _W"]], bootstrap: Bootstrap) -> tuple[Estimate, Estimate]:
    """The mean cosine among the rows of each x, and the mean of them all, resampled together.

    NaN where a row has no direction.
    """
    each = [_pair_cosine(one, bootstrap) for one in x]
    if not each:
        nan = Sampled(np.array(np.nan), np.full(len(bootstrap.weights), np.nan), bootstrap.prompts)
        return Estimate(np.zeros(0), np.zeros(0), np.zeros(0), bootstrap.prompts), nan.estimate
    found = combined(lambda *every: np.stack(every, axis=-1), *each)
    return found.estimate, combined(lambda every: every.mean(-1), found).estimate


def mean_cosine(x: Float[Tensor, "n W"]) -> float:
    """The mean cosine over pairs of different rows."""
    u, n = unit(x), len(x)
    return (float(u.sum(0).square().sum()) - n) / (n * (n - 1)) if n > 1 else float("nan")


def resultant(x: Float[Tensor, "n W"]) -> float:
    """R = ‖mean of the unit rows‖."""
    return float(unit(x).mean(0).norm())


def _pair_cosine(x: Float[Tensor, "n W"], bootstrap: Bootstrap) -> Sampled:
    u = unit(x).to(torch.float32)
    n = len(u)
    if n < 2 or bool((u.square().sum(-1) < 0.5).any()):
        return Sampled(np.array(np.nan), np.full(len(bootstrap.weights), np.nan), bootstrap.prompts)
    w = torch.from_numpy(bootstrap.weights).to(torch.float32)
    own = w.square().sum(1).double()
    sums = (w @ u).double().square().sum(1)
    samples = ((sums - own) / (w.sum(1).double().square() - own)).numpy()
    return Sampled(np.array(mean_cosine(x)), samples, bootstrap.prompts)
