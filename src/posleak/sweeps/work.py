"""A worker: keeps one model in memory and measures cells one after another, from the storage into the storage.

Both engines use it, in a process of its own. An error in a cell is written into its folder and does not stop the next.
"""

from __future__ import annotations

import gc
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posleak.errors import (
    BusyError,
    CheckError,
    NoEffectError,
    PosleakError,
    PosleakWarning,
    RunError,
    StorageError,
    TooLargeError,
    warn,
)
from posleak.files import remove, remove_leftovers, sha256_of
from posleak.models.sources import content_sha256, file_stamp
from posleak.runs.folder import HEADS_FILE, RECORD_FILE, RESULTS_FILE
from posleak.runs.software import now, versions
from posleak.text import one_line, visible

from .cells import MEASURE, Cell
from .state import (
    CELL_FILE,
    ERROR_FILE,
    FAILED,
    FINISHED,
    Failed,
    FileFacts,
    Finished,
    ModelFacts,
    Seconds,
    State,
    status_of,
)
from .storage import CELLS_FOLDER, Storage

OnStatus = Callable[[str], None]
"""A callback that receives a status line."""

LoadedModel = tuple[Any, tuple[str | None, str | None]]
"""A subject, with stamp and content of its model's files (posleak.models.sources)."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    state    None: undecided, because another worker has the cell (`busy`) or the storage cannot be written
    reused   it was settled already
    """

    id: str
    state: State | None
    why: str = ""
    busy: bool = False
    reused: bool = False
    seconds: Seconds = Seconds(0, 0, 0)


@dataclass
class Worker:
    """Measures cells; its fields are the options that hold for all cells of a sweep.

    retry_failed   measure cells that failed before
    retries        how often an engine starts a cell again whose worker process died
    threads        of torch; None: torch's own choice
    max_memory     bytes that the process may hold, as in `measure`
    verify         hash every file of finished cells
    """

    retry_failed: bool = False
    retries: int = 2
    threads: int | None = None
    max_memory: int | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        self._loaded: tuple[Any, LoadedModel] | None = None

    def hold(self, cell: Cell, subject: Any) -> None:
        """Use this subject for cells with the same model."""
        self._loaded = cell.group, (subject, (file_stamp(cell.model), content_sha256(cell.model)))

    def run(
        self, storage: Storage, cell: Cell, attempt: int = 1, on_status: OnStatus = lambda status: None,
        expected: str | None = None,
    ) -> Outcome:  # fmt: skip
        """Measure one cell.

        attempt    the number of workers that have started it, with this one
        expected   the cell's id in the process that started the sweep: another one means other software
        """
        started = time.perf_counter()
        try:
            if expected not in (None, cell.id):
                raise _software_differs(cell)
            with storage.work_folder(cell.folder) as folder:
                status = status_of(storage, cell, verify=self.verify)
                if status.record is not None:
                    return Outcome(cell.id, State.finished, reused=True, seconds=status.record.seconds)
                if status.error is not None and not self.retry_failed:
                    return Outcome(cell.id, status.state, status.why, reused=True)
                if status.why and status.error is None:  # damaged or outdated: no longer finished
                    storage.remove(f"{CELLS_FOLDER}/{cell.folder}/{CELL_FILE}")
                    _remove_strays(folder)
                return self._measure(storage, cell, folder, attempt, on_status, started)
        except BusyError as error:
            return Outcome(cell.id, None, f"another worker has it: {error.got}", busy=True)
        except StorageError as error:
            return Outcome(cell.id, None, error_line(error))
        except Exception as error:
            unforeseen = not isinstance(error, PosleakError)
            trace = visible("".join(traceback.format_exception(error))) if unforeseen else None
            left_out = isinstance(error, NoEffectError)
            return write_failure(
                storage, cell, error_line(error), trace, attempt, left_out=left_out, message=str(error)
            )

    def _measure(
        self, storage: Storage, cell: Cell, folder: Path, attempt: int, on_status: OnStatus, started: float
    ) -> Outcome:
        with _collected_warnings() as notes:
            on_status("loading")
            (subject, marks), loading = self._subject(cell, on_status)
            begun = time.perf_counter()
            results = _resumed(subject, cell, folder, self.max_memory, on_status)
            measuring = time.perf_counter() - begun
            on_status("writing")
            results.write(folder)
        remove_leftovers(folder, (CELL_FILE, ERROR_FILE).__contains__)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if _is_result(path))
        place, home = storage.upload(cell.folder, folder, names), f"{CELLS_FOLDER}/{cell.folder}"
        stamps = {name: storage.stamp(f"{home}/{place}{name}") or "" for name in names}
        run, identity = results.run.record, results.run.record.identity
        seconds = Seconds(loading, measuring, time.perf_counter() - started - loading - measuring)
        record = Finished(
            id=cell.id, cell=cell, place=place, inputs=run.inputs, seconds=seconds, attempts=attempt,
            files={name: FileFacts(sha256_of(folder / name), stamps[name]) for name in names},
            model=ModelFacts(
                *marks, identity.weights_sha256, identity.architecture, identity.dtype,
                identity.device, identity.layers, identity.heads, identity.revision,
            ),
            threads=run.machine.threads, host=platform.node(), versions=versions(), finished=now(),
            warnings=tuple(dict.fromkeys(notes)),
        )  # fmt: skip
        storage.write(f"{home}/{CELL_FILE}", FINISHED.text(record).encode())
        storage.remove(f"{home}/{ERROR_FILE}")
        return Outcome(cell.id, State.finished, seconds=seconds)

    def _subject(self, cell: Cell, on_status: OnStatus) -> tuple[LoadedModel, float]:
        """Return the cell's model, loaded if it is not in memory, and the seconds that loading took."""
        if self._loaded is not None and self._loaded[0] == cell.group:
            return self._loaded[1], 0.0
        self._loaded = None
        gc.collect()
        started = time.perf_counter()
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        mark = file_stamp(cell.model)
        subject = self._load(cell, on_status)
        loaded: LoadedModel = (subject, (mark, content_sha256(cell.model)))  # read now: the files may change meanwhile
        self._loaded = (cell.group, loaded)
        return loaded, time.perf_counter() - started

    def _load(self, cell: Cell, on_status: OnStatus) -> Any:
        """Load the model; if it does not fit in float32 and the cell names no dtype, in bfloat16."""
        from posleak.models import load

        trust: Any = {"trust_remote_code": self.trust_remote_code, "allow_pickle": self.allow_pickle}
        options: Any = {**cell.loading, **trust, "progress": on_status, "notice": on_status}
        try:
            return load(cell.model, **options)
        except TooLargeError:
            if cell.dtype is not None:
                raise
            warn(f"{cell.model} does not fit into memory in float32: it is loaded in bfloat16")
            return load(cell.model, **{**options, "dtype": "bfloat16"})


