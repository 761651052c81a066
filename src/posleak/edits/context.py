"""`context=borrowed`: every query sees equally many keys, because those that it lacks are lent by another document.

The model reads [donor of N + 64 tokens] [prompt of N tokens], position ids in order. The donor's queries see the donor
only, and the prompt's position 0 sees itself only. Every later query of the prompt sees its nearest N keys: its own,
position 0, and as many of the donor's last ones as it lacks. A layer's own window applies on top; where it always
shows the first token, that is the prompt's position 0, and the window is filled up without it. In layers out of scope
the prompt sees itself only.

Rows are taken without the lent keys, so that they split into mask, drift and sink; what the lent keys take away from
the total is kept beside them as `lent`.
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

SHORT = 32
"""Length of the prompt on which it is checked that nothing but attention carries a donor to it."""


@dataclass(frozen=True)
class Borrow(ScopedEdit):
    """Queries of the layers in scope are lent the keys that they lack."""

    name: ClassVar[str] = "context=borrowed"
    site: ClassVar[Site] = Site.CONTEXT
    needs_causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if any(head is not None for _, _, head in self.scope.items):
            raise InputError("a context is lent to whole layers", where=self.text, expected="layers, as in @0-5")

    def prompts(self, prompts: Prompts) -> Prompts:
        return prompts.after_donors()

    def edit(self, call: Call) -> Call:
        length, lends = (call.query.shape[2] - DONOR_MARGIN) // 2, bool(self.scope.heads(call).any())
        seen = call.visibility
        seen.cached(("same after a donor", length), lambda: require_same_sight(seen, length))
        rule = borrowed(seen.rule, length, lends, seen.cached("keeps first", lambda: keeps_first(seen)))
        return replace(
            call, visibility=call.visibility.with_rule(("borrowed", lends), rule), start=length + DONOR_MARGIN
        )

    def changed_heads(self, before: Call, after: Call) -> int:
        """Those that are lent something."""
        return int(self.scope.heads(before).sum())


def require_same_sight(seen: Visibility, length: int) -> None:
    """Refuse a layer in which a prompt sees other keys of its own after a donor: chunks are counted from the start.

    Position 0 is no such key: a layer may show it to every query, and is then made to show the prompt's."""
    import torch

    rows = torch.unique(torch.linspace(0, length - 1, 16).long())
    moved = seen.rows(rows + length + DONOR_MARGIN, slice(length + DONOR_MARGIN + 1, None))
    if not torch.equal(moved, seen.rows(rows, slice(1, length))):
        raise UnsupportedError(
            "a borrowed context is not defined here: attention is cut into chunks that are counted from the first "
            "token, so that a document before the prompt moves them",
            remedy=f"use a --length that is a multiple of the chunk, less {DONOR_MARGIN}",
        )  # fmt: skip


def keeps_first(seen: Visibility) -> bool:
    """Does the layer show position 0 to the last query, which does not see the key behind it?"""
    import torch

    first, second = seen.rows(torch.tensor([seen.shape[2] - 1]), slice(0, 2))[0, 0, 0].tolist()
    return bool(first and not second)


def borrowed(rule: Rule, length: int, lends: bool = True, kept: bool = False) -> Rule:
    """Another rule, narrowed: a donor of length + 64 keys among itself, then a prompt that sees the nearest `length`
    keys, or itself only if nothing is lent.

    kept: the rule shows position 0 to every query. Then the prompt's is shown, and a window has room for one lent key
    more, since position 0 is not one of those that it is filled with.
    """
    import torch

    start = length + DONOR_MARGIN

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own: Tensor = rule(batch, head, query, key)
        if kept:
            lent = (query >= start) & (key < start) & (key > 0) & rule(batch, head, query, (key + 1).clamp(max=start))
            first = (query >= start) & (key == start) & rule(batch, head, query - start, key - start)
            own = torch.where(query < start, own, lent | first | ((key > start) & own))
        near = key > query - length if lends else key >= start
        return own & ((query < start) | torch.where(query == start, key == start, near))

    return seen


INSTEAD = "`posleak measure` splits its leakage into mask, drift and sink"
"""The remedy where a borrowed context is not defined."""

NOWHERE = Scope(everywhere=False)
"""No layer at all: the donor is there, and nothing is lent."""


def require_closed(model: PreTrainedModel) -> None:
    """Refuse a model in which the donor changes a prompt that does not see it: there, lending is not what makes the
    difference. The same prompt is read after two donors, at the same positions, with nothing lent."""
    import torch

    from posleak.probe import attach, relative_difference

    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    ids = (torch.arange(2 * SHORT + DONOR_MARGIN, device=input_device(model)) * 7 % vocabulary).repeat(2, 1)
    ids[1, :-SHORT] = ids[1, :-SHORT].flip(0)
    with attach(model, edits=[Borrow(NOWHERE)]) as probe:
        one, other = probe.forward(ids)[0][:, -SHORT:]
    gap, bound = relative_difference(other, one), CLOSED.of(model.dtype)
    if gap > bound:
        raise UnsupportedError(
            "a borrowed context is not defined for this model: what stands before a prompt changes it although no "
            "query sees it, through layers that carry a state along",
            where=type(model).__name__, got=f"states differ by {gap:.2g}, relative", expected=f"at most {bound:.2g}",
            remedy=INSTEAD,
        )  # fmt: skip


register(
    EditKind(
        "context", "context=borrowed[@LAYERS]",
        "what each query sees: keys of another document, which stands before the prompt, in the place of those that it "
        "lacks, so that every query sees equally many. `@LAYERS`: only there; in the other layers the prompt sees "
        "itself only. Rows are measured without the lent keys; `left` is the total with them. `posleak trace` compares "
        "this with the ordinary pass",
        "edits of the embedding or the read of position 0, and of visibility; models with learned positions, scaled "
        "queries or recurrent layers", "context=borrowed@0-5",
        lambda value, scope: {"borrowed": Borrow(scope)}[value], scoped=True,
    )
)  # fmt: skip
