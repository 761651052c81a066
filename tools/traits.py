"""Special features of a model's attention, read from its calls: positions, visibility, shared parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from posleak.analyses.doctor.passes import RECURRENT, TABLE, first_entrance
from posleak.models import Subject
from posleak.probe import Calibration, Call, Placement, attach, default_plan, read_placements
from posleak.probe.call import ALIBI

EQUAL = 1e-3
"""Relative difference below which vectors of two positions are equal, in float32."""


@dataclass
class CallObserver:
    """Traits of every attention call on a constant-token prompt.

    turned    whether queries depend on position; None if the states already do
    sloped    whether there is a bias that is linear in the position of the key
    """

    turned: list[bool | None] = field(default_factory=list)
    sloped: list[bool] = field(default_factory=list)
    traits: list[str] = field(default_factory=list)
    heads: set[int] = field(default_factory=set)

    def observe(self, call: Call, out: Tensor) -> None:
        same_states = not _differ(call.value[0])
        directions = call.query[0] / call.query[0].norm(dim=-1, keepdim=True).clamp(min=1e-30)
        self.turned.append(_differ(directions) if same_states else None)
        self.sloped.append(call.bias_kind == ALIBI)
        self.heads.add(call.heads)
        for there, trait in (
            (call.bias is not None and not self.sloped[-1], "bias added to logits"),
            (call.softcap is not None, "soft-capped logits"),
            (call.s_aux is not None, "learned sink logits"),
            (call.value.shape[-1] != call.key.shape[-1], "values of another width than keys"),
            (kind := _narrowed(call), str(kind)),
        ):
            if there and trait not in self.traits:
                self.traits.append(trait)


def _differ(x: Tensor) -> bool:
    """Return whether the vectors x [H, T, E] differ between positions."""
    return float((x - x[:, :1]).abs().max()) > EQUAL * float(x.abs().max())


def _narrowed(call: Call) -> str | None:
    """Return the kind of restricted visibility: a window has a constant size, a chunk grows."""
    late = torch.arange(call.query.shape[2] - 2, call.query.shape[2], device=call.query.device)
    seen = call.visibility.rows(late)[0, 0].sum(-1).tolist()
    if seen[1] == call.query.shape[2]:
        return None
    return "sliding window" if seen[0] == seen[1] else "chunked attention"


@dataclass(frozen=True)
class Traits:
    """`positions`: how absolute or relative position enters; `special`: what else a reader of results should know;
    `moved`: can the origin's keys be moved?"""

    positions: str
    special: tuple[str, ...]
    moved: str


def traits(subject: Subject, calibration: Calibration, length: int, token: int) -> Traits:
    """Two constant-token prompts through the model, and what calibration found."""
    model, look = subject.model, CallObserver()
    ids = torch.full((1, length), token, device=subject.device)
    with attach(model, [look]) as probe:
        probe.forward(ids)
    plan = default_plan(length)
    placements, entrance = read_placements(model, ids, plan), first_entrance(model, token)
    rotary = any("inv_freq" in name for name, _ in model.named_buffers())
    special = list(look.traits)
    if any(place.temperature is not None for place in placements):
        special.append("queries scaled by position")
    if any(place.unevenness for place in placements):
        special.append("weighted norm after the rotation")
    special += _modules(calibration)
    if len(look.heads) > 1:
        special.append("layers with different numbers of heads")
    if "index_topk" in model.config.get_text_config().to_dict():
        special.append("keys selected by content in prompts longer than index_topk, which are refused")
    other = set(calibration.unmeasured) | (
        {entrance.module} if entrance is not None and entrance.kind == RECURRENT else set()
    )
    if other:
        special.append(_hybrid(subject, calibration, other))
    table = entrance is not None and entrance.kind == TABLE
    positions = "table of positions" if table else _positions(look.turned, look.sloped, rotary)
    return Traits(positions, tuple(special), _moved(placements))


def _moved(placements: list[Placement]) -> str:
    """Can the origin's keys be moved?"""
    stays = [place.stays for place in placements if place.stays is not None]
    if not stays:
        return "yes"
    return f"no: {stays[0]}" if len(stays) == len(placements) else f"in some layers; in {len(stays)} not: {stays[0]}"


def _positions(turned: list[bool | None], sloped: list[bool], rotary: bool) -> str:
    turns = [rotary if turn is None else turn for turn in turned]
    kinds = " and ".join(kind for kind, calls in (("rotary", turns), ("ALiBi", sloped)) if any(calls))
    if not kinds:
        return "none (NoPE)"
    without = [turn or slope for turn, slope in zip(turns, sloped, strict=True)].count(False)
    return f"{kinds}, {without} of {len(turns)} calls without (NoPE)" if without else kinds


def _hybrid(subject: Subject, calibration: Calibration, other: set[str]) -> str:
    """Which layers are measured, and what the others are; the innermost name where one holds another."""
    inner = [name for name in sorted(other) if not any(child.startswith(f"{name}.") for child in other)]
    kinds = sorted({type(subject.model.get_submodule(name)).__name__ for name in inner})
    measured = len([name for name, _ in groupby(calibration.modules)])
    return f"hybrid: attention in {measured} of {subject.identity.layers} layers, beside {', '.join(kinds)}"


def _modules(calibration: Calibration) -> list[str]:
    """Are there modules that call attention several times in a row, or that run several times?"""
    runs = [(name, len(list(calls))) for name, calls in groupby(calibration.modules)]
    found = []
    if (most := max(count for _, count in runs)) > 1:
        found.append(f"{most} attention calls per layer")
    if len(runs) > len({name for name, _ in runs}):
        found.append("modules that run more than once")
    return found
