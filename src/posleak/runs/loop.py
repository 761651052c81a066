"""The loop over prompts: batch by batch through the model; each batch gives a chunk, written as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from posleak.edits.context import INSTEAD, require_closed
from posleak.errors import CheckError, UnsupportedError
from posleak.inputs import Prompts
from posleak.leakage import LeakageObserver
from posleak.leakage.dataset import Chunk, require_finite, stack_layers
from posleak.metrics import Meters
from posleak.models import exclusive, input_device
from posleak.probe import Edit, EditEffectRecorder, Observer, Placement, Plan, attach, read_placements
from posleak.probe.head import token_losses
from posleak.probe.placement import PlacementPositions
from posleak.stopwatch import stage

from .folder import ANEW, batch_path, read_batch, write_batch
from .loss import LOSS, positions
from .progress import LayerCounter, OnProgress

SeeTouches = Callable[[list[EditEffectRecorder]], None]
"""Told what each edit changed."""

WIDER = "the model overflows, or its weights hold NaN: load it with a wider --dtype, and check its weights"

FORWARD = "forward"
"""The stage of a model's own forward pass, attention included, without the time that measuring adds."""


def kept_chunks(
    model: PreTrainedModel, prompts: Prompts, at: Sequence[range], plan: Plan, *, heads: Sequence[int],
    digest: str, folder: Path | None = None, edits: Sequence[Edit] = (),
    placements: Sequence[Placement] | None = None, observers: Sequence[Observer] = (),
    touched: SeeTouches = lambda touches: None, on_progress: OnProgress | None = None, meters: Meters | None = None,
    loss: bool = False,
) -> Generator[tuple[range, Chunk], None, None]:  # fmt: skip
    """Yield the batches `at` that the folder has already, then the others; each is written as soon as it is measured.

    heads    of each attention call, as calibration saw them
    digest   of the run: batches of other runs are refused
    touched  is told what the edits changed in the first batch that is measured, before that is written
    on_progress  is told of every layer
    """
    todo, layers = list(at), len(heads)
    while folder is not None and todo and (chunk := kept_batch(folder, todo[0], digest, heads)) is not None:
        yield todo.pop(0), chunk
    ids = (prompts.batch(batch) for batch in todo)
    watchers = [] if on_progress is None else [LayerCounter(on_progress, todo, layers)]
    # Closed explicitly: after an error, a stored traceback would keep the generator alive and the model attached.
    with closing(
        measure_chunks(
            model, ids, plan, layers=layers, edits=edits, placements=placements, observers=[*observers, *watchers],
            touched=touched, meters=meters, loss=loss,
        )
    ) as measured:  # fmt: skip
        for batch, chunk in zip(todo, measured):
            require_numbers(chunk, heads, f"{type(model).__name__}, prompts {batch.start} to {batch.stop - 1}", WIDER)
            if folder is not None:
                with stage("write"):
                    write_batch(folder, batch, chunk, digest)
            yield batch, chunk


def kept_batch(folder: Path, prompts: range, digest: str, heads: Sequence[int]) -> Chunk | None:
    """Read a finished batch of the run with this digest, checked; None where there is none yet."""
    chunk = read_batch(folder, prompts, digest)
    if chunk is not None:
        require_numbers(chunk, heads, str(batch_path(folder, prompts)), ANEW)
    return chunk


def require_numbers(chunk: Chunk, heads: Sequence[int], where: str, remedy: str) -> None:
    """Refuse parts and losses that are not numbers."""
    require_finite(chunk, heads, where, remedy)
    if LOSS in chunk and not np.isfinite(chunk[LOSS]).all():
        count = int((~np.isfinite(chunk[LOSS])).sum())
        raise CheckError(
            "the next token's loss is not finite", where=where, got=f"{count} of {chunk[LOSS].size} losses",
            remedy=remedy,
        )  # fmt: skip


