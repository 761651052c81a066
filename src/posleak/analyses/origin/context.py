"""The forward passes on prompts, and the memory plan of the origin analysis.

Each prompt is read in two versions that differ only in their first token. With a BOS the first version has the BOS, and
the second an ordinary token that differs between prompts. Without a BOS the first version has its own first token, and
the second the same token in every prompt. Either way one version has one first token throughout (`same`), and any
difference between the versions is caused by position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from posleak.inputs import Prompts
from posleak.models import Subject
from posleak.probe import Collector, Plan, attach
from posleak.runs.memory import FIRST_USE_BYTES, REPLICATES, SLACK, MemoryPlan, ModelSizes
from posleak.runs.spec import batches

from .fingerprint import FINGERPRINT_TOKENS, SHOWN, Projection, carried_difference
from .reading import LayerReading, read
from .states import ALONE, Closure, alone, first_values, joined, states

Progress = Callable[[str], None]

POSITIONS = 256
"""Body positions of each prompt whose states are kept, evenly spaced: memory does not grow with the length."""

WORK_COPIES = 8
"""Copies in float64 of the arrays of one depth or one call: as read, normalised, and intermediates."""

PROBE_MATRICES = 40
"""Matrices in float64 that the position probe holds: three sums over four groups each, and four ridge systems."""


@dataclass(frozen=True)
class Context:
    """The forward passes on all prompts.

    body           states at every depth, at `positions`
    values, same   v_0 for each call, whose K and Ev may differ: of the first version, and of the version with one
                   first token throughout
    changed        the first tokens of the two versions of each prompt
    """

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
    projections: Sequence[Projection],
    others: Int64[np.ndarray, "n"],
    count: int,
    batch: int,
    progress: Progress = lambda line: None,
) -> Context:
    """Read `count` prompts in batches; `others` are the first tokens of the second versions."""
    spaced = np.linspace(1, prompts.length - 1, min(POSITIONS, prompts.length - 1))  # position 0 is left out
    positions, first_is_shared = np.unique(np.rint(spaced).astype(np.int64)), prompts.first.id is not None
    results, firsts = [], list[NDArray[np.int64]]()
    for at in batches(count, batch):
        progress(f"prompts {at.start + 1} to {at.stop} of {count}, each with two first tokens")
        versions = np.repeat(prompts.batch(at)[None], 2, axis=0)
        versions[1, :, 0] = others[[b % len(others) for b in at]] if first_is_shared else others[0]
        firsts.append(versions[:, :, 0].T)
        reader = Collector(partial(read, plan=plan, projections=projections))
        results.append(_read(subject, torch.from_numpy(versions), reader, positions))
    origin, body, reading, other, carried = zip(*results, strict=True)
    own = joined([[layer.values for layer in layers] for layers in reading])
    return Context(
        closure=_closure(subject, joined(origin), firsts), body=joined(body), positions=positions,
        reading=list(reading), values=own, same=own if first_is_shared else joined(other),
        carried=np.concatenate(carried), changed=np.concatenate(firsts),
    )  # fmt: skip


def _read(
    subject: Subject, versions: Int[Tensor, "2 B T"], reader: Collector[LayerReading], at: Int64[np.ndarray, "P"]
) -> tuple[list[Tensor], list[Tensor], list[LayerReading], list[Tensor], Float64[np.ndarray, "B J"]]:
    """Read both versions of one batch of prompts.

    Return the states of position 0 at every depth (first versions, then second versions), states of the first version
    at the positions `at`, its readings, v_0 of the second version for each call, and the relative differences between
    the versions at late positions, by depth.
    """
    values = Collector(first_values)
    with attach(subject.model, [reader]) as probe:
        x = states(probe, versions[0].to(subject.device))
    with attach(subject.model, [values]) as probe:
        y = states(probe, versions[1].to(subject.device))
    origin = [torch.cat([a[:, 0], b[:, 0]]).cpu() for a, b in zip(x, y, strict=True)]
    body = [depth[:, torch.from_numpy(at).to(depth.device)].cpu() for depth in x]
    return origin, body, reader.layers, values.layers, carried_difference(x, y)


def _closure(subject: Subject, within: list[Tensor], firsts: list[Int64[np.ndarray, "_b 2"]]) -> Closure:
    """Check closure on both versions of every prompt; each different first token is run alone once."""
    tokens = torch.from_numpy(np.concatenate([first.T.reshape(-1) for first in firsts]))
    different, which = torch.unique(tokens, return_inverse=True)
    single = alone(subject.model, different).states
    return Closure.of(within, [single[which, d] for d in range(single.shape[1])], subject.model.dtype)


def origin_plan(subject: Subject, plan: Plan, prompts: int, tokens: int, batch: int) -> MemoryPlan:
    """Return the memory plan for `prompts` prompts, `batch` at once, and `tokens` first tokens.

    `results` holds what is stored of all of them, and the largest computation on it.
    """
    sizes, item, T = ModelSizes.of(subject), subject.dtype.itemsize, plan.length
    both = 2 * sizes.states(batch * T, item) + 3 * 4 * batch * T * sizes.width
    alone = sizes.forward(ALONE, item) + sizes.states(ALONE, item)
    outputs = WORK_COPIES * 8 * batch * sizes.all_heads * len(plan.rows)
    work = max(_portrait(sizes, tokens), _fingerprint(sizes, prompts), _position_probe(sizes, prompts, T))
    return MemoryPlan(
        activations=max(sizes.forward(batch * T, item) + sizes.own_pairs(batch, T, item) + both, alone),
        rows=max(sizes.sampled(plan, batch, T, item) + outputs, sizes.eager(1, min(128, T), item)),
        results=_stored(sizes, plan, prompts, tokens, item) + int(SLACK * work) + FIRST_USE_BYTES,
    )


def _stored(sizes: ModelSizes, plan: Plan, prompts: int, tokens: int, item: int) -> int:
    """Return the bytes of states and values of first tokens, sampled states of the prompts, W_O W_Oᵀ of all heads, and
    attention of all heads to position 0."""
    heads, P = sizes.layers * sizes.heads, min(POSITIONS, plan.length)
    singles = 2 * (sizes.states(tokens + 1, 4) + 4 * (tokens + 1) * sizes.layers * sizes.all_heads)
    body = 2 * sizes.states(prompts * P, max(4, item))
    products = 8 * heads * (sizes.all_heads // sizes.heads) ** 2
    reading = 8 * prompts * heads * (6 * len(plan.rows) + 5 * REPLICATES + 3 * prompts)
    portrait = 8 * (tokens + 1) * (sizes.layers + 1) * 2 * REPLICATES
    return singles + body + products + reading + portrait + 8 * prompts * plan.length


def _portrait(sizes: ModelSizes, tokens: int) -> int:
    """Return the bytes of the first tokens at one depth, and the matrix whose eigenvectors span the picture."""
    return 8 * (WORK_COPIES * (tokens + 1) * sizes.width + 5 * min(tokens + 1, sizes.width) ** 2)


def _fingerprint(sizes: ModelSizes, prompts: int) -> int:
    """Return the bytes of W_O of one call, its products with values, and the cosines of all heads."""
    n, inner, W = FINGERPRINT_TOKENS + 1, sizes.all_heads, sizes.width
    weight = 2 * 4 * inner**2 + WORK_COPIES * 8 * inner * W
    spread = 8 * sizes.heads * (2 * n * W + prompts * (3 * W + 2 * prompts))
    return weight + spread + WORK_COPIES * 8 * n * W + 8 * sizes.layers * sizes.heads * (REPLICATES * n + SHOWN**2)


def _position_probe(sizes: ModelSizes, prompts: int, length: int) -> int:
    """Return the bytes of the states of one depth, ridge systems, predictions at all depths, and removed directions."""
    W, L, H = sizes.width, sizes.layers, sizes.heads
    rows = prompts * min(POSITIONS, length)
    bases = 8 * W * (sum(min(W, depth * H) for depth in range(L + 1)) + 6 * L * H)
    states = WORK_COPIES * rows * W + PROBE_MATRICES * min(W, rows) ** 2 + 3 * 3 * 2 * (L + 1) * rows
    return 8 * states + bases
