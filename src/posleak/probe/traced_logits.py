"""From a product of queries and keys to the softmax: what a model that computes its own attention does in between.

    t = scaling · q kᵀ + bias, where not hidden

A `TracedLogits` is that form of one tensor. Each function that the model applies turns it into the trail of the result:
numbers scale, tensors are added, masks hide, views change the shape only. Whatever else happens is named in `unknown`,
and the call is refused. Biases and masks are the model's own tensors, not differences of rounded logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from .visibility import split_mask

HIDES = -1e4
"""A number in the place of a logit that hides its key; that the softmax then gives it nothing is checked."""

SAME = frozenset(
    {
        "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous", "clone", "detach",
        "to", "type", "type_as", "float", "double", "half", "bfloat16",
    }
)  # fmt: skip
"""Functions that keep every number, up to rounding."""


@dataclass(frozen=True)
class TracedLogits:
    """How a tensor [B·H, T, keys] or [B, H, T, keys] came from a product; `prompts` is B.

    apart     prompts and heads have had an axis each, so that their order is known
    weights   it has been through the softmax
    unknown   what happened to it that is not of this form
    """

    query: Float[Tensor, "*batch T E"]
    key: Float[Tensor, "*shared keys E"]
    prompts: int
    scaling: float = 1.0
    bias: Float[Tensor, "#B #H #T #keys"] | None = None
    hidden: Bool[Tensor, "#B #H #T #keys"] | None = None
    apart: bool = False
    weights: bool = False
    unknown: str | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """Of queries and keys."""
        return self.query.shape[-2], self.key.shape[-2]

    @property
    def is_square(self) -> bool:
        return self.lengths[0] == self.lengths[1]

    def after(
        self, name: str, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor
    ) -> TracedLogits | None:
        """The trail of what a function of this name made of x; None where the result has no such axes any more.

        args: of the function, x among them
        """
        if tuple(out.shape[-2:]) != self.lengths or out.ndim not in (3, 4):
            return None
        step = STEPS.get(name)
        found = None
        if step is not None and self.unknown is None:
            found = step(self, x, args, kwargs)
        if found is None:
            return replace(self, unknown=self.unknown or name)
        return replace(found, apart=found.apart or out.ndim == 4)

    def plus(self, added: Shaped[Tensor, "..."], ndim: int) -> TracedLogits:
        """Something added to a tensor of so many axes; where it hides a key, it says nothing else."""
        seen, rest = split_mask(self.lined_up(added, ndim))
        found = self if bool(seen.all()) else self.without(~seen, 4)
        if rest is not None and found.hidden is not None and rest.numel() >= found.hidden.numel():
            rest = rest.masked_fill(found.hidden, 0)
        if rest is None or not bool(rest.any()):
            return found
        return replace(found, bias=rest if found.bias is None else found.bias + rest)

    def times(self, factor: float) -> TracedLogits:
        return replace(self, scaling=self.scaling * factor, bias=None if self.bias is None else self.bias * factor)

    def without(self, hidden: Bool[Tensor, "..."], ndim: int) -> TracedLogits:
        """Keys hidden, in a tensor of so many axes."""
        hidden = self.lined_up(hidden, ndim)
        return replace(self, hidden=hidden if self.hidden is None else self.hidden | hidden)

    def over(self, x: Shaped[Tensor, "#B #H #T #keys"]) -> Shaped[Tensor, "#B #H T keys"]:
        """The same for every query and key."""
        return x.expand(-1, -1, *self.lengths)

    def lined_up(self, x: Shaped[Tensor, "..."], ndim: int) -> Shaped[Tensor, "#B #H #T #keys"]:
        """What meets a tensor of so many axes, with an axis for prompts and one for heads."""
        x = x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape))
        if ndim == 4:
            return x
        return x[None] if len(x) == 1 else x.unflatten(0, (self.prompts, -1))

    def heads(self, x: Float[Tensor, "*batch T E"]) -> Float[Tensor, "B H T E"]:
        """Queries, keys or values with an axis for prompts and one for heads."""
        return x if x.ndim == 4 else x.unflatten(0, (self.prompts, -1))


def _number(x: Any) -> float | None:
    """Of a number, or of a tensor with one number in it."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 else None
    return float(x) if isinstance(x, Number) and not isinstance(x, complex) else None  # type: ignore[arg-type]


def _other(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The other one of two operands."""
    rest = [arg for arg in args if arg is not x] or [kwargs.get("other")]
    return rest[0]


Step = Callable[[TracedLogits, Tensor, Sequence[Any], dict[str, Any]], "TracedLogits | None"]
"""(trail, its tensor, the function's arguments) -> the trail after it, or None where it is not of that form."""


def _same(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    return trail


def _add(
    trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], sign: float = 1.0
) -> TracedLogits | None:
    other = _other(x, args, kwargs)
    if trail.weights or kwargs.get("alpha", 1) != 1 or (not isinstance(other, Tensor) and _number(other) is None):
        return None
    other = other if isinstance(other, Tensor) else x.new_tensor(other)
    return None if other.ndim > x.ndim or not other.is_floating_point() else trail.plus(sign * other, x.ndim)


def _subtract(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    return _add(trail, x, args, kwargs, sign=-1.0) if args[0] is x else None


def _multiply(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    other = _other(x, args, kwargs)
    if trail.weights:
        return None
    if (factor := _number(other)) is not None:
        return trail.times(factor)
    if isinstance(other, Tensor) and bool(((other == 0) | (other == 1)).all()):  # a mask
        return trail.without(other == 0, x.ndim)
    return None


def _divide(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    by = _number(_other(x, args, kwargs))
    if trail.weights or by is None or args[0] is not x or kwargs.get("rounding_mode") is not None:
        return None
    return trail.times(1 / by)


def _fill(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    mask, value = (*args[1:], *(kwargs[name] for name in ("mask", "value") if name in kwargs))
    return _replaced(trail, x.ndim, mask, _number(value))


def _where(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    if len(args) != 3:
        return None
    condition, chosen, otherwise = args
    if chosen is x:
        return _replaced(trail, x.ndim, ~condition, _number(otherwise))
    return _replaced(trail, x.ndim, condition, _number(chosen)) if otherwise is x else None


def _replaced(trail: TracedLogits, ndim: int, mask: Bool[Tensor, "..."], value: float | None) -> TracedLogits | None:
    """A number in the place of some logits, or of weights that are 0 already."""
    if value is None:
        return None
    if not trail.weights:
        return trail.without(mask, ndim) if value <= HIDES else None
    visible = trail.lined_up(mask, ndim) if trail.hidden is None else trail.lined_up(mask, ndim) & ~trail.hidden
    return trail if value == 0 and not bool(visible.any()) else None


def _at_least(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    if len(args) > 2 or kwargs.get("max") is not None:
        return None
    least = _number(_other(x, args, kwargs) if len(args) > 1 else kwargs.get("min"))
    return trail if not trail.weights and least is not None and least <= torch.finfo(x.dtype).min / 2 else None


def _drop(trail: TracedLogits, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedLogits | None:
    """F.dropout(x, p, training); it must be off."""
    given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    return trail if not given.get("training", True) or given.get("p", 0.5) == 0 else None


STEPS: dict[str, Step] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "subtract", "isub"), _subtract),
    **dict.fromkeys(("mul", "multiply", "rmul", "imul"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv"), _divide),
    **dict.fromkeys(("max", "maximum", "clamp", "clamp_min"), _at_least),
    "masked_fill": _fill,
    "where": _where,
    "dropout": _drop,
}
"""By the name of a function of torch, without underscores around it."""
