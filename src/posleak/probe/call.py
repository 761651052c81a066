"""One attention call of one layer: what the model handed over, and the rows of logits that can be read from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .visibility import Visibility

ALIBI, BIAS = "ALiBi", "other bias"

EQUAL = 1e-3
"""Steps of a bias that differ by less than this, relative to the largest, are equal."""


@dataclass(frozen=True)
class Call:
    """Everything that enters the softmax of one attention call.

    query and key arrive after rotation and normalisation; K divides H, and head h reads the key head h // (H / K).
    s_aux: a learned logit without a value, in every row's denominator. bias: what the model itself adds to the logits
    (ALiBi, learned relative positions).

    The last three are for edits, and stay as they are where `among` and `select_heads` cut the rest. Of queries after
    position 0, unread: heads that may not read it; frozen: the share that they read there instead of their own (NaN:
    their own). start: where the prompt begins, after a borrowed context.

    index counts the calls of a forward pass; layer is the number that the model itself gives to the layer of this call:
    a hybrid has attention in some of its layers only, and some layers make two calls.
    """

    index: int
    module: torch.nn.Module
    query: Float[Tensor, "B H T E"]
    key: Float[Tensor, "B K T E"]
    value: Float[Tensor, "B K T Ev"]
    visibility: Visibility
    scaling: float
    softcap: float | None = None
    s_aux: Float[Tensor, "H"] | None = None
    bias: Float[Tensor, "#B #H T T"] | None = None
    unread: Bool[Tensor, "_H"] | None = None
    frozen: Float[Tensor, "B _H"] | None = None
    start: int = 0
    layer: int = 0

    @property
    def bias_kind(self) -> str | None:
        """What kind of bias is added to the logits: linear in the key's position, or another; None: nothing."""
        if self.bias is None:
            return None
        last = torch.tensor([self.query.shape[2] - 1], device=self.query.device)
        steps = self.bias[:, :, -1].double()[..., self.visibility.rows(last)[0, 0, 0]].diff(dim=-1)
        size = float(steps.abs().max()) if steps.shape[-1] else 0.0
        straight = size > 0 and float((steps - steps.mean(-1, keepdim=True)).abs().max()) <= EQUAL * size
        return ALIBI if straight else BIAS

    @property
    def heads(self) -> int:
        """How many query heads it has."""
        return self.query.shape[1]

    def slice_positions(self, start: int, stop: int) -> Call:
        """Queries and keys start … stop − 1, among themselves."""
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
        """Only the heads with chosen true, each with its own key head."""
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

    def logits(self, rows: Int[Tensor, "P"] | slice, keys: slice = slice(None)) -> Float[Tensor, "B H P keys"]:
        """s_ij of the chosen queries: scaled, soft-capped and biased, not masked; at least float32.

        The query heads of one key head are stacked along the rows, so that one matmul serves them and no key is copied.
        """
        q, k = self.query[:, :, rows], self.key[:, :, keys]
        wide = torch.promote_types(q.dtype, torch.float32)
        s = self.soft_capped(grouped_matmul(q.to(wide) * self.scaling, k.to(wide).transpose(-1, -2)))
        return s if self.bias is None else s.add_(self.bias[:, :, rows][..., keys])

    def soft_capped(self, s: Float[Tensor, "B H *rest"]) -> Float[Tensor, "B H *rest"]:
        """Scaled products of queries and keys, soft-capped in place if the model does that."""
        return s if self.softcap is None else torch.tanh_(s.div_(self.softcap)).mul_(self.softcap)


def grouped_matmul(
    rows: Float[Tensor, "B H P inner"], shared: Float[Tensor, "B K inner outer"]
) -> Float[Tensor, "B H P outer"]:
    """rows @ shared, where H / K consecutive heads share one of the K."""
    B, H, R, X = rows.shape
    K = shared.shape[1]
    return (rows.reshape(B, K, (H // K) * R, X) @ shared).view(B, H, R, shared.shape[-1])
