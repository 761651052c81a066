"""What queries may see: `mask=off`, `window=W`, `window=W+sink` (position 0 kept), `window=off` (plain causal)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from transformers.masking_utils import causal_mask_function

from posleak.probe import Call

from .base import NamedEdit, Site
from .positions import everything


@dataclass(frozen=True)
class MaskOff(NamedEdit):
    """Bidirectional attention."""

    site: ClassVar[Site] = Site.VISIBILITY
    causal: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return "mask=off"

    def edit(self, call: Call) -> Call:
        return replace(call, visibility=call.visibility.replaced("everything", everything))


@dataclass(frozen=True)
class Window(NamedEdit):
    """Of what each query sees, its nearest `size` keys, and position 0 with `sink`. size 0: plain causal, no window."""

    size: int
    sink: bool = False

    site: ClassVar[Site] = Site.VISIBILITY

    @property
    def text(self) -> str:
        return f"window={self.size or 'off'}{'+sink' if self.sink else ''}"

    def edit(self, call: Call) -> Call:
        seen = call.visibility
        if self.size == 0:
            return (
                call if seen.causal else replace(call, visibility=seen.replaced("causal", causal_mask_function, True))
            )
        if self.size >= call.query.shape[2]:
            return call  # nothing is farther away, and the kernel may go on without a mask

        def nearest(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = query - key < self.size
            return seen.rule(batch, head, query, key) & ((near | (key == 0)) if self.sink else near)

        return replace(call, visibility=seen.replaced(self.text, nearest))
