"""What is read at position 0: `sink=cut` and `sink=freeze`, at chosen heads or layers, and `patch0=ID`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from posleak.errors import InputError
from posleak.probe import Call, Probe, call_rows, default_plan

from .base import NamedEdit, Site
from .scope import EVERYWHERE, Scope


@dataclass(frozen=True)
class CutSink(NamedEdit):
    """No later query reads position 0; the rest of its attention is renormalised."""

    scope: Scope = EVERYWHERE

    site: ClassVar[Site] = Site.ORIGIN
    needs_causal: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"sink=cut{self.scope.text}"

    def edit(self, call: Call) -> Call:
        heads = self.scope.heads(call)
        return replace(call, unread=heads) if bool(heads.any()) else call


@dataclass(frozen=True)
class FreezeSink(NamedEdit):
    """Every later query reads one share from position 0: the mean of the reference queries, per head and prompt."""

    scope: Scope = EVERYWHERE

    site: ClassVar[Site] = Site.ORIGIN
    needs_causal: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"sink=freeze{self.scope.text}"

    def edit(self, call: Call) -> Call:
        heads = self.scope.heads(call)
        if not bool(heads.any()):
            return call
        late = call_rows(call, default_plan(call.query.shape[2])).references
        share = (late.sigma - late.log_z).exp().mean(-1)  # [B, H]
        return replace(call, frozen=share.masked_fill(~heads, torch.nan))


@dataclass
class FirstKeys:
    """Keys and values of position 0, call by call: [1, K, E]; `there` [B]: prompts that have that token already."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    there: Tensor | None = None

    def observe(self, call: Call, out: Tensor) -> None:
        self.seen.append((call.key[:, :, 0], call.value[:, :, 0]))


@dataclass(frozen=True)
class PatchOrigin(NamedEdit):
    """Later queries read another token's trajectory at position 0, taken from that token's own one-token run.

    Nothing else is touched: position 0 itself goes on from the embedding it has, but nobody reads it any more.
    """

    token: int
    _taken: FirstKeys = field(default_factory=FirstKeys, compare=False, repr=False)

    site: ClassVar[Site] = Site.EMBEDDING
    needs_causal: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"patch0={self.token}"

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        vocabulary = probe.model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
        if not 0 <= self.token < vocabulary:
            raise InputError("no such token", where=self.text, got=self.token, expected=f"below {vocabulary}")
        with probe.aside(self._taken):
            probe.forward(torch.tensor([[self.token]], device=probe.model.device))
        try:
            yield
        finally:
            self._taken.seen.clear()

    def reads(self, ids: Tensor) -> None:
        self._taken.there = ids[:, 0] == self.token

    def edit(self, call: Call) -> Call:
        (key, value), there = self._taken.seen[call.index], self._taken.there
        if there is None or bool(there.all()):
            return call
        return replace(call, key=_put_first(call.key, key, there), value=_put_first(call.value, value, there))


def _put_first(x: Tensor, first: Tensor, keep: Tensor) -> Tensor:
    """x [B, K, T, E] with its position 0 replaced, by a copy, but for the prompts to keep [B]."""
    chosen = torch.where(keep.to(x.device)[:, None, None], x[:, :, 0], first.to(x))
    return torch.cat([chosen[:, :, None], x[:, :, 1:]], dim=2)
