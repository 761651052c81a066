"""The loop over prompts: batch by batch through the model; each batch gives a chunk, written as soon as it is there."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from posleak.errors import CheckError
from posleak.inputs import Prompts
from posleak.leakage import LeakageObserver, norms_by_position
from posleak.leakage.dataset import Chunk, stack_layers
from posleak.probe import Edit, Plan, attach
from posleak.stopwatch import stage

from .folder import read_batch, write_batch

FORWARD = "forward"
"""The stage of a model's own forward pass, attention included, without the time that measuring adds."""


def kept_chunks(
    model: PreTrainedModel, prompts: Prompts, at: Sequence[range], plan: Plan, *, folder: Path | None = None,
    layers: int | None = None, edits: Sequence[Edit] = (),
) -> Generator[tuple[range, Chunk], None, None]:  # fmt: skip
    """Batches `at` that the folder has already, then the others; each is written as soon as it is measured."""
    todo = list(at)
    while folder is not None and todo and (chunk := read_batch(folder, todo[0])) is not None:
        yield todo.pop(0), chunk
    ids = (prompts.batch(batch) for batch in todo)
    # Closed explicitly: after an error, a stored traceback would keep the generator alive and the model attached.
    with closing(measure_chunks(model, ids, plan, layers=layers, edits=edits)) as measured:
        for batch, chunk in zip(todo, measured):
            if folder is not None:
                with stage("write"):
                    write_batch(folder, batch, chunk)
            yield batch, chunk


def measure_chunks(
    model: PreTrainedModel,
    ids: Iterable[NDArray[np.int64]],
    plan: Plan,
    *,
    layers: int | None = None,
    edits: Sequence[Edit] = (),
) -> Generator[Chunk, None, None]:
    """One chunk per batch of ids [B, T]; each pass must make the `layers` attention calls that calibration saw.

    A constant-token prompt goes first, to see whether the model scales its queries by position. The model stays
    attached until the last chunk is taken or the generator is closed.
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
