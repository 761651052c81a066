"""The base class of edits, and the record of what an edit changed.

An edit never mutates its arguments: it returns new values, or installs something in the model for the duration of an
attachment and removes it afterwards. The built-in edits are in posleak.edits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from posleak.axes import format_layers
from posleak.inputs import Prompts

if TYPE_CHECKING:
    from jaxtyping import Float64, Int
    from torch import Tensor

    from .attachment import Probe
    from .call import Call
    from .placement import Placement


class Edit:
    """An intervention on a run. Subclasses override the methods for what they change; the others change nothing.

    placing: True if the edit changes the effect of positions on queries and keys (position ids, rotation, precision).
    Such an edit is active while placements are read from the model.
    """

    placing: ClassVar[bool] = False

    def prompts(self, prompts: Prompts) -> Prompts:
        """Return the prompts to be used instead."""
        return prompts

    def reads(self, ids: Int[Tensor, "B T"]) -> None:
        """Receive the ids of the next forward pass."""

    def arrange(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B2 T2"], Int[Tensor, "B2 T2"] | None]:
        """Return the tokens of the next forward pass, and their position ids; None: 0, 1, 2, and so on."""
        return ids, None

    def positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Return the position ids to be used instead."""
        return positions

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        """Install something in the model for the duration of the attachment."""
        yield

    def edit(self, call: Call) -> Call:
        """Return the attention call to be computed instead."""
        return call

    def temperature(self, rows: Sequence[int], length: int) -> Float64[Tensor, "P"] | None:
        """Return the factors by which `edit` scales queries at these rows of prompts of this length; None: no scaling.

        Their effect on leakage is reported as the part `scaling`.
        """
        return None

    def changed_heads(self, before: Call, after: Call) -> int:
        """Return the number of heads of a call that the edit changed."""
        if after is before:
            return 0
        import torch

        pairs = ((after.unread, before.unread), (after.frozen, before.frozen))
        fields = [new for new, old in pairs if new is not None and new is not old]
        heads = [x if x.dtype == torch.bool else ~x.isnan().all(0) for x in fields]
        return int(torch.stack(heads).any(0).sum()) if heads else before.heads

    def placed(self, without: Sequence[Placement], within: Sequence[Placement]) -> list[int]:
        """Return the calls in which a placing edit changes the placement, from placements without and with it."""
        return [call for call, (one, other) in enumerate(zip(without, within, strict=True)) if one.differs(other)]


def only(edit: Edit, method: str) -> Edit:
    """Return an edit that changes only what this method of `edit` changes."""
    restricted = Edit()
    setattr(restricted, method, getattr(edit, method))
    return restricted


@dataclass
class EditEffectRecorder:
    """Record of what one edit changes during forward passes.

    calls    by call index: the layer, and the number of changed heads
    beside   descriptions of changes outside attention calls
    """

    calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    beside: dict[str, None] = field(default_factory=dict)

    def note(self, what: str) -> None:
        """Record a change outside attention calls, such as "the embedding at position 0"."""
        self.beside[what] = None

    def effect(self, edit: str) -> EditEffect:
        """Return a summary of the record. edit: the text of the edit"""
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
