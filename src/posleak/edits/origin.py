"""What is read at position 0: `sink=cut` and `sink=freeze`, at chosen heads or layers, and `patch0=ID`."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from posleak.errors import InputError
from posleak.probe.plan import default_plan

from .base import EditKind, NamedEdit, ScopedEdit, Site, register

if TYPE_CHECKING:
    from torch import Tensor

    from posleak.probe import Call, Probe


@dataclass(frozen=True)
class CutSink(ScopedEdit):
    """No later query reads position 0; the rest of its attention is renormalised."""

    name: ClassVar[str] = "sink=cut"
    site: ClassVar[Site] = Site.ORIGIN
    needs_causal: ClassVar[bool] = True

    def at(self, call: Call, heads: Tensor) -> Call:
        return replace(call, unread=heads)


@dataclass(frozen=True)
class FreezeSink(ScopedEdit):
    """Every later query gives position 0 the same share of attention: the references' mean, per head and prompt."""

    name: ClassVar[str] = "sink=freeze"
    site: ClassVar[Site] = Site.ORIGIN
    needs_causal: ClassVar[bool] = True

    def at(self, call: Call, heads: Tensor) -> Call:
        from posleak.probe import call_rows

        late = call_rows(call, default_plan(call.query.shape[2])).references
        share = (late.first[..., 0] - late.log_z).exp().mean(-1)  # [B, H]
        return replace(call, frozen=share.masked_fill(~heads, math.nan))


class FirstKeys(threading.local):
    """Keys and values of position 0 in one forward pass, by attention call: [1, K, E].

    Each thread has its own: specs of several threads may share an edit. `there` [B]: prompts that begin with the token.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.there: Tensor | None = None
        self.probe: Probe | None = None

    def __reduce__(self) -> tuple[type[FirstKeys], tuple[()]]:
        return FirstKeys, ()

    def observe(self, call: Call, out: Tensor) -> None:
        self.seen.append((call.key[:, :, 0], call.value[:, :, 0]))

    def forget(self) -> None:
        self.seen.clear()
        self.there = self.probe = None


@dataclass(frozen=True)
class PatchOrigin(NamedEdit):
    """Later queries read another token's trajectory at position 0, taken from that token's own one-token run.

    Position 0 itself starts from the embedding that it has; no later query reads what becomes of that.
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
        self._taken.probe = probe
        try:
            yield
        finally:
            self._taken.forget()

    def reads(self, ids: Tensor) -> None:
        """The token's own run is made before the first pass, when all other edits are installed: it has them too."""
        import torch

        probe = self._taken.probe
        if probe is not None and not self._taken.seen:
            with probe.side_pass(self._taken):
                probe.forward(torch.tensor([[self.token]], device=ids.device))
        self._taken.there = ids[:, 0] == self.token

    def edit(self, call: Call) -> Call:
        (key, value), there = self._taken.seen[call.index], self._taken.there
        if there is None or bool(there.all()):
            return call
        return replace(call, key=_put_first(call.key, key, there), value=_put_first(call.value, value, there))


def _put_first(x: Tensor, first: Tensor, keep: Tensor) -> Tensor:
    """x [B, K, T, E] with its position 0 replaced, by a copy, but for the prompts to keep [B]."""
    import torch

    chosen = torch.where(keep.to(x.device)[:, None, None], x[:, :, 0], first.to(x))
    return torch.cat([chosen[:, :, None], x[:, :, 1:]], dim=2)


register(
    EditKind(
        "sink", "sink=cut|freeze[@LAYERS.HEADS]",
        "what queries after position 0 read there. `cut`: nothing, and the rest of their attention is renormalised. "
        "`freeze`: all of them the same share of their attention, which is the mean share of the reference queries, "
        "per head and prompt",
        "`mask` and `ring`; a second edit of the read of position 0, even at other layers", "sink=cut@3-5,7.0",
        lambda value, scope: {"cut": CutSink(scope), "freeze": FreezeSink(scope)}[value], scoped=True,
    )
)  # fmt: skip
register(
    EditKind(
        "patch0", "patch0=ID",
        "what all queries read at position 0: in every layer the key and the value that the token ID has in a sequence "
        "of its own. Later queries cannot tell this from the token itself (`bos=token:ID`). The state of position 0 "
        "changes too, since it reads its own key, but no other query reads it",
        "an ID outside the vocabulary; `mask` and `ring`; a second edit of the embedding at position 0, which `bos` is "
        "too", "patch0=42",
        lambda value, scope: PatchOrigin(int(value)),
    )
)  # fmt: skip
