"""At which layers and heads an edit acts: `@3`, `@2-5`, `@3.1` (layer 3, head 1), `@2-5,7.0`; nothing: everywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        items = []
        for part in text.split(","):
            match = _ITEM.fullmatch(part.strip())
            if match is None:
                raise InputError(
                    "the scope of an edit cannot be read", where=f"@{text}", got=repr(part),
                    expected="layers and heads such as @3, @2-5 or @3.1 (layer 3, head 1), separated by commas",
                )  # fmt: skip
            first, last, head = match["first"], match["last"] or match["first"], match["head"]
            items.append((int(first), int(last), None if head is None else int(head)))
        return cls(tuple(items), everywhere=False)

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
            if first <= call.index <= last:
                chosen[slice(None) if head is None else slice(head, head + 1)] = True
        return chosen


EVERYWHERE = Scope()
