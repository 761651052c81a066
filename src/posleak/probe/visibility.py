"""Visible keys V(i) of queries, as a rule that is evaluated for single rows instead of an N×N tensor.

transformers builds masks with a mask function that is registered under the name of the attention function. posleak's
mask function returns a `Visibility`: for the model a boolean tensor of shape (B, 1, T, T) that it passes on, in memory
only the rule. A model that computes with its mask gets the dense tensor (correct, at that model's own cost), and
`read_mask` converts the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function

Cached = TypeVar("Cached")

Rule = Callable[..., Any]
"""(batch, head, query, key) index tensors -> bool, broadcast, like the mask functions of transformers."""

CACHED_SIZE = 2**26
"""Number of pairs of queries and keys, one byte each, up to which the visible keys of a pass are kept in memory."""

HIDES, LOW = -9000.0, -1e8
"""Numbers up to which a value hides a key: instead of a logit or in a mask of such values and 0, and in any mask.

That the softmax gives hidden keys weight 0 is checked where a model computes its own, and by parity.
"""

MOVES = (torch.ops.aten._to_copy, torch.ops.aten.to)
"""Operations that `.to(device)` dispatches to."""


class Visibility(torch.Tensor):
    """The visible keys of every query: `rule`, restricted to the keys that `padding` keeps.

    causal: the rule is plain causal attention without padding, for which kernels need no mask
    """

    rule: Rule
    padding: Bool[Tensor, "B keys"] | None
    causal: bool
    _cache: dict[object, Any]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        rule: Rule = causal_mask_function,
        padding: Bool[Tensor, "B keys"] | None = None,
        causal: bool = False,
        *,
        device: torch.device | str = "cpu",
    ) -> Visibility:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bool, device=torch.device(device))
        self.rule, self.padding, self.causal, self._cache = rule, padding, causal, {}
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "causal" if self.causal else "rule"
        return f"Visibility({kind}, shape={tuple(self.shape)}, padded={self.padding is not None})"

    def rows(self, queries: Int[Tensor, "P"], keys: slice = slice(None)) -> Bool[Tensor, "#B 1 P keys"]:
        """Return which keys, of all or of a span, are visible to the queries at these positions."""
        rule = self.rule if self.padding is None else and_masks(self.rule, padding_mask_function(self.padding))
        b = torch.arange(1 if self.padding is None else self.shape[0], device=self.device)[:, None, None, None]
        h = torch.zeros(1, dtype=torch.long, device=self.device)[:, None, None]
        j = torch.arange(self.shape[3], device=self.device)[keys]
        seen: Tensor = rule(b, h, queries.to(self.device)[:, None], j)
        return seen.expand(-1 if seen.ndim == 4 else 1, 1, len(queries), len(j))

    def cached(self, name: object, make: Callable[[], Cached]) -> Cached:
        """Return a value that depends only on the visibility; it is computed once per name for all layers of a pass."""
        if name not in self._cache:
            self._cache[name] = make()
        value: Cached = self._cache[name]
        return value

    def spans(self, block: int) -> list[tuple[int, int, int, int]]:
        """Return blocks of queries and the span of keys visible to any of them: (first query, end, first key, end)."""

        def span(start: int) -> tuple[int, int, int, int]:
            stop = min(start + block, self.shape[2])
            seen = self.rows(torch.arange(start, stop)).flatten(0, 2).any(0).nonzero()
            return (start, stop, int(seen[0]), int(seen[-1]) + 1) if len(seen) else (start, stop, start, start + 1)

        return self.cached(("spans", block), lambda: [span(start) for start in range(0, self.shape[2], block)])

    def block(self, start: int, stop: int, low: int, high: int) -> Bool[Tensor, "#B 1 P keys"]:
        """Return which of the keys low … high − 1 are visible to the queries start … stop − 1.

        It is computed once for all layers of a pass, unless the passes are so long that it would take much memory.
        """
        size = (1 if self.padding is None else self.shape[0]) * self.shape[2] * self.shape[3]
        queries = torch.arange(start, stop, device=self.device)
        if size > CACHED_SIZE:
            return self.rows(queries, slice(low, high))
        return self.cached(("block", start, stop, low, high), lambda: self.rows(queries, slice(low, high)).contiguous())

    def with_rule(self, name: object, rule: Rule, causal: bool = False) -> Visibility:
        """Return the visibility of the same queries, keys and padding under another rule, cached by name."""
        plain = causal and self.padding is None
        return self.cached(name, lambda: Visibility(self.shape, rule, self.padding, plain, device=self.device))

    def slice_positions(self, start: int, stop: int) -> Visibility:
        """Return the visibility restricted to the queries and keys start … stop − 1."""
        padding = None if self.padding is None else self.padding[:, start:stop]
        shape = (self.shape[0], 1, stop - start, stop - start)

        def moved(b: Any, h: Any, q: Any, k: Any) -> Any:
            return self.rule(b, h, q + start, k + start)

        return self.cached(
            ("part", start, stop), lambda: Visibility(shape, moved, padding, self.causal, device=self.device)
        )

    def to_device(self, device: torch.device | str) -> Visibility:
        """Return the same rule on another device: models on several devices pass their mask from one to the next."""
        if torch.device(device) == self.device:
            return self
        padding = None if self.padding is None else self.padding.to(device)
        return self.cached(
            ("moved", torch.device(device)),
            lambda: Visibility(self.shape, self.rule, padding, self.causal, device=device),
        )

    def dense(self) -> Bool[Tensor, "B 1 T keys"]:
        """Return the dense boolean tensor, for models that compute with their mask."""
        return self.rows(torch.arange(self.shape[2])).expand(self.shape[0], 1, -1, -1)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        values = (*args[1:], *(kwargs or {}).values())
        dtypes = [value for value in values if isinstance(value, torch.dtype)]
        if func.overloadpacket in MOVES and isinstance(args[0], Visibility) and set(dtypes) <= {torch.bool}:
            return args[0].to_device(
                next((value for value in values if isinstance(value, torch.device)), args[0].device)
            )
        plain = tree_map(lambda value: value.dense() if isinstance(value, Visibility) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def split_mask(mask: Shaped[Tensor, "..."]) -> tuple[Bool[Tensor, "..."], Float[Tensor, "..."] | None]:
    """Return the visible keys of a mask, and the bias that it adds to their logits (None: no bias).

    In a floating-point mask, very low numbers hide a key, and all other values are biases. If no value is small, -10000
    hides a key, too, as in old code; ALiBi has such biases at long distances, but also small ones.
    """
    if mask.dtype == torch.bool:
        return mask, None
    two_valued = not bool(((mask != 0) & (mask > HIDES)).any())
    seen = mask > (HIDES if two_valued else max(torch.finfo(mask.dtype).min / 2, LOW))
    bias = mask.masked_fill(~seen, 0)
    return seen, bias if bool(bias.any()) else None


def read_mask(
    mask: Shaped[Tensor, "#B #H T keys"],
    prompts: int | None = None,
) -> tuple[Visibility, Float[Tensor, "B #H T keys"] | None] | None:
    """Convert a mask that the model computed, for these prompts, to a visibility, and the bias that it adds to logits.

    Return None if the visible keys differ between heads, which no `Visibility` can represent.
    """
    seen, bias = split_mask(mask)
    if not bool((seen == seen[:, :1]).all()):
        return None
    seen = seen[:, 0]
    (masks, T, keys), B = seen.shape, prompts or len(seen)
    everyone = torch.ones(B, keys, dtype=torch.bool, device=mask.device)  # makes rows() evaluate every prompt
    return Visibility((B, 1, T, keys), lambda b, h, q, k: seen[b % masks, q, k], everyone, device=mask.device), bias


def visibility_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Rule = causal_mask_function,
    attention_mask: Bool[Tensor, "B keys"] | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **ignored: Any,
) -> Visibility:
    """Return a `Visibility`. This is the mask function that is registered with transformers, with its signature."""
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    local = local_size is not None and kv_length > local_size
    plain = allow_is_causal_skip and padding is None and not local and q_length == kv_length and kv_offset == 0
    shape = (batch_size, 1, q_length, kv_length)
    return Visibility(shape, causal_mask_function if plain else mask_function, padding, causal=plain, device=device)
