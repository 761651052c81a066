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

All meters read the same rows of an attention call (`Glimpse`), which are computed once. Up to FULL_LENGTH tokens
these are all rows of the attention matrix. Longer prompts are sampled: the first SINGLE_ROWS positions, where sinks are
and attention changes fastest, are groups of one; later positions form groups of nearly equal size, SAMPLED_ROWS groups
in total. The last position of a group represents it, and means over queries are weighted by the sizes of the groups.
Keys are never grouped. So the cost grows linearly with the length of the prompt, and no N × N matrix of more than
FULL_LENGTH tokens is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Float64, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from posleak.axes import DEPTH, LAYER, PROMPT
from posleak.leakage.dataset import stack_calls
from posleak.probe import Call, Plan
from posleak.stopwatch import stage

from .spectra import SHORTEST_PROFILE

Arrays = dict[str, NDArray[Any]]

FULL_LENGTH, SAMPLED_ROWS = 256, 128
"""Longest prompts of which all rows are used, and the number of rows that represent longer ones."""

SINGLE_ROWS = 32
"""Number of first positions that are not grouped."""

START_TOKENS = 64
"""Gu's T: number of first queries for the sink rate. By causality they are a prompt of that length."""


@dataclass(frozen=True)
class Sampling:
    """The rows that represent a prompt of `length` tokens."""

    length: int

    @cached_property
    def rows(self) -> Int64[np.ndarray, "P"]:
        """The last position of each group, increasing."""
        if self.length <= FULL_LENGTH:
            return np.arange(self.length)
        later = np.rint(np.linspace(SINGLE_ROWS, self.length, SAMPLED_ROWS - SINGLE_ROWS + 1)).astype(np.int64)[1:]
        return np.concatenate([np.arange(SINGLE_ROWS), later - 1])

    @cached_property
    def weights(self) -> Int64[np.ndarray, "P"]:
        """The number of positions that each row represents: itself and those since the row before."""
        return np.diff(self.rows, prepend=-1)

    def spread(self, by_row: Float[Tensor, "*cells P"]) -> Float[Tensor, "*cells T"]:
        """Interpolate values of the rows linearly to all positions."""
        if self.length == len(self.rows):
            return by_row
        right = np.searchsorted(self.rows, np.arange(self.length)).clip(1)
        step = (np.arange(self.length) - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
        weight = torch.from_numpy(step).to(by_row)
        return by_row[..., right - 1] * (1 - weight) + by_row[..., right] * weight


@dataclass(frozen=True)
class Glimpse:
    """Sampled rows of one attention call. origin: the width m; its keys are excluded from `by_offset`."""

    call: Call
    origin: int

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling(self.call.query.shape[2])

    @cached_property
    def rows(self) -> Int[Tensor, "P"]:
        return torch.from_numpy(self.sampling.rows).to(self.call.query.device)

    @cached_property
    def visible(self) -> Bool[Tensor, "P T"]:
        """The keys that the rows see: the same for all prompts of a batch, which the leakage's rows check."""
        return self.call.visibility.cached("glimpse", lambda: self.call.visibility.rows(self.rows)[0, 0])

    @cached_property
    def logits(self) -> Float[Tensor, "B H P T"]:
        """Logits s_ij before the mask."""
        return self.call.logits(self.rows)

    @cached_property
    def attention(self) -> Float[Tensor, "B H P T"]:
        return attention(self.call, self.logits, self.visible, self.rows)

    @cached_property
    def mean_attention(self) -> Float[Tensor, "B P T"]:
        """Attention averaged over heads."""
        return self.attention.mean(1)

    @cached_property
    def weights(self) -> Int[Tensor, "P"]:
        """The number of queries that each row represents."""
        return torch.from_numpy(self.sampling.weights).to(self.rows.device)

    @cached_property
    def by_offset(self) -> Float64[np.ndarray, "B H offsets"] | None:
        """Mean attention at offsets 0, 1, 2, … of the rows in the second half, up to the last offset that all have.

        Keys of the origin are excluded: in the mean they would be spread over all offsets. None if the prompt is short.
        """
        late = self.rows[self.rows >= self.call.query.shape[2] // 2]  # groups have one size, up to one position
        offsets = int(late[0]) - self.origin + 1
        if offsets < SHORTEST_PROFILE:
            return None
        key = late[:, None] - torch.arange(offsets, device=late.device)
        a = self.attention[:, :, -len(late) :]
        return a.gather(-1, key.expand(*a.shape[:2], -1, -1)).mean(2).double().cpu().numpy()


def start_attention(call: Call, tokens: int = START_TOKENS) -> Float[Tensor, "B H T T"]:
    """Return the attention matrix of the first tokens."""
    tokens = min(tokens, call.query.shape[2])
    first = call.slice_positions(0, tokens)
    rows = torch.arange(tokens, device=call.query.device)
    return attention(first, first.logits(slice(None)), first.visibility.rows(rows)[0, 0], rows)


def attention(
    call: Call, logits: Float[Tensor, "B H P T"], visible: Bool[Tensor, "P T"], rows: Int[Tensor, "P"]
) -> Float[Tensor, "B H P T"]:
    """Return the softmax of rows as the call computes it: with a learned sink logit and with edits of key 0."""
    hidden = call.visibility.cached(
        ("hidden", visible.shape, logits.dtype),
        lambda: torch.zeros(visible.shape, dtype=logits.dtype, device=logits.device).masked_fill_(~visible, -torch.inf),
    )
    s, later = logits + hidden, rows > 0
    if call.unread is not None:
        s[:, call.unread.nonzero()[:, 0, None], later.nonzero()[:, 0], 0] = -torch.inf
    aux = None if call.s_aux is None else call.s_aux.to(s).view(1, -1, 1).expand(s.shape[:3])
    if call.frozen is not None:
        rest = s[..., 1:].logsumexp(-1)
        rest = rest if aux is None else torch.logaddexp(rest, aux)
        share = call.frozen.to(s)[..., None]
        held = ~share.isnan() & later & visible[:, 0]
        s[..., 0] = torch.where(held, (share / (1 - share)).log() + rest, s[..., 0])
    if aux is not None:
        s = torch.cat([s, aux[..., None]], dim=-1)
    return torch.softmax(s, dim=-1)[..., : logits.shape[-1]]


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
        for first in {self.axes[name][0] for name in seen} - {LAYER, DEPTH}:
            raise AssertionError(f"the first axis of a meter's array is {first!r}; expected {LAYER!r} or {DEPTH!r}")
        return {name: stack_calls(arrays, self.axes[name]) for name, arrays in seen.items()}
