"""What needs a context: each prompt is read twice, and the two versions differ in their first token only.

With a BOS the first version has it, and the second another ordinary token in each prompt. Without one the first version
has its own first token, and the second the same token in every prompt. Either way one version has one first token
throughout (`same`), and the difference between the two is position 0's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from posleak.inputs import Prompts
from posleak.models import Subject
from posleak.probe import Plan, attach
from posleak.runs.spec import batches

from .closure import Closure
from .fingerprint import carried_difference
from .projection import Projection
from .reading import LayerReading, ReadingObserver
from .states import ValueObserver, alone, states

POSITIONS = 256
"""Body positions of each prompt whose states are kept, evenly spaced: memory does not grow with the length."""


@dataclass(frozen=True)
class Batch:
    """One batch of prompts, both versions: states of position 0, a sample of body states, reading, v_0, differences."""

    origin: list[Float[Tensor, "B2 _W"]]  # at every depth; B2 = 2B: first versions, then second
    body: list[Float[Tensor, "B=B2//2 P _W"]]
    reading: list[LayerReading]
    values: tuple[list[Float[Tensor, "B=B2//2 _K _Ev"]], list[Float[Tensor, "B=B2//2 _K _Ev"]]]  # of the two versions
    carried: Float64[np.ndarray, "B=B2//2 J"]


@dataclass(frozen=True)
class Context:
    """All prompts. body: at every depth, at `positions`; values, same: v_0 for each call, whose K and Ev may differ."""

    closure: Closure
    body: list[Float[Tensor, "B P _W"]]
    positions: Int64[np.ndarray, "P"]
    reading: list[list[LayerReading]]
    values: list[Float[Tensor, "B _K _Ev"]]
    same: list[Float[Tensor, "B _K _Ev"]]
    carried: Float64[np.ndarray, "B J"]
    changed: Int64[np.ndarray, "B 2"]


def read_context(
    subject: Subject,
    prompts: Prompts,
    plan: Plan,
    found: Sequence[Projection],
    others: Int64[np.ndarray, "n"],
    count: int,
    batch: int,
    progress: Callable[[str], None] = lambda part: None,
) -> Context:
    """`count` prompts, in batches; `others`: first tokens to put in the place of the prompts' own."""
    positions, first_is_shared = body_positions(prompts.length), prompts.first.id is not None
    done, firsts = list[Batch](), list[NDArray[np.int64]]()
    for at in batches(count, batch):
        progress(f"prompts {at.start + 1} to {at.stop} of {count}, each with two first tokens")
        ids = prompts.batch(at)
        changed = ids.copy()
        changed[:, 0] = others[[b % len(others) for b in at]] if first_is_shared else others[0]
        firsts.append(np.stack([ids[:, 0], changed[:, 0]], axis=1))
        done.append(_read(subject, torch.from_numpy(ids), torch.from_numpy(changed), plan, found, positions))
    first = np.concatenate(firsts)
    own, other = ([torch.cat(v) for v in zip(*(b.values[k] for b in done), strict=True)] for k in (0, 1))
    return Context(
        closure=_closure(subject, done, firsts),
        body=[torch.cat(depth) for depth in zip(*(b.body for b in done), strict=True)],
        positions=positions,
        reading=[b.reading for b in done],
        values=own,
        same=own if first_is_shared else other,
        carried=np.concatenate([b.carried for b in done]),
        changed=first,
    )


def _read(
    subject: Subject,
    ids: Int[Tensor, "B T"],
    changed: Int[Tensor, "B T"],
    plan: Plan,
    found: Sequence[Projection],
    at: Int64[np.ndarray, "P"],
) -> Batch:
    reader, values = ReadingObserver(plan, found), ValueObserver()
    with attach(subject.model, [reader]) as probe:
        x = states(probe, ids.to(subject.device))
    with attach(subject.model, [values]) as probe:
        y = states(probe, changed.to(subject.device))
    origin = [torch.cat([a[:, 0], b[:, 0]]).cpu() for a, b in zip(x, y, strict=True)]
    body = [depth[:, torch.from_numpy(at).to(depth.device)].cpu() for depth in x]
    reading = reader.collect()
    own = [layer.values for layer in reading]
    return Batch(origin, body, reading, (own, values.collect()), carried_difference(x, y))


def _closure(subject: Subject, done: list[Batch], firsts: list[Int64[np.ndarray, "_b 2"]]) -> Closure:
    """Of both versions of every prompt: their first tokens as one-token sequences, each token once."""
    tokens = torch.from_numpy(np.concatenate([first.T.reshape(-1) for first in firsts]))
    different, which = torch.unique(tokens, return_inverse=True)
    single = alone(subject.model, different).states
    within = [torch.cat(depth) for depth in zip(*(b.origin for b in done), strict=True)]
    return Closure.of(within, [single[which, d] for d in range(single.shape[1])], subject.model.dtype)


def body_positions(length: int) -> Int64[np.ndarray, "P"]:
    """1 … N − 1, or POSITIONS of them evenly spaced."""
    return np.unique(np.rint(np.linspace(1, length - 1, min(POSITIONS, length - 1))).astype(np.int64))
