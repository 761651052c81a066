"""The rows of one attention call that all meters read; they are computed once.

Up to FULL_LENGTH tokens these are all rows of the attention matrix. Longer prompts are sampled: the first SINGLE_ROWS
positions, where sinks are and attention changes fastest, are groups of one; later positions form groups of nearly equal
size, SAMPLED_ROWS groups in total. The last position of a group represents it, and means over queries are weighted by
the sizes of the groups. Keys are never grouped. So the cost grows linearly with the length of the prompt, and no N × N
matrix of more than FULL_LENGTH tokens is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from posleak.probe import Call

from .spectra import SHORTEST_PROFILE

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


@lru_cache(maxsize=4)
def sampling(length: int) -> Sampling:
    return Sampling(length)


@dataclass(frozen=True)
class Glimpse:
    """Sampled rows of one attention call. origin: the width m; its keys are excluded from `by_offset`."""

    call: Call
    origin: int

    @cached_property
    def sampling(self) -> Sampling:
        return sampling(self.call.query.shape[2])

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
