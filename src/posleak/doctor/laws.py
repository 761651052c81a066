"""The laws of docs/definitions.md, checked on one model and one short input. Each function returns a Check.

They hold for any rotary, NoPE or ALiBi causal model. A model that writes absolute position on purpose breaks some of
them, as it should: a table of positions breaks L2, L3 and L5; a recurrent layer L2 and L3; queries scaled by position
L5. The check then names the cause (explicit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from posleak.leakage import (
    AttentionObserver,
    Jackknife,
    LeakageObserver,
    Parts,
    component,
)
from posleak.leakage.dataset import assemble, stack_layers
from posleak.leakage.power import products
from posleak.origin import closure as closed_system
from posleak.probe import (
    Call,
    Edit,
    Motion,
    Placement,
    Plan,
    attach,
    body,
    exclusive,
    read_placements,
    relative_difference,
    takes_positions,
)
from posleak.rounding import AGREE, EXACT

from .check import Check
from .explicit import COUNTING, RECURRENT, TABLE, Entrance, first_entrance, shifts
from .memory import FEW, PADDING

Ids = NDArray[np.int64]

SHIFT = 512
"""By how many positions the check of L5 moves the prompt."""


@dataclass(frozen=True)
class Bench:
    """What the laws are checked on: a model, its plan, random prompts ids [B, T], one token repeated without BOS.

    batch: prompts that go through the model at once (0: all)
    """

    model: PreTrainedModel
    plan: Plan
    ids: Ids
    constant: Ids
    learned_sinks: bool = False
    batch: int = 0

    def parts(self, ids: Ids, *, padding: int = 0, edits: Sequence[Any] = ()) -> list[Parts]:
        """The parts of every layer; `padding` tokens are put before the prompts and masked away."""
        size = self.batch or len(ids)
        batches = [self._parts(ids[at : at + size], padding, edits) for at in range(0, len(ids), size)]
        return batches[0] if len(batches) == 1 else [joined(layer) for layer in zip(*batches, strict=True)]

    def _parts(self, ids: Ids, padding: int, edits: Sequence[Any]) -> list[Parts]:
        observer = LeakageObserver(self.plan, start=padding, placements=self.placements)
        tokens = torch.from_numpy(np.pad(ids, ((0, 0), (padding, 0)), mode="edge")).to(self.model.device)
        keep, positions = torch.ones_like(tokens), torch.arange(tokens.shape[1], device=tokens.device) - padding
        keep[:, :padding] = 0
        positions = positions.clamp(min=0).expand_as(tokens)
        with attach(self.model, [observer], edits) as probe:
            given = {"position_ids": positions} if takes_positions(self.model) else {}
            probe.forward(tokens, padding=keep, **given)
        return observer.collect()

    @cached_property
    def placements(self) -> list[Placement]:
        """What positions do to queries and keys."""
        return read_placements(self.model, torch.from_numpy(self.ids[:1]).to(self.model.device), self.plan)

    @cached_property
    def entrance(self) -> Entrance | None:
        """Where the model writes position into the residual stream by itself, if it does."""
        return first_entrance(self.model, int(self.constant[0, 0]))

    @property
    def cause(self) -> str | None:
        """What in the model itself makes equal tokens differ from position to position."""
        return self.entrance.reason if self.entrance is not None else self.uneven

    @property
    def uneven(self) -> str | None:
        gaps = [place.unevenness for place in self.placements]
        layers = [layer for layer, gap in enumerate(gaps) if gap]
        if not layers:
            return None
        return (
            f"in {len(layers)} layers something acts on queries or keys after their rotation and does not commute with "
            f"it, such as a norm with weights: norms vary by {max(gaps):.2g} with position"
        )

    @cached_property
    def measured(self) -> list[Parts]:
        """The parts of the random prompts, which several laws need."""
        return self.parts(self.ids)

    @property
    def few(self) -> Ids:
        """Prompts for the laws that hold for each one, where more would only cost time."""
        return self.ids[:FEW]


def joined(batches: Sequence[Parts]) -> Parts:
    """One layer of all prompts, from its batches."""

    def along_prompts(name: str) -> Tensor | None:
        found = [getattr(parts, name) for parts in batches]
        return None if found[0] is None else torch.cat(found)

    names = [field.name for field in fields(Parts) if field.name not in ("pairs", "remainder")]
    changed: dict[str, Any] = {name: along_prompts(name) for name in names}
    return replace(batches[0], **changed, remainder=max(parts.remainder for parts in batches))


def additivity(bench: Bench) -> Check:
    remainder = max(parts.remainder for parts in bench.measured)
    return Check("L1 additivity", remainder, 1e-9, "nats", "mask + drift + sink is the total, to rounding")


def constant_token(bench: Bench) -> Check:
    """With a learned sink logit weights do not add up to one, so a head writes less where it sees less: states differ
    from the second layer on, and the law is asked of the first layer only."""
    parts = bench.parts(bench.constant)
    why = "with one token repeated every state is equal, so all leakage is the mask's"
    if bench.learned_sinks:
        parts, why = parts[:1], f"{why} (first layer: learned sink logits break it after that)"
    data = assemble([stack_layers(parts)], bench.plan)
    powers = [np.nanmax(np.nanmean(component(data, name).values[0] ** 2, axis=(-1, -2))) for name in ("drift", "sink")]
    check = Check("L2 constant token", float(max(powers)), EXACT.of(bench.model.dtype), "nats²", why)
    return check if check.ok else check.because(bench.cause)


def first_layer(bench: Bench) -> Check:
    """Judged at 99.9%, so that a true law fails once in a thousand models and not once in twenty."""
    data = assemble([stack_layers(bench.measured[:1])], bench.plan)
    prompts = Jackknife(len(bench.ids))
    powers = {}
    for name in ("drift", "sink"):
        x = component(data, name).values
        sums = np.nanmean(products(x := x.reshape(*x.shape[:3], -1), x), axis=(0, 1))
        powers[name] = prompts.inner(sums).at(level=0.999)
    name = max(powers, key=lambda name: float(powers[name].interval[0]))
    why = (
        "i.i.d. tokens meet no position before the first attention: drift and sink are 0 within their intervals, "
        f"n={len(bench.ids)}"
    )
    unit = f"nats² (lower end of {name}; value {powers[name].value:.2g})"
    check = Check("L3 first layer", float(powers[name].interval[0]), EXACT.of(bench.model.dtype), unit, why)
    return check if check.ok else check.because(bench.cause)


class ZeroQueries(Edit):
    """Every logit becomes 0: each query weighs all that it sees alike."""

    def edit(self, call: Call) -> Call:
        return replace(call, query=torch.zeros_like(call.query), bias=None)


def zero_queries(bench: Bench) -> Check:
    """total = mask = mean over r of log((|V(r)| + A) / (|V(i)| + A)), where A = e^{s_aux}, 0 without one."""
    seen = Sizes(bench.plan)
    with attach(bench.model, [observer := LeakageObserver(bench.plan), seen], [ZeroQueries()]) as probe:
        probe.forward(torch.from_numpy(bench.few).to(bench.model.device))
    worst = 0.0
    for parts, expected in zip(observer.collect(), seen.expected, strict=True):
        rest = (parts.drift + parts.sink[..., None])[..., parts.pairs].abs().max()
        worst = max(worst, float((parts.mask - expected).abs().max()), float(rest))
    why = "equal logits leak log((r + 1) / (i + 1)), less behind a window, all of it mask"
    return Check("L4 zero queries", worst, 1e-9, "nats", why)


class Sizes:
    """What L4 predicts for every layer, from counting the keys that each query sees."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.expected = plan, list[Tensor]()

    def observe(self, call: Call, out: Tensor) -> None:
        rows = torch.tensor(self.plan.rows, device=call.query.device)
        aux = torch.zeros(1, 1).double() if call.s_aux is None else call.s_aux.double().exp()[:, None].cpu()
        log_size = (call.visibility.rows(rows)[0, 0].sum(-1).cpu() + aux).log()  # [H or 1, P]
        Q, R = len(self.plan.queries), len(self.plan.references)
        self.expected.append((log_size[:, Q : Q + R].mean(-1, keepdim=True) - log_size[:, :Q]).to(call.query.device))


