"""The observer that turns every attention call into its parts, as the forward pass goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError
from posleak.probe import Call, Plan

from .rows import Rows, reduce_rows
from .split import Parts, add, split


@dataclass
class LeakageObserver:
    """Collects the Parts of each layer of one forward pass; `start` is where the prompts begin after left padding."""

    plan: Plan
    start: int = 0
    layers: list[Parts] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.layers.append(split(layer_rows(call, self.plan, self.start)))

    def collect(self) -> list[Parts]:
        """The layers seen since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


def layer_rows(call: Call, plan: Plan, start: int = 0) -> Rows:
    """One matmul for the sampled rows of this call, then their reduction. Errors name the layer."""
    rows = torch.tensor(plan.rows, device=call.query.device) + start
    visible = call.visibility.rows(rows)[:, 0, :, start:]
    try:
        if not bool((visible == visible[:1]).all()):
            raise UnsupportedError("prompts of one batch see different keys", remedy="batch prompts of equal length")
        return reduce_rows(call.logits(rows, slice(start, None)), visible[0], plan, call.s_aux)
    except (CheckError, UnsupportedError) as error:
        raise error.at(f"layer {call.index}") from error


@dataclass
class AttentionObserver:
    """Collects log a_i(δ) [B, H, Q, D] of the measured queries of each layer, NaN where there is no such pair."""

    plan: Plan
    layers: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        rows = layer_rows(call, self.plan)
        log_z = add(add(rows.body_i, rows.sigma_i), rows.s_aux)
        nowhere = rows.offsets >= rows.n_i[:, None]
        self.layers.append((rows.s_i - log_z[..., None]).masked_fill(nowhere, torch.nan))
