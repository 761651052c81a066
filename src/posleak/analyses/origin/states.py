"""The residual stream at every depth, of whole prompts and of one-token sequences, and law L7 that relates them.

Depth 0 is the embedding; depth d is the stream after d layers. transformers returns the last state after the final
norm, where norms and directions are not comparable with those of other depths. It is replaced by the input of that
norm.

A model may carry several streams (Gemma 3n, hyper-connections). They are concatenated into one state. Where the last
state is a single stream mixed from them, it is replaced by the streams before mixing.

Law L7, closure: position 0 attends only to itself, so its state equals that of the one-token sequence at every depth.

    gap_d = max over prompts of  ‖x_0^d(in context) − x_0^d(alone)‖ / ‖x_0^d(alone)‖

The rest of this package relies on it: results on one-token sequences hold for position 0 of any prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import input_device
from posleak.models.hold import this_thread_only
from posleak.probe import Call, Collector, Edit, Probe, attach, backbone
from posleak.probe.attachment import decoder_layers, streaming
from posleak.rounding import CLOSED
from posleak.typed import Number

T = TypeVar("T")

ALONE = 256
"""One-token sequences per forward pass."""


def states(probe: Probe, ids: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B T _W"], ...]:
    """Return x at depths 0 … L, before the final norm and before several streams are mixed into one.

    The last state is narrower if the streams are mixed outside any module.
    """
    last, model, streams = _Last(), backbone(probe.model), dict[int, Tensor]()
    with (
        hooked((module for module in model.modules() if module is not model), last.hook),
        streaming(probe.model, streams.__setitem__),
    ):
        output = probe.forward(ids, output_hidden_states=True)
    hidden = output.get("hidden_states") if isinstance(output, Mapping) else getattr(output, "hidden_states", None)
    if not hidden:
        return _complete(streams, probe.model)
    before, end = tuple(_stream(x, ids) for x in hidden[:-1]), _stream(last.before_norm(hidden), ids)
    mixed = last.mixed if last.mixed is None else _stream(last.mixed, ids)
    if before and mixed is not None and mixed.shape == before[-1].shape != end.shape:
        end = mixed
    return (*before, end)


def _complete(streams: dict[int, Tensor], model: PreTrainedModel) -> tuple[Float[Tensor, "B T W"], ...]:
    """Return the residual stream that was seen between the layers of a model that does not return its states."""
    depths = range(len(decoder_layers(model)) + 1)
    if len(depths) > 1 and list(streams) == list(depths):
        return tuple(streams.values())
    raise UnsupportedError(
        "the states of this model cannot be seen: it returns none, and its layers do not pass a tensor from one to the "
        "next", where=type(model).__name__, got=f"{len(streams)} of {len(depths)} states, and no hidden_states",
        expected="layers in a torch.nn.ModuleList, or an output with hidden_states",
        remedy="return them from forward if output_hidden_states is true; `posleak measure` does not need them",
    )  # fmt: skip


def origin_states(probe: Probe, ids: Int[Tensor, "B T"]) -> list[Float[Tensor, "B _W"]]:
    """Return the state of position 0 at every depth, without keeping the states of other positions in memory."""
    return [x[:, 0].clone() for x in states(probe, ids)]


def _stream(x: Float[Tensor, "..."], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
    """Concatenate several streams, whose axis may precede or follow the axes of prompts and positions."""
    streams_first = x.ndim > 3 and x.shape[1:3] == ids.shape and x.shape[:2] != ids.shape
    return (x.movedim(0, 2) if streams_first else x).flatten(2)


@dataclass
class _Last:
    """The last modules of a forward pass.

    pair    input and output of the last module that maps a tensor to one of the same shape
    mixed   input of the last module whose output is smaller, for the same prompts and positions
    """

    pair: tuple[Tensor, Tensor] | None = None
    mixed: Tensor | None = None

    def hook(self, _: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (args and isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return
        if args[0].shape == output.shape:
            self.pair = (args[0], output)
        elif args[0].shape[:2] == output.shape[:2] and args[0].numel() > output.numel():
            self.mixed = args[0]

    def before_norm(self, hidden: Sequence[Tensor]) -> Tensor:
        """Return the input of the final norm, or the last state itself if a layer computed it."""
        if self.pair is None:
            return hidden[-1]
        x, y = self.pair
        is_final = y.data_ptr() == hidden[-1].data_ptr() and y.shape == hidden[-1].shape
        is_layer = len(hidden) > 1 and x.data_ptr() == hidden[-2].data_ptr()
        return x if is_final and not is_layer else hidden[-1]


@contextmanager
def hooked(modules: Iterable[torch.nn.Module], hook: Callable[..., None], with_kwargs: bool = False) -> Iterator[None]:
    """Register a forward hook on modules, for forward passes of this thread, and remove it at the end."""
    own_hook = this_thread_only(hook)
    handles = [module.register_forward_hook(own_hook, with_kwargs=with_kwargs) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class WithArrays:
    """A result with arrays for figures. They are not part of the JSON: its fields are those that the repr shows."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the arrays for figures."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}


