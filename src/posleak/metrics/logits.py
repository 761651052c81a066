"""Meters of logits, before the softmax. The causal mask acts in the softmax's denominator, which they do not see.

ΔR² (Ruscio, "Once upon a token", 2025) compares two least-squares fits over visible pairs:

    ΔR² = R²[ s ~ 1 + (i − j) + i + j ] − R²[ s ~ 1 + (i − j) ]

i, j and i − j are linearly dependent, so the larger design has rank 3: constant, offset and query position. By the
Frisch–Waugh–Lovell theorem the difference is the squared partial correlation with i, given the offset. In this form
there is no cancellation, and it is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.axes import HEAD, LAYER, OFFSET
from posleak.probe import Plan

from .glimpse import Glimpse
from .meter import Arrays, Meter


class PositionMeter(Meter):
    """ΔR² of Ruscio (2025): how much variance of the logits positions explain linearly beyond the offset."""

    name = "positions"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"r2_offset": (LAYER, HEAD), "delta_r2": (LAYER, HEAD)}

    def look(self, seen: Glimpse) -> Arrays:
        def moments() -> PositionMoments:
            return PositionMoments.of(seen.visible, seen.rows, seen.weights)

        offset, more = explained(seen.logits, seen.call.visibility.cached("design", moments))
        return {"r2_offset": offset.cpu().numpy(), "delta_r2": more.cpu().numpy()}


class ToeplitzMeter(Meter):
    """Mean logit of each diagonal at the plan's offsets. Kim's map (2025) is the deviation of the logits from it, which
    table.py computes with the logits that the leakage stores."""

    name = "toeplitz"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"diagonal": (LAYER, HEAD, OFFSET)}

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        return cls(plan)

    def look(self, seen: Glimpse) -> Arrays:
        key = seen.rows[:, None] - torch.tensor(self.plan.offsets, device=seen.rows.device)
        exists = (key >= 0) & seen.visible.gather(1, key.clamp(min=0))
        index = key.clamp(min=0).expand(*seen.logits.shape[:2], -1, -1)
        count = exists * seen.weights[:, None]
        sums = (seen.logits.gather(-1, index) * count).sum(2, dtype=torch.float64)
        return {"diagonal": (sums / count.sum(0)).cpu().numpy()}


@dataclass(frozen=True)
class PositionMoments:
    """Central moments of offset and query position over visible pairs. weights: queries that each row represents."""

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
    ) -> PositionMoments:
        """Compute the moments; without `weights`, every row represents one query."""
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
    logits: Float[Tensor, "B H P T"], moments: PositionMoments
) -> tuple[Float64[Tensor, "B H"], Float64[Tensor, "B H"]]:
    """Return R² of the offset alone and ΔR² of the position given the offset; NaN where logits do not vary."""
    # Sums are taken about a value near the mean, for precision; which value does not matter.
    last = moments.visible[-1].nonzero().flatten()
    near = logits[:, :, -1, last].mean(-1)
    s = (logits - near[..., None, None]).mul_(moments.visible.to(logits.dtype))
    key = torch.arange(s.shape[-1], device=s.device, dtype=s.dtype)
    sums = (s @ torch.stack([torch.ones_like(key), key], dim=-1)).double() * moments.weights[:, None]  # [B, H, P, 2]
    total, with_query = sums[..., 0].sum(-1), (sums[..., 0] * moments.query).sum(-1)
    with_offset = with_query - sums[..., 1].sum(-1)
    with_query, with_offset = with_query - moments.mean_query * total, with_offset - moments.mean_offset * total
    squares = torch.linalg.vector_norm(s, dim=-1).double().square() @ moments.weights
    power = squares - total**2 / moments.count
    power = torch.where(power > 0, power, torch.nan)
    left = moments.query_query - moments.offset_query**2 / moments.offset_offset
    partial = with_query - moments.offset_query / moments.offset_offset * with_offset
    return with_offset**2 / (moments.offset_offset * power), partial**2 / (left * power)
