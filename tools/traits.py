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

TOLERANCE = 1e-3
"""Relative difference below which vectors of two positions are equal, in float32."""


@dataclass
class CallObserver:
    """Traits of every attention call on a constant-token prompt.

    turned    by call, whether queries are rotated by position; None if the states already depend on position
    sloped    by call, whether it has an ALiBi bias
    traits    other features;  heads: numbers of heads
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
        for present, trait in (
            (call.bias is not None and not self.sloped[-1], "bias added to logits"),
            (call.softcap is not None, "soft-capped logits"),
            (call.s_aux is not None, "learned sink logits"),
            (call.value.shape[-1] != call.key.shape[-1], "values and keys of different widths"),
            (kind := _restriction(call), str(kind)),
        ):
            if present and trait not in self.traits:
                self.traits.append(trait)


def _differ(x: Tensor) -> bool:
    """Return whether the vectors x [H, T, E] differ between positions."""
    return float((x - x[:, :1]).abs().max()) > TOLERANCE * float(x.abs().max())


def _restriction(call: Call) -> str | None:
    """Return the kind of restricted visibility: a window has a constant size, a chunk grows with the query."""
    late = torch.arange(call.query.shape[2] - 2, call.query.shape[2], device=call.query.device)
    visible = call.visibility.rows(late)[0, 0].sum(-1).tolist()
    if visible[1] == call.query.shape[2]:
        return None
    return "sliding window" if visible[0] == visible[1] else "chunked attention"


@dataclass(frozen=True)
class Traits:
    """Features of a model's attention.

    positions   position encoding
    special     other features that matter for the interpretation of results
    moved       whether the origin's keys can be moved, and the reason if not
    """

    positions: str
    special: tuple[str, ...]
    moved: str


def traits(subject: Subject, calibration: Calibration, length: int, token: int) -> Traits:
    """Return the features of a model, from passes over one repeated token and from its calibration."""
    model, observer = subject.model, CallObserver()
    ids = torch.full((1, length), token, device=subject.device)
    with attach(model, [observer]) as probe:
        probe.forward(ids)
    plan = default_plan(length)
    placements, entrance = read_placements(model, ids, plan), first_entrance(model, token)
    rotary = any("inv_freq" in name for name, _ in model.named_buffers())
    special = list(observer.traits)
    if any(place.temperature is not None for place in placements):
        special.append("queries scaled by position")
    if any(place.unevenness for place in placements):
        special.append("weighted norm after the rotation")
    special += _repetitions(calibration)
    if len(observer.heads) > 1:
        special.append("layers with different numbers of heads")
    if "index_topk" in model.config.get_text_config().to_dict():
        special.append("keys selected by content in prompts longer than index_topk, which are refused")
    unmeasured = set(calibration.unmeasured)
    if entrance is not None and entrance.kind == RECURRENT:
        unmeasured.add(entrance.module)
    if unmeasured:
        special.append(_hybrid(subject, calibration, unmeasured))
    table = entrance is not None and entrance.kind == TABLE
    positions = "table of positions" if table else _positions(observer.turned, observer.sloped, rotary)
    return Traits(positions, tuple(special), _moved(placements))


def _moved(placements: list[Placement]) -> str:
    """Return whether the origin's keys can be moved, with the reason if not."""
    stays = [place.stays for place in placements if place.stays is not None]
    if not stays:
        return "yes"
    return f"no: {stays[0]}" if len(stays) == len(placements) else f"in some layers; not in {len(stays)}: {stays[0]}"


def _positions(turned: list[bool | None], sloped: list[bool], rotary: bool) -> str:
    """Return the position encoding of the calls. `rotary`: whether calls with unknown rotation are rotary."""
    turns = [rotary if turn is None else turn for turn in turned]
    kinds = " and ".join(kind for kind, calls in (("rotary", turns), ("ALiBi", sloped)) if any(calls))
    if not kinds:
        return "none (NoPE)"
    without = [turn or slope for turn, slope in zip(turns, sloped, strict=True)].count(False)
    return f"{kinds}, {without} of {len(turns)} calls without (NoPE)" if without else kinds


def _hybrid(subject: Subject, calibration: Calibration, unmeasured: set[str]) -> str:
    """Describe a hybrid model: the number of attention layers, and the classes of the innermost other modules."""
    inner = [name for name in sorted(unmeasured) if not any(child.startswith(f"{name}.") for child in unmeasured)]
    kinds = sorted({type(subject.model.get_submodule(name)).__name__ for name in inner})
    measured = len([name for name, _ in groupby(calibration.modules)])
    return f"hybrid: attention in {measured} of {subject.identity.layers} layers, with {', '.join(kinds)}"


def _repetitions(calibration: Calibration) -> list[str]:
    """Describe modules that call attention several times in a row, or that run several times."""
    runs = [(name, len(list(calls))) for name, calls in groupby(calibration.modules)]
    repetitions = []
    if (most := max(count for _, count in runs)) > 1:
        repetitions.append(f"{most} attention calls per layer")
    if len(runs) > len({name for name, _ in runs}):
        repetitions.append("modules that run more than once")
    return repetitions
