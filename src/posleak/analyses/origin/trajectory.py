"""The trajectory: x_0 at every depth, from the one-token sequence alone.

    massive    |x| > 100 and ≥ 1000 × the median |x| of the layer's states (Sun et al. 2024)
    middle     the direction of x_0 at the middle depth, J/2 of J depths
    settles    the first depth from which on, up to the middle, cos(x_0, middle) > 0.99 without a break
    leaves     the last depth up to which it stays so after the middle
    jump       the depth where the norm grows by the largest factor over the depth before

Scales are those of body states (positions ≥ 1 of random prompts), so that a large x_0 is large beside something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posleak.errors import UnsupportedError

from .cosines import mean_cosine
from .states import unit

ABSOLUTE, RELATIVE = 100.0, 1000.0
SETTLED = 0.99
TOP = 4


@dataclass(frozen=True)
class Scale:
    """Body states by depth, n of them: median |x| over positions and channels, median ‖x‖ over positions, and the
    mean cosine over pairs of them, which is far from 0 in most models."""

    entry: Float64[np.ndarray, "J"]
    norm: Float64[np.ndarray, "J"]
    alike: Float64[np.ndarray, "J"]
    n: int

    @classmethod
    def of(cls, body: Sequence[Float[Tensor, "... _W"]]) -> Scale:
        """body: states at every depth."""
        flat = [x.flatten(0, -2).float() for x in body]
        entry = np.array([float(x.abs().flatten().median()) for x in flat])
        norm = np.array([float(x.norm(dim=-1).median()) for x in flat])
        return cls(entry, norm, np.array([mean_cosine(x) for x in flat]), len(flat[0]))


@dataclass(frozen=True)
class Dimension:
    """One channel of x_0: its value, and its share of ‖x_0‖²."""

    index: int
    value: float
    share: float
    massive: bool


@dataclass(frozen=True)
class Trajectory:
    """x_0 of `token` at depths 0 … L.

    norm, relative   ‖x_0‖, and the same over the median norm of body states
    step, final      cosine to the depth before (NaN at 0), and to the last depth
    middle           cosine to the middle depth
    dimensions       for each depth the massive channels, or the TOP largest where the rule finds none
    """

    token: int
    spelled: str | None
    norm: Float64[np.ndarray, "J"]
    relative: Float64[np.ndarray, "J"]
    step: Float64[np.ndarray, "J"]
    final: Float64[np.ndarray, "J"]
    middle: Float64[np.ndarray, "J"]
    dimensions: tuple[tuple[Dimension, ...], ...]
    settles: int
    leaves: int
    jump: int
    scale: Scale

    @classmethod
    def of(cls, x: Float[Tensor, "J W"], scale: Scale, token: int, spelled: str | None) -> Trajectory:
        """x: the one-token sequence."""
        u, norm = unit(x), x.double().norm(dim=-1).numpy()
        _require_direction(norm, token)
        middle = (u @ u[len(u) // 2]).numpy()
        settles, leaves = settled(middle)
        step = np.concatenate([[np.nan], (u[1:] * u[:-1]).sum(-1).numpy()])
        return cls(
            token, spelled, norm, _ratio(norm, scale.norm, np.nan), step, (u @ u[-1]).numpy(), middle,
            tuple(dimensions(depth, float(entry)) for depth, entry in zip(x, scale.entry, strict=True)),
            settles, leaves, 1 + int(np.argmax(_ratio(norm[1:], norm[:-1], 0.0))), scale,
        )  # fmt: skip

    @property
    def massive(self) -> tuple[int, ...]:
        """How many massive channels there are at each depth."""
        return tuple(sum(dimension.massive for dimension in depth) for depth in self.dimensions)

    def as_dict(self) -> dict[str, Any]:
        scale = self.scale
        return {
            "token": self.token, "spelled": self.spelled, "settles": self.settles, "leaves": self.leaves,
            "jump": self.jump, "norm": self.norm, "relative": self.relative, "step": self.step, "final": self.final,
            "middle": self.middle, "dimensions": self.dimensions,
            "body": {"median_entry": scale.entry, "median_norm": scale.norm, "alike": scale.alike, "n": scale.n},
        }  # fmt: skip


def _require_direction(norm: Float64[np.ndarray, "J"], token: int) -> None:
    """Refuse a model whose state at position 0 is zero where its direction is asked for: at the middle depth."""
    if norm[len(norm) // 2] > 0:
        return
    zero = ", ".join(map(str, np.flatnonzero(norm == 0)))
    raise UnsupportedError(
        "the state at position 0 is zero, so that it has no direction that could be followed", where="position 0",
        got=f"token {token}: x_0 = 0 at depth {zero} of 0 to {len(norm) - 1}", expected="a state other than zero",
        remedy="check the weights, of embeddings and norms first; `posleak measure` and `posleak trace` need no states",
    )  # fmt: skip


def _ratio(x: Float64[np.ndarray, "n"], y: Float64[np.ndarray, "n"], undefined: float) -> Float64[np.ndarray, "n"]:
    """Return x / y, and `undefined` where y is zero."""
    return np.asarray(np.divide(x, y, out=np.full_like(x, undefined), where=y > 0))


def settled(cosine: Float64[np.ndarray, "J"]) -> tuple[int, int]:
    """First and last depth of the unbroken run above SETTLED that holds the middle depth, whose own cosine is 1."""
    middle = len(cosine) // 2
    outside = np.flatnonzero(~(cosine > SETTLED))
    before, after = outside[outside < middle], outside[outside > middle]
    first = int(before[-1]) + 1 if len(before) else 0
    return first, int(after[0]) - 1 if len(after) else len(cosine) - 1


def is_massive(x: Float[Tensor, "*shape"], entry: float) -> Bool[Tensor, "*shape"]:
    """Sun et al.'s rule, with the layer's median |x|."""
    return (x.abs() > ABSOLUTE) & (x.abs() >= RELATIVE * entry)


def dimensions(x: Float[Tensor, "W"], entry: float) -> tuple[Dimension, ...]:
    """The massive channels of one state, largest first, or its TOP largest where none is massive."""
    massive = is_massive(x, entry)
    count = int(massive.sum()) or min(TOP, len(x))
    whole = float(x.double().square().sum()) or 1.0
    order = torch.argsort(x.abs(), descending=True, stable=True)[:count]
    return tuple(
        Dimension(int(at), float(x[at]), float(x[at].double() ** 2) / whole, bool(massive[at])) for at in order
    )
