"""Metrics that read short prompts of their own, beside a measurement: the sink rate on natural text and on repeated
tokens (Gu et al. 2025), and what moving all positions does to attention in bfloat16 (Wang et al. 2024).

    sink_natural, sink_repeated   (sample, layer, head)   α_0 of 64 tokens, as `sink_start` is of the prompts
    shift_bfloat16, shift_own     (sample, layer, head)   mean over queries of ½ Σ_j |a_ij − a'_ij|, all position ids
                                  moved: with the weights in bfloat16, and as they are

Prompts are few and short, for these metrics hold at 64 tokens by their definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from posleak.axes import HEAD, LAYER, SAMPLE
from posleak.edits import NamedEdit, parse_edits
from posleak.errors import PosleakError
from posleak.inputs import Prompts, TextCrops, prepare
from posleak.metrics.glimpse import START, start_attention
from posleak.metrics.meter import stacked
from posleak.models import Subject
from posleak.probe import Call, attach, takes_positions
from posleak.stopwatch import stage

from .spec import MeasureSpec

NATURAL, REPEATED, SHIFTED = 8, 4, 8
"""Prompts of each kind, or as many as the measurement has, if those are fewer. Repeated ones hardly differ."""

SHIFTED_TOKENS = 32
"""Tokens of each prompt that is shifted."""

SHIFT = 512
"""By how many positions all are moved."""

PROSE = TextCrops("stdlib", most=300_000)
"""English that every Python has."""


@dataclass
class StartObserver:
    """Keeps the attention of the first queries, layer by layer, or what `make` makes of it."""

    make: Callable[[Float[Tensor, "B H T T"]], Tensor]
    layers: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.layers.append(self.make(start_attention(call)))


@dataclass(frozen=True)
class Beside:
    """What was found, and why something was not."""

    arrays: dict[str, xr.Variable]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, subject: Subject, spec: MeasureSpec, base: Prompts) -> Beside:
        arrays, notes = dict[str, NDArray[np.float64]](), list[str]()
        tokens, edits, ids = min(START, spec.length), spec.parsed_edits, base.batch(range(min(SHIFTED, spec.prompts)))
        with stage("metrics beside"):
            if "inputs" in spec.metrics:
                try:
                    text = prepare(subject, PROSE, bos=base.policy, length=tokens, seed=spec.seed)
                    crops = text.batch(range(min(NATURAL, spec.prompts)))
                    arrays["sink_natural"] = first_attention(subject, crops, edits)
                except PosleakError as error:
                    notes.append(f"the sink rate on natural text is left out: {error.what}")
                arrays["sink_repeated"] = first_attention(subject, ids[:REPEATED, -1:].repeat(tokens, 1), edits)
            if "shift" in spec.metrics:
                if (why := _unshiftable(subject, spec, tokens)) is not None:
                    notes.append(f"the effect of shifted positions is left out: {why}")
                else:
                    starts = ids[:, :SHIFTED_TOKENS]
                    arrays["shift_own"] = shifted(subject, starts, spec.edits)
                    try:
                        arrays["shift_bfloat16"] = shifted(subject, starts, [*spec.edits, "dtype=bfloat16"])
                    except RuntimeError as error:  # some layers compute in float32, whatever their weights are
                        notes.append(
                            f"shifted positions in bfloat16 are left out: the model breaks down there ({error})"
                        )
        return cls(
            {name: xr.Variable((f"{name}_{SAMPLE}", LAYER, HEAD), found) for name, found in arrays.items()},
            tuple(notes),
        )


def _unshiftable(subject: Subject, spec: MeasureSpec, tokens: int) -> str | None:
    if not takes_positions(subject.model):
        return "the model takes no position ids"
    if not subject.identity.rotary:
        return "the model does not rotate queries and keys by position"
    if any(edit.placing for edit in spec.parsed_edits):
        return "an edit changes positions or the dtype itself"
    if subject.context is not None and subject.context < tokens + SHIFT:
        return f"the model has only {subject.context} positions"
    return None


def first_attention(
    subject: Subject, ids: NDArray[np.int64], edits: Sequence[NamedEdit] = ()
) -> NDArray[np.float64]:  # fmt: skip
    """Mean attention of all queries to position 0, [samples, L, H]."""
    return _looked(subject, ids, edits, lambda attention: attention[..., 0].double().mean(-1))


def shifted(subject: Subject, ids: NDArray[np.int64], edits: Sequence[str]) -> NDArray[np.float64]:
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
    return stacked([layer.cpu().numpy() for layer in layers], (LAYER, HEAD))
