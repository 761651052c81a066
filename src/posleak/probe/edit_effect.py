"""What edits changed, as it happened: one that changes nothing is a mistake in what was asked, and no null result."""

from __future__ import annotations

from dataclasses import dataclass, field

from posleak.axes import format_layers

from .call import Call


@dataclass
class EditEffectRecorder:
    """What one edit has changed so far.

    calls    by attention call, its layer and how many of its heads;  beside: what else, in words
    """

    calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    beside: dict[str, None] = field(default_factory=dict)

    def add_call(self, call: Call, heads: int) -> None:
        """So many heads of a call were changed."""
        if heads:
            self.calls[call.index] = (call.layer, heads)

    def note(self, what: str) -> None:
        """Something else was changed."""
        self.beside[what] = None

    def effect(self, edit: str) -> EditEffect:
        layers, heads = {layer for layer, _ in self.calls.values()}, sum(heads for _, heads in self.calls.values())
        return EditEffect(edit, tuple(sorted(layers)), len(self.calls), heads, tuple(self.beside))


@dataclass(frozen=True)
class EditEffect:
    """What an edit changed in every forward pass, as results carry it.

    layers   numbers of the layers whose attention it changed;  calls, heads: how many of their calls and heads
    beside   what it changed besides, in words
    """

    edit: str
    layers: tuple[int, ...]
    calls: int
    heads: int
    beside: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return not (self.calls or self.beside)

    @property
    def words(self) -> str:
        """`9 heads in layer 3`; `the embedding at position 0`"""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''} in {format_layers(self.layers)}"
        return ", ".join([*([heads] if self.calls else []), *self.beside]) or "changes nothing: a control"