def shift_floor(model: PreTrainedModel, plan: Plan, ids: Ids, shift: int) -> float:
    """Root mean square change of log a_i(δ), in nats, when all position ids move by `shift`."""
    tokens = torch.from_numpy(ids).to(model.device)
    looks = []
    for start in (0, shift):
        with attach(model, [look := AttentionObserver(plan)]) as probe:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
            probe.forward(tokens, position_ids=positions)
        looks.append(look.layers)
    squares = [torch.nanmean((moved - still) ** 2) for still, moved in zip(*looks, strict=True)]
    return float(torch.stack(squares).mean().sqrt())


def shifted_positions(bench: Bench, shift: int) -> Check:
    why = f"only offsets enter rotated logits: moving all position ids by {shift} changes nothing beyond rounding"
    if not takes_positions(bench.model):
        return Check("L5 shift", 0.0, None, "nats rms", f"{why}; not checked: the model takes no position ids")
    check = Check(
        "L5 shift", shift_floor(bench.model, bench.plan, bench.few, shift), AGREE.of(bench.model.dtype), "nats rms", why
    )
    return check if check.ok else check.because(_shift_cause(bench))


def _shift_cause(bench: Bench) -> str | None:
    entrance = bench.entrance
    if entrance is not None and entrance.kind == TABLE:
        return entrance.reason
    scaled = [float(place.temperature.max()) for place in bench.placements if place.temperature is not None]
    if scaled:
        return f"{len(scaled)} layers scale their queries by absolute position, up to {max(scaled):.4g} times here"
    if entrance is None or entrance.kind != RECURRENT:
        return bench.uneven
    moved = shifts(bench.model, entrance.module, int(bench.constant[0, 0]), SHIFT)
    return replace(entrance, kind=COUNTING).reason if moved else bench.uneven


