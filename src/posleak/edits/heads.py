"""Ablate heads: `head=zero|mean@LAYERS.HEADS` replaces what the chosen heads write to the residual stream.

With o_h(p) the output of head h at position p, what attention returns before the output projection,

    zero   o_h(p) ← 0
    mean   o_h(p) ← mean of o_h over prompts and positions ≥ m

at every position p, 0 included. The attention of the head itself is unchanged: its rows are measured as they are, and
only what other layers read of it changes. The mean is the same at all positions, so that it carries none. It is fitted
on separate prompts like those of the run, without other edits, when a run starts.

The output is replaced where a module takes it: the first one whose input is what attention returned, with the heads
concatenated. This identifies the output projection without knowledge of model families. Models that change the output
before a module takes it, by a gate for example, are rejected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from posleak.errors import InputError, UnsupportedError
from posleak.inputs import Prompts
from posleak.models.parallel import ALONE

from .base import EditKind, ScopedEdit, Site, register
from .scope import Scope

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float, Float64
    from torch import Tensor

    from posleak.models import Subject
    from posleak.probe import Call, Probe

ZERO, MEAN = METHODS = ("zero", "mean")


@dataclass(frozen=True)
class AblatedHeads(ScopedEdit):
    """Edit that replaces the output of the heads in scope.

    method   ZERO or MEAN
    means    by attention call: the mean output of each head; a run fits them itself (`prepared`)
    """

    method: str = ZERO
    means: tuple[Float64[Tensor, "_H _Ev"], ...] | None = field(default=None, compare=False, repr=False)

    site: ClassVar[Site] = Site.HEADS

    def __post_init__(self) -> None:
        if self.scope.everywhere:
            raise InputError(
                "an ablation of heads needs a scope: all heads together are the whole attention",
                where=f"--edit {self.text}", remedy=f"name heads or layers, as in --edit {self.text}@3.1",
            )  # fmt: skip

    @property
    def text(self) -> str:
        return f"head={self.method}{self.scope.text}"

    def edit(self, call: Call) -> Call:
        return call

    def fit_bytes(self, depths: int, width: int, length: int) -> int:
        return 8 * depths * width if self.method == MEAN else 0

    def prepared(self, subject: Subject, base: Prompts, origin: int, cache: dict[Any, Any]) -> AblatedHeads:
        """Return the edit with means fitted on prompts like `base`."""
        if self.method == ZERO:
            return self
        from .positional import fit_prompts, head_means

        own = fit_prompts(subject, base)
        key = ("head means", own.source, own.policy, own.length, own.seed, origin)
        if key not in cache:
            cache[key] = head_means(subject.model, own, origin)
        return replace(self, means=cache[key])

    def replacement(self, call: int, out: Float[Tensor, "B H T Ev"]) -> Float[Tensor, "... H Ev"]:
        """Return what takes the place of the output of each head, at every token unless it has axes of tokens."""
        if self.method == ZERO:
            return out.new_zeros(out.shape[1], out.shape[3])
        if self.means is None:
            raise InputError(
                "the edit has no means yet", where=f"--edit {self.text}",
                remedy="use `posleak.measure` or `posleak.trace`, which fit them, or edit.prepared(…)",
            )  # fmt: skip
        return self.means[call].to(out)

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        from posleak.models.hold import this_thread_only
        from posleak.probe.native import backbone

        swap, before = OutputSwap(self, probe), probe.observers
        if self.means is not None:
            digest = hashlib.sha256(b"".join(means.numpy().tobytes() for means in self.means)).hexdigest()
            probe.effect_of(self).note(f"means of their output (sha256 {digest[:12]})")
        probe.observers = (*before, swap)
        try:
            with ExitStack() as hooks:
                for module in probe.model.modules():
                    hooks.enter_context(module.register_forward_pre_hook(this_thread_only(swap.before_module)))
                hooks.enter_context(backbone(probe.model).register_forward_hook(this_thread_only(swap.after_pass)))
                yield
        finally:
            probe.observers = before


@dataclass
class OutputSwap:
    """Observer of attention calls and hook of all modules: replaces the output of heads where a module takes it.

    waiting: call, chosen heads, concatenated output and its replacement, of an attention call whose output no module
    has taken yet. If processes share the heads, those of this one
    """

    edit: AblatedHeads
    probe: Probe
    waiting: tuple[Call, Bool[Tensor, "H"], Float[Tensor, "B T HEv"], Float[Tensor, "... H Ev"]] | None = None

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        self._require_taken()
        heads, ranks = self.edit.scope.heads(call), self.probe.ranks or ALONE
        self.waiting = None
        if count := int(heads.sum()):
            new = ranks.own(self.edit.replacement(call.index, out), -2)
            self.waiting = (call, ranks.own(heads, 0), concatenated(ranks.own(out, 1)), new)
            self.probe.effect_of(self.edit).calls[call.index] = (call.layer, count)

    def before_module(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        import torch

        if self.waiting is None or not args or not is_output(args[0], self.waiting[2]):
            return None
        (_, heads, _, replacement), self.waiting = self.waiting, None
        new = torch.where(heads[:, None], replacement, args[0].unflatten(-1, (len(heads), -1)))
        return (new.flatten(-2), *args[1:])

    def after_pass(self, *_: Any) -> None:
        self._require_taken()

    def _require_taken(self) -> None:
        if self.waiting is not None:
            (call, *_), self.waiting = self.waiting, None
            raise UnsupportedError(
                "the output of heads cannot be replaced: the model changes it before any module takes it, by a gate "
                "for example", where=f"layer {call.layer}, --edit {self.edit.text}", got=type(call.module).__name__,
                remedy="measure without the edit",
            )  # fmt: skip


def concatenated(out: Float[Tensor, "B H T Ev"]) -> Float[Tensor, "B T HEv"]:
    """Return the output of an attention call as output projections take it: heads concatenated."""
    return out.transpose(1, 2).flatten(2)


def is_output(x: object, whole: Float[Tensor, "B T HEv"]) -> bool:
    """Return whether x is the concatenated output of an attention call, however its leading axes are split."""
    import torch

    if not isinstance(x, torch.Tensor) or x.numel() != whole.numel() or x.shape[-1:] != whole.shape[-1:]:
        return False
    return x.dtype == whole.dtype and torch.equal(x.reshape(whole.shape), whole)


def _make(value: str, scope: Scope) -> AblatedHeads:
    if value not in METHODS:
        raise ValueError(value)
    return AblatedHeads(scope, value)


register(
    EditKind(
        "head", "head=zero|mean@LAYERS.HEADS",
        "what these heads write: their output at every position, before the output projection. `zero`: 0. `mean`: the "
        "mean of the head's output over prompts and positions after the origin, the same at every position. It is "
        "fitted on separate prompts from the same source, or on random tokens if you gave your own prompts, without "
        "other edits; its hash is recorded. The attention of the head itself is measured as it is; what later layers "
        "read changes, and the loss", "a missing scope; a second edit of the output of heads; models that change the "
        "output of heads before the output projection, by a gate for example",
        "head=mean@3.1", _make, scoped=True,
    )
)  # fmt: skip
