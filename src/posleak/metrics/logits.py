"""Meters of logits, before the softmax. What the causal mask does happens in the softmax's denominator: these cannot
see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from posleak.axes import HEAD, LAYER, OFFSET
from posleak.probe import Plan

from .glimpse import Glimpse
from .meter import Arrays, Meter
from .regression import Design, explained


class Positions(Meter):
    """ΔR² of Ruscio (2025): are logits explained by i and j beyond i − j, linearly?"""

    name = "positions"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"r2_offset": (LAYER, HEAD), "delta_r2": (LAYER, HEAD)}

    def look(self, seen: Glimpse) -> Arrays:
        design = seen.call.visibility.cached("design", lambda: Design.of(seen.visible, seen.rows, seen.weights))
        offset, more = explained(seen.logits, design)
        return {"r2_offset": offset.cpu().numpy(), "delta_r2": more.cpu().numpy()}


class Toeplitz(Meter):
    """The mean logit of each diagonal, at the plan's offsets. Kim's map (2025) is what logits differ from it; the
    logits themselves are those that the leakage keeps (table.py puts the two together)."""

    name = "toeplitz"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"diagonal": (LAYER, HEAD, OFFSET)}

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        return cls(plan)

    def look(self, seen: Glimpse) -> Arrays:
        key = seen.rows[:, None] - torch.tensor(self.plan.offsets, device=seen.rows.device)
        there = (key >= 0) & seen.visible.gather(1, key.clamp(min=0))
        index = key.clamp(min=0).expand(*seen.logits.shape[:2], -1, -1)
        count = there * seen.weights[:, None]
        sums = (seen.logits.gather(-1, index) * count).sum(2, dtype=torch.float64)
        return {"diagonal": (sums / count.sum(0)).cpu().numpy()}
