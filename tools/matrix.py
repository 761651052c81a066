"""Outcomes of the commands on every family: `measure`, with and without metrics, `trace`, `circuit`, `origin`,
`claims`, `doctor`.

They run on the tiny models of the census. Each gives a result or a message of posleak; other exceptions are bugs, which
are not caught here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posleak.analyses.circuit.circuit import Circuit, circuit
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

from .markdown import table

LENGTH, PROMPTS, TOKENS, NODES = 48, 4, 32, 2
WORKS, WITH_STATE, WITHOUT_CARRIER = "works", "with state", "writers only"
COMMANDS = ("measure", "metrics", "trace", "circuit", "origin", "claims", "doctor")

HEAD = """\
Each command was run on the tiny model of each supported family ({length} tokens, {prompts} prompts). `doctor`: `sound`
if every law holds, `by design` if the model violates a law by design. `claims`: number of claims with an effect; the
others are not applicable, in most families because a tiny random model has no sink and no tokenizer. `metrics`: number
of metrics of other papers that are defined (`measure --metrics all`), without natural text, which needs a tokenizer.
`trace`: the parts are earlier, here, origin and left if it `works`, and state as well if it works `with state`, as in
models with recurrent or convolutional layers. `circuit`: writers, readers and carrier if it `works`; `writers only` if
the layers exchange several streams, so that there is no direction to erase. A number in brackets refers to the reasons
below the table.
"""


@dataclass(frozen=True)
class CommandOutcomes:
    """Outcomes on one family, by command: `works`, a short result, or the reason of a failure."""

    family: str
    outcomes: Mapping[str, str]


def run_commands(subject: Subject, doctor: str) -> CommandOutcomes:
    """Run every command on a model. `doctor`: outcome of doctor, which has run before."""
    size: dict[str, Any] = {"length": LENGTH, "prompts": PROMPTS}
    commands: dict[str, Callable[[], str]] = {
        "measure": lambda: _works(measure(subject, **size)),
        "metrics": lambda: _metrics(measure(subject, **size, metrics="all")),
        "trace": lambda: WITH_STATE if "state" in trace(subject, **size).sources else WORKS,
        "circuit": lambda: _circuit(circuit(subject, length=LENGTH, prompts=2 * PROMPTS, nodes=NODES)),
        "origin": lambda: _works(origin(subject, **size, tokens=TOKENS)),
        "claims": lambda: _claims(subject),
        "doctor": lambda: doctor,
    }
    with silence_transformers():
        return CommandOutcomes(subject.identity.name, {name: _outcome(run) for name, run in commands.items()})


def _works(result: object) -> str:
    return WORKS


def _circuit(result: Circuit) -> str:
    return WITHOUT_CARRIER if result.carrier is None else WORKS


def _metrics(run: Run) -> str:
    """Return the number of metrics that the run has, except for the one that needs a tokenizer."""
    possible = {metric.id for metric in CATALOGUE} - {"sink_rate_natural"}
    defined = {row.metric.id for row in run.metrics.rows} if run.metrics is not None else set()
    return f"{len(defined & possible)} of {len(possible)}"


def _outcome(run: Callable[[], str]) -> str:
    """Return the result of a command, or the message of its error."""
    try:
        return run()
    except PosleakError as error:
        return error.what


def _claims(subject: Subject) -> str:
    """Return the number of claims with an effect."""
    results = list(examine(Lab(subject, MeasureSpec(length=LENGTH, prompts=PROMPTS))))
    for result in results:
        if str(result.reason).startswith(UNEXPECTED):
            raise CheckError(
                "the test of a claim failed",
                where=f"{subject.identity.name}, {result.id}",
                got=result.reason,
            )
    return f"{sum(result.reason is None for result in results)} of {len(results)}"


def section(families: Sequence[CommandOutcomes]) -> Iterator[str]:
    """Yield the lines of the section of docs/families.md."""
    reasons: dict[str, int] = {}
    yield from (
        f"## Commands ({len(families)} families)",
        "",
        *HEAD.format(length=LENGTH, prompts=PROMPTS).splitlines(),
        "",
    )
    rows = [(each.family, *(_cell(each.outcomes[name], reasons) for name in COMMANDS)) for each in families]
    yield from table(("family", *COMMANDS), rows)
    yield ""
    yield from (f"{number}. {reason}" for reason, number in reasons.items())


def _cell(outcome: str, reasons: dict[str, int]) -> str:
    """Return a short outcome unchanged, or the number of a reason."""
    return outcome if len(outcome) <= 12 else f"no [{reasons.setdefault(outcome, len(reasons) + 1)}]"


def read_section(text: str) -> dict[str, CommandOutcomes]:
    """Return the rows of a page, with full reasons."""
    lines = text.partition("## Commands (")[2].partition("\n## ")[0].splitlines()
    listed = (line.partition(". ") for line in lines if line[:1].isdigit())
    reasons = {f"no [{number}]": reason for number, _, reason in listed}
    families = {}
    for line in lines:
        family, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        if line.startswith("| ") and family != "family":
            outcomes = [reasons.get(cell, cell) for cell in cells]
            families[family] = CommandOutcomes(family, dict(zip(COMMANDS, outcomes, strict=True)))
    return families
