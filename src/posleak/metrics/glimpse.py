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
"""Tokens up to which attention is made whole; and how many rows stand for all in longer prompts."""

SINGLE_ROWS = 32
"""First positions that are not put into groups."""

START_TOKENS = 64
"""Gu's T: so many first queries are looked at apart. By causality they are a prompt of that length."""


@dataclass(frozen=True)
class Sampling:
    """The rows that stand for a prompt of `length` tokens."""

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
        """How many positions each row stands for: itself and those since the row before."""
        return np.diff(self.rows, prepend=-1)

    def spread(self, by_row: Float[Tensor, "*cells P"]) -> Float[Tensor, "*cells T"]:
        """Numbers of the rows as numbers of all positions, straight lines in between."""
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
    """Sampled rows of one call. `origin`: m; its keys are left out of profiles by offset."""

    call: Call
    origin: int

    @property
    def index(self) -> int:
        return self.call.index

    @cached_property
    def sampling(self) -> Sampling:
        return sampling(self.call.query.shape[2])

    @cached_property
    def rows(self) -> Int[Tensor, "P"]:
        return torch.from_numpy(self.sampling.rows).to(self.call.query.device)

    @cached_property
    def visible(self) -> Bool[Tensor, "P T"]:
        """The keys that the rows see; the same in all prompts of a batch, as the leakage's rows have made sure."""
        return self.call.visibility.cached("glimpse", lambda: self.call.visibility.rows(self.rows)[0, 0])

    @cached_property
    def logits(self) -> Float[Tensor, "B H P T"]:
        """s_ij, not masked."""
        return self.call.logits(self.rows)

    @cached_property
    def attention(self) -> Float[Tensor, "B H P T"]:
        return attention(self.call, self.logits, self.visible, self.rows)

    @cached_property
    def mean_attention(self) -> Float[Tensor, "B P T"]:
        """Averaged over heads."""
        return self.attention.mean(1)

    @cached_property
    def weights(self) -> Int[Tensor, "P"]:
        """How many queries each row stands for."""
        return torch.from_numpy(self.sampling.weights).to(self.rows.device)

    @cached_property
    def by_offset(self) -> Float64[np.ndarray, "B H offsets"] | None:
        """Mean attention of the rows of the second half at offsets 0, 1, 2, …, as far as all of them have body keys.

        Keys of the origin are left out: their attention would be spread over all offsets, a little at each. None where
        the prompt is too short.
        """
        late = self.rows[self.rows >= self.call.query.shape[2] // 2]  # groups of one size, but for one position
        offsets = int(late[0]) - self.origin + 1
        if offsets < SHORTEST_PROFILE:
            return None
        key = late[:, None] - torch.arange(offsets, device=late.device)
        found = self.attention[:, :, -len(late) :]
        return found.gather(-1, key.expand(*found.shape[:2], -1, -1)).mean(2).double().cpu().numpy()


def start_attention(call: Call, tokens: int = START_TOKENS) -> Float[Tensor, "B H T T"]:
    """The whole attention of the first queries among themselves."""
    tokens = min(tokens, call.query.shape[2])
    first = call.slice_positions(0, tokens)
    rows = torch.arange(tokens, device=call.query.device)
    return attention(first, first.logits(slice(None)), first.visibility.rows(rows)[0, 0], rows)


def attention(
    call: Call, logits: Float[Tensor, "B H P T"], visible: Bool[Tensor, "P T"], rows: Int[Tensor, "P"]
) -> Float[Tensor, "B H P T"]:
    """The softmax of rows, as the call computes it: with its learned sink logit, and with what edits do at key 0."""
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
