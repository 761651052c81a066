"""How much memory the checks of a model will hold, computed before the first forward pass."""

from __future__ import annotations

from posleak.models import Subject
from posleak.probe import Plan
from posleak.runs.memory import (
    MemoryPlan,
    own_bytes,
    pass_bytes,
    result_bytes,
    row_bytes,
    square_bytes,
    state_bytes,
    weight_count,
)

FEW, PADDING = 2, 5
"""Prompts for the laws that hold for each one, and masked tokens that are put before them."""


def doctor_plan(subject: Subject, plan: Plan, prompts: int, batch: int, *, short: bool = False) -> MemoryPlan:
    """Of all prompts, `batch` at once, and of a few under eager attention, at all depths, and with rounded weights.

    Eager attention, and a constant that is added to one row of logits, take tokens × tokens numbers.
    """
    item, T = subject.dtype.itemsize, plan.length + PADDING
    few = pass_bytes(subject, FEW * T, max(4, item))
    whole = state_bytes(subject, FEW * T, item) + square_bytes(subject, FEW, T, item)
    copies = 0 if short else weight_count(subject) * (2 if item == 4 else 4)  # rounded ones, beside those as they are
    return MemoryPlan(
        activations=max(
            pass_bytes(subject, batch * T, item) + own_bytes(subject, batch, T, item), few + max(whole, copies)
        ),
        rows=max(row_bytes(subject, plan, at_once, T, max(4, item)) for at_once in (batch, FEW)),
        results=result_bytes(subject, plan, prompts, layers=1) + 8 * prompts * T,
    )
