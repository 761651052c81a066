"""Read the runs of a report: each is shown whole, shown as partial, or rejected with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from posleak.analyses.circuit.circuit import CIRCUIT_FILE, Circuit
from posleak.analyses.claims.examination import read_findings
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.origin.origin import StoredOrigin, read_origin
from posleak.analyses.trace.trace import Trace
from posleak.errors import RunError, error_line
from posleak.files import read_json
from posleak.runs.conditions import METRICS, condition_folder
from posleak.runs.record import is_finished
from posleak.runs.run import Run

from .view import RunView

DOCTOR_FILE = "doctor.json"
"""Output of `posleak doctor MODEL --json`, if it was saved in the run's folder."""

T = TypeVar("T")

RunLike = Run | Trace | Circuit | str | Path
"""A run, a trace, a circuit, or a folder that has one."""


@dataclass(frozen=True)
class Refused:
    """A run that cannot be shown."""

    name: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"run": self.name, "reason": self.reason}


def gather(
    runs: Iterable[RunLike], *, unfinished: bool = True, only_traces: bool = False
) -> tuple[list[RunView], list[Refused]]:  # fmt: skip
    """Return the runs that can be shown, in order, and those that cannot.

    unfinished   accept unfinished runs
    only_traces  of the other results of a folder, read the trace only
    """
    views, refused = list[RunView](), list[Refused]()
    for run in runs:
        source, trace, circuit = _known(run)
        try:
            if not isinstance(source, Run):
                source = Run.load_partial(source) if unfinished else Run.load(source)
            views.append(_read(source, trace, None if only_traces else circuit, only_traces))
        except Exception as error:  # a damaged file can raise anything; the other runs are still shown
            name = source.path or source.name if isinstance(source, Run) else source
            refused.append(Refused(str(name), error_line(error)))
    return _labelled(views), refused


def _known(run: RunLike) -> tuple[Run | str | Path, Trace | None, Circuit | None]:
    """Return the run or its folder, and the trace and the circuit that are in memory already."""
    if isinstance(run, Circuit):
        return run.trace.ordinary, run.trace, run
    return (run.ordinary, run, None) if isinstance(run, Trace) else (run, None, None)


def require_some(runs: Sequence[object], refused: Sequence[Refused], least: int, what: str) -> None:
    """Raise RunError with the reason of every refused run if there are fewer than `least` runs."""
    if len(runs) < least:
        raise RunError(
            f"{what} needs {least} readable run{'s' if least > 1 else ''}",
            got="; ".join([f"{len(runs)}", *(f"{run.name}: {run.reason}" for run in refused)]),
            remedy="follow the remedy of each run, or pass folders that `posleak measure`, `posleak trace` or `posleak "
            "claims` has finished",
        )  # fmt: skip


def _read(run: Run, trace: Trace | None, circuit: Circuit | None, only_traces: bool) -> RunView:
    """Read the other results of the run's folder; a note says which of them are damaged or unfinished."""
    if run.path is None:
        return RunView(run, run.name, trace, circuit=circuit)
    folder, finished, notes = run.path, run.record.finished is not None, list[str]()

    def read(name: str, reader: Callable[[], T]) -> T | None:
        try:
            return reader()
        except Exception as error:  # as above
            notes.append(f"{name} is left out: {error_line(error)}")
            return None

    if finished and run.metrics is None and not only_traces:
        run = read("the folder of metrics", partial(_with_metrics, run)) or run
    if finished and trace is None:
        trace = read("the trace", partial(Trace.load, folder, run))
    if only_traces:
        return RunView(run, run.name, trace, notes=tuple(notes))
    claims = read("claims.json", lambda: read_findings(folder, run.record.digest))
    origin = read("origin.json", lambda: _origin(folder, run.record.digest))
    doctor = read(DOCTOR_FILE, lambda: _doctor(folder, run.name))
    if trace is not None and circuit is None:
        circuit = read(CIRCUIT_FILE, partial(Circuit.load, folder, trace))
    return RunView(run, run.name, trace, claims or None, origin, doctor, tuple(notes), circuit=circuit)


def _with_metrics(run: Run) -> Run:
    """Return the run with the metrics that `posleak claims` measured on the same prompts in a folder below it."""
    folder = condition_folder(run.path or Path(), METRICS)
    if not is_finished(folder):
        return run
    other = Run.load(folder)
    if not run.record.inputs.same_tokens(other.record.inputs):
        raise RunError("its metrics were measured on different prompts", where=str(folder))
    return replace(run, data=run.data.assign({n: x for n, x in other.data.data_vars.items() if n not in run.data}))


def _origin(folder: Path, digest: str) -> StoredOrigin | None:
    origin = read_origin(folder)
    if origin is not None and origin.digest != digest:
        raise RunError("it belongs to another measurement", where=str(folder))
    return origin


def _doctor(folder: Path, model: str) -> Diagnosis | None:
    path = folder / DOCTOR_FILE
    remedy = f"write it again with `posleak doctor {model} --json`"
    return read_json(Diagnosis, path, remedy) if path.is_file() else None


def _labelled(views: list[RunView]) -> list[RunView]:
    """Make labels unique: the model, then also edits, length and folder, then an index."""
    texts: list[Callable[[Run], str]] = [
        lambda run: ", ".join(run.record.spec.edit_texts),
        lambda run: f"{run.record.spec.length} tokens",
        lambda run: "" if run.path is None else run.path.name,
    ]
    labels = list[str]()
    for used in range(len(texts) + 1):
        pieces = [[view.label, *(text(view.run) for text in texts[:used])] for view in views]
        labels = [" · ".join(piece for piece in some if piece) for some in pieces]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} ({k + 1})" for k, label in enumerate(labels)]
    return [replace(view, label=label) for view, label in zip(views, labels, strict=True)]
