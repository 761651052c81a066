"""What an edit actually changed. An edit that changes nothing indicates a mistake in the request, not a null result."""

from __future__ import annotations

from dataclasses import dataclass, field

from posleak.axes import format_layers

from .call import Call


@dataclass
class EditEffectRecorder:
    """Collects what one edit changes during forward passes.

    calls    by call index: the layer, and the number of changed heads
    beside   descriptions of changes outside attention calls
    """

    calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    beside: dict[str, None] = field(default_factory=dict)

    def add_call(self, call: Call, heads: int) -> None:
        """Record the number of changed heads of a call."""
        if heads:
            self.calls[call.index] = (call.layer, heads)

    def note(self, what: str) -> None:
        """Record a change outside attention calls, such as "the embedding at position 0"."""
        self.beside[what] = None

    def effect(self, edit: str) -> EditEffect:
        """Return what was recorded, under the text of the edit."""
        layers, heads = {layer for layer, _ in self.calls.values()}, sum(heads for _, heads in self.calls.values())
        return EditEffect(edit, tuple(sorted(layers)), len(self.calls), heads, tuple(self.beside))


@dataclass(frozen=True)
class EditEffect:
    """What an edit changed in every forward pass, as stored in results.

    layers   indices of the layers with changed attention;  calls, heads: number of changed calls and heads
    beside   descriptions of changes outside attention calls
    """

    edit: str
    layers: tuple[int, ...]
    calls: int
    heads: int
    beside: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        """Whether the edit changed nothing."""
        return not (self.calls or self.beside)

    @property
    def words(self) -> str:
        """A short description, such as `9 heads in layer 3` or `the embedding at position 0`."""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''} in {format_layers(self.layers)}"
        return ", ".join([*([heads] if self.calls else []), *self.beside]) or "changes nothing: a control"
