"""Metrics that read short prompts of their own, beside a measurement: the sink rate on natural text and on repeated
tokens (Gu et al. 2025), and what moving all positions does to attention in bfloat16 (Wang et al. 2024).

    sink_natural, sink_repeated   (sample, layer, head)   α_0 of 64 tokens, as `sink_start` is of the prompts
    shift_bfloat16, shift_own     (sample, layer, head)   mean over queries of ½ Σ_j |a_ij − a'_ij|, all position ids
                                  moved: with the weights in bfloat16, and as they are

Prompts are few and short, for these metrics hold at 64 tokens by their definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from posleak.axes import HEAD, LAYER, SAMPLE
from posleak.edits import NamedEdit, parse_edits
from posleak.errors import PosleakError, UnsupportedError, is_recoverable
from posleak.inputs import Prompts, TextCrops, prepare
from posleak.metrics.glimpse import START_TOKENS, start_attention
from posleak.metrics.meter import stack_calls
from posleak.models import Subject
from posleak.probe import Call, Edit, attach, takes_positions
from posleak.stopwatch import stage
from posleak.text import one_line

from .spec import MeasureSpec

NATURAL, REPEATED, SHIFTED = 8, 4, 6
"""Prompts of each kind, or as many as the measurement has, if those are fewer. Repeated ones hardly differ."""

SHIFTED_TOKENS = 32
"""Tokens of each prompt that is shifted."""

Make = Callable[[], NDArray[np.float64]]

SHIFT = 512
"""By how many positions all are moved."""

PROSE = TextCrops("stdlib", max_characters=100_000)
"""English that every Python has."""


@dataclass
class StartObserver:
    """Keeps the attention of the first queries, layer by layer, or what `make` makes of it."""

    make: Callable[[Float[Tensor, "B H T T"]], Tensor]
    layers: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.layers.append(self.make(start_attention(call)))


@dataclass(frozen=True)
class ShortPromptMetrics:
    """What was found, and why something was not."""

    arrays: dict[str, xr.Variable]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject, spec: MeasureSpec, base: Prompts) -> ShortPromptMetrics:
        """What cannot be read on this model costs nothing else: its prompts are measured already."""
        arrays, notes = dict[str, xr.Variable](), list[str]()
        with stage("short-prompt metrics"):
            for name, what, make in wanted(subject, spec, base):
                try:
                    arrays[name] = xr.Variable((f"{name}_{SAMPLE}", LAYER, HEAD), make())
                except Exception as error:
                    if not is_recoverable(error):
                        raise
                    said = (
                        error.what if isinstance(error, PosleakError) else f"the model breaks down ({one_line(error)})"
                    )
                    notes.append(f"{what} is left out: {said}")
        return cls(arrays, tuple(notes))


def wanted(subject: Subject, spec: MeasureSpec, base: Prompts) -> Iterator[tuple[str, str, Make]]:
    """(array, what it is in words, how it is made) of everything that was asked for."""
    tokens, edits = min(START_TOKENS, spec.length), spec.edits
    ids = base.batch(range(min(SHIFTED, spec.prompts)))

    def natural() -> NDArray[np.float64]:
        text = prepare(subject, PROSE, bos=base.policy, length=tokens, seed=spec.seed)
        return first_attention(subject, text.batch(range(min(NATURAL, spec.prompts))), edits)

    def moved(*more: str) -> NDArray[np.float64]:
        require_shiftable(subject, spec)
        return shifted(subject, ids[:, :SHIFTED_TOKENS], [*spec.edits, *more])

    if "inputs" in spec.metrics:
        repeated = ids[:REPEATED, -1:].repeat(tokens, 1)
        yield "sink_natural", "the sink rate on natural text", natural
        yield "sink_repeated", "the sink rate on repeated tokens", lambda: first_attention(subject, repeated, edits)
    if "shift" in spec.metrics:
        yield "shift_own", "the effect of shifted positions", moved
        yield "shift_bfloat16", "the effect of shifted positions in bfloat16", lambda: moved("dtype=bfloat16")


def require_shiftable(subject: Subject, spec: MeasureSpec) -> None:
    """Refuse a model whose positions cannot be moved."""
    why = None
    if not takes_positions(subject.model):
        why = "the model takes no position ids"
    elif not subject.identity.rotary:
        why = "the model does not rotate queries and keys by position"
    elif any(edit.placing for edit in spec.edits):
        why = "an edit changes positions or the dtype itself"
    elif subject.context is not None and subject.context < SHIFTED_TOKENS + SHIFT:
        why = f"the model has only {subject.context} positions"
    if why is not None:
        raise UnsupportedError(why, where=subject.identity.name)


def first_attention(
    subject: Subject, ids: NDArray[np.int64], edits: Sequence[NamedEdit] = ()
) -> NDArray[np.float64]:  # fmt: skip
    """Mean attention of all queries to position 0, [samples, L, H]."""
    return _looked(subject, ids, edits, lambda attention: attention[..., 0].double().mean(-1))


def shifted(subject: Subject, ids: NDArray[np.int64], edits: Sequence[str | Edit]) -> NDArray[np.float64]:
    """Mean over queries of the total variation between attention as it is and with all position ids moved."""
    still, moved = (
        _layers(subject, ids, parse_edits([*edits, *more]), lambda attention: attention.float())
        for more in ((), (f"shift={SHIFT}",))
    )
    return _stack([(a - b).abs().sum(-1).double().mean(-1) / 2 for a, b in zip(still, moved, strict=True)])


def _looked(
    subject: Subject, ids: NDArray[np.int64], edits: Sequence[NamedEdit], make: Callable[[Tensor], Tensor]
) -> NDArray[np.float64]:
    return _stack(_layers(subject, ids, edits, make))


def _layers(
    subject: Subject, ids: NDArray[np.int64], edits: Sequence[NamedEdit], make: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    looked = StartObserver(make)
    with attach(subject.model, [looked], edits) as probe:
        probe.forward(torch.from_numpy(np.ascontiguousarray(ids)).to(subject.device))
    return looked.layers


def _stack(layers: Sequence[Tensor]) -> NDArray[np.float64]:
    return stack_calls([layer.cpu().numpy() for layer in layers], (LAYER, HEAD))
