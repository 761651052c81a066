"""Meters: each computes arrays per prompt from the attention calls and the residual stream of a forward pass.

    class Farthest(Meter):
        name = "farthest"
        arrays = {"farthest": (LAYER, HEAD)}
        def look(self, seen):
            ...
            return {"farthest": numbers}                  # [B, H]

    register(Farthest)                                    # then: posleak measure MODEL --metrics farthest

The arrays are stored in the run's dataset with the prompts as their first axis, here as `run.data["farthest"]`. The
metrics in the table (catalogue.py) are computed from them.
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
    """Base class of meters.

    name     its name in `--metrics`
    arrays   its arrays with their axes after the prompt axis; the first one is LAYER or DEPTH
    coords   coordinates of axes that only this meter has
    """

    name: ClassVar[str]
    arrays: ClassVar[Mapping[str, tuple[str, ...]]]
    coords: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        """Construct the meter for prompts of this plan."""
        return cls()

    def look(self, seen: Glimpse) -> Arrays:
        """Return arrays [B, …] of one attention call, without the layer axis."""
        return {}

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        """Return arrays [B, …] of the residual stream at one depth, without the depth axis."""
        return {}

    def finished(self, data: Arrays) -> Arrays:
        """Return the arrays to store, given those of all prompts; override for results that need all prompts."""
        return data


@dataclass
class Meters:
    """An observer that passes every attention call and the residual stream to several meters."""

    meters: Sequence[Meter]
    origin: int
    seen: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    depths: list[int] = field(default_factory=list)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The axes of all arrays after the prompt axis."""
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

    def _keep(self, by_meter: Iterable[Arrays]) -> None:
        for arrays in by_meter:
            for name, array in arrays.items():
                self.seen.setdefault(name, []).append(array)

    def finished(self, batches: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, xr.Variable]:
        """Return the labelled arrays of all prompts for the run's dataset. Batches may contain other arrays too."""
        data: Arrays = {
            name: np.concatenate([batch[name] for batch in batches]) for name in self.axes if name in batches[0]
        }
        for meter in self.meters:
            data |= meter.finished({name: data.pop(name) for name in meter.arrays if name in data})
        return {name: xr.Variable((PROMPT, *self.axes[name]), array) for name, array in data.items()}

    def unseen(self, batch: Mapping[str, NDArray[Any]]) -> list[str]:
        """Return the names of meters without any array in a batch."""
        return [meter.name for meter in self.meters if not any(name in batch for name in meter.arrays)]

    def collect(self) -> Arrays:
        """Return the arrays since the last call of this method, with layers or depths as the second axis.

        Layers with fewer heads than the widest are padded with NaN. Arrays by depth are dropped if a depth is missing.
        """
        seen, depths, self.seen, self.depths = self.seen, self.depths, {}, []
        if depths != list(range(len(depths))):
            seen = {name: arrays for name, arrays in seen.items() if self.axes[name][0] != DEPTH}
        return {name: stack_calls(arrays, self.axes[name]) for name, arrays in seen.items()}


def stack_calls(layers: Sequence[NDArray[Any]], axes: tuple[str, ...]) -> NDArray[Any]:
    """Stack arrays [B, …] of layers or depths into [B, L, …], padded with NaN to the widest layer."""
    if axes[0] not in (LAYER, DEPTH):
        raise AssertionError(f"the first axis of a meter's array is {axes[0]!r}; expected {LAYER!r} or {DEPTH!r}")
    if HEAD in axes:
        at, widest = axes.index(HEAD), max(x.shape[axes.index(HEAD)] for x in layers)
        layers = [
            np.pad(x, [(0, widest - x.shape[at] if axis == at else 0) for axis in range(x.ndim)],
                   constant_values=np.nan)
            for x in layers
        ]  # fmt: skip
    return np.stack(layers, axis=1)
