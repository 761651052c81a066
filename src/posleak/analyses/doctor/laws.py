"""The laws of docs/definitions.md, checked on one model and one short input. Each function returns a Check.

They hold for any rotary, NoPE or ALiBi causal model. A model that writes absolute position on purpose breaks some of
them, as it should: a table of positions breaks L2, L3 and L5; a recurrent layer L2 and L3; queries scaled by position
or frequencies that depend on the largest position L5. The check then names the cause (explicit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.leakage import AttentionObserver, Jackknife, component
from posleak.leakage.dataset import assemble, stack_layers
from posleak.leakage.power import products
from posleak.models import input_device
from posleak.probe import Call, Edit, Motion, Plan, attach, relative_difference, takes_positions
from posleak.probe.native import native
from posleak.rounding import AGREE, EXACT, computed_in

from .check import Check
from .explicit import COUNTING, RECURRENT, TABLE, shifts
from .memory import PADDING
from .passes import Ids, SharedPasses, pairs


def additivity(passes: SharedPasses) -> Check:
    looked = [*passes.together.parts, *(parts for alone in passes.alone.parts for parts in alone)]
    remainder = max(parts.remainder for parts in looked)
    return Check("L1 additivity", remainder, 1e-9, "nats", "mask + drift + sink is the total, to rounding")


def constant_token(passes: SharedPasses) -> Check:
    """With a learned sink logit weights do not add up to one, so a head writes less where it sees less: states differ
    from the second layer on, and the law is asked of the first layer only."""
    parts = passes.look(passes.constant).parts
    why = "with one token repeated every state is equal, so all leakage is the mask's"
    if passes.learned_sinks:
        parts, why = parts[:1], f"{why} (first layer: learned sink logits break it after that)"
    data = assemble([stack_layers(parts)], passes.plan)
    powers = [np.nanmax(np.nanmean(component(data, name).values[0] ** 2, axis=(-1, -2))) for name in ("drift", "sink")]
    check = Check("L2 constant token", float(max(powers)), EXACT.of(passes.model.dtype), "nats²", why)
    return check if check.ok else check.because(passes.cause)


def first_layer(passes: SharedPasses) -> Check:
    """Judged at 99.9%, so that a true law fails once in a thousand models and not once in twenty."""
    data = assemble([stack_layers([passes.first])], passes.plan)
    prompts = Jackknife(len(passes.ids))
    powers, lows = {}, {}
    for name in ("drift", "sink"):
        x = component(data, name).values
        sums = np.nanmean(products(x := x.reshape(*x.shape[:3], -1), x), axis=(0, 1))
        powers[name] = prompts.inner(sums).at(level=0.999)
        low = float(powers[name].interval[0])  # NaN where prompts do not differ: then the value itself is judged
        lows[name] = float(powers[name].value) if np.isnan(low) else low
    name = max(lows, key=lambda name: lows[name])
    why = (
        "i.i.d. tokens meet no position before the first attention: drift and sink are 0 within their intervals, "
        f"n={len(passes.ids)}"
    )
    unit = f"nats² (lower end of {name}; value {powers[name].value:.2g})"
    check = Check("L3 first layer", lows[name], EXACT.of(passes.model.dtype), unit, why)
    return check if check.ok else check.because(passes.cause)


def zero_queries(passes: SharedPasses) -> Check:
    """total = mask = mean over r of log((|V(r)| + A) / (|V(i)| + A)), where A = e^{s_aux}, 0 without one."""
    worst = 0.0
    for parts, expected in zip(passes.alone.zero, passes.alone.sizes, strict=True):
        rest = (parts.drift + parts.sink[..., None])[..., parts.pairs].abs().max()
        worst = max(worst, float((parts.mask - expected).abs().max()), float(rest))
    why = "equal logits leak log((r + 1) / (i + 1)), less behind a window, all of it mask"
    return Check("L4 zero queries", worst, 1e-9, "nats", why)


def shift_floor(model: PreTrainedModel, plan: Plan, ids: Ids, shift: int, edits: Sequence[Edit] = ()) -> float:
    """Root mean square change of log a_i(δ), in nats, when all position ids move by `shift`."""
    return rms_change(*(log_attention(model, plan, ids, start, edits) for start in (0, shift)))


def log_attention(
    model: PreTrainedModel, plan: Plan, ids: Ids, start: int, edits: Sequence[Edit] = ()
) -> list[Tensor]:  # fmt: skip
    """log a_i(δ) of every layer, with position ids that begin at `start`."""
    tokens = torch.from_numpy(ids).to(input_device(model))
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
    with attach(model, [look := AttentionObserver(plan)], edits) as probe:
        probe.forward(tokens, position_ids=positions)
    return look.layers


def rms_change(still: Sequence[Tensor], moved: Sequence[Tensor]) -> float:
    squares = [torch.nanmean((b - a) ** 2) for a, b in zip(still, moved, strict=True)]
    return float(torch.stack(squares).mean().sqrt())


def shifted_positions(passes: SharedPasses) -> Check:
    shift = passes.shift
    why = f"only offsets enter rotated logits: moving all position ids by {shift} changes nothing beyond rounding"
    if not takes_positions(passes.model):
        return Check("L5 shift", 0.0, None, "nats rms", f"{why}; not checked: the model takes no position ids")
    if not shift:
        full = f"the model has {passes.room} positions, and the prompt takes all"
        return Check("L5 shift", 0.0, None, "nats rms", f"not checked: {full}")
    moved = log_attention(passes.model, passes.plan, passes.ids[:1], shift)
    bound = AGREE.of(computed_in(passes.model.dtype))
    check = Check("L5 shift", rms_change(passes.alone.attention, moved), bound, "nats rms", why)
    return check if check.ok else check.because(_shift_cause(passes, shift))


def _shift_cause(passes: SharedPasses, shift: int) -> str | None:
    entrance = passes.entrance
    if entrance is not None and entrance.kind == TABLE:
        return entrance.reason
    scaled = [float(place.temperature.max()) for place in passes.placements if place.temperature is not None]
    if scaled:
        return f"{len(scaled)} layers scale their queries by absolute position, up to {max(scaled):.4g} times here"
    recurrent = entrance is not None and entrance.kind == RECURRENT
    if entrance is not None and recurrent and shifts(passes.model, entrance.module, int(passes.constant[0, 0]), shift):
        return replace(entrance, kind=COUNTING).reason
    return _reach(passes, shift) or passes.uneven


@dataclass
class Keys:
    """The keys of the first positions, in every call."""

    length: int
    layers: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.layers.append(call.key[:, :, : self.length].clone())


def _reach(passes: SharedPasses, shift: int) -> str | None:
    """Does a later token, which no earlier one sees, change their keys by the position that it stands at?"""
    T, looks = passes.plan.length, []
    tokens = torch.from_numpy(passes.ids[:1]).to(input_device(passes.model))
    tokens, far = torch.cat([tokens, tokens[:, -1:]], dim=1), T - 1 + shift
    for last in (T, far):
        positions = torch.tensor([*range(T), last], device=tokens.device)[None]
        with attach(passes.model, [keys := Keys(T)]) as probe:
            probe.forward(tokens, position_ids=positions)
        looks.append(keys.layers)
    gap = max(relative_difference(moved, still) for still, moved in zip(*looks, strict=True))
    if gap <= AGREE.of(passes.model.dtype):
        return None
    return (
        f"its rotary frequencies depend on the largest position that it reads: a last token at position {far} instead "
        f"of {T} changes the keys before it by up to {gap:.2g} of the largest, so that moving all positions changes "
        "the frequencies"
    )


def closure(passes: SharedPasses) -> Check:
    found = passes.alone.closure
    why = f"position 0 sees only itself: its states at all {len(found.per_layer)} depths are those of the token alone"
    return Check("L7 closure", found.worst, found.bound, "relative", why)


def batching(passes: SharedPasses) -> Check:
    worst = max(
        relative_difference(one, of_batch[b : b + 1])
        for b, alone in enumerate(passes.alone.parts)
        for one, of_batch in pairs(alone, passes.together.parts, "mask", "drift")
    )
    why = "a prompt's parts do not depend on its batch"
    return Check("L8 batch", worst, AGREE.of(passes.model.dtype), "relative", why)


def padding(passes: SharedPasses) -> Check:
    found, expected = passes.padded.parts, passes.together.parts
    worst = max(relative_difference(padded, plain) for padded, plain in pairs(found, expected, "mask", "drift"))
    check = Check("L8 padding", worst, AGREE.of(passes.model.dtype), "relative", "left padding changes nothing")
    return check if check.ok else check.because(_padding_cause(passes))


def _padding_cause(passes: SharedPasses) -> str | None:
    """Does left padding change the model's states under its own attention too? posleak itself never pads."""
    plain, padded = (
        native(passes.model, tokens, **given)[0]
        for tokens, given in (passes.tokens(passes.few), passes.tokens(passes.few, PADDING))
    )
    changed = relative_difference(padded[:, PADDING:], plain) > AGREE.of(passes.model.dtype)
    return "the model's own states change with left padding, under its own attention too" if changed else None


def gauge(passes: SharedPasses) -> Check:
    """Not asked of heads with a learned sink logit, which fixes the scale."""
    why = "a constant of 50 added to any one row of logits changes no part: a softmax does not see it"
    if passes.learned_sinks:
        return Check("L9 gauge", 0.0, None, "nats", f"{why}; not checked: a learned sink logit fixes the scale")
    names = ("mask", "drift", "sink", "mask_without_sink")
    worst = max(
        float((a - b).abs().max())
        for shifted in passes.alone.gauges
        for a, b in pairs(shifted, passes.alone.parts[0], *names)
    )
    return Check("L9 gauge", worst, AGREE.of(passes.model.dtype), "nats", why)


def moved_keys(passes: SharedPasses) -> Check:
    """L10; where the origin cannot be moved, the check says so and is not judged."""
    motion = Motion.of(passes.placements, passes.plan, passes.model.dtype)
    why = "a key moved to another place is the model's own key there, on tokens and places that were not read"
    if motion.stays:
        stays = f"in {len(motion.stays)} of {len(motion.layers)} layers the origin stays where it is: {motion.why}"
        return Check("L10 moved keys", motion.gap, None, "relative", stays)
    return Check("L10 moved keys", motion.gap, motion.bound, "relative", why)
