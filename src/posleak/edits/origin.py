"""Change what queries read at position 0: `sink=cut` and `sink=freeze`, at chosen layers and heads, and `patch0=ID`."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from posleak.probe.plan import default_plan

from .base import EditKind, NamedEdit, ScopedEdit, Site, register
from .embedding import require_token

if TYPE_CHECKING:
    from torch import Tensor

    from posleak.probe import Call, Probe


@dataclass(frozen=True)
class CutSink(ScopedEdit):
    """Edit that hides position 0 from later queries; the rest of their attention is renormalised."""

    name: ClassVar[str] = "sink=cut"
    site: ClassVar[Site] = Site.ORIGIN
    needs_causal: ClassVar[bool] = True

    def at(self, call: Call, heads: Tensor) -> Call:
        return replace(call, unread=heads)


@dataclass(frozen=True)
class FreezeSink(ScopedEdit):
    """Edit that fixes the attention of later queries to position 0 at its mean over references, per head and prompt."""

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

    Each thread has its own, since specs of several threads may share an edit.
    unchanged: bool [B], prompts that begin with the token already
    """

    def __init__(self) -> None:
        self.by_call: list[tuple[Tensor, Tensor]] = []
        self.unchanged: Tensor | None = None
        self.probe: Probe | None = None

    def __reduce__(self) -> tuple[type[FirstKeys], tuple[()]]:
        return FirstKeys, ()

    def observe(self, call: Call, out: Tensor) -> None:
        self.by_call.append((call.key[:, :, 0], call.value[:, :, 0]))

    def forget(self) -> None:
        self.by_call.clear()
        self.unchanged = self.probe = None


@dataclass(frozen=True)
class PatchOrigin(NamedEdit):
    """Edit that replaces keys and values at position 0 by those of another token in a run on that token alone.

    The state of position 0 starts from its own embedding; no later query reads it.
    """

    token: int
    _first: FirstKeys = field(default_factory=FirstKeys, compare=False, repr=False)

    site: ClassVar[Site] = Site.EMBEDDING
    needs_causal: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"patch0={self.token}"

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        require_token(self.token, probe.model.get_input_embeddings(), self.text)
        self._first.probe = probe
        try:
            yield
        finally:
            self._first.forget()

    def reads(self, ids: Tensor) -> None:
        """Run the token alone before the first pass, when all other edits are installed and apply to it too."""
        import torch

        probe = self._first.probe
        if probe is not None and not self._first.by_call:
            with probe.side_pass(self._first):
                probe.forward(torch.tensor([[self.token]], device=ids.device))
        self._first.unchanged = ids[:, 0] == self.token

    def edit(self, call: Call) -> Call:
        (key, value), keep = self._first.by_call[call.index], self._first.unchanged
        if keep is None or bool(keep.all()):
            return call
        return replace(call, key=_put_first(call.key, key, keep), value=_put_first(call.value, value, keep))


def _put_first(x: Tensor, first: Tensor, keep: Tensor) -> Tensor:
    """Return a copy of x [B, K, T, E] with position 0 replaced, except in the prompts `keep` [B]."""
    import torch

    chosen = torch.where(keep.to(x.device)[:, None, None], x[:, :, 0], first.to(x))
    return torch.cat([chosen[:, :, None], x[:, :, 1:]], dim=2)


register(
    EditKind(
        "sink", "sink=cut|freeze[@LAYERS.HEADS]",
        "what later queries read at position 0. `cut`: nothing; the rest of their attention is renormalised. `freeze`: "
        "the attention of all of them to position 0 is fixed at the mean of the reference queries, per head and prompt",
        "`mask` and `ring`; a second edit of the read of position 0, even at other layers", "sink=cut@3-5,7.0",
        lambda value, scope: {"cut": CutSink(scope), "freeze": FreezeSink(scope)}[value], scoped=True,
    )
)  # fmt: skip
register(
    EditKind(
        "patch0", "patch0=ID",
        "what all queries read at position 0: in every layer the key and the value that the token ID has in a sequence "
        "of its own. For later queries this is equivalent to the token itself (`bos=token:ID`). The state of position "
        "0 changes too, since it reads its own key, but no other query reads it",
        "an ID outside the vocabulary; `mask` and `ring`; a second edit of the embedding at position 0, such as `bos`",
        "patch0=42",
        lambda value, scope: PatchOrigin(int(value)),
    )
)  # fmt: skip
