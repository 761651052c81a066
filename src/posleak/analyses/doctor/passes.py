"""The forward passes that the laws share, and where a model writes absolute position by design.

Each pass is run once, when a law first needs it.

together   a few prompts in one batch                  L1, L8
separate   the same prompts, each in its own pass      L1, L4, L5, L7, L8, L9
padded     the same prompts with left padding          L8, parity with eager attention
first_call the first attention call of all prompts     L3

Absolute position is found by observing a forward pass, for any family. With one token repeated and no BOS, a causal
model with relative positions computes the same state at every position. Position enters at the first module that maps
equal states to different ones:

    a table of positions (learned or sinusoidal), added by an embedding module or by the backbone itself
    a recurrent or convolutional layer, whose state is empty at position 0: its output changes with earlier tokens even
    if every query sees only itself
    attention with a learned sink logit, whose weights do not sum to one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from posleak.analyses.origin.states import Closure, hooked, joined, origin_states
from posleak.leakage import LeakageObserver, Parts, log_attention_rows
from posleak.leakage.dataset import Chunk, assemble, stack_layers
from posleak.models import input_device
from posleak.probe import (
    Call,
    Collector,
    Edit,
    Observer,
    Placement,
    Plan,
    attach,
    read_placements,
    relative_difference,
    takes_positions,
)
from posleak.probe.kernels import KernelEffects, kernel_effects
from posleak.probe.native import backbone, items_of, states_of
from posleak.rounding import AGREE, Tolerance
from posleak.runs.spec import batches
from posleak.typed import Number

Ids = NDArray[np.int64]

FEW, PADDING = 2, 5
"""Prompts for the laws that hold for each prompt, and masked tokens that are put before them."""

SHIFT = 512
"""Number of positions by which the check of L5 shifts the prompt."""

LENGTH = 37
"""Prompt length: a prime that no other axis of a model has as its size, to recognise the axis of positions."""

TABLE, RECURRENT, SINKS = "position table", "recurrent layer", "learned sink logits"
COUNTING = "recurrent layer that reads position ids"

REASONS = {
    TABLE: "it has a table of absolute positions ({module}), which writes position into the residual stream",
    RECURRENT: "{module} carries a state from token to token that starts empty, so its output depends on position",
    COUNTING: "the recurrent layer {module} reads position ids itself, and its output changes with them",
    SINKS: "the learned sink logits of {module} take a share of attention that depends on the number of visible keys",
}


@dataclass(frozen=True)
class Entrance:
    """The first module at which position enters the residual stream other than through attention."""

    kind: str
    module: str

    @property
    def reason(self) -> str:
        return REASONS[self.kind].format(module=self.module)


def first_entrance(model: PreTrainedModel, token: int) -> Entrance | None:
    """Find where equal tokens become different states; None if they never do, as in rotary, NoPE or ALiBi models.

    It is the first module whose output differs between positions although its input does not.
    """
    entered = list[torch.nn.Module]()

    def observe(module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if entered or any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            return  # the cosines of a rotary module are not part of the stream
        before, after = _differs([*args, *kwargs.values()]), _differs(items_of(out))
        if after and (before is False or isinstance(module, torch.nn.Embedding)):
            entered.append(module)

    inner = backbone(model)
    parts = (module for module in inner.modules() if module is not inner)
    sinks = Collector(lambda call, out: call.module if call.s_aux is not None else None)
    with attach(model, [sinks]) as probe, hooked(parts, observe, with_kwargs=True):
        out = probe.forward(torch.full((1, LENGTH), token, device=input_device(model)))
    name = next((name for name, module in model.named_modules() if module in entered), "added in its body")
    if entered and hasattr(entered[0], "in_features"):
        return None  # a linear layer acts on each token alone: a kernel that rounds has amplified rounding of positions
    if not entered or isinstance(entered[0], torch.nn.Embedding):
        return Entrance(TABLE, name) if _differs([states_of(out)]) else None  # a table may hold sines for a rotation
    if entered[0] in sinks.layers:
        return Entrance(SINKS, name)
    return Entrance(RECURRENT if _carries(model, entered[0], token) else TABLE, name)


class OnlySelf(Edit):
    """Edit under which every query sees only its own key."""

    def edit(self, call: Call) -> Call:
        return replace(call, visibility=call.visibility.with_rule("only self", lambda b, h, q, k: q == k))


def _carries(model: PreTrainedModel, module: torch.nn.Module, token: int) -> bool:
    """Return whether a module's output changes with an earlier token that no query sees."""
    outputs: list[Tensor] = []

    def keep(_: torch.nn.Module, args: Any, out: Any) -> None:
        outputs.extend(_along_positions(items_of(out))[:1])

    ids = torch.full((2, LENGTH), token, device=input_device(model))
    ids[1, : LENGTH // 2] = token - 1 if token else 1
    with hooked([module], keep), attach(model, edits=[OnlySelf()]) as probe:
        probe.forward(ids)
    one, other = outputs[0].movedim(list(outputs[0].shape).index(LENGTH), 0)[LENGTH // 2 :].movedim(1, 0)
    return relative_difference(other, one) > AGREE.of(model.dtype)


def depends_on_position_ids(model: PreTrainedModel, module: str, token: int, shift: int) -> bool:
    """Return whether the output of a module changes if all position ids are shifted and nothing else changes."""
    outputs: list[Tensor] = []

    def keep(_: torch.nn.Module, args: Any, out: Any) -> None:
        outputs.extend(_along_positions(items_of(out))[:1])

    with hooked([model.get_submodule(module)], keep), attach(model) as probe:
        ids = torch.full((1, LENGTH), token, device=input_device(model))
        for start in (0, shift):
            probe.forward(ids, position_ids=torch.arange(start, start + LENGTH, device=ids.device)[None])
    still, moved = outputs
    return relative_difference(moved, still) > AGREE.of(model.dtype)


def _along_positions(candidates: Sequence[Any]) -> list[Tensor]:
    """Return the floating-point tensors with exactly one axis of positions."""
    tensors = [x for x in candidates if isinstance(x, Tensor) and x.is_floating_point()]
    return [x for x in tensors if list(x.shape).count(LENGTH) == 1]


def _differs(candidates: Sequence[Any]) -> bool | None:
    """Return whether positions of the first tensor with an axis of positions differ by more than rounding.

    None if there is no such tensor.
    """
    if not (tensors := _along_positions(candidates)):
        return None
    x = tensors[0]
    at = x.movedim(list(x.shape).index(LENGTH), 0).double()
    return float((at - at[:1]).abs().max()) > 1e-3 * float(at.abs().max())


@dataclass
class GaugeObserver(LeakageObserver):
    """Observer that measures every call with a constant added to one row of logits, to which a softmax is invariant."""

    row: int = 0
    by: float = 0.0

    def observe(self, call: Call, out: Tensor) -> None:
        T = call.query.shape[2]
        bias = call.query.new_zeros(1, 1, T, T) if call.bias is None else call.bias.clone()
        bias[..., self.row, :] += self.by
        super().observe(replace(call, bias=bias), out)


class ZeroObserver(LeakageObserver):
    """Observer that measures every call with all logits 0: each query attends equally to all visible keys."""

    def observe(self, call: Call, out: Tensor) -> None:
        super().observe(replace(call, query=torch.zeros_like(call.query), bias=None), out)


def mask_of_equal_logits(call: Call, plan: Plan) -> Tensor:
    """Return the mask part that L4 predicts from the number of visible keys of each query [H or 1, Q]:

    mean over r of log((|V(r)| + A) / (|V(i)| + A)), where A = e^{s_aux}, or 0 without s_aux.
    """
    rows = torch.tensor(plan.rows, device=call.query.device)
    aux = torch.zeros(1, 1).double() if call.s_aux is None else call.s_aux.double().exp()[:, None].cpu()
    log_size = (call.visibility.rows(rows)[0, 0].sum(-1).cpu() + aux).log()  # [H or 1, P]
    Q = len(plan.queries)
    return (log_size[:, Q:].mean(-1, keepdim=True) - log_size[:, :Q]).to(call.query.device)


class StopAtFirstCall(Exception):
    """Observer that ends a forward pass at its first attention call, after the observers before it."""

    def observe(self, call: Call, out: Tensor) -> None:
        raise StopAtFirstCall  # not self, which outlives the pass: a traceback holds its activations


@dataclass(frozen=True)
class JointPass:
    """One forward pass: the parts of every layer, and the states after the last layer, without padding."""

    parts: list[Parts]
    states: Tensor


@dataclass(frozen=True)
class SeparatePasses:
    """A few prompts, each in its own forward pass.

    parts      by prompt and layer
    attention  log a_i(δ) of the first prompt, by layer
    closure    of position 0
    zero       parts of the first prompt with all logits 0;  expected: the mask part that L4 predicts for them
    gauges     parts of the first prompt with a constant added to one row: of a query, of a reference
    """

    parts: list[list[Parts]]
    attention: list[Tensor]
    closure: Closure
    zero: list[Parts]
    expected: list[Tensor]
    gauges: list[list[Parts]]


@dataclass(frozen=True)
class SharedPasses:
    """The forward passes on one model, computed on first use.

    ids        random prompts [B, T];  constant: one prompt of one repeated token, without BOS
    batch      prompts per forward pass (0: all)
    room       number of positions of the model; None: unlimited
    quantised  whether its layers may have kernels of quantised weights, whose effects then explain failed checks
    """

    model: PreTrainedModel
    plan: Plan
    ids: Ids
    constant: Ids
    learned_sinks: bool = False
    batch: int = 0
    room: int | None = None
    quantised: bool = False

    @property
    def shift(self) -> int:
        """The shift of L5, limited by the size of a table of positions; 0 if the prompt takes all of it."""
        return SHIFT if self.room is None else max(0, min(SHIFT, self.room - self.plan.length))

    @property
    def few(self) -> Ids:
        """Prompts for the laws that hold for each prompt separately."""
        return self.ids[:FEW]

    def tokens(self, ids: Ids, padding: int = 0) -> tuple[Tensor, dict[str, Any]]:
        """Return left-padded ids, and padding mask and positions as arguments of the probe's forward pass."""
        tokens = torch.from_numpy(np.pad(ids, ((0, 0), (padding, 0)), mode="edge")).to(input_device(self.model))
        keep, positions = torch.ones_like(tokens), torch.arange(tokens.shape[1], device=tokens.device) - padding
        keep[:, :padding] = 0
        arguments = {"position_ids": positions.clamp(min=0).expand_as(tokens)} if takes_positions(self.model) else {}
        return tokens, {"padding": keep, **arguments}

    def measure(self, ids: Ids, padding: int = 0) -> JointPass:
        """Measure the parts of every layer, with `padding` masked tokens before the prompts."""
        tokens, arguments = self.tokens(ids, padding)
        observer = LeakageObserver(self.plan, start=padding, placements=self.placements)
        with attach(self.model, [observer]) as probe:
            states = states_of(probe.forward(tokens, **arguments))
        return JointPass(observer.collect(), states[:, padding:])

    @cached_property
    def together(self) -> JointPass:
        return self.measure(self.few)

    @cached_property
    def padded(self) -> JointPass:
        return self.measure(self.few, PADDING)

    def first_call(self) -> xr.Dataset:
        """Measure the parts of the first attention call, of all prompts."""
        observer, chunks = LeakageObserver(self.plan, placements=self.placements), list[Chunk]()
        for at in batches(len(self.ids), self.batch or len(self.ids)):
            tokens, arguments = self.tokens(self.ids[at.start : at.stop])
            with attach(self.model, [observer, StopAtFirstCall()]) as probe, suppress(StopAtFirstCall):
                probe.forward(tokens, **arguments)
            chunks.append(stack_layers(observer.collect()))
        return assemble(chunks, self.plan)

    @cached_property
    def separate(self) -> SeparatePasses:
        plan, places = self.plan, self.placements
        attention, zero = Collector(partial(log_attention_rows, plan=plan)), ZeroObserver(plan)
        expected = Collector(lambda call, out: mask_of_equal_logits(call, plan))
        rows = ((plan.queries[1], 50.0), (plan.references[0], -50.0))
        gauges = [GaugeObserver(plan, placements=places, row=row, by=by) for row, by in rows if not self.learned_sinks]
        parts, within = list[list[Parts]](), list[list[Tensor]]()
        first_only: list[Observer] = [attention, zero, expected, *gauges]
        for ids in np.split(self.few, len(self.few)):
            observer = LeakageObserver(plan, placements=places)
            within.append(self._origin(ids, [observer, *first_only]))
            parts.append(observer.collect())
            first_only = []
        single = self._origin(self.few[:, :1])
        closure = Closure.of(joined(within), single, self.model.dtype)
        shifted = [gauge.layers for gauge in gauges]
        return SeparatePasses(parts, attention.layers, closure, zero.layers, expected.layers, shifted)

    def _origin(self, ids: Ids, observers: Sequence[Observer] = ()) -> list[Tensor]:
        """Return the state of position 0 at every depth, from a pass with observers."""
        with attach(self.model, observers) as probe:
            return origin_states(probe, torch.from_numpy(ids).to(input_device(self.model)))

    @cached_property
    def placements(self) -> list[Placement]:
        """The effect of positions on queries and keys, by call."""
        return read_placements(self.model, torch.from_numpy(self.ids[:1]).to(input_device(self.model)), self.plan)

    @cached_property
    def entrance(self) -> Entrance | None:
        """Where the model writes position into the residual stream by design, if it does."""
        return first_entrance(self.model, int(self.constant[0, 0]))

    @cached_property
    def kernels(self) -> KernelEffects:
        """What the kernels of linear layers do to activations."""
        return kernel_effects(self.model, self.tokens(self.few)[0])

    def kernels_cause(self, value: Number, tolerance: Tolerance) -> str | None:
        """Return the effects of quantised kernels as a sentence if they explain the value of a failed check."""
        return self.kernels.explain(value, tolerance) if self.quantised else None

    def find_cause(self) -> str | None:
        """Return the property of the model by which equal tokens differ between positions; None if none is known."""
        return self.entrance.reason if self.entrance is not None else self.uneven

    @property
    def uneven(self) -> str | None:
        """In which layers norms of queries or keys depend on position, as a sentence; None if in no layer."""
        gaps = [place.unevenness for place in self.placements]
        layers = [layer for layer, gap in enumerate(gaps) if gap]
        if not layers:
            return None
        return (
            f"in {len(layers)} layers an operation after the rotation of queries or keys does not commute with it, "
            f"such as a norm with weights: norms vary by {max(gaps):.2g} with position"
        )


def pairs(got: Sequence[Parts], expected: Sequence[Parts], *names: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the named parts of both, layer by layer; undefined entries count as 0."""
    for a, b in zip(got, expected, strict=True):
        for name in names:
            yield getattr(a, name).nan_to_num(), getattr(b, name).nan_to_num()
