"""Tracing of attention that a model computes itself instead of through transformers' attention interface.

An `AttentionTracer` is active during one forward pass. It intercepts every torch function that the model calls, follows
products of queries and keys (traced_logits.py), and recognises the end of an attention call: softmax weights of such a
product multiplied with values, or torch's fused attention. The operands are passed to posleak's attention function,
whose result replaces the product of weights and values. No model family is treated specially. Any other pattern is
rejected with a description of what the model did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.rounding import PARTITION

from .traced_logits import SAME, TracedLogits, split_heads
from .visibility import Visibility, read_mask, split_mask

BIASED = "baddbmm"
FUSED, MULTIHEAD = "scaled_dot_product_attention", "multi_head_attention_forward"
OPERANDS = {
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "rmatmul": ("other", "input"),
    BIASED: ("batch1", "batch2"),
}
"""Argument names of the two factors of a product. In `rmatmul` (other @ self) they are exchanged."""

UNSUPPORTED = "this model cannot be measured: only causal softmax(scaling · q kᵀ + bias) v is supported"


class AttentionTracer(TorchFunctionMode):
    """Tracer of one forward pass over `prompts` × `length` tokens, which calls `attention` as transformers would.

    running: the running modules, the innermost last
    unfinished: number of softmaxes whose weights have not been multiplied with values yet
    """

    def __init__(self, attention: Callable[..., Any], model: PreTrainedModel, prompts: int, length: int) -> None:
        super().__init__()
        self.attention, self.model, self.prompts, self.length = attention, model, prompts, length
        self.running: list[torch.nn.Module] = []
        self.forms = WeakIdKeyDictionary()
        self.masks: list[tuple[Tensor, Visibility]] = []
        self.calls, self.unfinished, self.ordered = 0, 0, False

    @no_type_check  # type checks in tests would add a stack frame between the model and code that inspects its caller
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name == MULTIHEAD:
            with self._inside():
                return _traceable(func)(*args, **kwargs)
        if (ended := self.ending(name, args, kwargs)) is not None:
            return ended
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_floating_point():
            self.follow(name, args, kwargs, out)
        return out

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Trace a function of torch, in which prompts and heads share an axis in the known order [B·H]."""
        self.ordered = True
        try:
            with self:
                yield
        finally:
            self.ordered = False

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Store the form of a result."""
        tracked = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and arg in self.forms]
        form: TracedLogits | None = None
        if name in OPERANDS:
            form = self._product(name, args, kwargs)
        elif name == "softmax":
            form = self._softmax(args, kwargs, out)
        elif tracked:
            before: TracedLogits = self.forms[tracked[0]]
            form = before.after(name, tracked[0], args, kwargs, out)
            if form is not None and len(tracked) > 1 and name not in SAME:
                form = replace(form, unknown=f"{name} of two products")
        if form is not None:
            self.forms[out] = form
        elif tracked:
            self.forms.pop(out, None)

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedLogits | None:
        arguments = _arguments(name, args, kwargs)
        query, key = (arguments[operand] for operand in OPERANDS[name])
        if not self._has_heads(query) or not self._has_heads(key) or query.ndim != key.ndim:
            return None
        queries, keys = split_heads(query, self.prompts), split_heads(key.transpose(-1, -2), self.prompts)
        form = TracedLogits(queries, keys, float(arguments.get("alpha", 1)), apart=self.ordered or query.ndim == 4)
        beta = float(arguments.get("beta", 1))
        return form if name != BIASED or beta == 0 else form.plus(beta * arguments["input"], query.ndim)

    def _has_heads(self, x: Tensor) -> bool:
        """Return whether x has the shape [B, H, …] or [B·H, …]."""
        return len(x) == self.prompts if x.ndim == 4 else x.ndim == 3 and len(x) % self.prompts == 0

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> TracedLogits | None:
        x = args[0] if args else kwargs["input"]
        form: TracedLogits | None = self.forms.get(x)
        if form is None or form.weights:
            if x.ndim in (3, 4) and x.shape[-2] == self.length > 1 and (x.ndim == 4 or x.shape[-1] == self.length):
                raise self._unsupported("a softmax over keys is not applied to one product of queries and keys")
            return None
        if (args[1] if len(args) > 1 else kwargs.get("dim")) not in (-1, x.ndim - 1):
            form = replace(form, unknown=form.unknown or "a softmax over queries")
        if form.unknown is not None:
            raise self._unsupported(f"{form.unknown!r} is applied to products of queries and keys")
        if not form.apart and self.prompts > 1:
            raise self._unsupported("prompts and heads share one axis in an unknown order", remedy="use --batch 1")
        self._require_read(form, split_heads(x, self.prompts), split_heads(out, self.prompts))
        self.unfinished += 1
        return replace(form, weights=True)

    def _require_read(
        self, form: TracedLogits, logits: Float[Tensor, "B H T keys"], weights: Float[Tensor, "B H T keys"]
    ) -> None:
        """Check some rows: the model's logits equal those of the traced form, and hidden keys have weight 0."""
        T, _ = form.lengths
        rows = torch.tensor(sorted({0, T // 2, T - 1}), device=logits.device)
        key = form.key.transpose(-1, -2).to(logits.dtype)
        read = form.query[:, :, rows].to(logits.dtype) @ key * form.scaling
        if form.bias is not None:
            read = read + form.over(form.bias)[:, :, rows]
        hidden = torch.zeros_like(read, dtype=torch.bool)
        if form.hidden is not None:
            hidden = hidden | form.over(form.hidden)[:, :, rows]
        size = read.abs().masked_fill(hidden, 0).amax(-1, keepdim=True).clamp(min=1)
        gap = float(((logits[:, :, rows] - read) / size).masked_fill(hidden, 0).abs().max())
        if not gap <= PARTITION.of(form.query.dtype):
            raise self._unsupported("the traced logits differ from the model's", got=f"a difference of {gap:.2g}")
        blind = hidden.all(-1, keepdim=True)  # rows without visible keys have arbitrary weights
        left = float(weights[:, :, rows].masked_fill(~hidden | blind, 0).max())
        if left:
            raise self._unsupported("hidden keys have a weight above 0", got=f"a weight of {left:.2g}")

    def ending(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the replacement of the last product of an attention call; None for any other function."""
        if name == FUSED:
            return self._fused(*args, **kwargs)
        if name not in OPERANDS or name == BIASED:
            return None
        arguments = _arguments(name, args, kwargs)
        weights, value = (arguments[operand] for operand in OPERANDS[name])
        form: TracedLogits | None = self.forms.get(weights)
        if form is None or not form.weights:
            return None
        if form.unknown == "dropout":
            raise self._unsupported("attention dropout is on", remedy="call model.eval()")
        if form.unknown is not None or value.ndim != weights.ndim:
            raise self._unsupported(f"{form.unknown or 'a broadcast'!r} is applied to attention weights")
        self.unfinished -= 1
        hidden, bias = (None if x is None else form.over(x) for x in (form.hidden, form.bias))
        mask, values = None if hidden is None else ~hidden, split_heads(value, self.prompts)
        out = self._call(form.query, form.key, values, mask, form.scaling, bias)
        return out.reshape(*weights.shape[:-1], value.shape[-1])

    def _fused(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B K keys E"],
        value: Float[Tensor, "B K keys Ev"],
        attn_mask: Shaped[Tensor, "..."] | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Float[Tensor, "B H T Ev"]:
        """Handle torch's fused attention."""
        if query.ndim != 4 or len(query) != self.prompts:
            raise self._unsupported(
                "fused attention is called without separate axes for prompts and heads", got=tuple(query.shape)
            )
        lengths, mask, bias = (query.shape[2], key.shape[2]), None, None
        if attn_mask is not None:
            mask, bias = split_mask(split_heads(attn_mask, self.prompts, 4).expand(-1, -1, *lengths))
        if is_causal:
            mask = torch.ones(1, 1, *lengths, dtype=torch.bool, device=query.device).tril()
        return self._call(query, key, value, mask, scale, bias, dropout_p)

    def _call(
        self,
        query: Float[Tensor, "B H T E"],
        key: Float[Tensor, "B K keys E"],
        value: Float[Tensor, "B K keys Ev"],
        mask: Bool[Tensor, "#B #H T keys"] | None,
        scaling: float | None,
        bias: Float[Tensor, "#B #H T keys"] | None,
        dropout: float = 0.0,
    ) -> Float[Tensor, "B H T Ev"]:
        if query.shape[2] != self.length:
            raise self._unsupported(
                "queries are not the tokens of the prompt", got=f"{query.shape[2]} queries for {self.length} tokens"
            )
        if mask is None and query.shape[2] == key.shape[2] == 1:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        seen = None if mask is None else self._visibility(mask.expand(len(query), -1, -1, -1))
        module = self.running[-1] if self.running else self.model
        out, _ = self.attention(module, query, key, value, seen, scaling=scaling, dropout=dropout, position_bias=bias)
        self.calls += 1
        by_head: Tensor = out.transpose(1, 2)
        return by_head

    def _visibility(self, mask: Bool[Tensor, "B #H T keys"]) -> Shaped[Tensor, "B #H T keys"]:
        """Return the visibility of a mask, or the mask itself if no visibility can represent it.

        Calls with equal masks share one visibility, so that values derived from it are computed once.
        """
        for other, known in self.masks:
            if other.shape == mask.shape and torch.equal(other, mask):
                return known
        if torch.equal(mask, torch.ones_like(mask).tril()):
            visibility = Visibility((len(mask), 1, *mask.shape[2:]), causal=True, device=mask.device)
        elif (read := read_mask(mask)) is not None:
            visibility = read[0]
        else:
            return mask
        self.masks.append((mask, visibility))
        return visibility

    def require_complete(self) -> None:
        """Raise UnsupportedError after a pass without attention, or with an incomplete attention call."""
        if self.unfinished:
            raise self._unsupported("attention weights are not multiplied with values")
        if not self.calls:
            raise UnsupportedError(
                "no attention found in a forward pass: the model has none, or none of the form softmax(q kᵀ) v",
                where=type(self.model).__name__, remedy=UNSUPPORTED,
            )  # fmt: skip

    def _unsupported(self, what: str, remedy: str = UNSUPPORTED, got: Any = None) -> UnsupportedError:
        inside = f" ({type(self.running[-1]).__name__})" if self.running else ""
        return UnsupportedError(
            f"the model computes its own attention in an unsupported way: {what}",
            where=f"{type(self.model).__name__}, attention call {self.calls}{inside}", got=got, remedy=remedy,
        )  # fmt: skip


@contextmanager
def tracing_attention(model: PreTrainedModel, body: torch.nn.Module, attention: Callable[..., Any]) -> Iterator[None]:
    """Trace every forward pass of the backbone, in any thread. Restore its forward method on exit."""
    own, forward = vars(body).get("forward"), body.forward

    @functools.wraps(forward)
    def traced(*args: Any, **kwargs: Any) -> Any:
        ids = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        tracer = AttentionTracer(attention, model, *ids.shape[:2])

        def begins(module: torch.nn.Module, args: Any) -> None:
            tracer.running.append(module)

        def ends(module: torch.nn.Module, args: Any, out: Any) -> None:
            tracer.running.pop()

        with ExitStack() as stack:
            for module in body.modules():
                if module is not body:  # its pre-hooks have run already
                    stack.callback(module.register_forward_pre_hook(begins).remove)
                    stack.callback(module.register_forward_hook(ends).remove)
            stack.enter_context(tracer)
            out = forward(*args, **kwargs)
        tracer.require_complete()
        return out

    body.forward = traced
    try:
        yield
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that runs, instead of offering its own call to the tracer."""
    inside: Any = function
    names = {**inside.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(inside.__code__, names, inside.__name__, inside.__defaults__, inside.__closure__)
    copy.__kwdefaults__ = inside.__kwdefaults__
    return copy


def _arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a product by name; `self` of a method comes first."""
    names = ("input", *OPERANDS[name]) if name == BIASED else ("input", *(set(OPERANDS[name]) - {"input"}))
    return dict(zip(names, args, strict=False)) | kwargs
