"""How much better logits are explained by positions than by offsets alone (ΔR² of Ruscio, "Once upon a token", 2025).

    ΔR² = R²[ s ~ 1 + (i − j) + i + j ] − R²[ s ~ 1 + (i − j) ],   least squares over visible pairs

i, j and i − j are dependent, so the larger design has rank 3: offset and query position. By the theorem of Frisch,
Waugh and Lovell the difference is the squared partial correlation with i once the offset is taken out of both, which
has no difference of two nearly equal numbers in it and is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor


@dataclass(frozen=True)
class Design:
    """Moments of offset and query position over the visible pairs, about their means. `weights`: how many queries each
    row stands for."""

    visible: Bool[Tensor, "P T"]
    query: Float64[Tensor, "P"]
    weights: Float64[Tensor, "P"]
    count: float
    mean_offset: float
    mean_query: float
    offset_offset: float
    offset_query: float
    query_query: float

    @classmethod
    def of(
        cls, visible: Bool[Tensor, "P T"], rows: Int[Tensor, "P"], weights: Int[Tensor, "P"] | None = None
    ) -> Design:
        i = rows.double()
        weight = torch.ones_like(i) if weights is None else weights.double()
        j = torch.arange(visible.shape[1], device=visible.device).double()
        seen = visible.double() * weight[:, None]
        count = float(seen.sum())
        offset = i[:, None] - j
        mean_offset, mean_query = float((seen * offset).sum() / count), float((seen.sum(1) * i).sum() / count)
        d, q = offset - mean_offset, i[:, None] - mean_query
        return cls(
            visible, i, weight, count, mean_offset, mean_query,
            float((seen * d * d).sum()), float((seen * d * q).sum()), float((seen * q * q).sum()),
        )  # fmt: skip


def explained(
    logits: Float[Tensor, "B H P T"], design: Design
) -> tuple[Float64[Tensor, "B H"], Float64[Tensor, "B H"]]:
    """R² of the offset alone, and ΔR² of the position beside it; NaN where logits do not vary."""
    # Sums are taken about a number near the mean, so that they keep their digits; which number does not matter.
    last = design.visible[-1].nonzero().flatten()
    near = logits[:, :, -1, last].mean(-1)
    s = (logits - near[..., None, None]).mul_(design.visible.to(logits.dtype))
    key = torch.arange(s.shape[-1], device=s.device, dtype=s.dtype)
    sums = (s @ torch.stack([torch.ones_like(key), key], dim=-1)).double() * design.weights[:, None]  # [B, H, P, 2]
    total, with_query = sums[..., 0].sum(-1), (sums[..., 0] * design.query).sum(-1)
    with_offset = with_query - sums[..., 1].sum(-1)
    with_query, with_offset = with_query - design.mean_query * total, with_offset - design.mean_offset * total
    squares = torch.linalg.vector_norm(s, dim=-1).double().square() @ design.weights
    power = squares - total**2 / design.count
    power = torch.where(power > 0, power, torch.nan)
    left = design.query_query - design.offset_query**2 / design.offset_offset
    partial = with_query - design.offset_query / design.offset_offset * with_offset
    return with_offset**2 / (design.offset_offset * power), partial**2 / (left * power)
