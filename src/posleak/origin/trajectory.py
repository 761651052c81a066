"""The trajectory: x_0 at every depth, from the one-token sequence alone.

    massive    |x| > 100 and ≥ 1000 × the median |x| of the layer's states (Sun et al. 2024)
    middle     the direction of x_0 at the middle depth, D/2 of D depths
    settles    the first depth from which on, up to the middle, cos(x_0, middle) > 0.99 without a break
    leaves     the last depth up to which it stays so after the middle
    jump       the depth where the norm grows by the largest factor over the depth before

Scales are those of body states (positions ≥ 1 of random prompts), so that a large x_0 is large beside something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posleak.plain import plain

from .cosines import mean_cosine
from .states import unit

Array = NDArray[np.float64]

ABSOLUTE, RELATIVE = 100.0, 1000.0
SETTLED = 0.99
TOP = 4


@dataclass(frozen=True)
class Scale:
    """Body states by depth [D], n of them: median |x| over positions and channels, median ‖x‖ over positions, and the
    mean cosine over pairs of them, which is far from 0 in most models."""

    entry: Array
    norm: Array
    alike: Array
    n: int

    @classmethod
    def of(cls, body: Sequence[Tensor]) -> Scale:
        """body: states [..., W] at every depth."""
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
    """x_0 of `token` at depths 0 … L; arrays [D].

    norm, relative   ‖x_0‖, and the same over the median norm of body states
    step, final      cosine to the depth before (NaN at 0), and to the last depth
    middle           cosine to the middle depth
    dimensions       for each depth the massive channels, or the TOP largest where the rule finds none
    """

    token: int
    spelled: str | None
    norm: Array
    relative: Array
    step: Array
    final: Array
    middle: Array
    dimensions: tuple[tuple[Dimension, ...], ...]
    settles: int
    leaves: int
    jump: int
    scale: Scale

    @classmethod
    def of(cls, x: Tensor, scale: Scale, token: int, spelled: str | None) -> Trajectory:
        """x [D, W]: the one-token sequence."""
        u, norm = unit(x), x.double().norm(dim=-1).numpy()
        middle = (u @ u[len(u) // 2]).numpy()
        settles, leaves = settled(middle)
        step = np.concatenate([[np.nan], (u[1:] * u[:-1]).sum(-1).numpy()])
        return cls(
            token, spelled, norm, norm / scale.norm, step, (u @ u[-1]).numpy(), middle,
            tuple(dimensions(depth, float(entry)) for depth, entry in zip(x, scale.entry, strict=True)),
            settles, leaves, 1 + int(np.argmax(norm[1:] / norm[:-1])), scale,
        )  # fmt: skip

    @property
    def massive(self) -> tuple[int, ...]:
        """How many massive channels there are at each depth."""
        return tuple(sum(dimension.massive for dimension in depth) for depth in self.dimensions)

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(
            {
                "token": self.token, "spelled": self.spelled, "settles": self.settles, "leaves": self.leaves,
                "jump": self.jump, "norm": self.norm, "relative": self.relative, "step": self.step,
                "final": self.final, "middle": self.middle,
                "dimensions": [[asdict(dimension) for dimension in depth] for depth in self.dimensions],
                "body": {"median_entry": self.scale.entry, "median_norm": self.scale.norm, "alike": self.scale.alike,
                         "n": self.scale.n},
            }
        )  # fmt: skip
        return found


def settled(cosine: Array) -> tuple[int, int]:
    """First and last depth of the unbroken run above SETTLED that holds the middle depth, whose own cosine is 1."""
    middle = len(cosine) // 2
    outside = np.flatnonzero(~(cosine > SETTLED))
    before, after = outside[outside < middle], outside[outside > middle]
    first = int(before[-1]) + 1 if len(before) else 0
    return first, int(after[0]) - 1 if len(after) else len(cosine) - 1


def is_massive(x: Tensor, entry: float) -> Tensor:
    """bool, like x: Sun et al.'s rule, with the layer's median |x|."""
    return (x.abs() > ABSOLUTE) & (x.abs() >= RELATIVE * entry)


def dimensions(x: Tensor, entry: float) -> tuple[Dimension, ...]:
    """The massive channels of one state x [W], largest first, or its TOP largest where none is massive."""
    massive = is_massive(x, entry)
    count = int(massive.sum()) or min(TOP, len(x))
    whole = float(x.double().square().sum()) or 1.0
    order = torch.argsort(x.abs(), descending=True, stable=True)[:count]
    return tuple(
        Dimension(int(at), float(x[at]), float(x[at].double() ** 2) / whole, bool(massive[at])) for at in order
    )
