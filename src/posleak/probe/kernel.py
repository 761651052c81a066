"""The attention computation: the fused kernel where it is exact, else an exact computation in blocks of queries.

Neither holds more than (block × T) weights per head, so memory grows with T, not with T².
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from .call import Call, grouped_matmul

QUERY_BLOCK = 256


def attend(call: Call) -> Float[Tensor, "B H T Ev"]:
    """Compute softmax(s) v in the dtype of the values, under the edits `unread` and `frozen` of the call."""
    return _with_first_key_edited(call) if call.unread is not None or call.frozen is not None else _attend(call)


def _attend(call: Call) -> Float[Tensor, "B H T Ev"]:
    if call.softcap is not None or call.s_aux is not None or call.bias is not None:
        return _blocks(call, _explicit)
    if call.visibility.causal:
        return _fused(call.query, call.key, call.value, None, call.scaling)
    return _blocks(call, _fused_block)


def _with_first_key_edited(call: Call) -> Float[Tensor, "B H T Ev"]:
    """Remove position 0 from the softmax of later queries by removing it from the keys, then mix in its share.

    This is exact and costs one kernel call per head, with or without position 0. Correcting the finished output,
    (out − a_i0 v_0) / (1 − a_i0), would lose digits in heads that attend to little else.
    """
    B, H, T, _ = call.query.shape
    share = call.value.new_full((B, H), torch.nan) if call.frozen is None else call.frozen.to(call.value)
    if call.unread is not None:
        share = share.masked_fill(call.unread, 0)
    kept = share.isnan()
    out = call.value.new_empty(B, H, T, call.value.shape[-1])
    if bool((own := kept.any(0)).any()):
        out[:, own] = _attend(call.select_heads(own))
    if bool((edited := ~kept.all(0)).any()):
        some = call.select_heads(edited)
        body = _attend(some.slice_positions(1, T))
        share, kept = share[:, edited, None, None], kept[:, edited, None, None]
        first = some.value[:, :, :1].repeat_interleave(some.heads // some.value.shape[1], dim=1)
        # Where the share is 0, the result is bit-identical to the body.
        later = torch.where(share == 0, body, share * first + (1 - share) * body)
        later = torch.where(kept, out[:, edited, 1:], later)
        out[:, edited] = torch.cat([_attend(some.slice_positions(0, 1)), later], dim=2)
    return out


def _fused(
    query: Float[Tensor, "B H P E"],
    key: Float[Tensor, "B K keys E"],
    value: Float[Tensor, "B K keys Ev"],
    mask: Bool[Tensor, "#B 1 P keys"] | None,
    scaling: float,
) -> Float[Tensor, "B H P Ev"]:
    grouped, wide = (
        query.shape[1] != key.shape[1],
        value.to(query.dtype),
    )  # the values of some models are narrower than their queries
    return F.scaled_dot_product_attention(
        query, key, wide, attn_mask=mask, scale=scaling, is_causal=mask is None, enable_gqa=grouped
    ).to(value.dtype)


def _blocks(call: Call, attend_block: Callable[[Call, slice, slice, Tensor], Tensor]) -> Float[Tensor, "B H T Ev"]:
    """Compute blocks of queries against the span of keys visible to any of them. Without visible keys, return 0."""
    B, H, T, _ = call.query.shape
    out = call.value.new_zeros(B, H, T, call.value.shape[-1])
    for start, stop, low, high in call.visibility.spans(QUERY_BLOCK):
        seen = call.visibility.rows(torch.arange(start, stop, device=call.query.device), slice(low, high))
        block = attend_block(call, slice(start, stop), slice(low, high), seen)
        blind = ~seen.any(-1, keepdim=True)
        out[:, :, start:stop] = block.masked_fill(blind, 0) if bool(blind.any()) else block
    return out


def _fused_block(
    call: Call, queries: slice, keys: slice, seen: Bool[Tensor, "#B 1 P keys"]
) -> Float[Tensor, "B H P Ev"]:
    return _fused(call.query[:, :, queries], call.key[:, :, keys], call.value[:, :, keys], seen, call.scaling)


def _explicit(call: Call, queries: slice, keys: slice, seen: Bool[Tensor, "#B 1 P keys"]) -> Float[Tensor, "B H P Ev"]:
    """Compute an explicit softmax, for soft-caps, learned sink logits and biases, which fused kernels lack."""
    s = call.logits(queries, keys).masked_fill_(~seen, -torch.inf)
    if call.s_aux is not None:
        aux = call.s_aux.to(s).view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
        s = torch.cat([s, aux], dim=-1)
    weights = torch.softmax(s, dim=-1)[..., : keys.stop - keys.start].to(call.value.dtype)
    return grouped_matmul(weights, call.value[:, :, keys])
