"""Lending by head: some heads also attend to keys of a donor document, the others to keys of the prompt only.

A head with the share α has the output (1 − α) · attention to its own keys + α · attention to its own and lent keys. The
shares 0 and 1 are interventions; derivatives with respect to shares between them rank the heads (analyses/circuit).

`CopyLayout` puts several copies of a prompt after one donor, each with shares of its own, so that the states of the
donor, which do not depend on the shares, are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .visibility import Visibility

if TYPE_CHECKING:
    from .call import Call


@dataclass(frozen=True)
class Lending:
    """The heads of a call that attend to lent keys.

    share   α of each head: 0 own keys only, 1 also lent keys
    own     visible keys without lent ones; the visibility of the call includes them
    """

    share: Float[Tensor, "#B H"]
    own: Visibility


@dataclass(frozen=True)
class CopyLayout:
    """Where the copies of a prompt are in the tokens of a forward pass.

    length, donor   tokens of the prompt, and of the donor before it
    copies          number of copies of the prompt
    joined          one sequence [donor][copy 1][copy 2]…; otherwise each copy is a sequence of its own after the donor
    """

    length: int
    donor: int
    copies: int
    joined: bool

    def arrange(self, documents: Int[Tensor, "B document"]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of the pass, and their position ids if these are not the natural ones."""
        if not self.joined:
            return documents.repeat_interleave(self.copies, dim=0), None
        position = torch.arange(self.donor + self.length, device=documents.device)
        position = torch.cat([position[: self.donor], position[self.donor :].repeat(self.copies)])
        return documents[:, position], position.expand(len(documents), -1)

    def prompts(self, x: Float[Tensor, "B heads T E"]) -> Float[Tensor, "BC heads N E"]:
        """Return what x has at the tokens of the prompt, with one row for each prompt and copy."""
        x = x[:, :, self.donor :]
        return x.unflatten(2, (self.copies, self.length)).transpose(1, 2).flatten(0, 1) if self.joined else x

    def documents(self, x: Float[Tensor, "B heads T E"]) -> Float[Tensor, "BC heads document E"]:
        """Return what x has at the tokens of the donor and of the prompt, with one row for each prompt and copy."""
        if not self.joined:
            return x
        donor = x[:, :, : self.donor].repeat_interleave(self.copies, dim=0)
        return torch.cat([donor, self.prompts(x)], dim=2)

    def sequence(
        self, donor: Float[Tensor, "B heads donor E"], prompts: Float[Tensor, "BC heads N E"]
    ) -> Float[Tensor, "B heads T E"]:
        """Return the sequences of the pass from their donors and prompts: the inverse of `prompts`."""
        if self.joined:
            prompts = prompts.unflatten(0, (len(donor), self.copies)).transpose(1, 2).flatten(2, 3)
        return torch.cat([donor, prompts], dim=2)

    def view(self, call: Call, lent: Visibility, lending: Lending) -> Call:
        """Return the call of the queries of all copies, each with the keys of its own document.

        lent: visible keys, lent ones included, of the queries of one prompt [N, document]
        """
        bias = None if call.bias is None else call.bias[:, :, self.donor :]
        return replace(
            call, query=self.prompts(call.query), key=self.documents(call.key), value=self.documents(call.value),
            visibility=lent, bias=bias, lending=lending,
        )  # fmt: skip


@dataclass(frozen=True)
class Copies:
    """The attention of a pass over several copies of a prompt: `call` has the queries of the copies, `donor` the
    attention call of the donor alone."""

    layout: CopyLayout
    call: Call
    donor: Call
