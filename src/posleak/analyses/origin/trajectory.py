"""The trajectory: x_0 of the one-token sequence at every depth.

    massive    |x| > 100 and ≥ 1000 × the median |x| of body states at this depth (Sun et al. 2024)
    middle     the direction of x_0 at the middle depth, J/2 of J depths
    settles    the first depth of the unbroken run up to the middle with cos(x_0, middle) > 0.99
    leaves     the last depth of the unbroken run after the middle with cos(x_0, middle) > 0.99
    jump       the depth at which the norm grows by the largest factor over the previous depth

Scales are those of body states (positions ≥ 1 of random prompts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posleak.arrays import Array
from posleak.errors import UnsupportedError

from .directions import mean_cosine, unit

ABSOLUTE, RELATIVE = 100.0, 1000.0
SETTLED = 0.99
TOP = 4


@dataclass(frozen=True)
class BodyScale:
    """Scales of n body states, by depth [J].

    median_entry   median |x| over positions and channels
    median_norm    median ‖x‖ over positions
    alike          mean cosine over pairs of states, which is far from 0 in most models
    """

    median_entry: Array
    median_norm: Array
    alike: Array
    n: int

    @classmethod
    def of(cls, body: Sequence[Float[Tensor, "... _W"]]) -> BodyScale:
        """Compute the scales of body states at every depth."""
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
    """x_0 of `token` at depths 0 … L; arrays have one entry per depth [J].

    settles, leaves, jump   depths, as defined in this module
    norm, relative          ‖x_0‖, and ‖x_0‖ / median norm of body states
    step, final, middle     cosine to the previous depth (NaN at depth 0), to the last and to the middle depth
    dimensions              for each depth the massive channels, or the TOP largest if none is massive
    """

    token: int
    spelled: str | None
    settles: int
    leaves: int
    jump: int
    norm: Array
    relative: Array
    step: Array
    final: Array
    middle: Array
    dimensions: tuple[tuple[Dimension, ...], ...]
    body: BodyScale

    @classmethod
    def of(cls, x: Float[Tensor, "J W"], body: BodyScale, token: int, spelled: str | None) -> Trajectory:
        """Describe the states x of the one-token sequence."""
        u, norm = unit(x), x.double().norm(dim=-1).numpy()
        _require_direction(norm, token)
        middle = (u @ u[len(u) // 2]).numpy()
        settles, leaves = settled(middle)
        return cls(
            token=token, spelled=spelled, settles=settles, leaves=leaves,
            jump=1 + int(np.argmax(_ratio(norm[1:], norm[:-1], 0.0))),
            norm=norm, relative=_ratio(norm, body.median_norm, np.nan),
            step=np.concatenate([[np.nan], (u[1:] * u[:-1]).sum(-1).numpy()]),
            final=(u @ u[-1]).numpy(), middle=middle,
            dimensions=tuple(dimensions(*depth) for depth in zip(x, body.median_entry.tolist(), strict=True)),
            body=body,
        )  # fmt: skip

    @property
    def massive(self) -> tuple[int, ...]:
        """The number of massive channels at each depth."""
        return tuple(sum(dimension.massive for dimension in depth) for depth in self.dimensions)


def _require_direction(norm: Float64[np.ndarray, "J"], token: int) -> None:
    """Raise UnsupportedError if x_0 is zero at the middle depth, where its direction is needed."""
    if norm[len(norm) // 2] > 0:
        return
    zero = ", ".join(map(str, np.flatnonzero(norm == 0)))
    raise UnsupportedError(
        "the state at position 0 is zero, so it has no direction", where="position 0",
        got=f"token {token}: x_0 = 0 at depth {zero} of 0 to {len(norm) - 1}", expected="a nonzero state",
        remedy="check the weights, those of embeddings and norms first; `posleak measure` and `posleak trace` do not "
        "need states",
    )  # fmt: skip


def _ratio(x: Float64[np.ndarray, "n"], y: Float64[np.ndarray, "n"], undefined: float) -> Float64[np.ndarray, "n"]:
    """Return x / y, and `undefined` where y is zero."""
    return np.asarray(np.divide(x, y, out=np.full_like(x, undefined), where=y > 0))


def settled(cosine: Float64[np.ndarray, "J"]) -> tuple[int, int]:
    """Return the first and last depth of the unbroken run above SETTLED around the middle depth (cosine 1)."""
    middle = len(cosine) // 2
    outside = np.flatnonzero(~(cosine > SETTLED))
    before, after = outside[outside < middle], outside[outside > middle]
    first = int(before[-1]) + 1 if len(before) else 0
    return first, int(after[0]) - 1 if len(after) else len(cosine) - 1


def is_massive(x: Float[Tensor, "*shape"], entry: float) -> Bool[Tensor, "*shape"]:
    """Apply the rule of Sun et al. with the median |x| of the depth."""
    return (x.abs() > ABSOLUTE) & (x.abs() >= RELATIVE * entry)


def dimensions(x: Float[Tensor, "W"], entry: float) -> tuple[Dimension, ...]:
    """Return the massive channels of one state, largest first, or its TOP largest if none is massive."""
    massive = is_massive(x, entry)
    count = int(massive.sum()) or min(TOP, len(x))
    squared_norm = float(x.double().square().sum()) or 1.0
    order = torch.argsort(x.abs(), descending=True, stable=True)[:count]
    return tuple(
        Dimension(int(at), float(x[at]), float(x[at].double() ** 2) / squared_norm, bool(massive[at])) for at in order
    )
