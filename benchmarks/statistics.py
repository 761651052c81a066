"""The statistics that every case computes, and the difference between two cases.

Attention patterns give the total leakage and the attention to position 0; scores also give drift. Mask and sink need
queries and keys, because the keys of the origin are moved. Each case computes what it can, at the same queries,
references and offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posleak.axes import SCALING
from posleak.leakage import Parts, split
from posleak.leakage.dataset import Chunk, stack_layers
from posleak.probe import Plan, reduce_rows
from posleak.probe.rows import gather_offsets

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Statistics of a batch of prompts.

    total         leakage [B, L, H, Q, D] in nats, NaN where a pair of positions does not exist
    attention_0   attention to position 0, [B, L, H, Q]
    parts         the parts of the leakage that the case can compute, by name
    """

    total: Array
    attention_0: Array
    parts: dict[str, Array]

    def max_difference(self, other: Statistics) -> float:
        """Return the largest absolute difference, in nats or attention; infinite if NaNs are at different places."""
        pairs = [(self.total, other.total), (self.attention_0, other.attention_0)]
        pairs += [(self.parts[name], other.parts[name]) for name in self.parts.keys() & other.parts.keys()]
        return max(_max_difference(x, y) for x, y in pairs)


def _max_difference(x: Array, y: Array) -> float:
    defined = ~np.isnan(x)
    if not np.array_equal(defined, ~np.isnan(y)) or not defined.any():
        return float("inf")
    return float(np.abs(x[defined] - y[defined]).max())


def from_chunk(chunk: Chunk) -> Statistics:
    """Return the statistics of posleak. If queries are scaled by position, scores do not give the same parts."""
    parts = {name: chunk[name] for name in ("mask", "drift", "sink")}
    total = (parts["mask"] + parts["sink"])[..., None] + parts["drift"]
    return Statistics(total + chunk.get(SCALING, 0.0), chunk["attention_0"], {} if SCALING in chunk else parts)


def from_scores(layers: Sequence[Tensor], plan: Plan) -> Statistics:
    """Return the statistics of masked scores [B, H, P, T], one per layer; hidden keys have the lowest value or −inf."""
    parts: list[Parts] = []
    for s in (layer.cpu() for layer in layers):
        visible = s[0, 0] > torch.finfo(s.dtype).min / 2
        parts.append(split(reduce_rows(s.masked_fill(~visible, 0), visible, plan)))
    statistics = from_chunk(stack_layers(parts))
    return replace(statistics, parts={"drift": statistics.parts["drift"]})


def from_patterns(layers: Sequence[Tensor], plan: Plan) -> Statistics:
    """Return the statistics of attention weights [B, H, P, T], one per layer; hidden keys have weight 0."""
    positions, offsets, Q = torch.tensor(plan.rows), torch.tensor(plan.offsets), len(plan.queries)
    totals, firsts = [], []
    for a in (layer.cpu() for layer in layers):
        log_a = gather_offsets(a, positions, offsets, plan.origin).double().clamp(min=0).log()
        log_a = log_a.masked_fill(torch.isinf(log_a), torch.nan)
        totals.append((log_a[:, :, :Q] - log_a[:, :, Q:].mean(2, keepdim=True)).numpy())
        firsts.append(a[:, :, :Q, 0].double().numpy())
    return Statistics(np.stack(totals, axis=1), np.stack(firsts, axis=1), {})
