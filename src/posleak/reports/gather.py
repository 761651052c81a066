"""What a report is made from: run folders as they are found, each whole, partial, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from posleak.analyses.claims.catalogue import ClaimResult
from posleak.analyses.claims.examination import read_findings
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.origin.store import StoredOrigin, read_origin
from posleak.analyses.trace.trace import Trace
from posleak.errors import PosleakError, RunError
from posleak.files import read_json
from posleak.metrics import Metrics
from posleak.runs.conditions import METRICS, condition_folder
from posleak.runs.record import is_finished
from posleak.runs.run import Run
from posleak.text import one_line

from .curves import Curves, curves

DOCTOR = "doctor.json"
"""`posleak doctor MODEL --json`, where somebody has put it beside the run."""

T = TypeVar("T")


@dataclass(frozen=True)
class ShownRun:
    """One run and what its folder holds beside it; None: not there. `notes` say what could not be used, and why;
    `metrics`: whether what others measure is shown, if the run has it."""

    run: Run
    label: str
    trace: Trace | None = None
    claims: tuple[ClaimResult, ...] | None = None
    origin: StoredOrigin | None = None
    doctor: Diagnosis | None = None
    notes: tuple[str, ...] = field(default=())
    metrics: bool = True

    @cached_property
    def curves(self) -> Curves:
        """Every head's curves: the page and the tables draw on the same ones."""
        return curves(self.run.data)

    @property
    def alone(self) -> ShownRun:
        """The run without what its folder holds beside it, and without metrics; itself, if there is nothing."""
        beside = (self.trace, self.claims, self.origin, self.doctor, self.neighbours)
        without = ShownRun(self.run, self.label, notes=self.notes, metrics=False)
        return self if all(each is None for each in beside) else without

    @property
    def neighbours(self) -> Metrics | None:
        """What others measure; None if the run has no metrics, or if they are not shown."""
        return self.run.metrics if self.metrics else None

    @property
    def partial(self) -> bool:
        return self.run.prompts < self.run.record.spec.prompts


@dataclass(frozen=True)
class Refused:
    """A run that is not shown."""

    name: str
    reason: str


Given = Run | Trace | str | Path
"""What a report or a comparison can be made of: runs or traces in memory, or their folders."""


def gather(
    runs: Iterable[Given], *, partial: bool = True, traces: bool = True
) -> tuple[list[ShownRun], list[Refused]]:  # fmt: skip
    """Every run that can be shown, in order, and every one that cannot.

    Without `partial` an unfinished run cannot; without `traces` the borrowed passes that folders have are not read.
    """
    found, refused = list[ShownRun](), list[Refused]()
    for each in runs:
        given = each.ordinary if isinstance(each, Trace) else each
        name = str(given.path or given.name) if isinstance(given, Run) else str(given)
        try:
            run = given if isinstance(given, Run) else _load(Path(given), partial)
            found.append(_beside(run, each if isinstance(each, Trace) else None, traces))
        except Exception as error:  # files may hold anything; whatever one does, the others are shown
            refused.append(Refused(name, reason(error)))
    return _labelled(found), refused


def require_some(found: Sequence[object], refused: Sequence[Refused], least: int, what: str) -> None:
    """Refuse to go on with fewer than `least` runs, naming those that were refused."""
    if len(found) < least:
        raise RunError(
            f"{what} needs {least} run{'s' if least > 1 else ''} that can be read",
            got="; ".join([f"{len(found)}", *(f"{each.name}: {each.reason}" for each in refused)]),
            remedy="do what is said of each, or give folders that `posleak measure`, `posleak trace` or `posleak "
            "claims` wrote and finished",
        )  # fmt: skip


def _load(folder: Path, partial: bool) -> Run:
    return Run.load_partial(folder) if partial else Run.load(folder)


def reason(error: Exception) -> str:
    """One line: what, got, and the remedy; the place is in the name already."""
    if not isinstance(error, PosleakError):
        return f"it cannot be shown: {one_line(error)}"
    parts = [error.what, f"got {error.got}" if error.got is not None else "", error.remedy or ""]
    return "; ".join(part for part in parts if part)


def _beside(run: Run, trace: Trace | None, traces: bool) -> ShownRun:
    """The run with what its folder has besides; what is damaged or unfinished is left out, with a note."""
    if run.path is None:
        return ShownRun(run, run.name, trace)
    folder, notes = run.path, list[str]()

    def read(name: str, reader: Callable[[], T]) -> T | None:
        try:
            return reader()
        except Exception as error:  # as above
            notes.append(f"{name} is left out: {reason(error)}")
            return None

    if run.metrics is None and run.record.finished is not None:
        plain, metrics = run, condition_folder(folder, METRICS)
        more = read("what others measure", lambda: _with_metrics(plain, metrics))
        run = plain if more is None else more
    if trace is None and traces and run.record.finished is not None:
        loaded = read("the trace", lambda: Trace.load(folder))
        trace = None if loaded is None else replace(loaded, ordinary=run)
    claims = read("claims.json", lambda: read_findings(folder, run.record.digest)) or None
    origin = read("origin.json", lambda: read_origin(folder))
    if origin is not None and origin.digest != run.record.digest:
        notes.append("origin.json is left out: it is about another measurement")
        origin = None
    doctor = None
    if (folder / DOCTOR).is_file():
        remedy = f"write it again with `posleak doctor {run.name} --json`"
        doctor = read(DOCTOR, lambda: read_json(Diagnosis, folder / DOCTOR, remedy))
    return ShownRun(run, run.name, trace, claims, origin, doctor, tuple(notes))


def _with_metrics(run: Run, folder: Path) -> Run | None:
    """The run with the metrics of another on the same prompts, which `posleak claims` keeps below it; None without."""
    if not is_finished(folder):
        return None
    more = Run.load(folder)
    if not run.record.inputs.same_tokens(more.record.inputs):
        raise RunError("its metrics are of other prompts", where=str(folder))
    return replace(run, data=run.data.assign({n: x for n, x in more.data.data_vars.items() if n not in run.data}))


def _labelled(found: list[ShownRun]) -> list[ShownRun]:
    """Names that tell the runs of one page apart: the model, then its edits, then its length, then a number."""

    def names(*parts: str) -> list[str]:
        return [" · ".join([s.label, *(text for part in parts if (text := _part(s.run, part)))]) for s in found]

    for parts in ((), ("edits",), ("edits", "length"), ("edits", "length", "folder")):
        labels = names(*parts)
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} ({k + 1})" for k, label in enumerate(labels)]
    return [replace(shown, label=label) for shown, label in zip(found, labels, strict=True)]


def _part(run: Run, part: str) -> str:
    if part == "edits":
        return ", ".join(run.record.spec.edit_texts)
    if part == "length":
        return f"{run.record.spec.length} tokens"
    return run.path.name if run.path is not None else ""
