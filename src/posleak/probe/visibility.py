"""V(i): which keys a query may see, as a rule that is asked for rows and never laid out as an N×N tensor.

transformers builds its masks by calling a mask function under the same name as the attention function. posleak's
returns a `Visibility`: to the model it is a boolean tensor of shape (B, 1, T, T) that it passes on; in memory it is the
rule itself. A model that computes with its mask gets the real tensor (correct, at that model's own cost), and what it
made of it comes back through `read_mask`.
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
"""(batch, head, query, key) index tensors -> bool, broadcast; the form that transformers' mask functions have."""


MOVES = (torch.ops.aten._to_copy, torch.ops.aten.to)
"""What `.to(device)` becomes."""


class Visibility(torch.Tensor):
    """The visible keys of every query: `rule`, restricted to the keys that `padding` keeps.

    `causal` says that the rule is the plain causal one without padding, for which kernels need no mask at all.
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
        device: torch.device | str = "cpu",
    ) -> Visibility:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bool, device=torch.device(device))

    def __init__(
        self,
        shape: Sequence[int],
        rule: Rule = causal_mask_function,
        padding: Bool[Tensor, "B keys"] | None = None,
        causal: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rule, self.padding, self.causal, self._cache = rule, padding, causal, {}

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "causal" if self.causal else "rule"
        return f"Visibility({kind}, shape={tuple(self.shape)}, padded={self.padding is not None})"

    def rows(self, queries: Int[Tensor, "P"], keys: slice = slice(None)) -> Bool[Tensor, "#B 1 P keys"]:
        """The keys that the queries at these positions may see, of all keys or a span."""
        batch = self.shape[0]
        rule = self.rule if self.padding is None else and_masks(self.rule, padding_mask_function(self.padding))
        b = torch.arange(batch if self.padding is not None else 1, device=self.device)[:, None, None, None]
        h = torch.zeros(1, dtype=torch.long, device=self.device)[:, None, None]
        j = torch.arange(self.shape[3], device=self.device)[keys]
        seen: Tensor = rule(b, h, queries.to(self.device)[:, None], j)
        return seen.expand(-1 if seen.ndim == 4 else 1, 1, len(queries), len(j))

    def cached(self, name: object, make: Callable[[], Cached]) -> Cached:
        """What follows from the visibility alone, made once per name, since all layers of a pass ask for it."""
        if name not in self._cache:
            self._cache[name] = make()
        found: Cached = self._cache[name]
        return found

    def spans(self, block: int) -> list[tuple[int, int, int, int]]:
        """(first query, end, first key, end): blocks of queries and the keys that any of them sees."""
        return self.cached(("spans", block), lambda: [self._span(at, block) for at in range(0, self.shape[2], block)])

    def _span(self, start: int, block: int) -> tuple[int, int, int, int]:
        stop = min(start + block, self.shape[2])
        seen = self.rows(torch.arange(start, stop)).flatten(0, 2).any(0).nonzero()
        low, high = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (start, start + 1)
        return start, stop, low, high

    def with_rule(self, name: object, rule: Rule, causal: bool = False) -> Visibility:
        """The same queries, keys and padding under another rule."""
        plain = causal and self.padding is None
        return self.cached(name, lambda: Visibility(self.shape, rule, self.padding, plain, device=self.device))

    def slice_positions(self, start: int, stop: int) -> Visibility:
        """Queries and keys start … stop − 1, among themselves."""
        padding = None if self.padding is None else self.padding[:, start:stop]
        shape = (self.shape[0], 1, stop - start, stop - start)

        def moved(b: Any, h: Any, q: Any, k: Any) -> Any:
            return self.rule(b, h, q + start, k + start)

        return self.cached(
            ("part", start, stop), lambda: Visibility(shape, moved, padding, self.causal, device=self.device)
        )

    def to_device(self, device: torch.device | str) -> Visibility:
        """The same rule on another device: models that are spread over several hand their mask from one to the next."""
        if torch.device(device) == self.device:
            return self
        padding = None if self.padding is None else self.padding.to(device)
        return self.cached(
            ("moved", torch.device(device)),
            lambda: Visibility(self.shape, self.rule, padding, self.causal, device),
        )

    def dense(self) -> Bool[Tensor, "B 1 T keys"]:
        """The real boolean tensor, for models that compute with their mask."""
        return self.rows(torch.arange(self.shape[2])).expand(self.shape[0], 1, -1, -1)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asked = (*args[1:], *(kwargs or {}).values())
        dtypes = [value for value in asked if isinstance(value, torch.dtype)]
        if func.overloadpacket in MOVES and isinstance(args[0], Visibility) and set(dtypes) <= {torch.bool}:
            return args[0].to_device(
                next((value for value in asked if isinstance(value, torch.device)), args[0].device)
            )
        plain = tree_map(lambda value: value.dense() if isinstance(value, Visibility) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def split_mask(mask: Shaped[Tensor, "..."]) -> tuple[Bool[Tensor, "..."], Float[Tensor, "..."] | None]:
    """What a mask lets be seen, and what it adds to the logits of visible keys (None: nothing).

    Boolean: visible or not. Floating: the dtype's lowest number hides a key, and anything else is a bias.
    """
    if mask.dtype == torch.bool:
        return mask, None
    seen = mask > torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(~seen, 0)
    return seen, bias if bool(bias.any()) else None


def read_mask(
    mask: Shaped[Tensor, "B #H T keys"],
) -> tuple[Visibility, Float[Tensor, "B #H T keys"] | None] | None:
    """A mask that the model computed, one or one per head: the visible keys, and what it adds to the logits of others.

    None where heads of one layer see different keys, which has no rule.
    """
    seen, bias = split_mask(mask)
    if not bool((seen == seen[:, :1]).all()):
        return None
    seen = seen[:, 0]
    B, T, keys = seen.shape
    everyone = torch.ones(B, keys, dtype=torch.bool, device=mask.device)  # padded or not: each prompt has its own rule
    return Visibility((B, 1, T, keys), lambda b, h, q, k: seen[b, q, k], everyone, device=mask.device), bias


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
    """The mask function that is registered beside the attention function: same contract as transformers' own."""
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    local = local_size is not None and kv_length > local_size
    plain = allow_is_causal_skip and padding is None and not local and q_length == kv_length and kv_offset == 0
    shape = (batch_size, 1, q_length, kv_length)
    return Visibility(shape, causal_mask_function if plain else mask_function, padding, causal=plain, device=device)
