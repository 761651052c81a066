"""Memory that a case of the benchmark needs, computed before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posleak.edits import parse_edits
from posleak.edits.context import BRANCHED, Branches
from posleak.models import Subject
from posleak.runs.memory import ModelSizes, memory_plan
from posleak.runs.spec import MeasureSpec

RUN_TOKENS = 8192
"""Tokens of a whole measurement: 16 prompts of 512 tokens, the defaults of `posleak measure`."""


@dataclass(frozen=True)
class CaseMemory:
    """Memory of a case in bytes: `persistent` until the last round, and `running` while it runs."""

    persistent: int
    running: int


Needs = Callable[[Subject, int, int], CaseMemory]
"""(subject, prompts, tokens) -> memory of a case."""


def forward(subject: Subject, prompts: int, length: int) -> CaseMemory:
    """Return the memory of the plain forward pass."""
    activations = ModelSizes.of(subject).forward(prompts * length, subject.dtype.itemsize)
    return CaseMemory(0, activations + _own_attention(subject, prompts, length))


def posleak(*edits: str) -> Needs:
    """Return the memory of a measurement, including calibration."""

    def needs(subject: Subject, prompts: int, length: int) -> CaseMemory:
        spec = MeasureSpec(length=length, prompts=prompts, batch=prompts, edits=parse_edits(edits))
        return CaseMemory(0, memory_plan(subject, spec).total)

    return needs


def run(metrics: str = "none", loss: bool = False) -> Needs:
    """Return the memory of a whole measurement of RUN_TOKENS tokens."""

    def needs(subject: Subject, prompts: int, length: int) -> CaseMemory:
        return CaseMemory(0, memory_plan(subject, run_spec(length, metrics, loss).resolved()).total)

    return needs


def run_spec(length: int, metrics: str = "none", loss: bool = False) -> MeasureSpec:
    """Return the measurement of RUN_TOKENS tokens in prompts of `length` tokens."""
    return MeasureSpec(length=length, prompts=max(2, RUN_TOKENS // length), metrics=(metrics,), loss=loss)


def branches(subject: Subject, prompts: int, length: int) -> CaseMemory:
    """Return the memory of one pass over all branches, with a dense mask that is kept."""
    longer, item = Branches().sequences(length)[1], subject.dtype.itemsize
    return CaseMemory(longer**2, ModelSizes.of(subject).forward(prompts * longer, item) + longer**2 * (4 + 2 * item))


def trace(subject: Subject, prompts: int, length: int) -> CaseMemory:
    """Return the memory of the trace, whose second pass needs most."""
    return posleak(BRANCHED)(subject, prompts, length)


def patterns(copies: int, layers: bool) -> Needs:
    """Return the memory of eager attention in a copy of the model.

    copies    copies of the attention patterns;  layers: whether the patterns of all layers are kept
    """

    def needs(subject: Subject, prompts: int, length: int) -> CaseMemory:
        item, sizes = subject.dtype.itemsize, ModelSizes.of(subject)
        whole = prompts * sizes.heads * length**2 * item * copies * (sizes.layers if layers else 1)
        one = sizes.forward(prompts * length, item) + sizes.eager(prompts, length, item)
        return CaseMemory(sizes.parameters * item, one + whole)

    return needs


def _own_attention(subject: Subject, prompts: int, length: int) -> int:
    """Return the memory of the model's own attention: all weights if it is eager, a dense mask if it has windows."""
    item = subject.dtype.itemsize
    if subject.model.config._attn_implementation == "eager":
        return ModelSizes.of(subject).eager(prompts, length, item)
    return 2 * (1 + item) * prompts * length**2 if subject.identity.spans else 0
