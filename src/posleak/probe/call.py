"""One attention call: the arguments of the attention function, the logits computed from them, and the output.

The output is computed by the fused kernel where it is exact, else exactly in blocks of queries. Neither holds more than
(block × T) weights per head, so memory grows with T, not with T².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .visibility import Visibility

if TYPE_CHECKING:
    from .branches import BranchLayout
    from .lending import Copies, Lending
    from .placement import Placement

QUERY_BLOCK = 256

ALIBI, BIAS = "ALiBi", "other bias"

EQUAL_STEPS = 1e-3
"""A bias is linear if its steps differ by at most this, relative to the largest step."""


@dataclass(frozen=True)
class MovedKey:
    """A key that every query sees at another offset than its own.

    start    index of the key, and of the first query that sees it there
    logits   its logit with the queries start, start + 1, …; NaN: unchanged
    """

    start: int
    logits: Float[Tensor, "B H n"]

    def meets(self, start: int, stop: int) -> bool:
        """Return whether one of the queries start … stop − 1 sees the key at another offset."""
        return start < self.start + self.logits.shape[-1] and self.start < stop

    def put(self, s: Float[Tensor, "B H P keys"], rows: Int[Tensor, "P"], first_key: int) -> None:
        """Put its logits into those of the queries at `rows`, whose first column is the key `first_key`."""
        column, at = self.start - first_key, rows - self.start
        inside = (at >= 0) & (at < self.logits.shape[-1])
        if 0 <= column < s.shape[-1] and bool(inside.any()):
            new = self.logits[:, :, at.clamp(0, self.logits.shape[-1] - 1)].to(s)
            s[..., column] = torch.where(inside & ~new.isnan(), new, s[..., column])


@dataclass(frozen=True)
class Call:
    """Everything that enters the softmax of one attention call.

    index        number of the call in the forward pass
    layer        index of the layer in the model; hybrid models have layers without attention, and some layers make two
                 calls
    query, key   after rotation and normalisation; K divides H, and head h uses key head h // (H / K). There are as many
                 keys as queries, T = S, except in a view of copies after a donor (lending.py)
    s_aux        learned sink logit of a head, which adds e^{s_aux} to the denominator of every row
    bias         added to the logits by the model (ALiBi, learned relative positions)

    The following fields are set by edits. `slice_positions` and `select_heads` do not change them.

    unread       heads in which queries after position 0 cannot attend to position 0
    frozen       share of attention that queries after position 0 pay to position 0; NaN: unchanged
    start        position of the first token of the prompt, after a donor
    moved        a key at another position
    layout       where the branches of the prompt are, if the pass reads several (branches.py)
    lending      the heads that attend to lent keys; None: all heads, as far as `visibility` shows lent keys
    copies       the copies of the prompt, if the pass reads several (lending.py)

    placement    effect of positions in this call, if the probe knows it
    """

    index: int
    module: torch.nn.Module
    query: Float[Tensor, "B H T E"]
    key: Float[Tensor, "B K S E"]
    value: Float[Tensor, "B K S Ev"]
    visibility: Visibility
    scaling: float
    softcap: float | None = None
    s_aux: Float[Tensor, "H"] | None = None
    bias: Float[Tensor, "#B #H T S"] | None = None
    unread: Bool[Tensor, "_H"] | None = None
    frozen: Float[Tensor, "B _H"] | None = None
    start: int = 0
    layer: int = 0
    moved: MovedKey | None = None
    layout: BranchLayout | None = None
    lending: Lending | None = None
    copies: Copies | None = None
    placement: Placement | None = None

    @property
    def bias_kind(self) -> str | None:
        """`ALiBi` if the bias is linear in the key position, `other bias`, or None without a bias."""
        if self.bias is None:
            return None
        last = torch.tensor([self.query.shape[2] - 1], device=self.query.device)
        steps = self.bias[:, :, -1].double()[..., self.visibility.rows(last)[0, 0, 0]].diff(dim=-1)
        size = float(steps.abs().max()) if steps.shape[-1] else 0.0
        linear = size > 0 and float((steps - steps.mean(-1, keepdim=True)).abs().max()) <= EQUAL_STEPS * size
        return ALIBI if linear else BIAS

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.query.shape[1]

    def slice_positions(self, start: int, stop: int) -> Call:
        """Return the call restricted to the queries and keys start … stop − 1."""
        at = slice(start, stop)
        return replace(
            self,
            query=self.query[:, :, at],
            key=self.key[:, :, at],
            value=self.value[:, :, at],
            visibility=self.visibility.slice_positions(start, stop),
            bias=None if self.bias is None else self.bias[..., at, at],
        )

    def select_heads(self, chosen: Bool[Tensor, "H"]) -> Call:
        """Return the call restricted to the chosen heads, each with its own copy of its key head."""
        if bool(chosen.all()):
            return self
        heads = chosen.nonzero().flatten()
        shared = heads // (self.heads // self.key.shape[1])
        return replace(
            self,
            query=self.query[:, heads],
            key=self.key[:, shared],
            value=self.value[:, shared],
            s_aux=None if self.s_aux is None else self.s_aux[heads],
            bias=self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, heads],
        )

    def select_pairs(self, chosen: Bool[Tensor, "B H"]) -> Call:
        """Return the chosen (prompt, head) pairs as the heads of one prompt; all prompts must see the same keys."""
        prompts, heads = chosen.nonzero(as_tuple=True)
        shared, bias = heads // (self.heads // self.key.shape[1]), self.bias
        return replace(
            self,
            query=self.query[prompts, heads][None],
            key=self.key[prompts, shared][None],
            value=self.value[prompts, shared][None],
            s_aux=None if self.s_aux is None else self.s_aux[heads],
            bias=None if bias is None else bias.expand(*chosen.shape, -1, -1)[prompts, heads][None],
        )

    def logits(self, rows: Int[Tensor, "P"] | slice, keys: slice = slice(None)) -> Float[Tensor, "B H P keys"]:
        """Compute s_ij of the chosen queries in at least float32: scaled, soft-capped and biased, but not masked."""
        q, k = self.query[:, :, rows], self.key[:, :, keys]
        wide = torch.promote_types(q.dtype, torch.float32)
        s = self.soft_capped(grouped_matmul(q.to(wide) * self.scaling, k.to(wide).transpose(-1, -2)))
        s = s if self.bias is None else s.add_(self.bias[:, :, rows][..., keys])
        if self.moved is not None:
            T = self.query.shape[2]
            self.moved.put(s, torch.arange(T, device=s.device)[rows], keys.indices(self.key.shape[2])[0])
        return s

    def soft_capped(self, s: Float[Tensor, "B H *rest"]) -> Float[Tensor, "B H *rest"]:
        """Apply the model's soft-cap, if it has one, to scaled products of queries and keys, in place."""
        return s if self.softcap is None else torch.tanh_(s.div_(self.softcap)) * self.softcap


