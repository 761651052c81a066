"""Listening to a model: one attention function, registered with its mask, that observers look at and edits change.

    with attach(model, observers=[rows]) as probe:
        probe.forward(ids)

Any model on transformers' attention interface is served by the same function; nothing here knows a model by name. What
a model computes off the interface is seen while it is computed, and handed to that function too (tracer.py).
On exit, also after an exception, the model has its own attention back and the registries are as they were. A model is
attached once at a time: another thread waits, and the same thread is refused (hold.py).
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from posleak.errors import UnsupportedError, shorter_prompts
from posleak.models.hold import Hold, configs_of, holding, preserve_random_state, wrong_thread_error
from posleak.stopwatch import stage

from .call import Call
from .edit import Edit
from .edit_effect import EditEffectRecorder
from .experts import runnable_experts
from .kernel import attend
from .rotary import own_rotation
from .stream import StreamObserver, streaming
from .tracer import computes_own_attention, tracing_attention
from .visibility import Visibility, read_mask, visibility_mask

HARMLESS = frozenset(
    {
        "is_causal",  # the visibility says it
        "sliding_window",  # likewise
        "position_ids",  # already in the rotation
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "deterministic",  # about the backward pass
        "training",
        "layer_idx",
    }
)
"""Arguments that do not enter the softmax. Any other that is set is refused by name."""

_numbers = itertools.count()
"""Of attachments: each has a name of its own in transformers' registries."""


@runtime_checkable
class Observer(Protocol):
    """Looks at every attention call; `out` is what the model goes on with. One that has a method `stream` is shown the
    residual stream too (stream.py)."""

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        """Called once for each attention call of a forward pass, in order, after edits; it must change neither."""
        ...


@dataclass
class Probe:
    """An attachment: counts the calls of each forward pass and hands them to observers and edits, in call order.

    Passes of one thread only: of the one that attached the model, or that last called `forward`. layers: by the id of a
    module, the layer that it is part of.
    """

    model: PreTrainedModel
    hold: Hold = field(repr=False)
    observers: Sequence[Observer] = ()
    edits: Sequence[Edit] = ()
    calls: int = 0
    modules: list[torch.nn.Module] = field(default_factory=list)
    layers: dict[int, int | None] = field(default_factory=dict, repr=False)
    effects: dict[int, EditEffectRecorder] = field(default_factory=dict, repr=False)
    _passing: Any = field(default_factory=threading.RLock, repr=False)

    def attention(
        self,
        module: torch.nn.Module,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B K keys E"],
        value: Float[Tensor, "B K keys Ev"],
        attention_mask: Shaped[Tensor, "#B #H T keys"] | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Float[Tensor, "H"] | None = None,
        position_bias: Float[Tensor, "#B #H T keys"] | None = None,
        indices: Int[Tensor, "... chosen"] | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B T H Ev"], None]:
        """The one attention function, in the form that transformers calls; other keys than T are refused by name."""
        self._require_own()
        where = f"{type(self.model).__name__}, attention call {self.calls} ({type(module).__name__})"
        _refuse_unknown(where, query, key, dropout, kwargs)
        _refuse_selection(where, key, indices)
        visibility, added = _visible(where, attention_mask)
        bias = added if position_bias is None else position_bias if added is None else position_bias + added
        if bias is not None and softcap is not None:
            raise UnsupportedError("logits are both soft-capped and biased, in an unknown order", where=where)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = self.layers.get(id(module))
        call = Call(
            self.calls, module, query, key, value, visibility, scaling, softcap, s_aux, bias,
            layer=self.calls if layer is None else layer,
        )  # fmt: skip
        if self.edits:
            with stage("edits"):
                for edit in self.edits:
                    changed = edit.edit(call)
                    self.effect_of(edit).add_call(call, edit.changed_heads(call, changed))
                    call = changed
        out = attend(call)
        for observer in self.observers:
            observer.observe(call, out)
        self.calls += 1
        self.modules.append(module)
        return out.transpose(1, 2).contiguous(), None

    def effect_of(self, edit: Edit) -> EditEffectRecorder:
        """What this edit has changed so far; edits note here what they change besides attention calls."""
        return self.effects.setdefault(id(edit), EditEffectRecorder())

    def forward(self, ids: Int[Tensor, "B T"], *, padding: Shaped[Tensor, "B T"] | None = None, **kwargs: Any) -> Any:
        """The model's body on ids, without the head: its logits are B × T × vocabulary and nobody asked.

        The 2-D mask is always passed: without it, transformers guesses packed documents from the position ids.
        Position ids are passed only where an edit or the caller gives some: not every model takes them.
        """
        mask = torch.ones_like(ids) if padding is None else padding
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with self._pass(), preserve_random_state(self.model):
            for edit in self.edits:
                edit.reads(ids)
                positions = edit.positions(moved := positions)
                if positions is not moved:
                    kwargs["position_ids"] = positions
                    if not edit.placing:
                        self.effect_of(edit).note("position ids")
            with torch.no_grad():  # not in inference mode, see native.by_itself
                return backbone(self.model)(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs)

    @contextmanager
    def side_pass(self, observer: Observer) -> Iterator[None]:
        """A pass on the side: only this observer looks, and no edit changes attention calls."""
        kept = self.observers, self.edits
        self.observers, self.edits = (observer,), tuple(PositionsOnly(edit) for edit in self.edits)
        try:
            yield
        finally:
            self.observers, self.edits = kept

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """The attachment belongs to the thread that makes a pass: a generator may be taken up by another one."""
        if not self._passing.acquire(blocking=False):
            raise wrong_thread_error(self.hold)
        try:
            self.hold.thread = threading.current_thread()
            yield
        finally:
            self._passing.release()

    def _require_own(self) -> None:
        if not self.hold.is_mine:
            raise wrong_thread_error(self.hold)

    def _restart(self, *_: Any) -> None:
        self._require_own()
        self.calls = 0
        self.modules = []


@dataclass(frozen=True)
class PositionsOnly(Edit):
    """An edit's position ids, without its changes of attention calls."""

    inner: Edit

    def positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        return self.inner.positions(positions)


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its language-model head."""
    return model.base_model


def layer_of(name: str) -> int | None:
    """The number of the layer that a module is part of, in the model's own counting: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def takes_positions(model: PreTrainedModel) -> bool:
    """Can position ids be given to the model? Some count tokens themselves."""
    return "position_ids" in inspect.signature(backbone(model).forward).parameters


@contextmanager
def attach(model: PreTrainedModel, observers: Sequence[Observer] = (), edits: Sequence[Edit] = ()) -> Iterator[Probe]:
    """Let the probe compute the model's attention, and give everything back on exit."""
    hold, name = Hold.of(model, attached=True), f"posleak_{next(_numbers)}"
    layers = {id(module): layer_of(name) for name, module in model.named_modules()}
    probe = Probe(model, hold, tuple(observers), tuple(edits), layers=layers)
    with holding(hold), hold.cleanup as stack:
        if computes_own_attention(model):
            stack.enter_context(tracing_attention(model, backbone(model), probe.attention))
        else:
            stack.enter_context(registered(name, probe.attention))
            stack.enter_context(implemented(model, name))
        stack.callback(backbone(model).register_forward_pre_hook(probe._restart).remove)
        stack.enter_context(own_rotation(model, backbone(model)))
        if any(isinstance(observer, StreamObserver) for observer in probe.observers):
            stack.enter_context(streaming(model, backbone(model), lambda: probe.observers))
        for edit in probe.edits:
            stack.enter_context(edit.installed(probe))
        stack.enter_context(runnable_experts(model))  # of the dtype that edits have made
        yield probe


@contextmanager
def registered(name: str, attention: Callable[..., Any]) -> Iterator[None]:
    """transformers knows the attention function, and the mask function beside it, by this name."""
    try:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, visibility_mask)
        yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@contextmanager
