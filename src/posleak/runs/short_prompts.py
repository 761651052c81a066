"""Metrics that read short prompts of their own: the sink rate on natural text and on repeated tokens (Gu et al. 2025),
and the effect of shifted positions on attention in bfloat16 (Wang et al. 2024).

    sink_natural, sink_repeated   (sample, layer, head)   α_0 of 64 tokens, as `sink_start` is of the prompts
    shift_bfloat16, shift_own     (sample, layer, head)   mean over queries of ½ Σ_j |a_ij − a'_ij|, where a' has all
                                  position ids shifted: with weights in bfloat16, and in the model's own dtype

A few short prompts are enough: these metrics are defined at 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from posleak.axes import HEAD, LAYER, SAMPLE
from posleak.edits import NamedEdit, parse_edits
from posleak.errors import PosleakError, UnsupportedError, is_recoverable
from posleak.inputs import Prompts, TextCrops, prepare
from posleak.leakage.dataset import stack_calls
from posleak.metrics.meter import START_TOKENS, start_attention
from posleak.models import Subject
from posleak.probe import Collector, Edit, attach, takes_positions
from posleak.stopwatch import stage
from posleak.text import one_line

from .spec import MeasureSpec

NATURAL_PROMPTS, REPEATED_PROMPTS, SHIFTED_PROMPTS = 8, 4, 6
"""Numbers of prompts, or as many as the measurement has if it has fewer. Prompts of repeated tokens hardly differ."""

SHIFTED_TOKENS = 32
"""Tokens of each shifted prompt."""

SHIFT = 512
"""Number of positions by which all position ids are shifted."""

PROSE = TextCrops("stdlib", max_characters=100_000)
"""English text that every Python installation has."""

Compute = Callable[[], NDArray[np.float64]]


def short_prompt_metrics(
    subject: Subject, spec: MeasureSpec, base: Prompts
) -> tuple[dict[str, xr.Variable], list[str]]:  # fmt: skip
    """Return the arrays of the requested metrics by name, and a note about each metric that fails on this model."""
    arrays, notes = dict[str, xr.Variable](), list[str]()
    with stage("short-prompt metrics"):
        for name, description, compute in _requested(subject, spec, base):
            try:
                arrays[name] = xr.Variable((f"{name}_{SAMPLE}", LAYER, HEAD), compute())
            except Exception as error:
                if not is_recoverable(error):
                    raise
                reason = f"the model raised an error ({one_line(error)})"
                if isinstance(error, PosleakError):
                    reason = error.what
                notes.append(f"{description} is left out: {reason}")
    return arrays, notes


def _requested(subject: Subject, spec: MeasureSpec, base: Prompts) -> Iterator[tuple[str, str, Compute]]:
    """Yield (array, description, function that computes it) for every requested metric."""
    tokens, ids = min(START_TOKENS, spec.length), base.batch(range(min(SHIFTED_PROMPTS, spec.prompts)))

    def natural() -> NDArray[np.float64]:
        text = prepare(subject, PROSE, bos=base.policy, length=tokens, seed=spec.seed)
        return first_attention(subject, text.batch(range(min(NATURAL_PROMPTS, spec.prompts))), spec.edits)

    def shift_effect(*more: str) -> NDArray[np.float64]:
        require_shiftable(subject, spec)
        return shifted(subject, ids[:, :SHIFTED_TOKENS], [*spec.edits, *more])

    if "inputs" in spec.metrics:
        repeated = ids[:REPEATED_PROMPTS, -1:].repeat(tokens, 1)
        yield "sink_natural", "the sink rate on natural text", natural
        yield (
            "sink_repeated", "the sink rate on repeated tokens", lambda: first_attention(subject, repeated, spec.edits)
        )  # fmt: skip
    if "shift" in spec.metrics:
        yield "shift_own", "the effect of shifted positions", shift_effect
        yield "shift_bfloat16", "the effect of shifted positions in bfloat16", lambda: shift_effect("dtype=bfloat16")


def require_shiftable(subject: Subject, spec: MeasureSpec) -> None:
    """Raise an UnsupportedError if the model's positions cannot be shifted."""
    reason = None
    if not takes_positions(subject.model):
        reason = "the model takes no position ids"
    elif not subject.identity.rotary:
        reason = "the model does not rotate queries and keys by position"
    elif any(edit.placing for edit in spec.edits):
        reason = "an edit changes positions or the dtype itself"
    elif subject.context is not None and subject.context < SHIFTED_TOKENS + SHIFT:
        reason = f"the model has only {subject.context} positions"
    if reason is not None:
        raise UnsupportedError(reason, where=subject.identity.name)


def first_attention(
    subject: Subject, ids: NDArray[np.int64], edits: Sequence[NamedEdit] = ()
) -> NDArray[np.float64]:  # fmt: skip
    """Return the mean attention of all queries to position 0, [samples, L, H]."""
    return _stack(_layers(subject, ids, edits, lambda attention: attention[..., 0].double().mean(-1)))


def shifted(subject: Subject, ids: NDArray[np.int64], edits: Sequence[str | Edit]) -> NDArray[np.float64]:
    """Return the total variation between attention with original and with shifted position ids, mean over queries."""
    still, moved = (
        _layers(subject, ids, parse_edits([*edits, *more]), lambda attention: attention.float())
        for more in ((), (f"shift={SHIFT}",))
    )
    return _stack([(a - b).abs().sum(-1).double().mean(-1) / 2 for a, b in zip(still, moved, strict=True)])


def _layers(
    subject: Subject, ids: NDArray[np.int64], edits: Sequence[NamedEdit], reduce: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    observer = Collector(lambda call, out: reduce(start_attention(call)))
    with attach(subject.model, [observer], edits) as probe:
        probe.forward(torch.from_numpy(np.ascontiguousarray(ids)).to(subject.device))
    return observer.layers


def _stack(layers: Sequence[Tensor]) -> NDArray[np.float64]:
    return stack_calls([layer.cpu().numpy() for layer in layers])
