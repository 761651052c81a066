"""`context=borrowed`: every query also attends to keys of another document, so that all see equally many keys.

The model reads [donor of N + 64 tokens] [prompt of N tokens] with consecutive position ids. Queries of the donor see
the donor only, and the prompt's position 0 sees itself only. Every later query of the prompt sees the nearest N keys:
those of the prompt, and as many of the donor's last keys as are missing. A layer's own window applies as well. If it
always shows the first token, the prompt's position 0 is shown, and the window is filled with other keys. In layers
outside the scope the prompt sees itself only.

Rows are computed without donor keys, so that they split into mask, drift and sink. The effect of the donor keys on the
total is stored separately as `lent`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from posleak.errors import InputError, UnsupportedError
from posleak.inputs import Prompts
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.models import input_device
from posleak.rounding import CLOSED

from .base import EditKind, ScopedEdit, Site, register
from .scope import Scope

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from posleak.probe import Call, Visibility
    from posleak.probe.visibility import Rule

CHECK_LENGTH = 32
"""Length of the prompt on which it is checked that a donor changes prompts through attention only."""


@dataclass(frozen=True)
class Borrow(ScopedEdit):
    """Edit that lets queries of the layers in scope also attend to keys of a donor."""

    name: ClassVar[str] = "context=borrowed"
    site: ClassVar[Site] = Site.CONTEXT
    needs_causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if any(head is not None for _, _, head in self.scope.items):
            raise InputError(
                "a borrowed context applies to whole layers", where=self.text, expected="layers, as in @0-5"
            )

    def prompts(self, prompts: Prompts) -> Prompts:
        return prompts.after_donors()

    def edit(self, call: Call) -> Call:
        length, visible_donor = (call.query.shape[2] - DONOR_MARGIN) // 2, bool(self.scope.heads(call).any())
        old = call.visibility
        old.cached(("same after a donor", length), lambda: require_shift_invariant(old, length))
        rule = borrowed(old.rule, length, visible_donor, old.cached("keeps first", lambda: keeps_first(old)))
        new = old.with_rule(("borrowed", visible_donor), rule)
        return replace(call, visibility=new, start=length + DONOR_MARGIN)

    def changed_heads(self, before: Call, after: Call) -> int:
        """Return the number of heads that see donor keys."""
        return int(self.scope.heads(before).sum())


def require_shift_invariant(visibility: Visibility, length: int) -> None:
    """Raise an UnsupportedError if a prompt sees other keys of its own after a donor, as with chunked attention.

    Position 0 is not compared: a layer may show it to every query, and `borrowed` then shows the prompt's.
    """
    import torch

    rows = torch.unique(torch.linspace(0, length - 1, 16).long())
    shifted = visibility.rows(rows + length + DONOR_MARGIN, slice(length + DONOR_MARGIN + 1, None))
    if not torch.equal(shifted, visibility.rows(rows, slice(1, length))):
        raise UnsupportedError(
            "a borrowed context is not defined here: attention is cut into chunks counted from the first token, and a "
            "document before the prompt shifts them",
            remedy=f"use a --length of n × (chunk size) − {DONOR_MARGIN}, with an integer n",
        )  # fmt: skip


def keeps_first(visibility: Visibility) -> bool:
    """Return whether the layer shows position 0, but not position 1, to the last query."""
    import torch

    first, second = visibility.rows(torch.tensor([visibility.shape[2] - 1]), slice(0, 2))[0, 0, 0].tolist()
    return bool(first and not second)


def borrowed(rule: Rule, length: int, visible_donor: bool = True, keeps_origin: bool = False) -> Rule:
    """Return a rule for [donor of length + 64 keys] [prompt]: a prompt's query sees the nearest `length` keys.

    visible_donor   donor keys are visible; otherwise the prompt sees itself only
    keeps_origin    `rule` shows position 0 to every query. Then the prompt's position 0 replaces the donor's,
                    and a window has room for one more donor key
    """
    import torch

    start = length + DONOR_MARGIN

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own: Tensor = rule(batch, head, query, key)
        if keeps_origin:
            donor = (query >= start) & (key < start) & (key > 0) & rule(batch, head, query, (key + 1).clamp(max=start))
            first = (query >= start) & (key == start) & rule(batch, head, query - start, key - start)
            own = torch.where(query < start, own, donor | first | ((key > start) & own))
        near = key > query - length if visible_donor else key >= start
        return own & ((query < start) | torch.where(query == start, key == start, near))

    return visible


MEASURE_INSTEAD = "use `posleak measure`, which splits the leakage into mask, drift and sink"
"""Remedy for models without a borrowed context."""

NOWHERE = Scope(everywhere=False)
"""No layer: each prompt follows a donor, but no query sees the donor's keys."""


def require_closed(model: PreTrainedModel) -> None:
    """Raise an UnsupportedError if a donor changes a prompt that does not see it, as in recurrent layers.

    The same prompt is read after two donors at the same positions, with donor keys hidden.
    """
    import torch

    from posleak.probe import attach, relative_difference

    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    ids = (torch.arange(2 * CHECK_LENGTH + DONOR_MARGIN, device=input_device(model)) * 7 % vocabulary).repeat(2, 1)
    ids[1, :-CHECK_LENGTH] = ids[1, :-CHECK_LENGTH].flip(0)
    with attach(model, edits=[Borrow(NOWHERE)]) as probe:
        one, other = probe.forward(ids)[0][:, -CHECK_LENGTH:]
    gap, bound = relative_difference(other, one), CLOSED.of(model.dtype)
    if gap > bound:
        raise UnsupportedError(
            "a borrowed context is not defined for this model: a document before the prompt changes its states even "
            "if no query sees the document, as in layers with a recurrent state",
            where=type(model).__name__, got=f"a relative difference of states of {gap:.2g}",
            expected=f"at most {bound:.2g}", remedy=MEASURE_INSTEAD,
        )  # fmt: skip


register(
    EditKind(
        "context", "context=borrowed[@LAYERS]",
        "what each query sees: it also attends to keys of another document before the prompt, so that every query sees "
        "equally many keys. `@LAYERS`: in these layers only; in the others the prompt sees itself only. Rows are "
        "measured without the donor keys; `left` is the total with them. `posleak trace` compares this run with the "
        "ordinary one",
        "edits of the embedding or the read of position 0, and of visibility; models with learned positions, scaled "
        "queries or recurrent layers", "context=borrowed@0-5",
        lambda value, scope: {"borrowed": Borrow(scope)}[value], scoped=True,
    )
)  # fmt: skip