def grouped_matmul(
    rows: Float[Tensor, "B H P inner"], shared: Float[Tensor, "B K inner outer"]
) -> Float[Tensor, "B H P outer"]:
    """Compute rows @ shared, where H / K consecutive heads share one of the K matrices.

    The heads of a group are stacked along the rows: one matmul serves all of them, and nothing is copied per head.
    """
    B, H, R, X = rows.shape
    K = shared.shape[1]
    return (rows.reshape(B, K, (H // K) * R, X) @ shared).view(B, H, R, shared.shape[-1])


def attend(call: Call) -> Float[Tensor, "B H T Ev"]:
    """Compute softmax(s) v in the dtype of the values, under the edits of the call."""
    if call.copies is not None:
        return call.copies.layout.sequence(_attend(call.copies.donor), attend(call.copies.call))
    if call.lending is not None:
        return _with_lending(call, call.lending)
    return _with_first_key_edited(call) if call.unread is not None or call.frozen is not None else _attend(call)


def _with_lending(call: Call, lending: Lending) -> Float[Tensor, "B H T Ev"]:
    """Mix attention to own keys and attention to own and lent keys; shares 0 and 1 are exact.

    Each of the two kernels is called only where its output is used.
    """
    share = lending.share.expand(call.query.shape[0], -1)
    own = _attend_where(replace(call, visibility=lending.own, lending=None), share < 1)
    lent = _attend_where(replace(call, lending=None), share > 0)
    share = share[..., None, None].to(own)
    return torch.where(share == 1, lent, own + share * (lent - own))


def _attend_where(call: Call, chosen: Bool[Tensor, "B H"]) -> Float[Tensor, "B H T Ev"]:
    """Compute attention of the chosen prompts and heads; 0 for the others."""
    if bool(chosen.all()):
        return _attend(call)
    out = call.value.new_zeros(*call.query.shape[:3], call.value.shape[-1])
    if bool((chosen == chosen[:1]).all()):  # the same heads of every prompt; possibly none
        if bool(chosen.any()):
            out[:, chosen[0]] = _attend(call.select_heads(chosen[0]))
    else:
        out[chosen] = _attend(call.select_pairs(chosen))[0]
    return out


def _attend(call: Call) -> Float[Tensor, "B H T Ev"]:
    if call.softcap is not None or call.s_aux is not None or call.bias is not None:
        return _blocks(call, _explicit)
    if call.visibility.causal:
        return _fused(call)
    return _blocks(call, _fused)


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


def _blocks(call: Call, attend_block: Callable[[Call, slice, slice, Tensor], Tensor]) -> Float[Tensor, "B H T Ev"]:
    """Compute blocks of queries against the span of keys visible to any of them. Without visible keys, return 0."""
    B, H, T, _ = call.query.shape
    out = call.value.new_zeros(B, H, T, call.value.shape[-1])
    for start, stop, low, high in call.visibility.spans(QUERY_BLOCK):
        seen = call.visibility.block(start, stop, low, high)
        moved = call.moved is not None and call.moved.meets(start, stop)
        compute = _explicit if moved else attend_block
        block = compute(call, slice(start, stop), slice(low, high), seen)
        blind = ~seen.any(-1, keepdim=True)
        out[:, :, start:stop] = block.masked_fill(blind, 0) if bool(blind.any()) else block
    return out


def _fused(
    call: Call,
    queries: slice = slice(None),
    keys: slice = slice(None),
    seen: Bool[Tensor, "#B 1 P keys"] | None = None,
) -> Float[Tensor, "B H P Ev"]:
    """Call torch's fused attention; None: causal. The values of some models are narrower than their queries."""
    query, key, value = call.query[:, :, queries], call.key[:, :, keys], call.value[:, :, keys]
    grouped, wide = query.shape[1] != key.shape[1], value.to(query.dtype)
    return F.scaled_dot_product_attention(
        query, key, wide, attn_mask=seen, scale=call.scaling, is_causal=seen is None, enable_gqa=grouped
    ).to(value.dtype)


def _explicit(call: Call, queries: slice, keys: slice, seen: Bool[Tensor, "#B 1 P keys"]) -> Float[Tensor, "B H P Ev"]:
    """Compute an explicit softmax, for soft-caps, learned sink logits and biases, which fused kernels lack."""
    s = call.logits(queries, keys).masked_fill_(~seen, -torch.inf)
    if call.s_aux is not None:
        aux = call.s_aux.to(s).view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
        s = torch.cat([s, aux], dim=-1)
    weights = torch.softmax(s, dim=-1)[..., : keys.stop - keys.start].to(call.value.dtype)
    return grouped_matmul(weights, call.value[:, :, keys])
