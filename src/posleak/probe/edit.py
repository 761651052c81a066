"""The seam for changes: what an edit may do to a run, each defaulting to nothing.

An edit never mutates what it is given: it returns new values, or installs something for the time of an attachment and
takes it away again. The edits themselves are stage 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from posleak.inputs import Prompts

if TYPE_CHECKING:
    from jaxtyping import Float64, Int
    from torch import Tensor

    from .attachment import Probe
    from .call import Call
    from .placement import Placement


class Edit:
    """A change of one run. Subclasses override the places where they act.

    placing: it changes what a position does to queries and keys (position ids, rotation, their precision), so that it
    must be in force when that is read off the model.
    """

    placing: ClassVar[bool] = False

    def prompts(self, prompts: Prompts) -> Prompts:
        """Other tokens to read."""
        return prompts

    def reads(self, ids: Int[Tensor, "B T"]) -> None:
        """Told what the next forward pass reads."""

    def positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Other position ids."""
        return positions

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        """Something put into the model for the time of the attachment."""
        yield

    def edit(self, call: Call) -> Call:
        """Another attention call."""
        return call

    def temperature(self, rows: Sequence[int], length: int) -> Float64[Tensor, "P"] | None:
        """Factors that `edit` puts on queries by their positions, at these rows of prompts of this length; None if it
        puts none. What they do to leakage is told apart, as `scaling`."""
        return None

    def changed_heads(self, before: Call, after: Call) -> int:
        """How many heads of a call it changed."""
        if after is before:
            return 0
        import torch

        named = [
            x for x, y in ((after.unread, before.unread), (after.frozen, before.frozen)) if x is not None and x is not y
        ]
        chosen = [x if x.dtype == torch.bool else ~x.isnan().all(0) for x in named]
        return int(torch.stack(chosen).any(0).sum()) if chosen else before.heads

    def placed(self, without: Sequence[Placement], within: Sequence[Placement]) -> list[int]:
        """Asked of a placing edit: the calls in which it changes what positions do, which were read off the model
        without it and with it."""
        return [call for call, (one, other) in enumerate(zip(without, within, strict=True)) if one.differs(other)]
