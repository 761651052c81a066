"""The memory plan of the doctor, for the planner of runs/memory.py."""

from __future__ import annotations

from posleak.models import Subject
from posleak.probe import Plan
from posleak.runs.memory import MemoryPlan, ModelSizes

FEW, PADDING = 2, 5
"""Prompts for the laws that hold for each prompt, and masked tokens that are put before them."""


def doctor_plan(subject: Subject, plan: Plan, prompts: int, batch: int, *, short: bool = False) -> MemoryPlan:
    """Return the plan for all prompts, `batch` at once, and for FEW prompts under eager attention, at all depths, and
    with rounded weights.

    Eager attention, and a constant that is added to one row of logits, hold tokens × tokens numbers.
    """
    sizes, item, T = ModelSizes.of(subject), subject.dtype.itemsize, plan.length + PADDING
    whole = sizes.states(FEW * T, item) + sizes.eager(FEW, T, item)
    copies = 0 if short else sizes.parameters * (2 if item == 4 else 4)  # rounded weights, next to the model's own
    return MemoryPlan(
        activations=max(
            sizes.forward(batch * T, item) + sizes.own_pairs(batch, T, item),
            sizes.forward(FEW * T, max(4, item)) + max(whole, copies),
        ),
        rows=max(sizes.sampled(plan, at_once, T, max(4, item)) for at_once in (batch, FEW)),
        results=sizes.results(plan, prompts, layers=1) + 8 * prompts * T,
    )
