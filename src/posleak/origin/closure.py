"""Law L7, closure: position 0 sees only itself, so its state is that of the one-token sequence, at every depth.

    gap_d = max over prompts of  ‖x_0^d(in context) − x_0^d(alone)‖ / ‖x_0^d(alone)‖

Everything else in this stage stands on it: what is found about one-token sequences holds for position 0 of any prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.probe import Edit, attach

from .states import states

BOUND = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest gap that is rounding. The rotation is float32 even in float64 models."""


@dataclass(frozen=True)
class Closure:
    """per_layer[d]: the largest gap of any prompt at depth d, 0 the embedding and d the stream after d layers;
    per_prompt[b]: the largest of prompt b at any depth."""

    per_layer: tuple[float, ...]
    per_prompt: tuple[float, ...]
    bound: float

    @property
    def prompts(self) -> int:
        return len(self.per_prompt)

    @property
    def worst(self) -> float:
        return max(self.per_layer)

    @property
    def ok(self) -> bool:
        """NaN fails."""
        return all(gap <= self.bound for gap in self.per_layer)

    @classmethod
    def of(cls, within: Sequence[Tensor], alone: Sequence[Tensor], dtype: torch.dtype) -> Closure:
        """within, alone: states of position 0 [B, W] at every depth, in context and as one-token sequences."""
        gaps = torch.stack([_gaps(x, x0) for x, x0 in zip(within, alone, strict=True)])  # [depth, B]
        bound = BOUND.get(dtype, BOUND[torch.bfloat16])
        return cls(tuple(gaps.amax(1).tolist()), tuple(gaps.amax(0).tolist()), bound)

    def as_dict(self) -> dict[str, Any]:
        gaps = [gap if gap < float("inf") else None for gap in self.per_layer]
        return {
            "worst": max(gaps, key=lambda gap: float("inf") if gap is None else gap), "bound": self.bound,
            "ok": self.ok, "per_layer": gaps, "n": self.prompts,
        }  # fmt: skip


def closure(model: PreTrainedModel, ids: Tensor, *, batch: int = 8, edits: Sequence[Edit] = ()) -> Closure:
    """The law, asked of prompts ids [B, T]; an edit that lets position 0 see other keys is seen to break it."""
    within, single = list[list[Tensor]](), list[list[Tensor]]()
    with attach(model, edits=edits) as probe:
        for part in ids.split(batch):
            within.append([x[:, 0] for x in states(probe, part.to(model.device))])
            single.append([x[:, 0] for x in states(probe, part[:, :1].to(model.device))])
    return Closure.of(_joined(within), _joined(single), model.dtype)


def _joined(batches: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(depth) for depth in zip(*batches, strict=True)]


def _gaps(x: Tensor, x0: Tensor) -> Tensor:
    """[B]; NaN counts as infinite."""
    x, x0 = x.double().cpu(), x0.double().cpu()
    gaps = (x - x0).norm(dim=-1) / x0.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return gaps.nan_to_num(nan=torch.inf, posinf=torch.inf)
