"""The residual stream at every depth, of whole prompts and of one-token sequences.

Depth 0 is the embedding, depth d the stream after d layers. transformers returns the last one after the final norm,
which would make its norm and its directions incomparable with the others; the norm's own input is put in its place.
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

from posleak.probe import Call, Edit, Observer, Probe, attach, body
from posleak.probe.hold import own

ALONE = 256
"""One-token sequences that are read at once."""


def states(probe: Probe, ids: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B T _W"], ...]:
    """x at depths 0 … L, all of them before the final norm; the last is narrower where it joins several streams."""
    with _last_module(body(probe.model)) as last:
        hidden = probe.forward(ids, output_hidden_states=True).hidden_states
    return tuple(_stream(x, ids) for x in (*hidden[:-1], last.undone(hidden)))


def _stream(x: Float[Tensor, "..."], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
    """A model with several streams at once, before or after the axes of prompts, has them side by side."""
    streams_first = x.ndim > 3 and x.shape[1:3] == ids.shape and x.shape[:2] != ids.shape
    return (x.movedim(0, 2) if streams_first else x).flatten(2)


@dataclass
class _Last:
    """The last module of a forward pass that maps a tensor to one of the same shape: input and output."""

    pair: tuple[Tensor, Tensor] | None = None

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
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].shape == output.shape:
            last.pair = (args[0], output)

    hook = own(remember)
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
            x = states(probe, part[:, None].to(model.device))
            found.append(torch.stack([depth[:, 0].float().cpu() for depth in x], dim=1))
            values.append(look.collect())
    return Alone(tokens.cpu(), torch.cat(found), tuple(torch.cat(layer) for layer in zip(*values, strict=True)))


def unit(x: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """x / ‖x‖ along the last axis; zero stays zero."""
    x = x.double()
    norm: Tensor = x.norm(dim=-1, keepdim=True)
    return x / norm.clamp(min=torch.finfo(torch.float64).tiny)