def write_failure(
    storage: Storage, cell: Cell, what: str, trace: str | None, attempt: int, *, left_out: bool = False,
    message: str | None = None,
) -> Outcome:  # fmt: skip
    """Write error.json: why a cell has no results."""
    record = Failed(cell.id, cell, left_out, what, visible(message or what), trace, attempt, platform.node(), now())
    try:
        storage.write(f"{CELLS_FOLDER}/{cell.folder}/{ERROR_FILE}", FAILED.text(record).encode())
    except PosleakError as error:
        return Outcome(cell.id, None, f"{what}; and error.json cannot be written: {error.got or error.what}")
    return Outcome(cell.id, State.left_out if left_out else State.failed, what)


def _resumed(subject: Any, cell: Cell, folder: Path, max_memory: int | None, on_status: OnStatus) -> Any:
    """Measure into the folder; what it has and cannot be resumed is measured again."""
    try:
        return _results(subject, cell, folder, max_memory, on_status, fresh=False)
    except RunError:
        return _results(subject, cell, folder, max_memory, on_status, fresh=True)


def _results(
    subject: Any, cell: Cell, folder: Path, max_memory: int | None, on_status: OnStatus, *, fresh: bool
) -> Any:
    from posleak.analyses.trace.trace import traced
    from posleak.runs.conditions import Conditions
    from posleak.runs.prepared import PreparedRun

    from .numbers import Measured

    if cell.kind == MEASURE:
        ready = PreparedRun.of(subject, cell.spec, max_memory=max_memory)
        return Measured(
            ready.run_with_warnings(folder, fresh=fresh, on_progress=lambda progress: on_status(progress.text))
        )
    trace = traced(Conditions(subject, cell.spec, folder, fresh, max_memory, on_status))
    return Measured(trace.ordinary, trace)


def _remove_strays(folder: Path) -> None:
    """Remove results without a run.json: they belong to no run."""
    for name in (RESULTS_FILE, HEADS_FILE):
        for path in folder.rglob(name):
            if not (path.parent / RECORD_FILE).exists():
                remove(path)


def _is_result(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name not in (CELL_FILE, ERROR_FILE)


def error_line(error: Exception) -> str:
    """Return an error in one line: what, got and remedy."""
    if not isinstance(error, PosleakError):
        return one_line(error)
    parts = [error.what, f"got {error.got}" if error.got is not None else "", error.remedy or ""]
    return visible("; ".join(part for part in parts if part)).replace("\n", " ")


def _software_differs(cell: Cell) -> CheckError:
    here = ", ".join(f"{name} {version}" for name, version in versions().items())
    return CheckError(
        "the worker's software or texts differ from those where the sweep was started", where=cell.details,
        got=f"{here}, Python {platform.python_version()}",
        remedy="install the same versions everywhere, and give texts by a path that all machines share",
    )  # fmt: skip


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Give a list that receives posleak's warnings."""
    notes = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("always", PosleakWarning)
        warnings.showwarning = lambda message, category, *_: (
            notes.append(str(message)) if issubclass(category, PosleakWarning) else None
        )
        yield notes
