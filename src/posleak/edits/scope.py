"""The layers and heads at which an edit acts: `@3`, `@2-5`, `@3.1` (layer 3, head 1), `@2-5,7.0`; default: all.

Layers have the ids of the model itself, as in tables, also in hybrid models with attention in some layers only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posleak.axes import format_layers
from posleak.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from posleak.probe import Call

_ITEM = re.compile(r"(?P<first>\d+)(-(?P<last>\d+)|\.(?P<head>\d+))?")


@dataclass(frozen=True)
class Scope:
    """A selection of layers and heads; `items`: (first layer, last layer, head or None)."""

    items: tuple[tuple[int, int, int | None], ...] = ()
    everywhere: bool = True

    @classmethod
    def parse(cls, text: str | None) -> Scope:
        if text is None:
            return cls()
        return cls(tuple(_item(part.strip(), text) for part in text.split(",")), everywhere=False)

    @property
    def text(self) -> str:
        if self.everywhere:
            return ""
        parts = [
            f"{first}.{head}" if head is not None else str(first) if first == last else f"{first}-{last}"
            for first, last, head in self.items
        ]
        return "@" + ",".join(parts)

    def heads(self, call: Call) -> Tensor:
        """Return which heads of a call are in scope, bool [H]."""
        import torch

        chosen = torch.full((call.heads,), self.everywhere, dtype=torch.bool, device=call.query.device)
        for first, last, head in self.items:
            if first <= call.layer <= last:
                chosen[slice(None) if head is None else slice(head, head + 1)] = True
        return chosen

    def require(self, layer_ids: Sequence[int], heads: Sequence[int], where: str) -> None:
        """Raise an InputError if the model lacks a layer or head; `layer_ids` and `heads` are given by attention call.

        A layer without attention may be part of a range, but cannot be named alone.
        """
        for first, last, head in self.items:
            here = [count for layer, count in zip(layer_ids, heads, strict=True) if first <= layer <= last]
            if not here or last > max(layer_ids):
                raise InputError(
                    "the edit names layers without attention", where=where,
                    got=f"layer {first}" if first == last else f"layers {first} to {last}",
                    expected=f"among {format_layers(layer_ids)}",
                )  # fmt: skip
            if head is not None and head >= max(here):
                raise InputError(
                    "the edit names a head that the layer does not have", where=where,
                    got=f"head {head} of layer {first}", expected=f"heads 0 to {max(here) - 1}",
                )  # fmt: skip


def _item(part: str, text: str) -> tuple[int, int, int | None]:
    match = _ITEM.fullmatch(part)
    first, last, head = (None, None, None) if match is None else (match["first"], match["last"], match["head"])
    if first is None or int(last or first) < int(first):
        raise InputError(
            "the scope of an edit cannot be read", where=f"@{text}", got=repr(part),
            expected="layers and heads such as @3, @2-5 or @3.1 (layer 3, head 1), separated by commas",
        )  # fmt: skip
    return int(first), int(last or first), None if head is None else int(head)


EVERYWHERE = Scope()
