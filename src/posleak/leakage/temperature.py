"""Queries that a model scales by absolute position on purpose (Llama 4, Ministral 3): found and measured, not assumed.

    s_pj = t_p u_pj        t_p: a known function of the position p, the same for all heads of a layer

With one token repeated and no BOS every state of a layer is equal, and a rotation keeps norms, so that

    t_p / t_0 = ‖q_p‖ / ‖q_0‖

exactly, whatever formula the model has. That the states are equal is seen on the values, which no rotation touches;
where they are not (recurrent layers, learned positions), the scaling cannot be told from content and stays in drift.

Norms that differ from position to position, and not by one factor for all heads, mean that something acts on queries or
keys after their rotation which does not commute with it (HunYuan: a norm with a weight per dimension). Then logits do
not depend on offsets alone, and no part says so by itself: `unevenness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.probe import Call, Edit, attach
from posleak.probe.attachment import Unchanging

ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative differences that are rounding, with room: of values that should be equal, and of a scale that should be 1.
Deep models amplify what the float32 rotation rounds, also where they are float64."""


@dataclass
class NormObserver:
    """What a constant-token prompt shows of every call.

    temperatures: t_p / t_0 [T]; None where it is 1 throughout, or cannot be told
    unevenness: the largest relative difference of norms between positions of a head that no common factor explains
    """

    temperatures: list[Tensor | None] = field(default_factory=list)
    unevenness: list[float] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        rounding = ROUNDING.get(call.query.dtype, ROUNDING[torch.bfloat16])
        values = call.value[0].double()
        t, uneven = None, 0.0
        if float((values - values[:, :1]).abs().max()) <= rounding * float(values.abs().max()):
            common, query_gap = _common_factor(call.query[0])
            _, key_gap = _common_factor(call.key[0], factor=False)
            uneven = gap if (gap := max(query_gap, key_gap)) > rounding else 0.0
            t = common if not uneven and float((common - 1).abs().max()) > rounding else None
        self.temperatures.append(t)
        self.unevenness.append(uneven)


def _common_factor(x: Tensor, factor: bool = True) -> tuple[Tensor, float]:
    """x [H, T, E] -> the mean over heads of ‖x_p‖ / ‖x_0‖ [T], and how far a head is from it (without: from 1)."""
    norms = x.double().norm(dim=-1)
    ratios = norms / norms[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    ratios = ratios[norms[:, 0] > 0] if bool((norms[:, 0] > 0).any()) else torch.ones_like(ratios)
    common = ratios.mean(0) if factor else torch.ones_like(ratios[0])
    return common, float((ratios - common).abs().max())


def norms_by_position(model: PreTrainedModel, ids: Tensor, edits: Sequence[Edit] = ()) -> NormObserver:
    """One constant-token prompt of the length of ids [B, T]; of the edits, only their position ids count."""
    constant = ids[:1, -1:].expand(1, ids.shape[1]).contiguous()
    look = NormObserver()
    with attach(model, [look], [Unchanging(edit) for edit in edits]) as probe:
        probe.forward(constant)
    return look
