"""Attention that a model computes by itself, off transformers' attention interface: seen while it is computed.

A watch is on during one forward pass of such a model. It sees every function of torch that the model calls, follows
what becomes of products of queries and keys (traced_logits.py), and knows an attention call by its end: weights from a softmax
over such a product, multiplied with values; or torch's own fused attention. What it was made of is handed to the one
attention function, and what that returns takes the place of the product of weights and values. Nothing here knows a
model by name. A pattern that does not fit is refused, with what the model did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.rounding import PARTITION

from .traced_logits import SAME, TracedLogits
from .visibility import Visibility, read_mask, split_mask

BIASED = "baddbmm"
FUSED = "scaled_dot_product_attention"
OPERANDS = {
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "rmatmul": ("other", "input"),
    BIASED: ("batch1", "batch2"),
}
"""What the two factors of a product are called; of `rmatmul`, a matrix times self, the second comes first."""

CANNOT = "this family cannot be measured: posleak follows softmax(scaling · q kᵀ + bias) v, causal, and nothing else"


def computes_own_attention(model: PreTrainedModel) -> bool:
    """Does the model compute its attention itself, so that no other can be set? transformers reads it off its code."""
    return not model._can_set_attn_implementation()


class AttentionTracer(TorchFunctionMode):
    """One forward pass over `prompts` × `length` tokens; `attention` is called as transformers calls it."""

    def __init__(self, attention: Callable[..., Any], model: PreTrainedModel, prompts: int, length: int) -> None:
        super().__init__()
        self.attention, self.model, self.prompts, self.length = attention, model, prompts, length
        self.running: list[torch.nn.Module] = []
        self.trails = WeakIdKeyDictionary()
        self.masks: list[tuple[Tensor, Visibility]] = []
        self.calls = 0
        self.open = 0
        """Softmaxes whose weights have not been multiplied with values yet."""

    @no_type_check  # or the check of its types, in the tests, would stand between the model and whoever asks who calls
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if (ended := self.ending(name, args, kwargs)) is not None:
            return ended
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_floating_point():
            self.follow(name, args, kwargs, out)
        return out

    # -- from products to weights -------------------------------------------------------------------------------------

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Remember what a result was made of."""
        tracked = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and arg in self.trails]
        found: TracedLogits | None = None
        if name in OPERANDS:
            found = self._product(name, args, kwargs)
        elif name == "softmax":
            found = self._softmax(args, kwargs, out)
        elif tracked:
            trail: TracedLogits = self.trails[tracked[0]]
            found = trail.after(name, tracked[0], args, kwargs, out)
            if found is not None and len(tracked) > 1 and name not in SAME:
                found = replace(found, unknown=f"{name} of two products")
        if found is not None:
            self.trails[out] = found
        elif tracked:
            self.trails.pop(out, None)

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedLogits | None:
        given = _given(name, args, kwargs)
        query, key = (given[operand] for operand in OPERANDS[name])
        if not self._has_heads(query) or not self._has_heads(key) or query.ndim != key.ndim:
            return None
        trail = TracedLogits(
            query, key.transpose(-1, -2), self.prompts, float(given.get("alpha", 1)), apart=query.ndim == 4
        )
        beta = float(given.get("beta", 1))
        return trail if name != BIASED or beta == 0 else trail.plus(beta * given["input"], query.ndim)

    def _has_heads(self, x: Tensor) -> bool:
        """[B, H, …] or [B·H, …]"""
        return len(x) == self.prompts if x.ndim == 4 else x.ndim == 3 and len(x) % self.prompts == 0

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> TracedLogits | None:
        x = args[0] if args else kwargs["input"]
        trail: TracedLogits | None = self.trails.get(x)
        if trail is None or trail.weights:
            if x.ndim in (3, 4) and x.shape[-2] == self.length > 1 and (x.ndim == 4 or x.shape[-1] == self.length):
                raise self._refusal("its softmax over keys is not of one product of queries and keys")
            return None
        if (args[1] if len(args) > 1 else kwargs.get("dim")) not in (-1, x.ndim - 1):
            trail = replace(trail, unknown=trail.unknown or "a softmax along queries")
        if trail.unknown is not None:
            raise self._refusal(f"it applies {trail.unknown!r} to products of queries and keys")
        if not trail.apart and self.prompts > 1:
            raise self._refusal(
                "prompts and heads are folded into one axis, in an order that cannot be told", remedy="use --batch 1"
            )
        self._require_read(trail, trail.heads(x), trail.heads(out))
        self.open += 1
        return replace(trail, weights=True)

    def _require_read(
        self, trail: TracedLogits, logits: Float[Tensor, "B H T keys"], weights: Float[Tensor, "B H T keys"]
    ) -> None:
        """Some rows of the model's logits against those that were read off it: nothing was missed in between."""
        T, _ = trail.lengths
        rows = torch.tensor(sorted({0, T // 2, T - 1}), device=logits.device)
        key = trail.heads(trail.key).transpose(-1, -2).to(logits.dtype)
        read = trail.heads(trail.query)[:, :, rows].to(logits.dtype) @ key * trail.scaling
        if trail.bias is not None:
            read = read + trail.over(trail.bias)[:, :, rows]
        hidden = torch.zeros_like(read, dtype=torch.bool)
        if trail.hidden is not None:
            hidden = hidden | trail.over(trail.hidden)[:, :, rows]
        size = read.abs().masked_fill(hidden, 0).amax(-1, keepdim=True).clamp(min=1)
        gap = float(((logits[:, :, rows] - read) / size).masked_fill(hidden, 0).abs().max())
        if not gap <= PARTITION.of(trail.query.dtype):
            raise self._refusal("its logits are not those that were read off it", got=f"a difference of {gap:.2g}")
        blind = hidden.all(-1, keepdim=True)  # its weights mean nothing
        left = float(weights[:, :, rows].masked_fill(~hidden | blind, 0).max())
        if left:
            raise self._refusal("keys are hidden only in part", got=f"a weight of {left:.2g}")

    # -- from weights to a call ---------------------------------------------------------------------------------------

    def ending(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What takes the place of the last product of an attention call; None: this is none."""
        if name == FUSED:
            return self._fused(*args, **kwargs)
        if name not in OPERANDS or name == BIASED:
            return None
        given = _given(name, args, kwargs)
        weights, value = (given[operand] for operand in OPERANDS[name])
        trail: TracedLogits | None = self.trails.get(weights)
        if trail is None or not trail.weights:
            return None
        if trail.unknown == "dropout":
            raise self._refusal("attention dropout is on", remedy="call model.eval()")
        if trail.unknown is not None or value.ndim != weights.ndim:
            raise self._refusal(f"it applies {trail.unknown or 'a broadcast'!r} to attention weights")
        self.open -= 1
        hidden, bias = (None if x is None else trail.over(x) for x in (trail.hidden, trail.bias))
        query, key = trail.heads(trail.query), trail.heads(trail.key)
        out = self._call(query, key, trail.heads(value), None if hidden is None else ~hidden, trail.scaling, bias)
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
        """torch's own fused attention, which says what it does."""
        if query.ndim != 4 or len(query) != self.prompts:
            raise self._refusal("its fused attention is not over prompts and heads", got=tuple(query.shape))
        lengths, mask, bias = (query.shape[2], key.shape[2]), None, None
        if attn_mask is not None:
            attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
            mask, bias = split_mask(attn_mask.expand(-1, -1, *lengths))
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
            raise self._refusal(
                "its queries are not the tokens of the prompt", got=f"{query.shape[2]} queries for {self.length} tokens"
            )
        if mask is None and query.shape[2] == key.shape[2] == 1:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        seen = None if mask is None else self._visibility(mask.expand(len(query), -1, -1, -1))
        module = self.running[-1] if self.running else self.model
        out, _ = self.attention(module, query, key, value, seen, scaling=scaling, dropout=dropout, position_bias=bias)
        self.calls += 1
        found: Tensor = out.transpose(1, 2)
        return found

    def _visibility(self, mask: Bool[Tensor, "B #H T keys"]) -> Shaped[Tensor, "B #H T keys"]:
        """One visibility for all calls that see the same keys, since what follows from it is computed once; the mask
        itself where it has none."""
        for other, known in self.masks:
            if other.shape == mask.shape and torch.equal(other, mask):
                return known
        if torch.equal(mask, torch.ones_like(mask).tril()):
            found = Visibility((len(mask), 1, *mask.shape[2:]), causal=True, device=mask.device)
        elif (read := read_mask(mask)) is not None:
            found = read[0]
        else:
            return mask
        self.masks.append((mask, found))
        return found

    # -- the pass -----------------------------------------------------------------------------------------------------

    def require_complete(self) -> None:
        """Refuse a pass in which no attention was seen, or only the beginning of it."""
        if self.open:
            raise self._refusal("it has weights from queries and keys that are not multiplied with values")
        if not self.calls:
            raise UnsupportedError(
                "no attention was seen in a forward pass: the model has none, or none that is softmax(q kᵀ) v",
                where=type(self.model).__name__, remedy=CANNOT,
            )  # fmt: skip

    def _refusal(self, what: str, remedy: str = CANNOT, got: Any = None) -> UnsupportedError:
        inside = f" ({type(self.running[-1]).__name__})" if self.running else ""
        return UnsupportedError(
            f"the model computes its attention itself, in a way that cannot be followed: {what}",
            where=f"{type(self.model).__name__}, attention call {self.calls}{inside}", got=got, remedy=remedy,
        )  # fmt: skip


@contextmanager
def tracing_attention(model: PreTrainedModel, body: torch.nn.Module, attention: Callable[..., Any]) -> Iterator[None]:
    """Every forward pass of the body is watched, in whatever thread it runs; on exit it is as it was."""
    own, forward = vars(body).get("forward"), body.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        ids = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        watch = AttentionTracer(attention, model, *ids.shape[:2])
        with innermost(watch.running, body), watch:
            out = forward(*args, **kwargs)
        watch.require_complete()
        return out

    body.forward = watched
    try:
        yield
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own


@contextmanager
def innermost(running: list[torch.nn.Module], body: torch.nn.Module) -> Iterator[None]:
    """Keep the modules that are running, the innermost last."""

    def begins(module: torch.nn.Module, args: Any) -> None:
        running.append(module)

    def ends(module: torch.nn.Module, args: Any, out: Any) -> None:
        running.pop()

    handles = []
    try:
        for module in body.modules():
            if module is not body:  # its hooks have been called, and its forward is what is watched
                handles += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a product by their names; `self` of a method comes first."""
    names = ("input", *OPERANDS[name]) if name == BIASED else ("input", *(set(OPERANDS[name]) - {"input"}))
    return dict(zip(names, args, strict=False)) | kwargs
