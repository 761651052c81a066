"""A measurement in memory: prompts through the model, batch by batch, one chunk of parts for each."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from posleak.errors import CheckError
from posleak.probe import Edit, Plan, attach
from posleak.stopwatch import stage

from .dataset import Chunk, stack_layers
from .observer import LeakageObserver
from .temperature import norms_by_position

TOKENS_AT_ONCE = 4096
"""Enough to keep a machine busy; the default does not look at the machine, since the batch moves the last bits."""

FORWARD = "forward"
"""The stage of a model's own forward pass, attention included and looking at it not."""


def batches(prompts: int, batch: int, start: int = 0) -> list[range]:
    """Prompts start … prompts − 1 in consecutive batches; boundaries do not depend on where one starts."""
    return [range(first, min(first + batch, prompts)) for first in range(start, prompts, batch)]


def measure_chunks(
    model: PreTrainedModel,
    ids: Iterable[NDArray[np.int64]],
    plan: Plan,
    *,
    layers: int | None = None,
    edits: Sequence[Edit] = (),
) -> Generator[Chunk, None, None]:
    """One chunk per batch of ids [B, T]; each pass must make the `layers` attention calls that calibration saw.

    A constant-token prompt goes first: does the model scale its queries by position? The model stays attached until the
    last chunk is taken or the generator is closed.
    """
    remaining = iter(ids)
    if (first := next(remaining, None)) is not None:
        observer = leakage_observer(model, first, plan, edits)
        yield from observed_chunks(model, chain([first], remaining), observer, layers=layers, edits=edits)


def leakage_observer(
    model: PreTrainedModel, ids: NDArray[np.int64], plan: Plan, edits: Sequence[Edit] = ()
) -> LeakageObserver:
    """An observer that knows how this model scales its queries by position, in prompts of the length of ids [B, T]."""
    with stage("constant token"):
        norms = norms_by_position(model, torch.from_numpy(ids[:1]).to(model.device), edits, plan.rows)
    return LeakageObserver(plan, temperatures=norms.temperatures)


def observed_chunks(
    model: PreTrainedModel,
    ids: Iterable[NDArray[np.int64]],
    observer: LeakageObserver,
    *,
    layers: int | None = None,
    edits: Sequence[Edit] = (),
) -> Generator[Chunk, None, None]:
    """One chunk per batch, as this observer sees them."""
    with attach(model, [observer], edits) as probe:
        for batch in ids:
            with stage(FORWARD):
                probe.forward(torch.from_numpy(batch).to(model.device))
            seen = observer.collect()
            if layers is not None and len(seen) != layers:
                raise CheckError(
                    "a forward pass made another number of attention calls than calibration saw",
                    where=type(model).__name__,
                    got=len(seen),
                    expected=layers,
                    remedy="the model changes its layers from call to call; it cannot be measured",
                )
            with stage("arrays"):
                chunk = stack_layers(seen)
            yield chunk
