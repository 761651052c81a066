"""`denominator=fixed`: every query mixes as if it saw as many keys as the reference queries do.

Hiding the keys that query i does not see from a late query r makes r's log-denominator smaller by mask(i, r). The edit
gives query i that much back: virtual keys make up for the hidden ones and carry the prompt's mean value vector, so

    a_ij -> a_ij e^{−m_i},   out_i -> e^{−m_i} out_i + (1 − e^{−m_i}) v̄,   m_i = mean over r of mask(i, r)

and the mask component is 0 by construction where it acts; what is left is not the denominator's doing. Position 0 keeps
its own softmax over itself, and reference queries theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from posleak.probe import Call, Visibility, call_rows, default_plan
from posleak.probe.rows import Sight, sight

from .base import NamedEdit, Site
from .scope import EVERYWHERE, Scope

BLOCK = 256


@dataclass(frozen=True)
class FixDenominator(NamedEdit):
    """The denominators of early queries made those of late ones."""

    scope: Scope = EVERYWHERE

    site: ClassVar[Site] = Site.DENOMINATOR
    needs_causal: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"denominator=fixed{self.scope.text}"

    def edit(self, call: Call) -> Call:
        heads = self.scope.heads(call)
        if not bool(heads.any()):
            return call
        return replace(call, virtual=hidden_mass(call).masked_fill(~heads[:, None], 0.0))


def hidden_mass(call: Call) -> Tensor:
    """m_i [B, H, T]: mean over references of mask(i, r); 0 at position 0 and from the first reference on."""
    plan = default_plan(call.query.shape[2])
    first = plan.references[0]
    seen = queries_sight(call, first)
    hidden = call_rows(call, plan).references.hidden(seen).mean(2)
    mass = hidden.new_zeros(*hidden.shape[:2], plan.length)
    mass[..., 1:first] = hidden.clamp(min=0)
    return mass


def queries_sight(call: Call, stop: int) -> Sight:
    """n_i and the sight of key 0 for the queries 1 … stop − 1."""
    seen = call.visibility.kept(("sight", stop), lambda: _sight(call.visibility, stop))
    return Sight(seen.body, seen.origin if call.unread is None else seen.origin & ~call.unread[:, None])


def _sight(visibility: Visibility, stop: int) -> Sight:
    """In blocks of rows, so that memory grows with the length and not with its square."""
    blocks = torch.arange(1, stop, device=visibility.device).split(BLOCK)
    parts = [sight(visibility.rows(positions)[0, 0], positions) for positions in blocks]
    return Sight(torch.cat([part.body for part in parts]), torch.cat([part.origin for part in parts]))