def first_values(call: Call, out: Float[Tensor, "B H T Ev"]) -> Float[Tensor, "B K _Ev"]:
    """Return v_0 of an attention call, one per key-value head."""
    return call.value[:, :, 0].float().cpu()


@dataclass(frozen=True)
class Alone:
    """One-token sequences: by closure, all that position 0 depends on. Tensors are on the CPU.

    states   at depths 0 … L
    values   v_0 for each attention call, whose K and Ev may differ
    """

    tokens: Int[Tensor, "n"]
    states: Float[Tensor, "n J W"]
    values: tuple[Float[Tensor, "n _K _Ev"], ...]


def alone(model: PreTrainedModel, tokens: Int[Tensor, "n"], *, batch: int = ALONE) -> Alone:
    """Run every token as a sequence of its own."""
    observer, batches, values = Collector(first_values), [], []
    with attach(model, [observer]) as probe:
        for part in tokens.split(batch):
            x = require_one_width(states(probe, part[:, None].to(input_device(model))), model)
            batches.append(torch.stack([depth[:, 0].float().cpu() for depth in x], dim=1))
            values.append(observer.collect())
    return Alone(tokens.cpu(), torch.cat(batches), tuple(joined(values)))


def require_one_width(
    x: tuple[Float[Tensor, "B T _W"], ...], model: PreTrainedModel
) -> tuple[Float[Tensor, "B T W"], ...]:
    """Return the states, or raise UnsupportedError if their widths differ between depths."""
    if len(widths := {depth.shape[-1] for depth in x}) == 1:
        return x
    raise UnsupportedError(
        "the states have different widths at different depths, so their directions cannot be compared",
        where=type(model).__name__, got=f"widths {', '.join(map(str, sorted(widths)))}",
        expected="one width at every depth", remedy="`posleak measure` and `posleak trace` do not need states",
    )  # fmt: skip


@dataclass(frozen=True)
class Closure:
    """Relative differences between the state of position 0 in context and alone.

    per_layer    largest over prompts, by depth [J]
    bound        largest difference that counts as rounding
    n            prompts
    per_prompt   largest over depths, by prompt; not part of the JSON
    """

    per_layer: tuple[Number, ...]
    bound: float
    n: int
    per_prompt: tuple[float, ...] = ()

    @property
    def worst(self) -> float:
        return float(np.max(self.per_layer))

    @property
    def ok(self) -> bool:
        """Whether every gap is within the bound; NaN is not."""
        return all(gap <= self.bound for gap in self.per_layer)

    @classmethod
    def of(
        cls, within: Sequence[Float[Tensor, "B _W"]], alone: Sequence[Float[Tensor, "B _W"]], dtype: torch.dtype
    ) -> Closure:
        """Compare states of position 0 in context (`within`) and alone, at every depth."""
        gaps = torch.stack([_gaps(x, x0) for x, x0 in zip(within, alone, strict=True)])  # [J, B]
        per_prompt = tuple(gaps.amax(0).tolist())
        return cls(tuple(gaps.amax(1).tolist()), CLOSED.of(dtype), len(per_prompt), per_prompt)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object; an infinite gap is null."""
        return {"worst": self.worst, "bound": self.bound, "ok": self.ok, "per_layer": self.per_layer, "n": self.n}


def closure(model: PreTrainedModel, ids: Int[Tensor, "B T"], *, batch: int = 8, edits: Sequence[Edit] = ()) -> Closure:
    """Check law L7 on prompts; edits that let position 0 see other keys break it."""
    within, single = list[list[Tensor]](), list[list[Tensor]]()
    with attach(model, edits=edits) as probe:
        for part in ids.to(input_device(model)).split(batch):
            within.append(origin_states(probe, part))
            single.append(origin_states(probe, part[:, :1]))
    return Closure.of(joined(within), joined(single), model.dtype)


def joined(batches: Sequence[Sequence[Float[Tensor, "_b ..."]]]) -> list[Float[Tensor, "_B ..."]]:
    """Concatenate tensors of batches of prompts, separately for each depth or attention call."""
    return [torch.cat(depth) for depth in zip(*batches, strict=True)]


def _gaps(x: Float[Tensor, "B W"], x0: Float[Tensor, "B W"]) -> Float64[Tensor, "B"]:
    """Return ‖x − x0‖ / ‖x0‖ for each row; NaN counts as infinite."""
    x, x0 = x.double().cpu(), x0.double().cpu()
    gaps: Tensor = (x - x0).norm(dim=-1) / x0.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return gaps.nan_to_num(nan=torch.inf, posinf=torch.inf)
