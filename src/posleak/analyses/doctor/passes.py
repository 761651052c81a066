"""What the laws are checked on: each forward pass is made once, when a law first asks for it, and shared by all.

together   a few prompts in one batch          L1, L8
alone      the same, each in a pass of its own  L1, L4, L5, L7, L8, L9
padded     the same behind masked tokens        L8, parity with eager attention
first      all prompts up to the first attention call, where the pass ends      L1, L3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from posleak.analyses.origin.states import Closure, origin_states
from posleak.leakage import AttentionObserver, LeakageObserver, Parts
from posleak.models import input_device
from posleak.probe import Call, Observer, Placement, Plan, attach, read_placements, takes_positions

from .explicit import Entrance, first_entrance
from .memory import FEW, PADDING

Ids = NDArray[np.int64]

SHIFT = 512
"""By how many positions the check of L5 moves the prompt."""


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


class ZeroObserver(LeakageObserver):
    """Looks at every call as if each logit were 0: each query weighs all that it sees alike."""

    def observe(self, call: Call, out: Tensor) -> None:
        super().observe(replace(call, query=torch.zeros_like(call.query), bias=None), out)


@dataclass
class VisibleCounts:
    """What L4 predicts for every layer, from counting the keys that each query sees:

    mean over r of log((|V(r)| + A) / (|V(i)| + A)), where A = e^{s_aux}, 0 without one.
    """

    plan: Plan
    expected: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        rows = torch.tensor(self.plan.rows, device=call.query.device)
        aux = torch.zeros(1, 1).double() if call.s_aux is None else call.s_aux.double().exp()[:, None].cpu()
        log_size = (call.visibility.rows(rows)[0, 0].sum(-1).cpu() + aux).log()  # [H or 1, P]
        Q, R = len(self.plan.queries), len(self.plan.references)
        self.expected.append((log_size[:, Q : Q + R].mean(-1, keepdim=True) - log_size[:, :Q]).to(call.query.device))


class StopForward(Exception):
    """Ends a forward pass of which the rest is not needed."""


class StopAtFirstCall:
    """Ends a pass at its first attention call, when the observers before it have looked."""

    def observe(self, call: Call, out: Tensor) -> None:
        raise StopForward


@dataclass(frozen=True)
class JointPass:
    """One pass: the parts of every layer, and the states behind the last one, without the padding."""

    parts: list[Parts]
    states: Tensor


@dataclass(frozen=True)
class SeparatePasses:
    """The few prompts, each in a pass of its own.

    parts      by prompt and layer;  attention: log a_i(δ) of the first prompt, by layer
    closure    of position 0, against sequences of its token alone
    zero       parts of the first prompt with all logits 0;  sizes: the mask that L4 predicts for them
    gauges     parts of the first prompt with a constant added to one row: to a query's, to a reference's
    """

    parts: list[list[Parts]]
    attention: list[Tensor]
    closure: Closure
    zero: list[Parts]
    sizes: list[Tensor]
    gauges: list[list[Parts]]


@dataclass(frozen=True)
class SharedPasses:
    """A model, its plan, random prompts ids [B, T], one token repeated without BOS.

    batch: prompts that go through the model at once (0: all);  room: how many positions the model has, None: any number
    """

    model: PreTrainedModel
    plan: Plan
    ids: Ids
    constant: Ids
    learned_sinks: bool = False
    batch: int = 0
    room: int | None = None

    @property
    def shift(self) -> int:
        """By how many positions L5 moves a prompt: by fewer where a table of positions ends before, 0 if it is full."""
        return SHIFT if self.room is None else max(0, min(SHIFT, self.room - self.plan.length))

    @property
    def few(self) -> Ids:
        """Prompts for the laws that hold for each one, where more would only cost time."""
        return self.ids[:FEW]

    def tokens(self, ids: Ids, padding: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Ids with masked tokens before them, and their mask and positions as the probe's forward pass takes them."""
        tokens = torch.from_numpy(np.pad(ids, ((0, 0), (padding, 0)), mode="edge")).to(input_device(self.model))
        keep, positions = torch.ones_like(tokens), torch.arange(tokens.shape[1], device=tokens.device) - padding
        keep[:, :padding] = 0
        given = {"position_ids": positions.clamp(min=0).expand_as(tokens)} if takes_positions(self.model) else {}
        return tokens, {"padding": keep, **given}

    def look(self, ids: Ids, padding: int = 0) -> JointPass:
        """The parts of every layer; `padding` tokens are put before the prompts and masked away."""
        tokens, given = self.tokens(ids, padding)
        observer = LeakageObserver(self.plan, start=padding, placements=self.placements)
        with attach(self.model, [observer]) as probe:
            states = probe.forward(tokens, **given)[0]
        return JointPass(observer.collect(), states[:, padding:])

    @cached_property
    def together(self) -> JointPass:
        return self.look(self.few)

    @cached_property
    def padded(self) -> JointPass:
        return self.look(self.few, PADDING)

    @cached_property
    def first(self) -> Parts:
        """The first layer of all prompts."""
        size = self.batch or len(self.ids)
        return joined([self._first(self.ids[at : at + size]) for at in range(0, len(self.ids), size)])

    def _first(self, ids: Ids) -> Parts:
        tokens, given = self.tokens(ids)
        look = LeakageObserver(self.plan, placements=self.placements)
        with attach(self.model, [look, StopAtFirstCall()]) as probe, suppress(StopForward):
            probe.forward(tokens, **given)
        return look.collect()[0]

    @cached_property
    def alone(self) -> SeparatePasses:
        plan, places = self.plan, self.placements
        attention, zero, sizes = AttentionObserver(plan), ZeroObserver(plan), VisibleCounts(plan)
        rows = ((plan.queries[1], 50.0), (plan.references[0], -50.0))
        gauges = [GaugeObserver(plan, placements=places, row=row, by=by) for row, by in rows if not self.learned_sinks]
        parts, within = list[list[Parts]](), list[list[Tensor]]()
        more: list[Observer] = [attention, zero, sizes, *gauges]
        for ids in np.split(self.few, len(self.few)):
            look = LeakageObserver(plan, placements=places)
            within.append(self._origin(ids, [look, *more]))
            parts.append(look.collect())
            more = []  # these look at the first prompt only
        single = self._origin(self.few[:, :1])
        closure = Closure.of([torch.cat(depth) for depth in zip(*within, strict=True)], single, self.model.dtype)
        return SeparatePasses(
            parts, attention.layers, closure, zero.layers, sizes.expected, [look.layers for look in gauges]
        )

    def _origin(self, ids: Ids, observers: Sequence[Observer] = ()) -> list[Tensor]:
        """The state of position 0 at every depth, while observers look."""
        with attach(self.model, observers) as probe:
            return origin_states(probe, torch.from_numpy(ids).to(input_device(self.model)))

    @cached_property
    def placements(self) -> list[Placement]:
        """What positions do to queries and keys."""
        return read_placements(self.model, torch.from_numpy(self.ids[:1]).to(input_device(self.model)), self.plan)

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


def joined(batches: Sequence[Parts]) -> Parts:
    """One layer of all prompts, from its batches."""

    def along_prompts(name: str) -> Tensor | None:
        found = [getattr(parts, name) for parts in batches]
        return None if found[0] is None else torch.cat(found)

    names = [field.name for field in fields(Parts) if field.name not in ("pairs", "remainder")]
    changed: dict[str, Any] = {name: along_prompts(name) for name in names}
    return replace(batches[0], **changed, remainder=max(parts.remainder for parts in batches))


def pairs(found: Sequence[Parts], expected: Sequence[Parts], *names: str) -> Iterator[tuple[Tensor, Tensor]]:
    """What to compare, layer by layer; what is not defined counts as 0 in both."""
    for a, b in zip(found, expected, strict=True):
        for name in names:
            yield getattr(a, name).nan_to_num(), getattr(b, name).nan_to_num()
