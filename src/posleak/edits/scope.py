"""At which layers and heads an edit acts: `@3`, `@2-5`, `@3.1` (layer 3, head 1), `@2-5,7.0`; nothing: everywhere.

Layers have the numbers that the model itself gives them: in a hybrid, whose attention is in some layers only, these are
the numbers that tables show.
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
    """`items`: (first layer, last layer, head or None). An empty text means everywhere."""

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
        """bool [H]: the heads of this call that are in scope."""
        import torch

        chosen = torch.full((call.heads,), self.everywhere, dtype=torch.bool, device=call.query.device)
        for first, last, head in self.items:
            if first <= call.layer <= last:
                chosen[slice(None) if head is None else slice(head, head + 1)] = True
        return chosen

    def require(self, numbers: Sequence[int], heads: Sequence[int], where: str) -> None:
        """Refuse layers and heads that the model does not have: by attention call, the layer's number and its heads.

        A layer without attention may lie within a range, but not stand alone.
        """
        for first, last, head in self.items:
            here = [count for number, count in zip(numbers, heads, strict=True) if first <= number <= last]
            if not here or last > max(numbers):
                raise InputError(
                    "the edit names layers in which there is no attention to change", where=where,
                    got=f"layer {first}" if first == last else f"layers {first} to {last}",
                    expected=f"among {format_layers(numbers)}",
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
