"""Attachment of a probe to a model: one attention function that observers watch and edits change.

    with attach(model, observers=[rows]) as probe:
        probe.forward(ids)

All models that use transformers' attention interface are supported by the same function; no model family is treated
specially. Attention that a model computes itself is traced and passed to that function (tracer.py). On exit, also after
an exception, the model has its own attention again and transformers' registries are unchanged. A model has one
attachment at a time: other threads wait, and the same thread gets an error (models/hold.py).

Observers with a method `stream` receive the residual stream during the forward pass, one depth at a time, so that only
one is in memory: the input of each decoder layer, and the output of the last one. Depth 0 is the embedding, depth d the
output of d layers. If layers exchange anything but one tensor [B, T, W] (several streams, for example), observers
receive nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError, shorter_prompts
from posleak.models.hold import Hold, holding, preserve_random_state, this_thread_only, wrong_thread_error
from posleak.models.parallel import Ranks, gathered, split_heads
from posleak.stopwatch import stage

from .call import Call, attend
from .edit import Edit, EditEffectRecorder, only
from .interface import computes_own_attention, registered, require_traceable
from .native import backbone, own_rotation, run, runnable_experts
from .tracer import tracing_attention
from .visibility import Visibility, read_mask

if TYPE_CHECKING:
    from .placement import Placement

T = TypeVar("T")

IGNORED_ARGUMENTS = frozenset(
    {
        "sliding_window",  # contained in the visibility
        "position_ids", "cache_position",  # contained in the rotation
        "use_cache", "output_attentions", "output_hidden_states", "return_dict", "training", "layer_idx",
        "deterministic",  # of the backward pass
    }
)  # fmt: skip
"""Arguments of the attention function that do not affect the softmax. Any other unknown argument is rejected."""


@runtime_checkable
class Observer(Protocol):
    """Receiver of every attention call. An observer with a method `stream` also receives the residual stream."""

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        """Receive a call after all edits, and its output. Called in call order; must change neither."""
        ...


@dataclass
class Collector(Generic[T]):
    """Observer that collects read(call, out) of every attention call; `out` is the output of the attention function.

    keep: store the values; otherwise they are computed only, as a backward pass needs that computes layers again
    """

    read: Callable[[Call, Tensor], T]
    layers: list[T] = field(default_factory=list)
    keep: bool = True

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        value = self.read(call, out)
        if self.keep:
            self.layers.append(value)

    def collect(self) -> list[T]:
        """Return what was collected since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


