"""transformers' attention interface: which attention calls of a model go through it, and how to replace them.

Whether a model uses the interface is found by watching one short forward pass, not in its source code: classes may have
any name, and be defined anywhere. A function that returns zeros is registered for the pass and counts its calls;
attention that torch computes outside of it is the model's own. A model is watched once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import input_device
from posleak.models.hold import Hold, configs_of, undraw, wrong_thread_error
from posleak.models.parallel import require_whole_model

from .native import native, unmodified
from .visibility import visibility_mask

WATCHED_TOKENS = 11
"""Tokens of the watched pass: a prime, which other axes of a model rarely have as their size."""

WHOLE_CALLS = ("scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention")
"""Functions of torch that compute a whole attention call."""

TRACEABLE = ("eager", "sdpa", None)
"""Implementations of the interface that consist of functions that can be traced."""

_numbers = itertools.count()
"""Each registration has a unique name in transformers' registries."""


@dataclass
class AttentionCalls:
    """Number of attention calls of a forward pass: through transformers' interface, and outside of it.

    A model that fails with another function in the interface than its own has 0 of both.
    """

    interface: int = 0
    own: int = 0


_watched: WeakKeyDictionary[PreTrainedModel, AttentionCalls] = WeakKeyDictionary()


def computes_own_attention(model: PreTrainedModel) -> bool:
    """Return whether the model computes attention itself in any layer, so that its passes must be traced."""
    calls = attention_calls(model)
    return calls.own > 0 or calls.interface == 0


def attention_calls(model: PreTrainedModel) -> AttentionCalls:
    """Return the number of attention calls in a watched forward pass. Must not be called while it is attached."""
    if model not in _watched:
        _watched[model] = undraw(model, lambda: _watch(model))
    return _watched[model]


def require_traceable(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if some layers use an implementation of the interface that tracing would miss, or if
    processes share the heads, which only the interface gathers."""
    require_whole_model(model, "tracing the attention that a model computes itself")
    calls, implementation = attention_calls(model), model.config.get_text_config()._attn_implementation
    if calls.interface and implementation not in TRACEABLE:
        raise UnsupportedError(
            f"the model computes some attention itself, and some with {implementation!r}, which cannot be traced",
            where=type(model).__name__, got=f"{calls.own} own calls, {calls.interface} through transformers",
            expected="'sdpa' or 'eager' for the latter", remedy="load the model with attn_implementation='sdpa'",
        )  # fmt: skip


@contextmanager
def registered(model: PreTrainedModel, attention: Callable[..., Any]) -> Iterator[None]:
    """Let the model use this function for attention, and posleak's for masks. Restore everything on exit."""
    name = f"posleak_{next(_numbers)}"
    with ExitStack() as stack:
        for registry, own in ((AttentionInterface, attention), (AttentionMaskInterface, visibility_mask)):
            registry.register(name, own)
            stack.callback(registry._global_mapping.pop, name, None)
        stack.enter_context(implemented(model, name))
        yield


@contextmanager
def implemented(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use the attention function of this name, and restore its own on exit.

    The caller must hold the model (`exclusive`). All configs are set, since transformers' `set_attn_implementation`
    skips classes whose source code it cannot read or does not recognise.
    """
    before = [(config, getattr(config, "_attn_implementation_internal", None)) for config in configs_of(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


class _OwnAttention(TorchFunctionMode):
    """Counter of attention that torch computes: whole calls, and softmaxes over as many keys as there are tokens."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "").strip("_")
        T = WATCHED_TOKENS
        over_keys = isinstance(out, Tensor) and out.ndim > 2 and out.shape[-2] == T and out.shape[-1] in (T, T + 1)
        self.calls += name in WHOLE_CALLS or (name == "softmax" and over_keys)
        return out


def _watch(model: PreTrainedModel) -> AttentionCalls:
    """Run a few tokens. A model that fails is run again with its own attention, and raises if it fails there, too."""
    calls, ids = AttentionCalls(), torch.zeros(1, WATCHED_TOKENS, dtype=torch.long, device=input_device(model))
    hold = Hold.of(model, attached=False)  # that of `unmodified`, for the thread

    def zeros(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if not hold.is_mine:
            raise wrong_thread_error(hold)
        calls.interface += 1
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None

    try:
        with unmodified(model), registered(model, zeros), _OwnAttention() as counter:
            native(model, ids)
    except UnsupportedError:
        raise
    except Exception:
        native(model, ids)
        return AttentionCalls()
    calls.own = counter.calls
    return calls
