"""Observers of attention calls: one computes the parts of the leakage, one stores log attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posleak.probe import Call, Placement, Plan, call_rows
from posleak.stopwatch import stage

from .split import Parts, split, split_scaled


@dataclass
class LeakageObserver:
    """Computes the Parts of every attention call during a forward pass.

    start        position at which the prompts begin, after left padding
    placements   what positions do in each call; without them, the origin's keys are not moved and queries not scaled
    layers       the Parts of the calls so far
    """

    plan: Plan
    start: int = 0
    placements: Sequence[Placement] = ()
    layers: list[Parts] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        place = self.placements[call.index] if self.placements else None
        t = None if place is None else place.temperature
        with stage("rows"):
            rows = call_rows(call, self.plan, self.start, place)
            even = None if t is None else call_rows(self._even(call, t), self.plan, self.start, place)
        with stage("split"):
            self.layers.append(split(rows) if even is None else split_scaled(rows, even))

    def _even(self, call: Call, t: Float64[Tensor, "P"]) -> Call:
        """Return the call with every query at the references' mean temperature."""
        late = slice(len(self.plan.queries), None)
        rows = torch.tensor(self.plan.rows, device=call.query.device) + self.start
        query = call.query.to(torch.promote_types(call.query.dtype, torch.float32), copy=True)
        query[:, :, rows] *= (t[late].mean() / t)[:, None].to(query)
        return replace(call, query=query)

    def collect(self) -> list[Parts]:
        """Return the layers observed since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


@dataclass
class AttentionObserver:
    """Stores log a_i(δ) of the measured queries of every layer; NaN at pairs that do not exist."""

    plan: Plan
    layers: list[Float64[Tensor, "B _H Q D"]] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        rows = call_rows(call, self.plan)
        missing = rows.offsets >= rows.seen.body[:, None]
        self.layers.append((rows.s - rows.log_z[..., None]).masked_fill(missing, torch.nan))
