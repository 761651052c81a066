"""Branches of a prompt after a donor document: the same prompt under several masks, read in one forward pass.

    A  every query sees its own prompt only
    B  every query but position 0 also sees the donor's last keys, N keys in total
    C  as B, and position 0 stands at one distance: its key is moved so that every query sees it at offset N

Positions are those of the *document* [donor][prompt]. In C position 0 is outside of it: the positions of the prompt are
smaller by one, so that the donor ends right before position 1, and every query sees the offsets 0 … N − 2 and N. With
the positions of B, query i would miss the offset i, which tells its position.

The donor sees itself only, so that its states do not depend on the branch, and one copy of it serves all branches: a
joined `BranchLayout` is the sequence [A][B][donor][C], with explicit masks and position ids. Models with a recurrent
state or with biases, and those that count their tokens themselves, read one document for each branch instead; these
follow one another in the batch.

`BranchLayout.view` returns the attention call of one branch in the coordinates of its document, where rows are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from .call import Call, MovedKey
from .placement import Rotation
from .visibility import Rule, Visibility

A, B, C = BRANCHES = range(3)
"""Numbers of the branches."""

DONOR = len(BRANCHES)
"""Number of the donor among the segments of a joined sequence."""


@dataclass(frozen=True)
class BranchLayout:
    """Where donor and branches are in the tokens of a forward pass.

    length, donor   tokens of the prompt, and of the donor before it
    joined          one sequence holds all branches; otherwise each is a sequence of its own after the donor
    rules           the visible keys of each branch in document coordinates, in one attention call
    """

    length: int
    donor: int
    joined: bool
    rules: tuple[Rule, ...] = ()

    @cached_property
    def segment(self) -> Int[Tensor, "T"]:
        """The segment of every token of a joined sequence: the number of its branch, or DONOR."""
        sizes = torch.tensor([self.length, self.length, self.donor, self.length])
        return torch.tensor([A, B, DONOR, C]).repeat_interleave(sizes)

    @cached_property
    def position(self) -> Int[Tensor, "T"]:
        """The position in its document of every token of a joined sequence."""
        prompt = torch.arange(self.donor, self.donor + self.length)
        return torch.cat([prompt, prompt, torch.arange(self.donor), prompt])

    def arrange(self, documents: Int[Tensor, "B document"]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of the pass, and their position ids if these are not the natural ones."""
        if self.joined:
            position, of_c = (x.to(documents.device) for x in (self.position, (self.segment == C).long()))
            return documents[:, position], (position - of_c).expand(len(documents), -1)
        return documents.repeat_interleave(len(BRANCHES), dim=0), None

    def visibility(self, like: Visibility) -> Visibility:
        """Return the visible keys of every query of the pass; like: the model's own visibility of these queries."""
        rules = self.rules
        if self.joined:
            segment, position = self.segment.to(like.device), self.position.to(like.device)

            def joined(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                of, seen = segment[q], rules[A](b, h, position[q], position[k])  # for the donor all rules are the same
                for number in (B, C):
                    seen = torch.where(of == number, rules[number](b, h, position[q], position[k]), seen)
                same: Tensor = seen & ((segment[k] == of) | (segment[k] == DONOR))
                return same

            return Visibility(like.shape, joined, like.padding, device=like.device)

        def apart(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen: Tensor = rules[A](b, h, q, k)
            of = b % len(BRANCHES)
            for number in (B, C):
                seen = torch.where(of == number, rules[number](b, h, q, k), seen)
            return seen

        every = torch.ones(like.shape[0], like.shape[3], dtype=torch.bool, device=like.device)  # see Visibility.rows
        return Visibility(like.shape, apart, every, device=like.device)

    def first(self, branch: int) -> int:
        """Return the index in its sequence of the first token of a branch, or of the DONOR of a joined sequence."""
        return int((self.segment == branch).nonzero()[0]) if self.joined else self.donor

    def sequences(self, branch: int) -> slice:
        """Return the sequences of the batch that hold a branch."""
        return slice(None) if self.joined else slice(branch, None, len(BRANCHES))

    def of_branch(self, branch: int, x: Tensor) -> Tensor:
        """Return the sequences of x that hold a branch; those of an x for all sequences are the same."""
        return x if len(x) == 1 else x[self.sequences(branch)]

    def closed_up(self, call: Call, rotation: Rotation) -> Call:
        """Return the call of separate documents with the positions of the prompt of C smaller by one."""
        back = torch.tensor([-1], device=call.query.device)

        def nearer(x: Tensor) -> Tensor:
            x = x.clone()
            x[C :: len(BRANCHES), :, self.donor :] = rotation.rotated(self.prompt(C, x), back)
            return x

        bias = call.bias
        if bias is not None:
            bias = bias.expand(len(call.query), -1, -1, -1).clone()
            of_c = bias[C :: len(BRANCHES), :, self.donor :]
            of_c[..., : self.donor] = of_c[..., 1 : self.donor + 1].clone()
        return replace(call, query=nearer(call.query), key=nearer(call.key), bias=bias)

    def prompt(self, branch: int, x: Tensor) -> Tensor:
        """Return what x [B, heads, T, …] has at the tokens of the prompt in one branch."""
        first = self.first(branch)
        return x[self.sequences(branch), :, first : first + self.length]

    def view(self, call: Call, branch: int) -> Call:
        """Return the call of one branch in document coordinates, without values, which sampled rows do not need.

        The view of A has the queries and keys of A, and the visible keys of B: rows are sampled with lent keys, too.
        """
        rows, donor = self.sequences(branch), self.first(DONOR) if self.joined else 0

        def document(x: Tensor) -> Tensor:
            return torch.cat([x[rows, :, donor : donor + self.donor], self.prompt(branch, x)], dim=2)

        query, key = document(call.query), document(call.key)
        old, T = call.visibility, self.donor + self.length

        def of_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen: Tensor = self.rules[max(branch, B)](b if self.joined else b * len(BRANCHES) + branch, h, q, k)
            return seen

        visibility = old.cached(("view", branch), lambda: Visibility((len(query), 1, T, T), of_row, device=old.device))
        bias = None if call.bias is None else self.of_branch(branch, call.bias)
        moved = None if call.moved is None or branch != C else MovedKey(self.donor, call.moved.logits[rows])
        return replace(
            call, query=query, key=key, value=key[..., :0], visibility=visibility, bias=bias, moved=moved,
            start=self.donor, layout=None,
        )  # fmt: skip
