"""The laws of docs/definitions.md, checked on one model and a few short prompts. Each function returns a Check.

The laws hold for any rotary, NoPE or ALiBi causal model. A model that writes absolute position by design breaks some of
them: a table of positions breaks L2, L3 and L5; a recurrent layer L2 and L3; queries scaled by position, or rotary
frequencies that depend on the largest position, L5. The check then names the cause (`passes.Entrance`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.leakage import Jackknife, component, log_attention_rows
from posleak.leakage.dataset import assemble, stack_layers
from posleak.leakage.power import products
from posleak.models import input_device
from posleak.probe import Collector, Edit, Motion, Plan, attach, relative_difference, takes_positions
from posleak.probe.native import native, states_of
from posleak.rounding import AGREE, CLOSED, EXACT, Tolerance, computed_in
from posleak.typed import Number

from .passes import COUNTING, PADDING, RECURRENT, TABLE, Ids, SharedPasses, depends_on_position_ids, pairs


class DoctorVerdict(Enum):
    """What failed checks mean for the results."""

    SOUND = "sound"
    """Every check passed."""
    BY_DESIGN = "by design"
    """The results are correct. The model breaks a law on purpose, and the check names the cause."""
    WRONG = "wrong"
    """A check failed without a known cause: results would be wrong."""


MARKS = {DoctorVerdict.SOUND: "✓", DoctorVerdict.BY_DESIGN: "!", DoctorVerdict.WRONG: "✗"}


@dataclass(frozen=True)
class Check:
    """One check.

    bound   the largest value that passes; None for a value that is reported only
    why     the property that is checked, as a sentence
    cause   the property of the model that breaks the law, if known: the failure is then not an error of posleak
    """

    id: str
    value: Number
    bound: float | None
    unit: str
    why: str
    cause: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the check passed; NaN does not pass."""
        return self.bound is None or self.value <= self.bound

    @property
    def verdict(self) -> DoctorVerdict:
        if self.ok:
            return DoctorVerdict.SOUND
        return DoctorVerdict.WRONG if self.cause is None else DoctorVerdict.BY_DESIGN

    @property
    def mark(self) -> str:
        """One glyph: passed, broken by design, failed, or reported only."""
        return "·" if self.bound is None else MARKS[self.verdict]

    def because(self, find_cause: Callable[[], str | None]) -> Check:
        """Return a failed check with its cause, if one is found, appended to `why`; a passed check stays as it is."""
        if self.ok or (cause := find_cause()) is None:
            return self
        return replace(self, cause=cause, why=f"{self.why}. Violated here: {cause}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def judged(
    check: Check, passes: SharedPasses, tolerance: Tolerance, find_cause: Callable[[], str | None] = lambda: None
) -> Check:
    """Return a check with its cause if it failed: quantised kernels if they explain it, else what is found."""
    return check.because(lambda: passes.kernels_cause(check.value, tolerance) or find_cause())


def additivity(passes: SharedPasses) -> Check:
    """Check L1: the parts are an exact additive decomposition of the total."""
    measured = [*passes.together.parts, *(parts for layers in passes.separate.parts for parts in layers)]
    remainder = max(parts.remainder for parts in measured)
    return Check("L1 additivity", remainder, 1e-9, "nats", "mask + drift + sink equals the total, up to rounding")


def constant_token(passes: SharedPasses) -> Check:
    """Check L2: with one token repeated, drift and sink are 0.

    With a learned sink logit, attention weights do not sum to one, so the output of a head depends on the number of
    visible keys. States then differ from the second layer on, and the law is checked on the first layer only.
    """
    parts = passes.measure(passes.constant).parts
    why = "with one token repeated all states are equal, so drift and sink are 0"
    if passes.learned_sinks:
        parts, why = parts[:1], f"{why} (first layer: learned sink logits break it after that)"
    data = assemble([stack_layers(parts)], passes.plan)
    powers = [np.nanmax(np.nanmean(component(data, name).values[0] ** 2, axis=(-1, -2))) for name in ("drift", "sink")]
    check = Check("L2 constant token", float(max(powers)), EXACT.of(passes.model.dtype), "nats²", why)
    return judged(check, passes, EXACT, passes.find_cause)


