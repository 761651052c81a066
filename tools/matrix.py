"""Outcomes of the commands on every family: `measure`, with and without metrics, `trace`, `origin`, `claims`, `doctor`.

They run on the tiny models of the census. Each gives a result or a message of posleak; other exceptions are bugs, which
are not caught here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posleak.analyses.claims.examination import examine
from posleak.analyses.claims.lab import Lab
from posleak.analyses.origin.origin import origin
from posleak.analyses.trace.trace import trace
from posleak.errors import CheckError, PosleakError
from posleak.metrics.catalogue import CATALOGUE
from posleak.models import Subject
from posleak.models.pretrained import silence_transformers
from posleak.runs.measure import measure
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.show.unexpected import UNEXPECTED

LENGTH, PROMPTS, TOKENS = 48, 4, 32
WORKS = "works"
COMMANDS = ("measure", "metrics", "trace", "origin", "claims", "doctor")

HEAD = """\
Each command was run on the tiny model of each supported family ({length} tokens, {prompts} prompts). `doctor` says
`sound` if every law holds, and `by design` if the model breaks some on purpose. Of the claims it says how many have an
effect: the others are not applicable, on most families because a tiny random model has no sink and no tokenizer.
`metrics` says how many of what others measure (`measure --metrics all`) a family can give, natural text left out, which
takes a tokenizer. A number in brackets is the reason, below the table.
"""


@dataclass(frozen=True)
class Tried:
    """Outcomes on one family, by command: `works`, a short result, or the reason of a failure."""

    family: str
    outcomes: Mapping[str, str]


def tried(subject: Subject, doctor: str) -> Tried:
    """Run every command except doctor, whose outcome is given."""
    size: dict[str, Any] = {"length": LENGTH, "prompts": PROMPTS}
    work: dict[str, Callable[[], str]] = {
        "measure": lambda: _works(measure(subject, **size)),
        "metrics": lambda: _metrics(measure(subject, **size, metrics="all")),
        "trace": lambda: _works(trace(subject, **size)),
        "origin": lambda: _works(origin(subject, **size, tokens=TOKENS)),
        "claims": lambda: _claims(subject),
        "doctor": lambda: doctor,
    }
    with silence_transformers():
        return Tried(subject.identity.name, {name: _outcome(run) for name, run in work.items()})


def _works(found: object) -> str:
    return WORKS


def _metrics(run: Run) -> str:
    wanted = {metric.id for metric in CATALOGUE} - {"sink_rate_natural"}
    there = {row.metric.id for row in run.metrics.rows} if run.metrics is not None else set()
    return f"{len(there & wanted)} of {len(wanted)}"


def _outcome(run: Callable[[], str]) -> str:
    try:
        return run()
    except PosleakError as error:
        return error.what


def _claims(subject: Subject) -> str:
    results = list(examine(Lab(subject, MeasureSpec(length=LENGTH, prompts=PROMPTS))))
    for result in results:
        if str(result.reason).startswith(UNEXPECTED):
            raise CheckError(
                "the test of a claim failed",
                where=f"{subject.identity.name}, {result.id}",
                got=result.reason,
            )
    return f"{sum(result.reason is None for result in results)} of {len(results)}"


def section(rows: Sequence[Tried]) -> Iterator[str]:
    """Yield the lines of the section of docs/families.md."""
    reasons: dict[str, int] = {}
    yield from (
        f"## Commands ({len(rows)} families)",
        "",
        *HEAD.format(length=LENGTH, prompts=PROMPTS).splitlines(),
        "",
    )
    yield f"| family | {' | '.join(COMMANDS)} |"
    yield "|---|" + "---|" * len(COMMANDS)
    for row in rows:
        cells = [_cell(row.outcomes[name], reasons) for name in COMMANDS]
        yield f"| {row.family} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {reason}" for reason, number in reasons.items())


def _cell(outcome: str, reasons: dict[str, int]) -> str:
    """Return a short outcome unchanged, or the number of a reason."""
    return outcome if len(outcome) <= 12 else f"no [{reasons.setdefault(outcome, len(reasons) + 1)}]"


def read_section(text: str) -> dict[str, Tried]:
    """Return the rows of a page, with full reasons."""
    lines = text.partition("## Commands (")[2].partition("\n## ")[0].splitlines()
    listed = (line.partition(". ") for line in lines if line[:1].isdigit())
    reasons = {f"no [{number}]": reason for number, _, reason in listed}
    found = {}
    for line in lines:
        family, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        if line.startswith("| ") and family != "family":
            outcomes = [reasons.get(cell, cell) for cell in cells]
            found[family] = Tried(family, dict(zip(COMMANDS, outcomes, strict=True)))
    return found
