"""A measurement in memory: prompts through the model, batch by batch, one chunk of parts for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from posleak.errors import CheckError
from posleak.probe import Edit, Plan, attach

from .dataset import Chunk, stack_layers
from .observer import LeakageObserver


def batches(prompts: int, batch: int, start: int = 0) -> list[range]:
    """Prompts start … prompts − 1 in consecutive batches; boundaries do not depend on where one starts."""
    return [range(first, min(first + batch, prompts)) for first in range(start, prompts, batch)]


def measure_chunks(
    model: PreTrainedModel,
    ids: Iterator[NDArray[np.int64]] | Sequence[NDArray[np.int64]],
    plan: Plan,
    *,
    layers: int | None = None,
    edits: Sequence[Edit] = (),
) -> Iterator[Chunk]:
    """One chunk per batch of ids [B, T]; each pass must make the `layers` attention calls that calibration saw."""
    observer = LeakageObserver(plan)
    with attach(model, [observer], edits) as probe:
        for batch in ids:
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
            yield stack_layers(seen)
