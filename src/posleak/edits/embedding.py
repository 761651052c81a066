"""Replace the embedding at position 0: `bos=zero|mean|noise[:SEED]|token:ID|none|random`."""

from __future__ import annotations

import hashlib
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
    noise  a random direction for each prompt (`number`: random seed), with the norm of the original embedding
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
        same = None if self.kind == "noise" else self.vector(table)

        def put(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            probe.effect_of(self).note("the embedding at position 0")
            first = out[:, 0]
            new = self.noise(args[0], first) if same is None else same.to(out).expand_as(first)
            return torch.cat([new[:, None], out[:, 1:]], dim=1)

        with table.register_forward_hook(put):  # removed at the end of the block
            yield

    def vector(self, table: torch.nn.Module) -> Tensor:
        """Return the new embedding [W]. The module is called, since it may scale its rows."""
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
            return torch.zeros_like(like)

    def noise(self, ids: Tensor, first: Tensor) -> Tensor:
        """Return a vector with the norm of `first` [B, W] for each prompt of ids [B, T].

        It depends on the seed and on the prompt's tokens after position 0, and on nothing else in the batch.
        """
        import torch

        def direction(prompt: bytes) -> Tensor:
            digest = hashlib.sha256(f"{self.number}:".encode() + prompt).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            return torch.randn(first.shape[-1], generator=generator)

        drawn = torch.stack([direction(row.tobytes()) for row in ids[:, 1:].cpu().numpy().astype("<i8")])
        noise: Tensor = (drawn / drawn.norm(dim=-1, keepdim=True)).to(first) * first.norm(dim=-1, keepdim=True)
        return noise


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
                remedy="pass prompts without BOS (for texts: --bos none), or use bos=random",
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
        "the vocabulary. `noise`: a random direction with the norm of the original embedding, different in each "
        "prompt; it depends on SEED (default 0) and on the prompt's tokens. `token`: the embedding of the token ID. "
        "`none`: no BOS; the prompt's own first token is at position 0. `random`: a random token, different in each "
        "prompt",
        "an ID outside the vocabulary; a second edit of the embedding at position 0, such as `patch0`",
        "bos=mean", _make,
    )
)  # fmt: skip