def first_layer(passes: SharedPasses) -> Check:
    """Check L3: in the first layer, drift and sink are 0 on average over random prompts.

    The level is 99.9%, so that a true law fails once in a thousand models.
    """
    data, prompts = passes.first_call(), Jackknife(len(passes.ids))
    powers, lows = {}, {}
    for name in ("drift", "sink"):
        x = component(data, name).values
        sums = np.nanmean(products(x := x.reshape(*x.shape[:3], -1), x), axis=(0, 1))
        powers[name] = prompts.inner(sums).at(level=0.999)
        low = float(powers[name].interval[0])  # NaN if prompts do not differ: then the value itself is checked
        lows[name] = float(powers[name].value) if np.isnan(low) else low
    name = max(lows, key=lambda name: lows[name])
    why = (
        "i.i.d. tokens have no position before the first attention: drift and sink are not significantly different "
        f"from 0, n={len(passes.ids)}"
    )
    unit = f"nats² (lower end of {name}; value {powers[name].value:.2g})"
    check = Check("L3 first layer", lows[name], EXACT.of(passes.model.dtype), unit, why)
    return judged(check, passes, EXACT, passes.find_cause)


def zero_queries(passes: SharedPasses) -> Check:
    """Check L4: total = mask = mean over r of log((|V(r)| + A) / (|V(i)| + A)); A = e^{s_aux}, or 0 without s_aux."""
    worst = 0.0
    for parts, expected in zip(passes.separate.zero, passes.separate.expected, strict=True):
        rest = (parts.drift + parts.sink[..., None])[..., parts.pairs].abs().max()
        worst = max(worst, float((parts.mask - expected).abs().max()), float(rest))
    why = "equal logits leak log((r + 1) / (i + 1)), less with a window, all of it in the mask part"
    return Check("L4 zero queries", worst, 1e-9, "nats", why)


def log_attention(model: PreTrainedModel, plan: Plan, ids: Ids, start: int, edits: Sequence[Edit] = ()) -> list[Tensor]:
    """Return log a_i(δ) of every layer, with position ids that begin at `start`."""
    tokens = torch.from_numpy(ids).to(input_device(model))
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
    with attach(model, [observer := Collector(partial(log_attention_rows, plan=plan))], edits) as probe:
        probe.forward(tokens, position_ids=positions)
    return observer.layers


def rms_change(still: Sequence[Tensor], moved: Sequence[Tensor]) -> float:
    """Return the root mean square difference of log a_i(δ), in nats; each layer has the same weight."""
    squares = [torch.nanmean((b - a) ** 2) for a, b in zip(still, moved, strict=True)]
    return float(torch.stack(squares).mean().sqrt())


def shifted_positions(passes: SharedPasses) -> Check:
    """Check L5: shifting all positions changes only rounding.

    It is not checked if the model takes no position ids or has no free positions.
    """
    shift = passes.shift
    why = f"rotated logits depend on offsets only: shifting all position ids by {shift} changes only rounding"
    if not takes_positions(passes.model):
        return Check("L5 shift", 0.0, None, "nats rms", f"{why}; not checked: the model takes no position ids")
    if not shift:
        full = f"the model has {passes.room} positions, and the prompt takes all of them"
        return Check("L5 shift", 0.0, None, "nats rms", f"not checked: {full}")
    moved = log_attention(passes.model, passes.plan, passes.ids[:1], shift)
    bound = AGREE.of(computed_in(passes.model.dtype))
    check = Check("L5 shift", rms_change(passes.separate.attention, moved), bound, "nats rms", why)
    return judged(check, passes, AGREE, lambda: _shift_cause(passes, shift))


def _shift_cause(passes: SharedPasses, shift: int) -> str | None:
    """Return the property of the model by which a shift changes more than rounding; None if none is known."""
    entrance = passes.entrance
    if entrance is not None and entrance.kind == TABLE:
        return entrance.reason
    scaled = [float(place.temperature.max()) for place in passes.placements if place.temperature is not None]
    if scaled:
        return f"{len(scaled)} layers scale their queries by absolute position, up to {max(scaled):.4g} times here"
    recurrent = None if entrance is None or entrance.kind != RECURRENT else entrance
    token = int(passes.constant[0, 0])
    if recurrent is not None and depends_on_position_ids(passes.model, recurrent.module, token, shift):
        return replace(recurrent, kind=COUNTING).reason
    return _dynamic_frequencies(passes, shift) or passes.uneven


