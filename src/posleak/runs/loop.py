"""The loop over prompts: batches go through the model, and each becomes a chunk of arrays that is stored at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from posleak.errors import CheckError
from posleak.inputs import Prompts
from posleak.leakage import LeakageObserver
from posleak.leakage.dataset import Chunk, require_finite, stack_layers
from posleak.metrics import Meters
from posleak.models import input_device
from posleak.models.parallel import ALONE, Ranks, own_batches
from posleak.probe import Edit, EditEffectRecorder, Observer, Placement, Plan, attach
from posleak.probe.native import token_losses
from posleak.stopwatch import stage

from .folder import REMEASURE, batch_path, read_batch, write_batch
from .loss import LOSS, loss_positions
from .placements import placements_of
from .progress import LayerCounter, OnProgress

OnEffects = Callable[[list[EditEffectRecorder]], None]
"""Callback that receives what each edit changed."""

FORWARD = "forward"
"""Stage of a model's own forward pass, attention included, without the time that measuring adds."""


@dataclass(frozen=True)
class Passes:
    """What a series of forward passes measures.

    edits        in the order in which they are applied
    placements   effect of positions in every layer; None: read from the model with the first batch; empty: not used
    observers    see every attention call after posleak's own observers
    meters       observers of metrics, whose arrays become part of the chunks
    loss         also compute the next-token loss at the sampled positions
    calls        number of attention calls that each pass must make; None: not checked
    on_effects   receives what the edits changed in the first batch, before its chunk is returned
    """

    model: PreTrainedModel
    plan: Plan
    edits: Sequence[Edit] = ()
    placements: Sequence[Placement] | None = None
    observers: Sequence[Observer] = ()
    meters: Meters | None = None
    loss: bool = False
    calls: int | None = None
    on_effects: OnEffects = lambda effects: None

    def measure(self, batches: Iterable[NDArray[np.int64]]) -> Generator[Chunk, None, None]:
        """Yield one chunk per batch of ids [B, T].

        The model stays attached until the last chunk is taken or the generator is closed.
        """
        remaining = iter(batches)
        if (first := next(remaining, None)) is None:
            return
        placements = self.placements
        if placements is None:
            placements = placements_of(self.model, first, self.plan, self.edits)
        observer = LeakageObserver(self.plan, placements=placements)
        meters = [] if self.meters is None else [self.meters]
        with attach(self.model, [observer, *meters, *self.observers], self.edits, placements) as probe:
            for number, ids in enumerate(chain([first], remaining)):
                tokens = torch.from_numpy(ids).to(input_device(self.model))
                with stage(FORWARD):
                    output = probe.forward(tokens)
                layers = observer.collect()
                self._require_calls(len(layers))
                if number == 0:
                    self.on_effects([probe.effect_of(edit) for edit in self.edits])
                with stage("arrays"):
                    chunk = stack_layers(layers) | ({} if self.meters is None else self.meters.collect())
                if self.loss:
                    with stage("loss"):
                        losses = token_losses(self.model, output, tokens, loss_positions(self.plan))
                        chunk[LOSS] = losses.double().cpu().numpy()
                yield chunk

    def _require_calls(self, calls: int) -> None:
        if self.calls is not None and calls != self.calls:
            raise CheckError(
                "the number of attention calls of a forward pass differs from calibration",
                where=type(self.model).__name__, got=calls, expected=self.calls,
                remedy="the model changes its layers from call to call and cannot be measured",
            )  # fmt: skip


@dataclass(frozen=True)
class BatchStore:
    """Finished batches of an unfinished run in its folder; without a folder nothing is stored.

    digest   of the run: batches of other runs are rejected
    heads    number of heads of each attention call, from calibration
    """

    folder: Path | None
    digest: str
    heads: Sequence[int]

    def read(self, prompts: range) -> Chunk | None:
        """Return a finished batch after checking it; None if there is none."""
        chunk = None if self.folder is None else read_batch(self.folder, prompts, self.digest)
        if self.folder is not None and chunk is not None:
            _require_finite(chunk, self.heads, str(batch_path(self.folder, prompts)), REMEASURE)
        return chunk

    def write(self, prompts: range, chunk: Chunk, model: str) -> None:
        """Store a batch that was measured after checking it; `model` names the model in error messages."""
        _require_finite(
            chunk, self.heads, f"{model}, prompts {prompts.start} to {prompts.stop - 1}",
            "the model overflows, or its weights contain NaN: load it with a wider --dtype, and check its weights",
        )  # fmt: skip
        if self.folder is not None:
            with stage("write"):
                write_batch(self.folder, prompts, chunk, self.digest)


def resume_chunks(
    passes: Passes,
    prompts: Prompts,
    batches: Sequence[range],
    store: BatchStore,
    on_progress: OnProgress | None = None,
    ranks: Ranks = ALONE,
) -> Generator[tuple[range, Chunk], None, None]:
    """Yield the batches that are stored already, then measure and store the others.

    on_progress  receives the progress after every attention call
    ranks        processes that share the batches; all receive all chunks
    """
    todo = list(batches)
    while todo and (chunk := store.read(todo[0])) is not None:
        yield todo.pop(0), chunk
    if on_progress is not None:
        passes = replace(passes, observers=[*passes.observers, LayerCounter(on_progress, todo, len(store.heads))])
    own = own_batches(todo, ranks)
    # Closed explicitly: after an error, a stored traceback would keep the generator alive and the model attached.
    with closing(passes.measure(prompts.batch(batch) for batch in own)) as measured:
        for batch, chunk in zip(todo, _from_all(measured, ranks)):
            store.write(batch, chunk, type(passes.model).__name__)
            yield batch, chunk


def _from_all(measured: Iterator[Chunk], ranks: Ranks) -> Iterator[Chunk]:
    """Yield the chunks of all processes in the order of the batches, which they take in turns."""
    if ranks.size == 1:
        yield from measured
        return
    while chunks := [chunk for chunk in ranks.share(next(measured, None)) if chunk is not None]:
        yield from chunks


def _require_finite(chunk: Chunk, heads: Sequence[int], where: str, remedy: str) -> None:
    require_finite(chunk, heads, where, remedy)
    if LOSS in chunk and (count := int((~np.isfinite(chunk[LOSS])).sum())):
        raise CheckError(
            "the next-token loss is not finite", where=where, got=f"{count} of {chunk[LOSS].size} losses",
            remedy=remedy,
        )  # fmt: skip