def implemented(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use the attention of this name, and its own again on exit. Hold it (`exclusive`) meanwhile.

    A model that keeps its own attention has at most an eager and a fused form of it, and looks up which it is to use.
    """
    before = [(config, getattr(config, "_attn_implementation_internal", None)) for config in configs_of(model)]
    try:
        if computes_own_attention(model):
            for config, _ in before:
                config._attn_implementation_internal = name
        else:
            model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _refuse_unknown(
    where: str,
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B K keys E"],
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    unknown = {name: value for name, value in kwargs.items() if name not in HARMLESS and _is_set(value)}
    if unknown:
        raise UnsupportedError(
            f"the attention is called with arguments that posleak does not understand: {', '.join(sorted(unknown))}",
            where=where,
            expected="query, key, value, mask, scaling, softcap, s_aux, position_bias",
            remedy="this architecture cannot be measured by this version; please report it",
        )
    if dropout:
        raise UnsupportedError("attention dropout is on", where=where, got=dropout, remedy="call model.eval()")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "queries and keys have different lengths: keys are compressed, or come from elsewhere than the prompt",
            where=where, got=(query.shape[2], key.shape[2]),
            remedy="offsets between a query and such keys are not defined, so the model cannot be measured",
        )  # fmt: skip


def _refuse_selection(where: str, key: Float[Tensor, "B K keys E"], indices: Int[Tensor, "... chosen"] | None) -> None:
    """Sparse attention with an indexer: exact as long as the selection takes every key."""
    if indices is not None and indices.shape[-1] < key.shape[2]:
        raise UnsupportedError(
            "queries read only some keys, selected by content: not their nearest ones, so offsets have gaps",
            where=where, got=f"{indices.shape[-1]} of {key.shape[2]} keys",
            remedy=shorter_prompts(indices.shape[-1], ", where every key is selected"),
        )  # fmt: skip


def _visible(
    where: str, mask: Shaped[Tensor, "#B #H T keys"] | None
) -> tuple[Visibility, Float[Tensor, "#B #H T keys"] | None]:
    """V(i), and what the mask adds to visible logits, if the model made a mask of its own out of ours."""
    if isinstance(mask, Visibility):
        return mask, None
    found = None if mask is None else read_mask(mask)
    if found is not None:
        return found
    raise UnsupportedError(
        "the attention was given no mask, so it would see the future" if mask is None
        else "the heads of one layer see different keys",
        where=where,
        got="no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}",
        expected="the mask that posleak's mask function returned, or one made of it",
        remedy="the model builds its mask off transformers' mask interface and cannot be measured",
    )  # fmt: skip


def _is_set(value: Any) -> bool:
    return value is not None and value is not False
