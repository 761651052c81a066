"""The residual stream at every depth, of whole prompts and of one-token sequences.

Depth 0 is the embedding, depth d the stream after d layers. transformers returns the last one after the final norm,
which would make its norm and its directions incomparable with the others; the norm's own input is put in its place.

A model may carry several streams (Gemma 3n, hyper-connections). They stand side by side in one state here. Where the
last state is one stream that was mixed from them, what was mixed is put in its place: the streams after the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import input_device
from posleak.models.hold import this_thread_only
from posleak.probe import Call, Edit, Observer, Probe, attach, backbone

ALONE = 256
"""One-token sequences that are read at once."""


def states(probe: Probe, ids: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B T _W"], ...]:
    """x at depths 0 … L, all of them before the final norm, and before several streams are mixed into one.

    The last is narrower where no module of its own mixes them.
    """
    with _last_module(backbone(probe.model)) as last:
        hidden = probe.forward(ids, output_hidden_states=True).hidden_states
    before, end = tuple(_stream(x, ids) for x in hidden[:-1]), _stream(last.undone(hidden), ids)
    mixed = last.mixed if last.mixed is None else _stream(last.mixed, ids)
    if before and mixed is not None and mixed.shape == before[-1].shape != end.shape:
        end = mixed
    return (*before, end)


def _stream(x: Float[Tensor, "..."], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
    """A model with several streams at once, before or after the axes of prompts, has them side by side."""
    streams_first = x.ndim > 3 and x.shape[1:3] == ids.shape and x.shape[:2] != ids.shape
    return (x.movedim(0, 2) if streams_first else x).flatten(2)


@dataclass
class _Last:
    """The last modules of a forward pass.

    pair    input and output of the last one that maps a tensor to one of the same shape
    mixed   input of the last one that makes a smaller tensor of it, for the same prompts and positions
    """

    pair: tuple[Tensor, Tensor] | None = None
    mixed: Tensor | None = None

    def undone(self, hidden: Sequence[Tensor]) -> Tensor:
        """The input of the final norm; the last state itself where no norm made it (it is then a layer's output)."""
        if self.pair is None:
            return hidden[-1]
        x, y = self.pair
        is_final = y.data_ptr() == hidden[-1].data_ptr() and y.shape == hidden[-1].shape
        is_layer = len(hidden) > 1 and x.data_ptr() == hidden[-2].data_ptr()
        return x if is_final and not is_layer else hidden[-1]


@contextmanager
def _last_module(model: torch.nn.Module) -> Iterator[_Last]:
    last = _Last()

    def remember(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (args and isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return
        if args[0].shape == output.shape:
            last.pair = (args[0], output)
        elif args[0].shape[:2] == output.shape[:2] and args[0].numel() > output.numel():
            last.mixed = args[0]

    hook = this_thread_only(remember)
    handles = [module.register_forward_hook(hook) for module in model.modules() if module is not model]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class ValueObserver:
    """Collects v_0 of every attention call; value heads are not repeated."""

    values: list[Float[Tensor, "B _K _Ev"]] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        self.values.append(call.value[:, :, 0].float().cpu())

    def collect(self) -> list[Float[Tensor, "B _K _Ev"]]:
        values, self.values = self.values, []
        return values


@dataclass(frozen=True)
class Alone:
    """One-token sequences, which are all that position 0 ever sees.

    states at depths 0 … L; values: v_0 for each attention call, whose K and Ev may differ. On the CPU.
    """

    tokens: Int[Tensor, "n"]
    states: Float[Tensor, "n J W"]
    values: tuple[Float[Tensor, "n _K _Ev"], ...]

    def rows(self, start: int, stop: int | None = None) -> Alone:
        at = slice(start, stop)
        return Alone(self.tokens[at], self.states[at], tuple(v[at] for v in self.values))


def alone(model: PreTrainedModel, tokens: Int[Tensor, "n"], *, batch: int = ALONE, edits: Sequence[Edit] = ()) -> Alone:
    """Every token as a sequence of its own."""
    look = ValueObserver()
    observers: list[Observer] = [look]
    found, values = [], []
    with attach(model, observers, edits) as probe:
        for part in tokens.split(batch):
            x = comparable(states(probe, part[:, None].to(input_device(model))), model)
            found.append(torch.stack([depth[:, 0].float().cpu() for depth in x], dim=1))
            values.append(look.collect())
    return Alone(tokens.cpu(), torch.cat(found), tuple(torch.cat(layer) for layer in zip(*values, strict=True)))


def comparable(x: tuple[Float[Tensor, "B T _W"], ...], model: PreTrainedModel) -> tuple[Float[Tensor, "B T W"], ...]:
    """The states themselves, if they have one width: directions of different widths cannot be compared."""
    if len(widths := {depth.shape[-1] for depth in x}) == 1:
        return x
    raise UnsupportedError(
        "its states have different widths at different depths, so that directions cannot be followed through them",
        where=type(model).__name__, got=f"widths {', '.join(map(str, sorted(widths)))}",
        expected="one width at every depth", remedy="`posleak measure` and `posleak trace` do not need states",
    )  # fmt: skip


def unit(x: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """x / ‖x‖ along the last axis; zero stays zero."""
    x = x.double()
    norm: Tensor = x.norm(dim=-1, keepdim=True)
    return x / norm.clamp(min=torch.finfo(torch.float64).tiny)
