"""Meters: each turns what passes by in a forward pass into a few numbers per prompt, as the leakage's observer does.

    class Farthest(Meter):
        name = "farthest"
        arrays = {"farthest": (LAYER, HEAD)}
        def look(self, seen):
            ...
            return {"farthest": numbers}                  # [B, H]

    register(Farthest)                                    # then: posleak measure MODEL --metrics farthest

The arrays go into the run's dataset, with the prompts as their first axis; `run.data["farthest"]` has them. A metric in
the table (catalogue.py) says what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from posleak.axes import DEPTH, HEAD, LAYER, PROMPT
from posleak.probe import Call, Plan
from posleak.stopwatch import stage

from .glimpse import Glimpse

Arrays = dict[str, NDArray[Any]]


class Meter:
    """Looks at one forward pass after the other.

    name     what `--metrics` calls it
    arrays   what it leaves of every prompt: the axes after the prompt's, the layer's or the depth's first
    coords   labels of axes that only it has
    """

    name: ClassVar[str]
    arrays: ClassVar[Mapping[str, tuple[str, ...]]]
    coords: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        """Ready for prompts of this plan."""
        return cls()

    def look(self, seen: Glimpse) -> Arrays:
        """Of one attention call: [B, …], without the axis of layers."""
        return {}

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        """Of the residual stream at one depth: [B, …], without the axis of depths."""
        return {}

    def finished(self, data: Arrays) -> Arrays:
        """Its arrays of all prompts, as they are kept; for what can only be computed from all of them."""
        return data


@dataclass
class Meters:
    """An observer that shows every call, and the stream, to several meters; `collect` gives one batch as arrays."""

    meters: Sequence[Meter]
    origin: int
    seen: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    depths: list[int] = field(default_factory=list)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Of all arrays that are collected, without the prompt's."""
        return {name: axes for meter in self.meters for name, axes in meter.arrays.items()}

    @property
    def coords(self) -> dict[str, Sequence[Any]]:
        return {axis: labels for meter in self.meters for axis, labels in meter.coords.items()}

    def observe(self, call: Call, out: Tensor) -> None:
        with stage("metrics"):
            seen = Glimpse(call, self.origin)
            self._keep(meter.look(seen) for meter in self.meters)

    def stream(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        with stage("metrics"):
            self.depths.append(depth)
            self._keep(meter.depth(depth, x) for meter in self.meters)

    def _keep(self, found: Iterable[Arrays]) -> None:
        for arrays in found:
            for name, array in arrays.items():
                self.seen.setdefault(name, []).append(array)

    def finished(self, batches: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, xr.Variable]:
        """All prompts together: labelled arrays for the run's dataset. Batches may hold other arrays too."""
        found: Arrays = {
            name: np.concatenate([batch[name] for batch in batches]) for name in self.axes if name in batches[0]
        }
        for meter in self.meters:
            own = meter.finished({name: found.pop(name) for name in meter.arrays if name in found})
            found |= own
        return {name: xr.Variable((PROMPT, *self.axes[name]), array) for name, array in found.items()}

    def unseen(self, batch: Mapping[str, NDArray[Any]]) -> list[str]:
        """Names of meters that have left nothing in a batch."""
        return [meter.name for meter in self.meters if not any(name in batch for name in meter.arrays)]

    def collect(self) -> Arrays:
        """What was seen since the last call of this method: layers or depths as the second axis, and NaN for the heads
        that a layer has fewer than the widest. Depths of which some were not shown are left out: no one could tell
        which is which."""
        seen, depths, self.seen, self.depths = self.seen, self.depths, {}, []
        if depths != list(range(len(depths))):
            seen = {name: each for name, each in seen.items() if self.axes[name][0] != DEPTH}
        return {name: stack_calls(each, self.axes[name]) for name, each in seen.items()}


def stack_calls(layers: Sequence[NDArray[Any]], axes: tuple[str, ...]) -> NDArray[Any]:
    """Arrays [B, …] of layers or depths side by side: [B, L, …]."""
    if axes[0] not in (LAYER, DEPTH):
        raise AssertionError(f"the first axis of a meter's array is {axes[0]}: expected layers or depths")
    if HEAD in axes:
        at, widest = axes.index(HEAD), max(x.shape[axes.index(HEAD)] for x in layers)
        layers = [
            np.pad(x, [(0, widest - x.shape[at] if axis == at else 0) for axis in range(x.ndim)],
                   constant_values=np.nan)
            for x in layers
        ]  # fmt: skip
    return np.stack(layers, axis=1)