@runtime_checkable
class StreamObserver(Protocol):
    """Receiver of the residual stream."""

    def stream(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        """Receive the stream at one depth. Called once per depth and forward pass, in order; must not change x."""
        ...


@dataclass
class Probe:
    """An attachment to a model, which passes the attention calls of forward passes to edits and observers.

    Only passes of one thread are accepted: the thread that attached the model, or that last called `forward`.

    calls, modules   number of attention calls of the current pass, and their modules
    layers           by the id of a module: the index of its layer
    placements       effect of positions in each call, for edits that move keys; empty if it is not known
    effects          by the id of an edit: what it has changed
    ranks            processes over which the heads are split; None: all heads are here
    """

    model: PreTrainedModel
    hold: Hold = field(repr=False)
    observers: Sequence[Observer] = ()
    edits: Sequence[Edit] = ()
    calls: int = 0
    modules: list[torch.nn.Module] = field(default_factory=list)
    layers: dict[int, int | None] = field(default_factory=dict, repr=False)
    effects: dict[int, EditEffectRecorder] = field(default_factory=dict, repr=False)
    placements: Sequence[Placement] = ()
    ranks: Ranks | None = None
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
        is_causal: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B T H Ev"], None]:
        """Compute attention, with the signature that transformers expects. Unknown arguments raise UnsupportedError."""
        self._require_own()
        if self.ranks is not None:
            query, key, value = (self.ranks.gather(x, 1) for x in (query, key, value))
            s_aux = None if s_aux is None else self.ranks.gather(s_aux, 0)
        where = f"{type(self.model).__name__}, attention call {self.calls} ({type(module).__name__})"
        chosen = None if indices is None else indices.shape[-1]
        _reject_unsupported(where, query.shape[2], key.shape[2], chosen, dropout, kwargs)
        if attention_mask is None and is_causal:
            attention_mask = Visibility((len(query), 1, query.shape[2], key.shape[2]), causal=True, device=query.device)
        visibility, added = _visible(where, attention_mask, len(query))
        bias = added if position_bias is None else position_bias if added is None else position_bias + added
        if bias is not None and softcap is not None:
            raise UnsupportedError("logits have both a soft-cap and a bias, in an unknown order", where=where)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = self.layers.get(id(module))
        call = Call(
            self.calls, module, query, key, value, visibility, scaling, softcap, s_aux, bias,
            layer=self.calls if layer is None else layer,
            placement=self.placements[self.calls] if self.calls < len(self.placements) else None,
        )  # fmt: skip
        if self.edits:
            with stage("edits"):
                for edit in self.edits:
                    edited = edit.edit(call)
                    if heads := edit.changed_heads(call, edited):
                        self.effect_of(edit).calls[call.index] = (call.layer, heads)
                    call = edited
        out = attend(call)
        for observer in self.observers:
            observer.observe(call, out)
        self.calls += 1
        self.modules.append(module)
        own = out if self.ranks is None else self.ranks.own(out, 1)
        return own.transpose(1, 2).contiguous(), None

    def effect_of(self, edit: Edit) -> EditEffectRecorder:
        """Return the recorder of an edit's changes, in which edits note changes outside attention calls."""
        return self.effects.setdefault(id(edit), EditEffectRecorder())

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        padding: Shaped[Tensor, "B T"] | None = None,
        grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the backbone of the model on ids, without the language-model head; `grad`: record the autograd graph.

        The 2-D mask is always passed: without it, transformers infers packed documents from position ids. Position ids
        are passed only if an edit or the caller sets them, since some models do not accept them.
        """
        if not self._passing.acquire(blocking=False):
            raise wrong_thread_error(self.hold)
        with ExitStack() as stack:
            stack.callback(self._passing.release)
            _reject_packed(self.model, kwargs.get("position_ids"))
            self.hold.thread = threading.current_thread()  # a generator may be continued by another thread
            stack.enter_context(preserve_random_state(self.model))
            for edit in self.edits:
                edit.reads(ids)
                ids, arranged = edit.arrange(ids)
                if arranged is not None:
                    kwargs["position_ids"] = arranged
            positions = kwargs.get("position_ids", torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
            for edit in self.edits:
                positions = edit.positions(before := positions)
                if positions is not before:
                    kwargs["position_ids"] = positions
                    if not edit.placing:
                        self.effect_of(edit).note("position ids")
            with torch.set_grad_enabled(grad):  # not inference mode, see native.unmodified
                return run(self.model, ids, padding, **kwargs)

    def deliver(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        """Pass the residual stream at one depth to the observers that have a method `stream`."""
        for observer in self.observers:
            if isinstance(observer, StreamObserver):
                observer.stream(depth, x)

    @contextmanager
    def side_pass(self, observer: Observer) -> Iterator[None]:
        """Run auxiliary passes with only this observer, and without edits of attention calls."""
        before = self.observers, self.edits
        self.observers, self.edits = (observer,), tuple(only(edit, "positions") for edit in self.edits)
        try:
            yield
        finally:
            self.observers, self.edits = before

    def _require_own(self) -> None:
        if not self.hold.is_mine:
            raise wrong_thread_error(self.hold)

    def _restart(self, *_: Any) -> None:
        self._require_own()
        self.calls = 0
        self.modules = []


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the model accepts position ids. Some models count tokens themselves."""
    return "position_ids" in inspect.signature(backbone(model).forward).parameters


@contextmanager
def attach(
    model: PreTrainedModel,
    observers: Sequence[Observer] = (),
    edits: Sequence[Edit] = (),
    placements: Sequence[Placement] = (),
) -> Iterator[Probe]:
    """Replace the model's attention by a probe. Restore the model on exit.

    placements: effect of positions in every attention call, for edits that move keys
    """
    hold, traced = Hold.of(model, attached=True), computes_own_attention(model)
    layers = {  # the first number in the path of a module
        id(module): next((int(part) for part in path.split(".") if part.isdigit()), None)
        for path, module in model.named_modules()
    }
    ranks = split_heads(model)
    probe = Probe(model, hold, tuple(observers), tuple(edits), layers=layers, placements=placements, ranks=ranks)
    with holding(hold), gathered(model), hold.cleanup as stack:
        if traced:
            require_traceable(model)
            stack.enter_context(tracing_attention(model, backbone(model), probe.attention))
        else:
            stack.enter_context(registered(model, probe.attention))
        stack.callback(backbone(model).register_forward_pre_hook(probe._restart).remove)
        stack.enter_context(own_rotation(model))
        if any(isinstance(observer, StreamObserver) for observer in probe.observers):
            stack.enter_context(streaming(model, probe.deliver))
        for edit in probe.edits:
            stack.enter_context(edit.installed(probe))
        stack.enter_context(runnable_experts(model))  # after edits, which may change the dtype
        yield probe


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the module list of the decoder that has the most parameters, for every family; empty if there is none.

    transformers knows the text decoder of a multimodal model; in a few families it returns the language-model head.
    """
    decoders = (part.modules() for part in (model.get_decoder(), model))
    lists = next(filter(None, ([m for m in modules if isinstance(m, torch.nn.ModuleList)] for modules in decoders)), [])
    size = {id(layers): sum(parameter.numel() for parameter in layers.parameters()) for layers in lists}
    return list(max(lists, key=lambda layers: size[id(layers)], default=()))


@contextmanager
def streaming(model: PreTrainedModel, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `receive` with each depth and the residual stream there, in every forward pass of the backbone."""
    depth, last, body = 0, None, backbone(model)

    def deliver(x: Tensor | None) -> None:
        nonlocal depth
        if x is not None:
            receive(depth, x)
        depth += 1

    def begin(*_: Any) -> None:
        nonlocal depth, last
        depth, last = 0, None

    def before_layer(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        deliver(one_stream((*args, kwargs.get("hidden_states"))))

    def after_layer(_: torch.nn.Module, __: Any, output: Any) -> None:
        nonlocal last
        last = one_stream(output if isinstance(output, (tuple, list)) else (output,))

    def end(*_: Any) -> None:
        deliver(last)
        begin()

    with ExitStack() as hooks:
        hooks.enter_context(body.register_forward_pre_hook(this_thread_only(begin)))
        for layer in decoder_layers(model):
            hooks.enter_context(layer.register_forward_pre_hook(this_thread_only(before_layer), with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(this_thread_only(after_layer)))
        hooks.enter_context(body.register_forward_hook(this_thread_only(end)))
        yield


def one_stream(values: Sequence[Any]) -> Float[Tensor, "B T W"] | None:
    """Return the first tensor if it is a residual stream [B, T, W]; else None."""
    first = next((x for x in values if isinstance(x, Tensor)), None)
    return first if first is not None and first.ndim == 3 and first.is_floating_point() else None


def _reject_packed(model: PreTrainedModel, positions: Int[Tensor, "#B T"] | None) -> None:
    """Reject position ids that start again at 0: several documents in one row, whose masks transformers separates."""
    if positions is None or not bool((starts := (positions[..., 1:] == 0) & (positions.diff(dim=-1) < 0)).any()):
        return
    raise UnsupportedError(
        "position ids start again at 0 inside a prompt, as in packed documents, so that offsets have two meanings",
        where=type(model).__name__, got=f"0 at token {int(starts.nonzero()[0, -1]) + 1}",
        expected="one document per row", remedy="put each document in a row of its own, with padding",
    )  # fmt: skip


def _reject_unsupported(
    where: str, queries: int, keys: int, chosen: int | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    """Raise UnsupportedError for unknown arguments, dropout, and keys that do not correspond to queries.

    queries, keys: their numbers;  chosen: number of keys that sparse attention with an indexer selects; None: all
    """
    unknown = [name for name, x in kwargs.items() if name not in IGNORED_ARGUMENTS and x is not None and x is not False]
    if unknown:
        raise UnsupportedError(
            f"unknown arguments of the attention function: {', '.join(sorted(unknown))}", where=where,
            expected="query, key, value, mask, scaling, softcap, s_aux, position_bias",
            remedy="this version does not support this architecture; please report it",
        )  # fmt: skip
    if dropout:
        raise UnsupportedError("attention dropout is active", where=where, got=dropout, remedy="call model.eval()")
    if queries != keys:
        raise UnsupportedError(
            "the numbers of queries and keys differ: keys are compressed, or do not come from the prompt",
            where=where, got=f"{queries} queries, {keys} keys", expected="one key per query",
            remedy="this model cannot be measured: offsets between such queries and keys are not defined",
        )  # fmt: skip
    if chosen is not None and chosen < keys:
        raise UnsupportedError(
            "queries attend to keys selected by content, so that offsets have gaps",
            where=where, got=f"{chosen} of {keys} keys",
            remedy=shorter_prompts(chosen, ", for which all keys are selected"),
        )  # fmt: skip


def _visible(
    where: str, mask: Shaped[Tensor, "#B #H T keys"] | None, prompts: int
) -> tuple[Visibility, Float[Tensor, "#B #H T keys"] | None]:
    """Return the visibility, and the bias that a mask contains if the model derived it from posleak's mask."""
    if isinstance(mask, Visibility):
        return mask, None
    read = None if mask is None else read_mask(mask, prompts)
    if read is not None:
        return read
    raise UnsupportedError(
        "attention was called without a mask, so that it is not causal" if mask is None
        else "the visible keys differ between heads of one layer",
        where=where, got="no mask" if mask is None else f"a mask of shape {tuple(mask.shape)}",
        expected="a mask of visible keys",
        remedy="this model cannot be measured: a causal mask that all heads of a layer share is required",
    )  # fmt: skip
