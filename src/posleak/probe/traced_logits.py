"""Logits of a model that computes its own attention, traced from the product of queries and keys to the softmax.

    t = scaling · q kᵀ + bias, where not hidden

`TracedLogits` is this form of one tensor. Each torch function that the model applies is translated to the form of its
result: numbers scale, tensors are added, masks hide keys, views change only the shape. Any other function is named in
`unknown`, and the call is rejected. Biases and masks are the model's own tensors, not differences of rounded logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Number
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from .visibility import HIDES, split_mask

SAME = frozenset(
    {
        "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous", "clone", "detach",
        "to", "type", "type_as", "float", "double", "half", "bfloat16",
    }
)  # fmt: skip
"""Functions that keep all values, up to rounding."""


@dataclass(frozen=True)
class TracedLogits:
    """The form of a tensor [B·H, T, keys] or [B, H, T, keys] that was computed from a product of queries and keys.

    apart     the tensor has had separate axes for prompts and heads, so that their order is known
    weights   the tensor is the result of the softmax
    unknown   the first function that does not preserve this form
    """

    query: Float[Tensor, "B H T E"]
    key: Float[Tensor, "B K keys E"]
    scaling: float = 1.0
    bias: Float[Tensor, "#B #H #T #keys"] | None = None
    hidden: Bool[Tensor, "#B #H #T #keys"] | None = None
    apart: bool = False
    weights: bool = False
    unknown: str | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.query.shape[-2], self.key.shape[-2]

    def after(
        self, name: str, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor
    ) -> TracedLogits | None:
        """Return the form of `out`, the result of the named function on x; None if it has no query and key axes.

        args: the arguments of the function, including x
        """
        if tuple(out.shape[-2:]) != self.lengths or out.ndim not in (3, 4):
            return None
        step = STEPS.get(name)
        result = None if step is None or self.unknown is not None else step(self, x, args, kwargs)
        if result is None:
            return replace(self, unknown=self.unknown or name)
        return replace(result, apart=result.apart or out.ndim == 4)

    def plus(self, added: Shaped[Tensor, "..."], ndim: int) -> TracedLogits:
        """Return the form after adding a tensor, given the number of axes of the sum. Hidden keys get no bias."""
        seen, rest = split_mask(split_heads(added, len(self.query), ndim))
        masked = self if bool(seen.all()) else self.without(~seen, 4)
        if rest is not None and masked.hidden is not None and rest.numel() >= masked.hidden.numel():
            rest = rest.masked_fill(masked.hidden, 0)
        if rest is None or not bool(rest.any()):
            return masked
        return replace(masked, bias=rest if masked.bias is None else masked.bias + rest)

    def times(self, factor: float) -> TracedLogits:
        """Return the form after multiplication by a number."""
        return replace(self, scaling=self.scaling * factor, bias=None if self.bias is None else self.bias * factor)

    def without(self, hidden: Bool[Tensor, "..."], ndim: int) -> TracedLogits:
        """Return the form with more hidden keys, given the number of axes of the tensor."""
        hidden = split_heads(hidden, len(self.query), ndim)
        return replace(self, hidden=hidden if self.hidden is None else self.hidden | hidden)

    def over(self, x: Shaped[Tensor, "#B #H #T #keys"]) -> Shaped[Tensor, "#B #H T keys"]:
        """Expand x over all queries and keys."""
        return x.expand(-1, -1, *self.lengths)


def split_heads(x: Shaped[Tensor, "..."], prompts: int, ndim: int | None = None) -> Shaped[Tensor, "#B #H #T #keys"]:
    """Reshape [B·H, T, …] or [B, H, T, …] to the latter. ndim: the number of axes with which x is broadcast."""
    x = x.reshape((1,) * ((ndim or x.ndim) - x.ndim) + tuple(x.shape))
    if x.ndim == 4:
        return x
    return x[None] if len(x) == 1 else x.unflatten(0, (prompts, -1))


def _number(x: Any) -> float | None:
    """Return the value of a number or of a tensor with one element; else None."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 else None
    return float(x) if isinstance(x, Number) and not isinstance(x, complex) else None  # type: ignore[arg-type]


def _other(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return ([arg for arg in args if arg is not x] or [kwargs.get("other")])[0]


Step = Callable[[TracedLogits, Tensor, Sequence[Any], dict[str, Any]], "TracedLogits | None"]
"""(form, its tensor, the function's arguments) -> the form of the result; None: the function does not preserve it."""


def _add(
    form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], sign: float = 1.0
) -> TracedLogits | None:
    other = _other(x, args, kwargs)
    if sign < 0 and args[0] is not x:  # other − x
        return None
    if form.weights or kwargs.get("alpha", 1) != 1 or (not isinstance(other, Tensor) and _number(other) is None):
        return None
    other = other if isinstance(other, Tensor) else x.new_tensor(other)
    return None if other.ndim > x.ndim or not other.is_floating_point() else form.plus(sign * other, x.ndim)


def _multiply(form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    other = _other(x, args, kwargs)
    if form.weights:
        return None
    if (factor := _number(other)) is not None:
        return form.times(factor)
    if isinstance(other, Tensor) and bool(((other == 0) | (other == 1)).all()):  # a mask
        return form.without(other == 0, x.ndim)
    return None


def _divide(form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    by = _number(_other(x, args, kwargs))
    if form.weights or by is None or args[0] is not x or kwargs.get("rounding_mode") is not None:
        return None
    return form.times(1 / by)


def _fill(form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    mask, value = (*args[1:], *(kwargs[name] for name in ("mask", "value") if name in kwargs))
    return _replaced(form, x.ndim, mask, _number(value))


def _where(form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    if len(args) != 3:
        return None
    condition, chosen, otherwise = args
    if chosen is x:
        return _replaced(form, x.ndim, ~condition, _number(otherwise))
    return _replaced(form, x.ndim, condition, _number(chosen)) if otherwise is x else None


def _replaced(form: TracedLogits, ndim: int, mask: Bool[Tensor, "..."], value: float | None) -> TracedLogits | None:
    """Return the form after replacing some logits by a number, or by 0 some weights that are 0 already."""
    if value is None:
        return None
    if not form.weights:
        return form.without(mask, ndim) if value <= HIDES else None
    mask = split_heads(mask, len(form.query), ndim)
    visible = mask if form.hidden is None else mask & ~form.hidden
    return form if value == 0 and not bool(visible.any()) else None


def _at_least(form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    if len(args) > 2 or kwargs.get("max") is not None:
        return None
    least = _number(_other(x, args, kwargs) if len(args) > 1 else kwargs.get("min"))
    return form if not form.weights and least is not None and least <= torch.finfo(x.dtype).min / 2 else None


def _drop(form: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    """Handle F.dropout(x, p, training), which must be off."""
    arguments = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    return form if not arguments.get("training", True) or arguments.get("p", 0.5) == 0 else None


STEPS: dict[str, Step] = {
    **dict.fromkeys(SAME, lambda form, *_: form),
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "subtract", "isub"), partial(_add, sign=-1.0)),
    **dict.fromkeys(("mul", "multiply", "rmul", "imul"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv"), _divide),
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_min"), _at_least),
    "masked_fill": _fill,
    "where": _where,
    "dropout": _drop,
}
"""Handlers by the name of a torch function, without leading and trailing underscores."""
