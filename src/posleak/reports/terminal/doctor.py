"""Table of a diagnosis: `posleak doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from posleak.show.lines import Prose, prose
from posleak.show.numbers import NAN
from posleak.show.terminal import table

if TYPE_CHECKING:
    from posleak.analyses.doctor.doctor import Diagnosis
    from posleak.analyses.doctor.laws import Check

VERDICT_STYLES = {"sound": "green", "by design": "yellow", "wrong": "red"}
MARKS = {
    "✓": "holds", "!": "violated by design of the model; the results are correct", "✗": "failed",
    "·": "measured, without a bound",
}  # fmt: skip


def doctor_tables(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Yield the verdict, one row per check, and notes."""
    verdict = (diagnosis.sentence, VERDICT_STYLES[diagnosis.verdict.value])
    prompts = f"({diagnosis.prompts} prompts of {diagnosis.length} tokens; positions: {diagnosis.positions})"
    yield Prose(Text.assemble((diagnosis.model, "bold"), ": ", verdict, " ", (prompts, "dim")))
    checks = table(("", "check", "value", "bound", "unit", "why"), right=("value", "bound"), wrap=("unit", "why"))
    for check in diagnosis.checks:
        value, bound = _scientific(check.value), _scientific(check.bound)
        checks.add_row(_mark(check), check.id, value, bound, check.unit, check.why)
    yield checks
    for note in diagnosis.notes:
        yield prose(f"note: {note}", style="yellow")
    marks = {check.mark for check in diagnosis.checks}
    yield prose("  ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marks), style="dim")


def _mark(check: Check) -> Text:
    return Text(check.mark, style="dim" if check.bound is None else VERDICT_STYLES[check.verdict.value])


def _scientific(value: float | None) -> str:
    if value is None or math.isnan(value):
        return NAN
    return f"{value:.1e}" if value else "0"
