"""How much memory the look at position 0 will hold, computed before its first forward pass."""

from __future__ import annotations

from posleak.models import Subject
from posleak.probe import Plan
from posleak.runs.memory import (
    FIRST_USE,
    REPLICATES,
    MemoryPlan,
    own_bytes,
    pass_bytes,
    row_bytes,
    square_bytes,
    state_bytes,
)
from posleak.runs.sizes import SLACK

from .context import POSITIONS
from .fingerprint import FINGERPRINT_TOKENS, SHOWN
from .states import ALONE

COPIES = 8
"""Copies, in float64, of what is worked on at one depth or in one call: as it is, of length 1, and in between."""

SYSTEMS = 40
"""Matrices, in float64, that the position probe holds: sums of four groups three times over, and four ridges."""


def origin_plan(subject: Subject, plan: Plan, prompts: int, tokens: int, batch: int) -> MemoryPlan:
    """Of `prompts` prompts, `batch` at once, and `tokens` first tokens. The last part is what is kept of all of them,
    and the largest piece of work on that."""
    item, T = subject.dtype.itemsize, plan.length
    both = 2 * state_bytes(subject, batch * T, item) + 3 * 4 * batch * T * subject.identity.width
    alone = pass_bytes(subject, ALONE, item) + state_bytes(subject, ALONE, item)
    outputs = COPIES * 8 * batch * subject.identity.heads * len(plan.rows) * subject.identity.head_dim
    work = (_portrait(subject, tokens), _fingerprint(subject, prompts), _position_probe(subject, prompts, T))
    return MemoryPlan(
        activations=max(pass_bytes(subject, batch * T, item) + own_bytes(subject, batch, T, item) + both, alone),
        rows=max(row_bytes(subject, plan, batch, T, item) + outputs, square_bytes(subject, 1, min(128, T), item)),
        results=_kept(subject, plan, prompts, tokens) + int(SLACK * max(work)) + FIRST_USE,
    )


def _kept(subject: Subject, plan: Plan, prompts: int, tokens: int) -> int:
    """States and values of first tokens, a sample of the prompts' states, W_O W_Oᵀ of all heads, and who reads what."""
    identity, P = subject.identity, min(POSITIONS, plan.length)
    heads, every = identity.layers * identity.heads, identity.layers + 1
    singles = 2 * (state_bytes(subject, tokens + 1, 4) + 4 * (tokens + 1) * heads * identity.head_dim)
    body = 2 * state_bytes(subject, prompts * P, max(4, subject.dtype.itemsize))
    products = 8 * heads * identity.head_dim**2
    reading = 8 * prompts * heads * (6 * len(plan.rows) + 5 * REPLICATES + 3 * prompts)
    portrait = 8 * (tokens + 1) * every * 2 * REPLICATES
    return singles + body + products + reading + portrait + 8 * prompts * plan.length


def _portrait(subject: Subject, tokens: int) -> int:
    """One depth of the first tokens, and the matrix whose eigenvectors make the picture."""
    W = subject.identity.width
    return 8 * (COPIES * (tokens + 1) * W + 5 * min(tokens + 1, W) ** 2)


def _fingerprint(subject: Subject, prompts: int) -> int:
    """W_O of one call and what it makes of values; and the cosines of all heads."""
    identity, n = subject.identity, FINGERPRINT_TOKENS + 1
    heads, inner = identity.layers * identity.heads, identity.heads * identity.head_dim
    weight = 2 * 4 * inner**2 + COPIES * 8 * inner * identity.width
    spread = 8 * identity.heads * (2 * n * identity.width + prompts * (3 * identity.width + 2 * prompts))
    return weight + spread + COPIES * 8 * n * identity.width + 8 * heads * (REPLICATES * n + SHOWN**2)


def _position_probe(subject: Subject, prompts: int, length: int) -> int:
    """The states of one depth, its systems of equations, predictions of all depths, and directions to take out."""
    W, L, H = subject.identity.width, subject.identity.layers, subject.identity.heads
    rows = prompts * min(POSITIONS, length)
    bases = 8 * W * (sum(min(W, depth * H) for depth in range(L + 1)) + 6 * L * H)
    return 8 * (COPIES * rows * W + SYSTEMS * min(W, rows) ** 2 + 3 * 3 * 2 * (L + 1) * rows) + bases
