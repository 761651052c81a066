"""`context=borrowed`: every query also attends to keys of another document, so that all see equally many keys.

The model reads [donor of N + 64 tokens] [prompt of N tokens] with consecutive position ids. Queries of the donor see
the donor only, and the prompt's position 0 sees itself only. Every later query of the prompt sees the nearest N keys:
those of the prompt, and as many of the donor's last keys as are missing. A layer's own window applies as well. If it
always shows the first token, the prompt's position 0 is shown, and the window is filled with other keys. In layers and
heads outside the scope, queries see only the prompt.

Rows are computed without donor keys, so that they split into mask, drift and sink. The effect of the donor keys on the
total is stored separately as `lent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from posleak.errors import UnsupportedError
from posleak.inputs import Prompts
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.models import input_device
from posleak.rounding import CLOSED

from .base import EditKind, NamedEdit, ScopedEdit, Site, register
from .scope import Scope

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

    from posleak.probe import Call, Visibility
    from posleak.probe.branches import BranchLayout
    from posleak.probe.call import MovedKey
    from posleak.probe.lending import CopyLayout
    from posleak.probe.placement import Rotation
    from posleak.probe.visibility import Rule

BORROWED, BRANCHED = "context=borrowed", "context=branches"

CHECK_LENGTH = 32
"""Length of the prompt on which it is checked that a donor changes prompts through attention only."""


class AfterDonor(NamedEdit):
    """An edit under which the model reads a donor document before each prompt.

    apart   each copy of the prompt is a sequence of its own; otherwise one sequence holds the donor and all copies
    """

    site: ClassVar[Site] = Site.CONTEXT
    needs_causal: ClassVar[bool] = True

    apart: bool = False

    @property
    def copies(self) -> int:
        """The number of copies of the prompt that the model reads."""
        return 1

    def donor_tokens(self, length: int) -> int:
        """Return the number of tokens of the donor before a prompt of this length."""
        return length + DONOR_MARGIN

    def sequences(self, length: int) -> tuple[int, int]:
        """Return the number of sequences that the model reads for a prompt, and their tokens."""
        donor = self.donor_tokens(length)
        return (self.copies, donor + length) if self.apart else (1, donor + self.copies * length)

    def prompt_length(self, tokens: int, copies: int | None = None) -> int:
        """Return the length of the prompt in a sequence of this many tokens that has a donor and these copies of it."""
        return (tokens - DONOR_MARGIN) // (1 + (copies or self._copies_in_sequence))

    @property
    def _copies_in_sequence(self) -> int:
        return 1 if self.apart else self.copies

    def document_starts(self, tokens: int) -> list[int]:
        """Return the indices of the first tokens of the donor and the prompts in a sequence of this many tokens."""
        length = self.prompt_length(tokens)
        return [0, *range(self.donor_tokens(length), tokens, length)]

    def prompts(self, prompts: Prompts) -> Prompts:
        return prompts.after_donors(self.donor_tokens(prompts.length))


@dataclass(frozen=True)
class Borrow(AfterDonor, ScopedEdit):
    """Edit that lets queries of the layers and heads in scope also attend to keys of a donor: branch B alone."""

    name: ClassVar[str] = BORROWED

    def edit(self, call: Call) -> Call:
        from posleak.probe.lending import Lending

        length, heads, old = self.prompt_length(call.query.shape[2]), self.scope.heads(call), call.visibility
        start = self.donor_tokens(length)

        def seen(visible_donor: bool) -> Visibility:
            name = "borrowed", visible_donor
            rule = old.cached(("rule", *name), lambda: borrowing(old, length, start)(visible_donor=visible_donor))
            return old.with_rule(name, rule)

        if bool(heads.all()) or not bool(heads.any()):
            return replace(call, visibility=seen(bool(heads.any())), start=start)
        lending = Lending(heads[None].to(call.query), seen(False))
        return replace(call, visibility=seen(True), start=start, lending=lending)

    def changed_heads(self, before: Call, after: Call) -> int:
        """Return the number of heads that see donor keys."""
        return int(self.scope.heads(before).sum())


@dataclass(frozen=True, eq=False)
class LendByHead(AfterDonor):
    """Edit that reads several copies of the prompt after one donor; in each copy, other heads attend to donor keys.

    share   α of each copy, attention call and head (probe/lending.py)
    """

    share: Float[Tensor, "C L H"]
    apart: bool = False

    @property
    def text(self) -> str:
        """The name of the edit. It does not include the shares: the edit is used inside one analysis only."""
        return f"{BORROWED}×{self.copies}"

    @property
    def copies(self) -> int:
        return len(self.share)

    def layout(self, length: int) -> CopyLayout:
        """Return the layout for prompts of this length."""
        from posleak.probe.lending import CopyLayout

        return CopyLayout(length, self.donor_tokens(length), self.copies, joined=not self.apart)

    def arrange(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.layout(self.prompt_length(ids.shape[1], 1)).arrange(ids)

    def edit(self, call: Call) -> Call:
        from posleak.probe.lending import Copies, Lending

        layout, old = self.layout(self.prompt_length(call.query.shape[2])), call.visibility
        if call.bias is not None and layout.joined:
            raise UnsupportedError(
                "several copies cannot share one sequence: the model adds a position-dependent bias to its logits",
                where=f"layer {call.layer}", remedy="use LendByHead(share, apart=True)",
            )  # fmt: skip
        lent, own = old.cached(("copies", layout), lambda: self._visible(layout, old))
        share = self.share[:, call.index, : call.heads].to(call.query)
        lending = Lending(share.repeat(call.query.shape[0] // (1 if layout.joined else layout.copies), 1), own)
        donor = call.slice_positions(0, layout.donor)
        return replace(call, copies=Copies(layout, layout.view(call, lent, lending), donor))

    def _visible(self, layout: CopyLayout, old: Visibility) -> tuple[Visibility, Visibility]:
        """Return the visible keys of a prompt's queries, with lent keys and without them."""
        from posleak.probe import Visibility

        length, start = layout.length, layout.donor
        rule_of = borrowing(old, length, start)

        def seen(visible_donor: bool) -> Visibility:
            rule = rule_of(visible_donor=visible_donor)

            def of_prompt(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return cast("Tensor", rule(b, h, q + start, k))

            return Visibility((1, 1, length, start + length), of_prompt, device=old.device)

        return seen(True), seen(False)

    def changed_heads(self, before: Call, after: Call) -> int:
        return before.heads


@dataclass(frozen=True)
class Branches(AfterDonor):
    """Edit that reads the prompt three times after its donor, as the branches A, B and C (probe/branches.py).

    long    the donor has 3N tokens, whose queries see at most N keys each, as those of the prompt do
    """

    apart: bool = False
    long: bool = False

    @property
    def text(self) -> str:
        return BRANCHED + ":apart" * self.apart + ":long" * self.long

    @property
    def copies(self) -> int:
        return 3

    def donor_tokens(self, length: int) -> int:
        return 3 * length if self.long else super().donor_tokens(length)

    def prompt_length(self, tokens: int, copies: int | None = None) -> int:
        if self.long:
            return tokens // (3 + (copies or self._copies_in_sequence))
        return super().prompt_length(tokens, copies)

    def document_starts(self, tokens: int) -> list[int]:
        from posleak.probe.branches import BRANCHES, DONOR

        layout = self.layout(self.prompt_length(tokens))
        return [layout.first(segment) for segment in (*BRANCHES, DONOR)] if layout.joined else [0, layout.donor]

    def layout(self, length: int) -> BranchLayout:
        """Return the layout for prompts of this length."""
        from posleak.probe.branches import BranchLayout

        return BranchLayout(length, self.donor_tokens(length), joined=not self.apart)

    def arrange(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.layout(self.prompt_length(ids.shape[1], 1)).arrange(ids)

    def edit(self, call: Call) -> Call:
        layout, old = self.layout(self.prompt_length(call.query.shape[2])), call.visibility
        if call.bias is not None and not self.apart:
            raise UnsupportedError(
                "branches of one sequence are not defined where the model adds a bias by position to its logits",
                where=f"layer {call.layer}", remedy=f"use --edit {replace(self, apart=True).text}",
            )  # fmt: skip

        branched, visibility = old.cached(("branches", self), lambda: self.branched(layout, old))
        rotation = None if call.placement is None else call.placement.rotation
        if rotation is None or rotation.frequency is None:
            raise UnsupportedError(
                "branch C is not defined here: the key of position 0 cannot be moved, since the rotation is not "
                "proportional to the position", where=f"layer {call.layer}", remedy=MEASURE_INSTEAD,
            )  # fmt: skip
        moved = self._moved(call, branched, rotation)
        call = call if branched.joined else branched.closed_up(call, rotation)
        return replace(call, visibility=visibility, layout=branched, moved=moved)

    def branched(self, layout: BranchLayout, own: Visibility) -> tuple[BranchLayout, Visibility]:
        """Return the layout with the rules of its branches, and the visible keys of the pass; own: the model's."""
        rule_of = partial(borrowing(own, layout.length, layout.donor), even_donor=self.long)
        ruled = replace(layout, rules=(rule_of(visible_donor=False), rule_of(), rule_of(fixed=True)))
        return ruled, ruled.visibility(own)

    def _moved(self, call: Call, layout: BranchLayout, rotation: Rotation) -> MovedKey:
        """Return the key of position 0 in branch C at offset N from every query."""
        import torch

        from posleak.probe.branches import BRANCHES, C
        from posleak.probe.call import MovedKey

        wide = torch.promote_types(call.query.dtype, torch.float32)
        query, keys = (layout.prompt(C, x).to(wide) for x in (call.query, call.key))
        steps = torch.arange(layout.length, device=keys.device) - layout.length  # to i − N
        key = rotation.rotated(keys[:, :, :1].expand_as(keys), steps)
        key = key.repeat_interleave(call.heads // keys.shape[1], dim=1)
        s = call.soft_capped((query * call.scaling * key).sum(-1))
        if call.bias is not None:
            at = torch.arange(layout.donor, layout.donor + layout.length, device=s.device)
            s = s + layout.of_branch(C, call.bias)[:, :, at, at - layout.length]
        if not layout.joined:
            every = s.new_full((len(call.query), *s.shape[1:]), torch.nan)
            every[C :: len(BRANCHES)] = s
            s = every
        return MovedKey(layout.first(C), s)

    def changed_heads(self, before: Call, after: Call) -> int:
        return before.heads


def require_shift_invariant(visibility: Visibility, length: int, donor: int) -> None:
    """Raise an UnsupportedError if a prompt sees other keys of its own after a donor, as with chunked attention.

    Position 0 is not compared: a layer may show it to every query, and `borrowed` then shows the prompt's.
    """
    import torch

    rows = torch.unique(torch.linspace(0, length - 1, 16).long())
    shifted = visibility.rows(rows + donor, slice(donor + 1, donor + length))
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


def borrowing(own: Visibility, length: int, donor: int) -> Callable[..., Rule]:
    """Return `borrowed` for the visible keys of a layer, after a check that a donor does not shift them."""
    require_shift_invariant(own, length, donor)
    return partial(borrowed, own.rule, length, donor, keeps_origin=keeps_first(own))


def borrowed(
    rule: Rule,
    length: int,
    start: int,
    *,
    visible_donor: bool = True,
    keeps_origin: bool = False,
    fixed: bool = False,
    even_donor: bool = False,
) -> Rule:
    """Return a rule for [donor of `start` keys] [prompt]: a prompt's query sees the nearest `length` keys.

    visible_donor   donor keys are visible; otherwise the prompt sees itself only
    keeps_origin    `rule` shows position 0 to every query. Then the prompt's position 0 replaces the donor's,
                    and a window has room for one more donor key
    fixed           position 0 stands outside the text, at the offset `length` from every query, and `rule` decides
                    whether it is visible there. The donor ends right before position 1, so that no offset is missing
    even_donor      queries of the donor see at most `length` keys: its position 0, and the nearest other ones
    """
    import torch

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own: Tensor = rule(batch, head, query, key)
        first = rule(batch, head, query, torch.full_like(key, start))
        reach = (key + (keeps_origin or fixed)).clamp(max=start)
        if keeps_origin:
            first = rule(batch, head, (query - start).clamp(min=0), torch.zeros_like(key))
        elif fixed:
            first = rule(batch, head, query, (query - length).clamp(min=0) + torch.zeros_like(key))
        donor = (key > query - length) & (key > 0) & rule(batch, head, query, reach) & visible_donor
        prompt = torch.where(key == start, first, torch.where(key < start, donor, own))
        prompt = torch.where(query == start, key == start, prompt)
        even = own & ((key > query - length + 1) | (key == 0))
        return torch.where(query < start, even if even_donor else own, prompt)

    return visible


MEASURE_INSTEAD = "use `posleak measure`, which splits the leakage into mask, drift and sink"
"""Remedy for models without a borrowed context."""

NOWHERE = Scope(everywhere=False)
"""No layer: each prompt follows a donor, but no query sees the donor's keys."""


def carried_difference(model: PreTrainedModel) -> float:
    """Return the largest relative change of a prompt's states by a donor that no query sees.

    It exceeds rounding in models that carry the donor along by other means than attention, such as a recurrent state.
    The same prompt is read after two donors at the same positions.
    """
    import torch

    from posleak.probe import attach, relative_difference
    from posleak.probe.native import states_of

    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    ids = (torch.arange(2 * CHECK_LENGTH + DONOR_MARGIN, device=input_device(model)) * 7 % vocabulary).repeat(2, 1)
    ids[1, :-CHECK_LENGTH] = ids[1, :-CHECK_LENGTH].flip(0)
    with attach(model, edits=[Borrow(NOWHERE)]) as probe:
        one, other = states_of(probe.forward(ids))[:, -CHECK_LENGTH:]
    return relative_difference(other, one)


def prefix_difference(model: PreTrainedModel) -> float:
    """Return the largest relative change of a text's states by what follows it: rounding in every causal model.

    It is more if layers depend on later tokens, or on the number of tokens that are read.
    """
    import torch

    from posleak.probe import attach, relative_difference
    from posleak.probe.native import states_of

    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    ids = torch.arange(2 * CHECK_LENGTH, device=input_device(model))[None] * 7 % vocabulary
    with attach(model) as probe:
        alone, whole = (states_of(probe.forward(part)) for part in (ids[:, :CHECK_LENGTH], ids))
    return relative_difference(whole[:, :CHECK_LENGTH], alone)


def branches_of(model: PreTrainedModel, *, long: bool = False) -> Branches:
    """Return the edit that reads all branches of a prompt: in one sequence if the model allows it, else apart.

    Branches are joined if the model takes position ids, and if a donor that no query sees leaves the prompt unchanged.
    """
    from posleak.probe import takes_positions

    carries = not takes_positions(model) or carried_difference(model) > CLOSED.of(model.dtype)
    return Branches(apart=carries, long=long)


def _make(value: str, scope: Scope) -> NamedEdit:
    name, *options = value.split(":")
    if name == "borrowed" and not options:
        return Borrow(scope)
    branches = Branches(apart="apart" in options, long="long" in options)
    if branches.text.partition("=")[2] != value or not scope.everywhere:
        raise ValueError(value)
    return branches


register(
    EditKind(
        "context", "context=borrowed[@LAYERS.HEADS]|branches[:apart][:long]",
        "what each query sees. `borrowed`: every query also attends to keys of another document before the prompt, so "
        "that it sees N keys. `@LAYERS.HEADS`: only these layers or heads attend to the document, as in `@0-5` or "
        "`@0.8,1.5`; all others see only the prompt. Rows are measured without the donor keys; `left` is the total "
        "with them. "
        "`branches`: the prompt is read three times after the document: alone, with borrowed keys, and with borrowed "
        "keys and position 0 at one distance. `posleak trace` decomposes the leakage by source from it. `:apart` reads "
        "three sequences instead of one; `:long` uses a document of three times the length, whose queries see equally "
        "many keys too",
        "edits of the embedding or the read of position 0, and of visibility; models with learned positions or scaled "
        "queries", "context=borrowed@0-5", _make, scoped=True,
    )
)  # fmt: skip
