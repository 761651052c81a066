"""Erase or set directions of the residual stream: `position=erase|leace|random|random-leace|at:…[@DEPTHS]`.

At every depth in scope and at positions ≥ m of each document, with V the K leading positional directions, c the mean
state and a(p) the mean coefficients of the fit (positional.py),

    erase:K          h ← h − V Vᵀ (h − c);   all directions: h ← c
    leace:K          h ← h − W⁺ U Uᵀ W (h − c), LEACE
    random:K         as erase, with K random orthonormal directions: its control
    random-leace:K   as leace, with K random orthonormal columns of U: its control
    at:P             h ← h − v (vᵀ (h − c) − a(P)), with the leading direction v

The edit's text does not contain the directions. They are fitted to the model, on separate prompts, when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from posleak.errors import InputError
from posleak.inputs import Prompts

from .base import EditKind, NamedEdit, Site, register
from .context import AfterDonor
from .scope import EVERYWHERE, Scope

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64
    from torch import Tensor

    from posleak.models import Subject
    from posleak.probe import Edit, Probe

    from .positional import PositionFit

ERASE, LEACE, RANDOM, RANDOM_LEACE, AT = "erase", "leace", "random", "random-leace", "at"
ALL = "all"

CONTROLS = {ERASE: RANDOM, LEACE: RANDOM_LEACE}
"""The control of each method of erasure."""


class StreamProjection(NamedTuple):
    """The change at one depth: h ← h − out (readᵀ (h − c) − target); `out` None: h ← c."""

    mean: Float64[Tensor, "W"]
    out: Float64[Tensor, "W K"] | None
    read: Float64[Tensor, "W K"] | None
    target: Float64[Tensor, "K"] | None = None

    def of(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        """Return the changed states; sums are in float32 at least."""
        import torch

        if self.out is None or self.read is None:
            return self.mean.to(x).expand_as(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, out, read = (part.to(x.device, wide) for part in (self.mean, self.out, self.read))
        coefficient = (x.to(wide) - mean) @ read
        if self.target is not None:
            coefficient = coefficient - self.target.to(coefficient)
        return (x.to(wide) - coefficient @ out.mT).to(x.dtype)


@dataclass(frozen=True)
class PositionEdit(NamedEdit):
    """Edit of the residual stream along positional directions.

    method     ERASE, LEACE, RANDOM, RANDOM_LEACE or AT
    count      number K of directions; None: all
    scope      depths: 0 is the embedding, d the output of d layers; by default 1 to the last one
    seed       random seed of RANDOM;  position: that of AT
    fit        the directions; a run fits them itself (`prepared`)
    """

    method: str
    count: int | None = 1
    scope: Scope = EVERYWHERE
    seed: int = 0
    position: int = 0
    fit: PositionFit | None = field(default=None, compare=False, repr=False)

    site: ClassVar[Site] = Site.STREAM

    def __post_init__(self) -> None:
        if any(head is not None for _, _, head in self.scope.items):
            raise InputError(
                "an edit of the residual stream applies to depths, not to heads", where=f"--edit {self.text}",
                expected="depths, as in @0-5",
            )  # fmt: skip

    @property
    def text(self) -> str:
        count = ALL if self.count is None else str(self.count)
        seed = f":{self.seed}" if self.seed else ""
        value = {AT: str(self.position), RANDOM: count + seed}.get(self.method, count)
        return f"position={self.method}:{value}{self.scope.text}"

    @property
    def is_control(self) -> bool:
        return self.count == 0

    @property
    def whitens(self) -> bool:
        """Whether the edit needs the directions of LEACE, or their control."""
        return self.method in (LEACE, RANDOM_LEACE)

    def require_length(self, length: int) -> None:
        self.require_position(0, length)

    def require_position(self, origin: int, length: int) -> None:
        """Raise an InputError if AT names a position that the fit does not have."""
        if self.method == AT and not origin <= self.position < length:
            raise InputError(
                "the position is outside the fitted range", where=f"--edit {self.text}",
                got=f"position {self.position}", expected=f"{origin} to {length - 1}",
                remedy="use a position after the origin (--origin) and within the prompt (--length)",
            )  # fmt: skip

    def depths(self, layers: int) -> list[int]:
        """Return the depths in scope; raise an InputError if the model of this many layers does not have them."""
        last = max((last for _, last, _ in self.scope.items), default=0)
        if last > layers:
            raise InputError(
                "the edit names a depth that the model does not have", where=f"--edit {self.text}",
                got=f"depth {last}", expected=f"0 (the embedding) to {layers} (the output of the last layer)",
            )  # fmt: skip
        if self.scope.everywhere:
            return list(range(1, layers + 1))
        return [d for d in range(layers + 1) if any(first <= d <= last for first, last, _ in self.scope.items)]

    def fit_bytes(self, depths: int, width: int, length: int) -> int:
        full = width if self.count is None else min(self.count, width)
        squares = width * width + 4 * width * full if self.whitens else 0
        return 8 * depths * (3 * length * width + squares)

    def prepared(self, subject: Subject, base: Prompts, origin: int, cache: dict[Any, Any]) -> PositionEdit:
        """Return the edit with directions fitted on prompts like `base`."""
        from posleak.probe.attachment import decoder_layers

        from .positional import cached_fit

        if self.is_control:
            return self
        self.require_position(origin, base.length)
        self.depths(len(decoder_layers(subject.model)))
        leace = self.count if self.whitens else 0
        return self.fitted(cached_fit(subject, base, origin, cache, leace=leace))

    def fitted(self, fit: PositionFit) -> PositionEdit:
        """Return the edit with these directions; raise an InputError if the fit does not have what it needs."""
        self.require_position(fit.origin, fit.length)
        _, W, K = fit.directions.shape
        if self.method == ERASE and self.count is not None and K < self.count < W:
            raise InputError(
                "the edit names more directions than a fit keeps", where=f"--edit {self.text}", got=self.count,
                expected=f"0 to {K}, or {ALL}",
            )  # fmt: skip
        if self.whitens and not self.is_control and fit.leace is None:
            raise InputError(
                "the fit has no LEACE directions", where=f"--edit {self.text}",
                remedy=f"use PositionFit.of(…, leace={self.count})",
            )  # fmt: skip
        return replace(self, fit=fit)

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        if self.is_control:
            yield
            return
        if self.fit is None:
            raise InputError(
                "the edit has no directions yet", where=f"--edit {self.text}",
                remedy="use edit.fitted(fit), with fit = posleak.edits.positional.PositionFit.of(subject, prompts, "
                "origin), or `posleak.measure`, which fits them itself",
            )  # fmt: skip
        with ExitStack() as hooks:
            self._register(probe, self.fit, hooks)
            yield

    def _register(self, probe: Probe, fit: PositionFit, hooks: ExitStack) -> None:
        """Change the input of layer d for depth d, and the output of the last layer for the last depth.

        These hooks run before those by which observers receive the stream.
        """
        from posleak.probe.attachment import decoder_layers

        layers = decoder_layers(probe.model)
        count = "all directions" if self.count is None else f"{self.count} direction{'s' * (self.count > 1)}"
        what = f"the residual stream along {count} (sha256 {fit.sha256[:12]})"
        for depth in self.depths(len(layers)):
            change = StreamChange(self, probe, self.projection(depth, fit), fit.origin, what)
            if depth < len(layers):
                hook = layers[depth].register_forward_pre_hook(change.before_layer, prepend=True, with_kwargs=True)
            else:
                hook = layers[-1].register_forward_hook(change.after_layer, prepend=True)
            hooks.enter_context(hook)

    def projection(self, depth: int, fit: PositionFit) -> StreamProjection:
        """Return the change at one depth."""
        import torch

        from .positional import random_directions

        mean, W = torch.from_numpy(fit.mean[depth]), fit.mean.shape[1]
        if self.whitens and fit.leace is not None:
            parts = fit.leace.arrays[:2] if self.method == LEACE else fit.leace.arrays[2:]
            return StreamProjection(mean, *(torch.from_numpy(part[depth])[:, : self.count] for part in parts))
        if self.count is None or self.count >= W:
            return StreamProjection(mean, None, None)
        if self.method == RANDOM:
            v = random_directions(W, self.count, self.seed, depth)
        else:
            v = torch.from_numpy(fit.directions[depth])[:, : self.count]
        at = torch.from_numpy(fit.coefficient[depth, self.position - fit.origin, :1]) if self.method == AT else None
        return StreamProjection(mean, v, v, at)


@dataclass(frozen=True)
class StreamChange:
    """Hooks that change the residual stream at one depth, at positions >= origin. what: the change, for the record"""

    edit: PositionEdit
    probe: Probe
    projection: StreamProjection
    origin: int
    what: str

    def before_layer(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        changed = self._changed((*args, kwargs.get("hidden_states")))
        return changed[:-1], kwargs if changed[-1] is None else {**kwargs, "hidden_states": changed[-1]}

    def after_layer(self, _: Any, __: Any, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return type(output)(self._changed(output))
        return self._changed((output,))[0]

    def _changed(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values with the stream among them changed at positions >= m of each document."""
        import torch

        from posleak.probe.attachment import one_stream

        from .positional import several_streams

        if (x := one_stream(values)) is None:
            raise several_streams(self.probe.model)
        self.probe.effect_of(self.edit).note(self.what)
        body = body_tokens(self.probe.edits, x.shape[1], self.origin)
        new = torch.where(body.to(x.device)[:, None], self.projection.of(x), x)
        return tuple(new if value is x else value for value in values)