def _dynamic_frequencies(passes: SharedPasses, shift: int) -> str | None:
    """Return a cause if the position of the last token changes the keys of earlier tokens, which cannot see it."""
    T, keys = passes.plan.length, []
    tokens = torch.from_numpy(passes.ids[:1]).to(input_device(passes.model))
    tokens, far = torch.cat([tokens, tokens[:, -1:]], dim=1), T - 1 + shift
    for last in (T, far):
        positions = torch.tensor([*range(T), last], device=tokens.device)[None]
        observer = Collector(lambda call, out: call.key[:, :, :T].clone())
        with attach(passes.model, [observer]) as probe:
            probe.forward(tokens, position_ids=positions)
        keys.append(observer.layers)
    gap = max(relative_difference(moved, still) for still, moved in zip(*keys, strict=True))
    if gap <= AGREE.of(passes.model.dtype):
        return None
    return (
        f"its rotary frequencies depend on the largest position: a last token at position {far} instead of {T} changes "
        f"the keys before it by up to {gap:.2g} of the largest, so that shifting all positions changes the frequencies"
    )


def closure(passes: SharedPasses) -> Check:
    """Check L7: the state of position 0 does not depend on later tokens."""
    result = passes.separate.closure
    why = f"position 0 sees only itself: its states at all {len(result.per_layer)} depths are those of the token alone"
    return judged(Check("L7 closure", result.worst, result.bound, "relative", why), passes, CLOSED)


def batching(passes: SharedPasses) -> Check:
    """Check the first half of L8: a prompt's parts do not depend on the other prompts of its batch."""
    worst = max(
        relative_difference(one, of_batch[b : b + 1])
        for b, layers in enumerate(passes.separate.parts)
        for one, of_batch in pairs(layers, passes.together.parts, "mask", "drift")
    )
    why = "the parts of a prompt do not depend on its batch"
    return judged(Check("L8 batch", worst, AGREE.of(passes.model.dtype), "relative", why), passes, AGREE)


def padding(passes: SharedPasses) -> Check:
    """Check the second half of L8: left padding has no effect. posleak itself never pads.

    The cause is the model if its states change with left padding under its own attention, too.
    """
    got, expected = passes.padded.parts, passes.together.parts
    worst = max(relative_difference(padded, plain) for padded, plain in pairs(got, expected, "mask", "drift"))
    bound = AGREE.of(passes.model.dtype)

    def find_cause() -> str | None:
        plain, padded = (
            states_of(native(passes.model, tokens, **arguments))
            for tokens, arguments in (passes.tokens(passes.few), passes.tokens(passes.few, PADDING))
        )
        changed = relative_difference(padded[:, PADDING:], plain) > bound
        return "the model's own states change with left padding, under its own attention too" if changed else None

    check = Check("L8 padding", worst, bound, "relative", "left padding has no effect")
    return judged(check, passes, AGREE, find_cause)


def gauge(passes: SharedPasses) -> Check:
    """Check L9: a constant added to a row of logits changes no part.

    It is not checked with a learned sink logit, which fixes the scale of the logits.
    """
    why = "a constant of 50 added to one row of logits changes no part: a softmax is invariant to it"
    if passes.learned_sinks:
        return Check("L9 gauge", 0.0, None, "nats", f"{why}; not checked: a learned sink logit fixes the scale")
    names = ("mask", "drift", "sink", "mask_without_sink")
    worst = max(
        float((a - b).abs().max())
        for shifted in passes.separate.gauges
        for a, b in pairs(shifted, passes.separate.parts[0], *names)
    )
    return Check("L9 gauge", worst, AGREE.of(passes.model.dtype), "nats", why)


def moved_keys(passes: SharedPasses) -> Check:
    """Check L10: moved keys equal the model's own; if the origin cannot be moved, the check has no bound."""
    motion = Motion.of(passes.placements, passes.plan, passes.model.dtype)
    why = "a key moved to another position equals the model's own key there, on tokens and positions not used before"
    if motion.stays:
        stays = f"in {len(motion.stays)} of {len(motion.layers)} layers the origin is not moved: {motion.why}"
        return Check("L10 moved keys", motion.gap, None, "relative", stays)
    return Check("L10 moved keys", motion.gap, motion.bound, "relative", why)
