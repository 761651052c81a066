"""`denominator=fixed`: every query mixes as if it saw as many keys as the reference queries do.

Hiding the keys that query i does not see from a late query r makes r's log-denominator smaller by mask(i, r). The edit
gives query i that much back: virtual keys make up for the hidden ones and carry the prompt's mean value vector, so

    a_ij -> a_ij e^{−m_i},   out_i -> e^{−m_i} out_i + (1 − e^{−m_i}) v̄,   m_i = mean over r of mask(i, r)

and the mask component is 0 by construction where the edit acts: what leakage is left has other sources than the
denominator. Position 0 and the reference queries keep their own softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from posleak.probe import Call, Visibility, call_rows, default_plan
from posleak.probe.rows import Sight, sight

from .base import Kind, ScopedEdit, Site, register

BLOCK = 256


@dataclass(frozen=True)
class FixDenominator(ScopedEdit):
    """Gives early queries the denominators of late ones."""

    name: ClassVar[str] = "denominator=fixed"
    site: ClassVar[Site] = Site.DENOMINATOR
    needs_causal: ClassVar[bool] = True

    def at(self, call: Call, heads: Tensor) -> Call:
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
    """For the queries 1 … stop − 1: n_i, and whether they see key 0."""
    seen: Sight = call.visibility.kept(("sight", stop), lambda: _sight(call.visibility, stop))
    return seen.without_first(call.unread)


def _sight(visibility: Visibility, stop: int) -> Sight:
    """In blocks of rows, so that memory grows with the length and not with its square."""
    blocks = torch.arange(1, stop, device=visibility.device).split(BLOCK)
    parts = [sight(visibility.rows(positions)[0, 0], positions) for positions in blocks]
    return Sight(torch.cat([part.body for part in parts]), torch.cat([part.first for part in parts]))


register(
    Kind(
        "denominator", "denominator=fixed[@LAYERS]",
        "the denominators of early queries: virtual keys stand in for those that they cannot see, so that their "
        "denominators are those of the reference queries, on average over these. Virtual keys carry the mean value of "
        "all keys after position 0. Position 0 and the queries from the first reference on are left alone",
        "`mask` and `ring`, under which nothing is hidden; a second edit of the denominator", "denominator=fixed@0",
        lambda value, scope: {"fixed": FixDenominator(scope)}[value], scoped=True,
    )
)  # fmt: skip
