"""Change which keys queries see: `mask=off`, `window=W`, `window=W+sinkM` (keeps the first M keys), `window=off`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from posleak.errors import NoEffectError

from .base import EditKind, NamedEdit, Site, register
from .positions import everything
from .scope import Scope

if TYPE_CHECKING:
    from torch import Tensor

    from posleak.probe import Call, Visibility

CHECKED_ROWS = 64
"""Queries that are checked for a change of their visible keys."""


@dataclass(frozen=True)
class MaskOff(NamedEdit):
    """Edit that shows every key to every query (bidirectional attention)."""

    text = "mask=off"
    site: ClassVar[Site] = Site.VISIBILITY
    causal: ClassVar[bool] = False

    def edit(self, call: Call) -> Call:
        return replace(call, visibility=call.visibility.with_rule("everything", everything))


@dataclass(frozen=True)
class Window(NamedEdit):
    """Edit that shows each query its nearest `size` keys and the first `sink` keys; size 0 removes all windows."""

    size: int
    sink: int = 0

    site: ClassVar[Site] = Site.VISIBILITY

    @property
    def text(self) -> str:
        sink = "" if not self.sink else "+sink" if self.sink == 1 else f"+sink{self.sink}"
        return f"window={self.size or 'off'}{sink}"

    def edit(self, call: Call) -> Call:
        old = call.visibility
        if self.size == 0:
            from transformers.masking_utils import causal_mask_function as causal

            return call if old.causal else _with_visibility(call, self.text, old.with_rule("causal", causal, True))
        if self.size >= call.query.shape[2]:
            return call  # the window hides nothing, and the kernel needs no mask for it

        def nearest(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = query - key < self.size
            visible: Tensor = old.rule(batch, head, query, key)
            return visible & ((near | (key < self.sink)) if self.sink else near)

        return _with_visibility(call, self.text, old.with_rule(self.text, nearest))

    def require_length(self, length: int) -> None:
        if self.size >= length:
            raise NoEffectError(
                "the window is as long as the prompts, so it hides nothing", where=f"--edit {self.text}",
                got=f"prompts of {length} tokens", remedy=f"use a window below {length}, or a longer --length",
            )  # fmt: skip


def _with_visibility(call: Call, name: str, new: Visibility) -> Call:
    """Return the call with another visibility; the call itself if every query sees the same keys as before."""
    import torch

    old = call.visibility

    def differs() -> bool:
        rows = torch.unique(torch.linspace(0, old.shape[2] - 1, CHECKED_ROWS).long())
        return not torch.equal(old.rows(rows), new.rows(rows))

    return replace(call, visibility=new) if old.cached((name, "differs"), differs) else call


def _make_window(value: str, scope: Scope) -> Window:
    if value == "off":
        return Window(0)
    match = re.fullmatch(r"([1-9]\d*)(?:(\+sink)([1-9]\d*)?)?", value)
    if match is None:
        raise ValueError(value)
    return Window(int(match[1]), int(match[3] or 1) if match[2] else 0)


register(
    EditKind(
        "window", "window=W|W+sink[M]|off",
        "what each query sees: of the keys that the model shows it, the nearest W, itself included. `+sink`: also "
        "position 0; `+sink4`: also the first four keys, as in a streaming cache. `off`: all keys up to itself, "
        "without the windows or chunks of the model",
        "a second edit of visibility, such as `mask`; `ring`", "window=64+sink", _make_window,
    )
)  # fmt: skip
register(
    EditKind(
        "mask", "mask=off",
        "what each query sees: every key, also later ones. `claims` shows with it that position 0 then depends on "
        "later tokens. Leakage is not defined under it",
        "`measure`; `window` and `ring`; `sink`, `patch0` and `context`, which are defined for causal queries only",
        "mask=off",
        lambda value, scope: {"off": MaskOff()}[value],
    )
)  # fmt: skip
