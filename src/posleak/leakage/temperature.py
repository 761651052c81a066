"""Queries that a model scales by absolute position on purpose (Llama 4, Ministral 3): found and measured, not assumed.

    s_pj = t_p u_pj        t_p: a known function of the position p, the same for all heads of a layer

With one token repeated and no BOS every state of a layer is equal, and a rotation keeps norms, so that

    t_p / t_0 = ‖q_p‖ / ‖q_0‖

exactly, whatever formula the model has. That the states are equal is seen on the values, which no rotation touches;
where they are not (recurrent layers, learned positions), the scaling cannot be told from content and stays in drift.

Norms that differ from position to position, and not by one factor for all heads, mean that something acts on queries or
keys after their rotation which does not commute with it (HunYuan: a norm with a weight per dimension). Then logits do
not depend on offsets alone, and no part says so by itself: `unevenness`.

A prompt of the full length would cost as much as a measured one. A few tokens at the positions of interest are enough
where positions reach the model as position ids. A model that counts tokens itself (Llama 4 for its scale, mixtures of
experts for their sorting) gets the full prompt. One that slices a ready-made table by index, without counting, would
be taken for one that does not scale: no family does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from posleak.probe import Call, Edit, attach, takes_positions
from posleak.probe.attachment import Unchanging
from posleak.rounding import CONSTANT


@dataclass
class NormObserver:
    """What a constant-token prompt shows of every call.

    temperatures: t_p / t_0, one for each token looked at; None where it is 1 throughout, or cannot be told
    unevenness: the largest relative difference of norms between positions of a head that no common factor explains
    """

    temperatures: list[Float64[Tensor, "T"] | None] = field(default_factory=list)
    unevenness: list[float] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        rounding = CONSTANT.of(call.query.dtype)
        values = call.value[0].double()
        t, uneven = None, 0.0
        if float((values - values[:, :1]).abs().max()) <= rounding * float(values.abs().max()):
            common, query_gap = _common_factor(call.query[0])
            _, key_gap = _common_factor(call.key[0], factor=False)
            uneven = gap if (gap := max(query_gap, key_gap)) > rounding else 0.0
            t = common if not uneven and float((common - 1).abs().max()) > rounding else None
        self.temperatures.append(t)
        self.unevenness.append(uneven)

    def at(self, rows: Sequence[int]) -> NormObserver:
        """The same with temperatures of these tokens only."""
        return NormObserver([None if t is None else t[list(rows)] for t in self.temperatures], self.unevenness)


def _common_factor(x: Float[Tensor, "H T E"], factor: bool = True) -> tuple[Float64[Tensor, "T"], float]:
    """The mean over heads of ‖x_p‖ / ‖x_0‖, and how far a head is from it (without: from 1)."""
    norms = x.double().norm(dim=-1)
    ratios = norms / norms[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    ratios = ratios[norms[:, 0] > 0] if bool((norms[:, 0] > 0).any()) else torch.ones_like(ratios)
    common = ratios.mean(0) if factor else torch.ones_like(ratios[0])
    return common, float((ratios - common).abs().max())


COUNTS = (torch.arange, torch.linspace, torch.range, torch.cumsum, Tensor.cumsum)
"""With what a model can make positions out of nothing but the number of its tokens."""


class Counting(TorchFunctionMode):
    """Does anything but posleak make positions of its own while this is on?"""

    found = False

    @no_type_check  # or the check of its types, in the tests, would be the caller that it sees
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COUNTS and not sys._getframe(1).f_globals.get("__name__", "").startswith("posleak."):
            self.found = True
        return func(*args, **(kwargs or {}))


def norms_by_position(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], edits: Sequence[Edit] = (), rows: Sequence[int] | None = None
) -> NormObserver:
    """A constant-token prompt of the length of ids; of the edits, only their position ids count.

    With `rows`, temperatures are those of these positions, and the prompt is short where it can be.
    """
    constant = ids[:1, -1:].expand(1, ids.shape[1]).contiguous()
    if rows is not None and (found := _at_positions(model, constant, edits, rows)) is not None:
        return found
    look = NormObserver()
    with attach(model, [look], [Unchanging(edit) for edit in edits]) as probe:
        probe.forward(constant)
    return look if rows is None else look.at(rows)


def _at_positions(
    model: PreTrainedModel, constant: Int[Tensor, "1 T"], edits: Sequence[Edit], rows: Sequence[int]
) -> NormObserver | None:
    """One token at each of these positions, after one at position 0; None where the model counts for itself."""
    if not takes_positions(model):
        return None
    positions = torch.arange(constant.shape[1], device=constant.device)[None]
    for edit in edits:
        positions = edit.positions(positions)
    places = [0, *rows]
    look = NormObserver()
    with attach(model, [look]) as probe, Counting() as counting:
        probe.forward(constant[:, : len(places)], position_ids=positions[:, places])
    return None if counting.found else look.at(range(1, len(places)))
