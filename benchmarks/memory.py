"""How much memory a contestant of the benchmark will hold, computed before it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posleak.analyses.trace.trace import BORROWED
from posleak.edits import parse_edits
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.models import Subject
from posleak.runs.memory import ModelSizes, memory_plan
from posleak.runs.spec import MeasureSpec

RUN_TOKENS = 8192
"""Tokens of a whole measurement that is timed: 16 prompts of 512 tokens, as `posleak measure` makes it by default."""


@dataclass(frozen=True)
class CaseMemory:
    """Bytes: `kept` from when a contestant is made until the last round is over, and `running` while it runs."""

    kept: int
    running: int


Needs = Callable[[Subject, int, int], CaseMemory]
"""(subject, prompts, tokens) -> what a contestant needs"""


def forward(subject: Subject, prompts: int, length: int) -> CaseMemory:
    activations = ModelSizes.of(subject).forward(prompts * length, subject.dtype.itemsize)
    return CaseMemory(0, activations + _own_attention(subject, prompts, length))


def posleak(*edits: str) -> Needs:
    """A measurement, calibration included."""

    def needs(subject: Subject, prompts: int, length: int) -> CaseMemory:
        return CaseMemory(
            0,
            memory_plan(
                subject, MeasureSpec(length=length, prompts=prompts, batch=prompts, edits=parse_edits(edits))
            ).total,
        )

    return needs


def run(metrics: str = "none", loss: bool = False) -> Needs:
    """A whole measurement of RUN_TOKENS tokens."""

    def needs(subject: Subject, prompts: int, length: int) -> CaseMemory:
        return CaseMemory(0, memory_plan(subject, run_spec(length, metrics, loss).resolved()).total)

    return needs


def run_spec(length: int, metrics: str = "none", loss: bool = False) -> MeasureSpec:
    return MeasureSpec(length=length, prompts=max(2, RUN_TOKENS // length), metrics=(metrics,), loss=loss)


def two_passes(subject: Subject, prompts: int, length: int) -> CaseMemory:
    """The second one is twice as long, and has a mask of its own, which is kept, and added to logits as numbers."""
    longer, item = 2 * length + DONOR_MARGIN, subject.dtype.itemsize
    return CaseMemory(longer**2, ModelSizes.of(subject).forward(prompts * longer, item) + longer**2 * (4 + 2 * item))


def trace(subject: Subject, prompts: int, length: int) -> CaseMemory:
    return posleak(BORROWED)(subject, prompts, length)


def patterns(copies: int, layers: bool) -> Needs:
    """Eager attention in a copy of the model; `copies` of the patterns, of all layers or of one."""

    def needs(subject: Subject, prompts: int, length: int) -> CaseMemory:
        item, sizes = subject.dtype.itemsize, ModelSizes.of(subject)
        whole = prompts * sizes.heads * length**2 * item * copies * (sizes.layers if layers else 1)
        one = sizes.forward(prompts * length, item) + sizes.eager(prompts, length, item)
        return CaseMemory(sizes.parameters * item, one + whole)

    return needs


def _own_attention(subject: Subject, prompts: int, length: int) -> int:
    """What the model's own attention holds beside the activations: all weights if it is eager, a mask for windows."""
    item = subject.dtype.itemsize
    if subject.model.config._attn_implementation == "eager":
        return ModelSizes.of(subject).eager(prompts, length, item)
    return 2 * (1 + item) * prompts * length**2 if subject.identity.spans else 0
