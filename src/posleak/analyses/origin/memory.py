"""The memory plan of the origin analysis, for the planner of runs/memory.py."""

from __future__ import annotations

from posleak.models import Subject
from posleak.probe import Plan
from posleak.runs.memory import FIRST_USE_BYTES, REPLICATES, SLACK, MemoryPlan, ModelSizes

from .context import POSITIONS
from .fingerprint import FINGERPRINT_TOKENS, SHOWN
from .states import ALONE

WORK_COPIES = 8
"""Copies in float64 of the arrays of one depth or one call: as read, normalised, and intermediates."""

PROBE_MATRICES = 40
"""Matrices in float64 that the position probe holds: three sums over four groups each, and four ridge systems."""


def origin_plan(subject: Subject, plan: Plan, prompts: int, tokens: int, batch: int) -> MemoryPlan:
    """Return the plan for `prompts` prompts, `batch` at once, and `tokens` first tokens.

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
    """Return the states and values of first tokens, sampled states of the prompts, W_O W_Oᵀ of all heads, and the
    attention of all heads to position 0."""
    heads, P = sizes.layers * sizes.heads, min(POSITIONS, plan.length)
    singles = 2 * (sizes.states(tokens + 1, 4) + 4 * (tokens + 1) * sizes.layers * sizes.all_heads)
    body = 2 * sizes.states(prompts * P, max(4, item))
    products = 8 * heads * (sizes.all_heads // sizes.heads) ** 2
    reading = 8 * prompts * heads * (6 * len(plan.rows) + 5 * REPLICATES + 3 * prompts)
    portrait = 8 * (tokens + 1) * (sizes.layers + 1) * 2 * REPLICATES
    return singles + body + products + reading + portrait + 8 * prompts * plan.length


def _portrait(sizes: ModelSizes, tokens: int) -> int:
    """Return the first tokens at one depth, and the matrix whose eigenvectors span the picture."""
    return 8 * (WORK_COPIES * (tokens + 1) * sizes.width + 5 * min(tokens + 1, sizes.width) ** 2)


def _fingerprint(sizes: ModelSizes, prompts: int) -> int:
    """Return W_O of one call and its products with values, and the cosines of all heads."""
    n, inner, W = FINGERPRINT_TOKENS + 1, sizes.all_heads, sizes.width
    weight = 2 * 4 * inner**2 + WORK_COPIES * 8 * inner * W
    spread = 8 * sizes.heads * (2 * n * W + prompts * (3 * W + 2 * prompts))
    return weight + spread + WORK_COPIES * 8 * n * W + 8 * sizes.layers * sizes.heads * (REPLICATES * n + SHOWN**2)


def _position_probe(sizes: ModelSizes, prompts: int, length: int) -> int:
    """Return the states of one depth, the ridge systems, predictions at all depths, and directions to remove."""
    W, L, H = sizes.width, sizes.layers, sizes.heads
    rows = prompts * min(POSITIONS, length)
    bases = 8 * W * (sum(min(W, depth * H) for depth in range(L + 1)) + 6 * L * H)
    states = WORK_COPIES * rows * W + PROBE_MATRICES * min(W, rows) ** 2 + 3 * 3 * 2 * (L + 1) * rows
    return 8 * states + bases
