"""Replace the embedding at position 0: `bos=zero|mean|noise[:SEED]|token:ID|none|random`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from posleak.errors import InputError
from posleak.inputs import Prompts
from posleak.inputs.bodies import GivenBody, RandomFirstBody
from posleak.inputs.vocabulary import FirstToken

from .base import EditKind, NamedEdit, Site, register
from .scope import Scope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posleak.probe import Probe


@dataclass(frozen=True)
class FirstEmbedding(NamedEdit):
    """Edit that replaces the embedding at position 0 before the first layer.

    zero   the zero vector
    mean   the mean embedding of the vocabulary
    noise  a random direction, the same for all prompts (`number`: random seed), with the norm of the original embedding
    token  the embedding of another token (`number`: its id)
    """

    kind: str
    number: int = 0

    site: ClassVar[Site] = Site.EMBEDDING

    @property
    def text(self) -> str:
        shown = {"token": f":{self.number}", "noise": f":{self.number}" if self.number else ""}
        return f"bos={self.kind}{shown.get(self.kind, '')}"

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        import torch

        table = probe.model.get_input_embeddings()
        new = self.vector(table)

        def put(module: torch.nn.Module, args: object, out: Tensor) -> Tensor:
            probe.effect_of(self).note("the embedding at position 0")
            first = new.to(out)
            if self.kind == "noise":
                first = first * out[:, 0].norm(dim=-1, keepdim=True)
            return torch.cat([first.expand_as(out[:, 0])[:, None], out[:, 1:]], dim=1)

        with table.register_forward_hook(put):  # removed at the end of the block
            yield

    def vector(self, table: torch.nn.Module) -> Tensor:
        """Return the new embedding [W], for noise a unit vector. The module is called, since it may scale its rows."""
        import torch

        weight = next(table.parameters())
        rows, device = weight.shape[0], weight.device
        with torch.inference_mode():
            if self.kind == "token":
                require_token(self.number, table, self.text)
                embedding: Tensor = table(torch.tensor([self.number], device=device))[0]
                return embedding
            like: Tensor = table(torch.zeros(1, dtype=torch.long, device=device))[0]
            if self.kind == "mean":
                ids = torch.arange(rows, device=device).split(8192)
                return (torch.stack([table(part).double().sum(0) for part in ids]).sum(0) / rows).to(like)
            if self.kind == "noise":
                direction = torch.randn(like.shape, generator=torch.Generator().manual_seed(self.number))
                norm: Tensor = direction.norm()
                return (direction / norm).to(like)
            return torch.zeros_like(like)


def require_token(token: int, table: torch.nn.Module, where: str) -> None:
    """Raise an InputError if the embedding table has no such token."""
    rows = next(table.parameters()).shape[0]
    if not 0 <= token < rows:
        raise InputError("unknown token id", where=where, got=token, expected=f"an id from 0 to {rows - 1}")


@dataclass(frozen=True)
class FirstOrdinary(NamedEdit):
    """Edit that puts the prompt's own first token (`none`) or a random token per prompt (`random`) at position 0."""

    kind: str

    site: ClassVar[Site] = Site.EMBEDDING

    @property
    def text(self) -> str:
        return f"bos={self.kind}"

    def prompts(self, prompts: Prompts) -> Prompts:
        if self.kind == "none" and isinstance(prompts.body, GivenBody):
            raise InputError(
                "prompts that were passed by the user have a fixed first token", where=self.text,
                remedy="pass prompts without BOS (for texts: bos='none'), or use bos=random",
            )  # fmt: skip
        first = FirstToken(self.kind, None, None)
        body = RandomFirstBody(prompts.body, prompts.vocabulary) if self.kind == "random" else prompts.body
        return replace(prompts, first=first, body=body)


def _make(value: str, scope: Scope) -> NamedEdit:
    kind, _, number = value.partition(":")
    if kind in ("none", "random") and not number:
        return FirstOrdinary(kind)
    if kind == "token" or (kind == "noise" and number):
        return FirstEmbedding(kind, int(number))
    return {name: FirstEmbedding(name) for name in ("zero", "mean", "noise")}[value]


register(
    EditKind(
        "bos", "bos=zero|mean|noise[:SEED]|token:ID|none|random",
        "the token embedding at position 0, before the first layer. `zero`: all zeros. `mean`: the mean embedding of "
        "the vocabulary. `noise`: a random direction with the norm of the original embedding; the direction depends on "
        "SEED (default 0) and is the same in all prompts. `token`: the embedding of the token ID. `none`: no BOS; the "
        "prompt's own first token is at position 0. `random`: a random token, different in each prompt",
        "an ID outside the vocabulary; a second edit of the embedding at position 0, such as `patch0`",
        "bos=mean", _make,
    )
)  # fmt: skip