def body_tokens(edits: Sequence[Edit], tokens: int, origin: int) -> Bool[Tensor, "T"]:
    """Return which tokens of a sequence are at positions >= `origin` of their document."""
    import torch

    after_donor = next((edit for edit in edits if isinstance(edit, AfterDonor)), None)
    body = torch.ones(tokens, dtype=torch.bool)
    for start in [0] if after_donor is None else after_donor.document_starts(tokens):
        body[start : start + origin] = False
    return body


def _make(value: str, scope: Scope) -> PositionEdit:
    method, *numbers = value.split(":")
    if method not in (*CONTROLS, *CONTROLS.values(), AT) or not 1 <= len(numbers) <= 1 + (method == RANDOM):
        raise ValueError(value)
    count, *seed = (None if text == ALL and method != AT else _natural(text) for text in numbers)
    if method == AT:
        return PositionEdit(AT, scope=scope, position=count or 0)
    return PositionEdit(method, count, scope, seed[0] or 0 if seed else 0)


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise ValueError(text)
    return int(text)


register(
    EditKind(
        "position", "position=erase:K|leace:K|random:K[:SEED]|random-leace:K|at:P[@DEPTHS]",
        "the residual stream at all positions after the origin, along the directions that carry position. They are "
        "fitted on separate prompts from the same source, or on random tokens if you gave your own prompts, without "
        "other edits; their hash is recorded. `erase:K`: project out the K leading directions (at most 8), relative to "
        "the mean state; `erase:all`: replace the state by the mean state. `leace:K`: K directions of LEACE (Belrose "
        "et al. 2023) for the one-hot position. `random:K`, `random-leace:K`: the same with K random directions, as "
        "controls. "
        "`at:P`: set the coefficient along the leading direction to its mean at position P. `@DEPTHS`: at these depths "
        "only; 0 is the embedding, d the output of d layers. Default: depth 1 to the last one",
        "a second edit of the residual stream; models whose layers exchange several streams; heads; a P within the "
        "origin or beyond the prompt", "position=erase:1", _make, scoped=True,
    )
)  # fmt: skip