def closure(bench: Bench) -> Check:
    found = closed_system(bench.model, torch.from_numpy(bench.few))
    why = f"position 0 sees only itself: its states at all {len(found.per_layer)} depths are those of the token alone"
    return Check("L7 closure", found.worst, found.bound, "relative", why)


def batching(bench: Bench) -> Check:
    together = bench.measured
    alone = [bench.parts(bench.ids[b : b + 1]) for b in range(FEW)]
    worst = max(
        relative_difference(getattr(one[layer], name).nan_to_num(), getattr(parts, name)[b : b + 1].nan_to_num())
        for b, one in enumerate(alone)
        for layer, parts in enumerate(together)
        for name in ("mask", "drift")
    )
    why = "a prompt's parts do not depend on its batch"
    return Check("L8 batch", worst, AGREE.of(bench.model.dtype), "relative", why)


def padding(bench: Bench) -> Check:
    plain, padded = bench.parts(bench.few), bench.parts(bench.few, padding=PADDING)
    worst = max(
        relative_difference(getattr(p, name).nan_to_num(), getattr(parts, name).nan_to_num())
        for parts, p in zip(plain, padded, strict=True)
        for name in ("mask", "drift")
    )
    check = Check("L8 padding", worst, AGREE.of(bench.model.dtype), "relative", "left padding changes nothing")
    return check if check.ok else check.because(_padding_cause(bench))


def _padding_cause(bench: Bench, padding: int = PADDING) -> str | None:
    """Does left padding change the model's states under its own attention too? posleak itself never pads."""
    ids = torch.from_numpy(bench.few).to(bench.model.device)
    padded = torch.nn.functional.pad(ids, (padding, 0), value=int(ids[0, 0]))
    keep = torch.ones_like(padded)
    keep[:, :padding] = 0
    given = {}
    if takes_positions(bench.model):
        places = (torch.arange(padded.shape[1], device=ids.device) - padding).clamp(min=0)
        given = {"position_ids": places.expand_as(padded)}
    with exclusive(bench.model), torch.inference_mode():
        plain = body(bench.model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
        moved = body(bench.model)(input_ids=padded, attention_mask=keep, use_cache=False, **given)[0][:, padding:]
    changed = relative_difference(moved, plain) > AGREE.of(bench.model.dtype)
    return "the model's own states change with left padding, under its own attention too" if changed else None


@dataclass
class GaugeObserver(LeakageObserver):
    """Looks at every call with a constant added to all logits of one row, which no softmax sees."""

    row: int = 0
    by: float = 0.0

    def observe(self, call: Call, out: Tensor) -> None:
        T = call.query.shape[2]
        bias = call.query.new_zeros(1, 1, T, T) if call.bias is None else call.bias.clone()
        bias[..., self.row, :] += self.by
        super().observe(replace(call, bias=bias), out)


def gauge(bench: Bench) -> Check:
    """Not asked of heads with a learned sink logit, which fixes the scale."""
    why = "a constant of 50 added to any one row of logits changes no part: a softmax does not see it"
    if bench.learned_sinks:
        return Check("L9 gauge", 0.0, None, "nats", f"{why}; not checked: a learned sink logit fixes the scale")
    rows = ((0, 0.0), (bench.plan.queries[1], 50.0), (bench.plan.references[0], -50.0))
    looks = [GaugeObserver(bench.plan, placements=bench.placements, row=row, by=by) for row, by in rows]
    with attach(bench.model, looks) as probe:
        probe.forward(torch.from_numpy(bench.ids[:1]).to(bench.model.device))
    plain, *shifted = (look.collect() for look in looks)
    worst = max(
        float((getattr(a, name) - getattr(b, name)).nan_to_num().abs().max())
        for other in shifted
        for a, b in zip(plain, other, strict=True)
        for name in ("mask", "drift", "sink", "mask_without_sink")
    )
    return Check("L9 gauge", worst, AGREE.of(bench.model.dtype), "nats", why)


def moved_keys(bench: Bench) -> Check:
    """L10; where the origin cannot be moved, the check says so and is not judged."""
    motion = Motion.of(bench.placements, bench.plan, bench.model.dtype)
    why = "a key moved to another place is the model's own key there, on tokens and places that were not read"
    if motion.stays:
        stays = f"in {len(motion.stays)} of {len(motion.layers)} layers the origin stays where it is: {motion.why}"
        return Check("L10 moved keys", motion.gap, None, "relative", stays)
    return Check("L10 moved keys", motion.gap, motion.bound, "relative", why)
