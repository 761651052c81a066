"""Meters of the residual stream: massive activations, the compression valley, and the position probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from posleak.axes import DEPTH
from posleak.probe import Plan

from .eigenvalues import eigenvalues
from .meter import Arrays, Meter
from .ridge import GROUPS, cross_predict, rescaled, ridge_problem

LARGE, TIMES = 100.0, 1000.0
"""Sun et al. (2024): an activation is massive if |x| > LARGE and |x| > TIMES · median |x|."""

MEDIAN_POSITIONS = 64
"""Number of evenly spaced positions whose activations the median is computed from."""

VALLEY_TOKENS = 128
"""Number of first tokens in the spectrum. By causality their states are those of a prompt of that length."""


class MassiveMeter(Meter):
    """Massive activations: the largest |x|, its ratio to the median, the number of massive activations, and the number
    of those at position 0."""

    name = "massive"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "largest": (DEPTH,), "largest_times": (DEPTH,), "massive": (DEPTH,), "massive_first": (DEPTH,),
    }  # fmt: skip

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        size = x.float().abs()
        some = size[:, :: -(-x.shape[1] // MEDIAN_POSITIONS)].flatten(1)
        median = some.median(1).values.clamp(min=torch.finfo(size.dtype).tiny)
        largest = size.amax((1, 2))
        over = (size > (TIMES * median).clamp(min=LARGE)[:, None, None]).sum(-1)
        arrays = {
            "largest": largest, "largest_times": largest / median, "massive": over.sum(1), "massive_first": over[:, 0],
        }  # fmt: skip
        return {name: value.double().cpu().numpy() for name, value in arrays.items()}


class ValleyMeter(Meter):
    """The compression valley of Queipo-de-Llano et al. (2025): entropy of the singular spectrum of the states, the norm
    at position 0, and the median norm at other positions."""

    name = "valley"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "spectrum_entropy": (DEPTH,), "norm_0": (DEPTH,), "norm_body": (DEPTH,),
    }  # fmt: skip

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).double()
        entropy, body = spectrum_entropy(x[:, :VALLEY_TOKENS]), norms[:, 1:].median(1).values
        arrays = {"spectrum_entropy": entropy, "norm_0": norms[:, 0], "norm_body": body}
        return {name: value.cpu().numpy() for name, value in arrays.items()}


def spectrum_entropy(x: Float[Tensor, "B T W"]) -> Float[Tensor, "B"]:
    """Return −Σ p log p in nats, p_k = σ_k² / Σ σ², with σ the singular values of the states, not centred."""
    x = x.double()
    gram = x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x
    p = eigenvalues(gram).clamp(min=0)
    p = p / p.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy


class ProbeMeter(Meter):
    """The position probe of Haviv et al. (2022), linear: ridge regression of the position on states, cross-validated
    over prompts. Wide states are reduced by a fixed random projection; `posleak origin` probes whole states."""

    name = "probe"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"probe_error": (DEPTH,), "probe_states": (DEPTH, "place", "x")}

    PLACES = 32
    """Number of evenly spaced positions, from 1 on, whose states are used."""

    FEATURES = 128
    """Number of dimensions of the projection."""

    def __init__(self, length: int) -> None:
        self.places = np.unique(np.rint(np.linspace(1, length - 1, self.PLACES)).astype(np.int64))
        self.view: Tensor | None = None

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        return cls(plan.length)

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        some = rescaled(x[:, self.places].float())
        if x.shape[-1] > self.FEATURES:
            if self.view is None or self.view.shape[0] != x.shape[-1]:
                self.view = projection(x.shape[-1], self.FEATURES).to(some)
            some = some @ self.view
        return {"probe_states": some.cpu().numpy()}

    def finished(self, data: Arrays) -> Arrays:
        """Replace states by held-out errors in tokens, by prompt and depth; NaN for fewer than three prompts."""
        if "probe_states" not in data:
            return data
        states = data.pop("probe_states")  # [B, J, places, features]
        B, J = states.shape[:2]
        error = np.full((B, J), np.nan)
        if B >= 3:
            fold = np.arange(B) % min(GROUPS, B)
            target = torch.from_numpy(self.places).double()[:, None]
            for depth in range(J):
                error[:, depth] = _held_out(torch.from_numpy(states[:, depth]).double(), target, fold)
        return data | {"probe_error": error}


def _held_out(x: Tensor, target: Tensor, fold: np.ndarray) -> np.ndarray:
    """Return the mean |predicted − true| of each prompt [B]; each group is predicted from the others."""
    x = x - x.flatten(0, 1).mean(0)
    groups = [np.flatnonzero(fold == g) for g in range(int(fold.max()) + 1)]
    rows, y = [x[group].flatten(0, 1) for group in groups], [target.repeat(len(group), 1) for group in groups]
    error = np.empty(len(x))
    for group, guess, true in zip(groups, cross_predict(ridge_problem(rows, y), rows, y), y, strict=True):
        error[group] = (guess - true).abs().view(len(group), -1).mean(1).numpy()
    return error


def projection(width: int, features: int) -> Float[Tensor, "{width} {features}"]:
    """Return a Gaussian random projection that preserves expected squared norms; the same on every machine."""
    normal = np.random.Generator(np.random.PCG64(np.random.SeedSequence([width, features]))).standard_normal
    return torch.from_numpy(normal((width, features)) / features**0.5)
