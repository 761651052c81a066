"""Law L7, closure: position 0 sees only itself, so its state is that of the one-token sequence, at every depth.

    gap_d = max over prompts of  ‖x_0^d(in context) − x_0^d(alone)‖ / ‖x_0^d(alone)‖

Everything else in this stage stands on it: what is found about one-token sequences holds for position 0 of any prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.models import input_device
from posleak.probe import Edit, attach
from posleak.rounding import CLOSED

from .states import states


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
    def of(
        cls, within: Sequence[Float[Tensor, "B _W"]], alone: Sequence[Float[Tensor, "B _W"]], dtype: torch.dtype
    ) -> Closure:
        """within, alone: states of position 0 at every depth, in context and as one-token sequences."""
        gaps = torch.stack([_gaps(x, x0) for x, x0 in zip(within, alone, strict=True)])  # [J, B]
        return cls(tuple(gaps.amax(1).tolist()), tuple(gaps.amax(0).tolist()), CLOSED.of(dtype))

    def as_dict(self) -> dict[str, Any]:
        gaps = [gap if gap < float("inf") else None for gap in self.per_layer]
        return {
            "worst": max(gaps, key=lambda gap: float("inf") if gap is None else gap), "bound": self.bound,
            "ok": self.ok, "per_layer": gaps, "n": self.prompts,
        }  # fmt: skip


def closure(model: PreTrainedModel, ids: Int[Tensor, "B T"], *, batch: int = 8, edits: Sequence[Edit] = ()) -> Closure:
    """The law, asked of prompts; an edit that lets position 0 see other keys is seen to break it."""
    within, single = list[list[Tensor]](), list[list[Tensor]]()
    with attach(model, edits=edits) as probe:
        for part in ids.split(batch):
            within.append(
                [x[:, 0].clone() for x in states(probe, part.to(input_device(model)))]
            )  # or it would keep all of x
            single.append([x[:, 0] for x in states(probe, part[:, :1].to(input_device(model)))])
    return Closure.of(_joined(within), _joined(single), model.dtype)


def _joined(batches: list[list[Float[Tensor, "_b _W"]]]) -> list[Float[Tensor, "B _W"]]:
    return [torch.cat(depth) for depth in zip(*batches, strict=True)]


def _gaps(x: Float[Tensor, "B W"], x0: Float[Tensor, "B W"]) -> Float64[Tensor, "B"]:
    """NaN counts as infinite."""
    x, x0 = x.double().cpu(), x0.double().cpu()
    gaps: Tensor = (x - x0).norm(dim=-1) / x0.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return gaps.nan_to_num(nan=torch.inf, posinf=torch.inf)
