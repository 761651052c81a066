"""The observer that turns every attention call into its parts, as the forward pass goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posleak.probe import Call, Plan, call_rows

from .split import Parts, split


@dataclass
class LeakageObserver:
    """Collects the Parts of each layer of one forward pass; `start` is where the prompts begin after left padding."""

    plan: Plan
    start: int = 0
    layers: list[Parts] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.layers.append(split(call_rows(call, self.plan, self.start)))

    def collect(self) -> list[Parts]:
        """The layers seen since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


@dataclass
class AttentionObserver:
    """Collects log a_i(δ) [B, H, Q, D] of the measured queries of each layer, NaN where there is no such pair."""

    plan: Plan
    layers: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        rows = call_rows(call, self.plan)
        log_z = rows.log_z if rows.virtual is None else rows.log_z + rows.virtual
        nowhere = rows.offsets >= rows.sight.body[:, None]
        self.layers.append((rows.s - log_z[..., None]).masked_fill(nowhere, torch.nan))