def measure_chunks(
    model: PreTrainedModel,
    ids: Iterable[NDArray[np.int64]],
    plan: Plan,
    *,
    layers: int | None = None,
    edits: Sequence[Edit] = (),
    placements: Sequence[Placement] | None = None,
    observers: Sequence[Observer] = (),
    touched: SeeTouches = lambda touches: None,
    meters: Meters | None = None,
    loss: bool = False,
) -> Generator[Chunk, None, None]:
    """One chunk per batch of ids [B, T]; each pass must make the `layers` attention calls that calibration saw.

    What positions do to queries and keys is read off the model first, unless `placements` has it. Observers `beside`
    look on. The model stays attached until the last chunk is taken or the generator is closed.
    """
    remaining = iter(ids)
    if (first := next(remaining, None)) is not None:
        known = placements_of(model, first, plan, edits) if placements is None else placements
        observer = LeakageObserver(plan, placements=known)
        yield from observed_chunks(
            model, chain([first], remaining), observer, layers=layers, edits=edits, others=observers, touched=touched,
            meters=meters, loss=positions(plan) if loss else (),
        )  # fmt: skip


def placements_of(
    model: PreTrainedModel, ids: NDArray[np.int64], plan: Plan, edits: Sequence[Edit] = ()
) -> list[Placement]:
    """What positions do in every layer, at the plan's rows; ids [B, T] may have a borrowed context before the prompts.

    Such a context must change nothing else: a model where it does is refused.
    """
    with stage("constant token"), exclusive(model):
        tokens, start = torch.from_numpy(ids[:1]).to(input_device(model)), ids.shape[1] - plan.length
        if not start:
            return read_placements(model, tokens, plan, edits)
        alone = read_placements(model, tokens[:, start:], plan, edits)
        _require_free(model, alone)  # a table of positions may have none for a document before the prompt
        require_closed(model)
        found = read_placements(model, tokens, plan, edits, start)
        _require_alike(model, plan, found, alone)
    return found


def _require_free(model: PreTrainedModel, found: list[Placement]) -> None:
    """Refuse a model in which a place does more than turn queries and keys."""
    why = next((place.stays for place in found if place.stays is not None), None)
    if any(place.temperature is not None for place in found):
        why = "it scales its queries by absolute position"
    if why is not None:
        raise _not_defined(model, why)


def _not_defined(model: PreTrainedModel, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"a borrowed context is not defined for this model: {why}", where=type(model).__name__, remedy=INSTEAD
    )


def _require_alike(model: PreTrainedModel, plan: Plan, after: list[Placement], alone: list[Placement]) -> None:
    """Refuse a model in which a later place is another sort of place: not only the context would differ."""
    turns = [
        float((more - more[:1]).sin().abs().max())
        for a, b in zip(after, alone, strict=True)
        if a.rotation is not None and b.rotation is not None and len(a.rotation.first) == len(b.rotation.first) > 0
        for more in [a.rotation.angles - b.rotation.angles]
    ]
    if any(place.temperature is not None for place in after):
        raise _not_defined(model, "it scales its queries by absolute position")
    bound = PlacementPositions.of(plan).bound(model.dtype)
    if max(turns, default=0.0) > 3 * bound:  # at up to three times the positions
        raise _not_defined(model, "its rotation changes with the length of what it reads")


def observed_chunks(
    model: PreTrainedModel,
    ids: Iterable[NDArray[np.int64]],
    observer: LeakageObserver,
    *,
    layers: int | None = None,
    edits: Sequence[Edit] = (),
    others: Sequence[Observer] = (),
    touched: SeeTouches = lambda touches: None,
    meters: Meters | None = None,
    loss: Sequence[int] = (),
) -> Generator[Chunk, None, None]:
    """One chunk per batch, as this observer and the meters see them; `others` see the same calls after them. `loss`:
    positions at which the next token's loss is taken."""
    first = True
    beside = [] if meters is None else [meters]
    with attach(model, [observer, *beside, *others], edits) as probe:
        for batch in ids:
            tokens = torch.from_numpy(batch).to(input_device(model))
            with stage(FORWARD):
                output = probe.forward(tokens)
            seen = observer.collect()
            if layers is not None and len(seen) != layers:
                raise CheckError(
                    "a forward pass made another number of attention calls than calibration saw",
                    where=type(model).__name__,
                    got=len(seen),
                    expected=layers,
                    remedy="the model changes its layers from call to call; it cannot be measured",
                )
            if first:
                touched([probe.effect_of(edit) for edit in edits])
                first = False
            with stage("arrays"):
                chunk = stack_layers(seen) | ({} if meters is None else meters.collect())
            if loss:
                with stage("loss"):
                    chunk[LOSS] = token_losses(model, output, tokens, loss).double().cpu().numpy()
            yield chunk
