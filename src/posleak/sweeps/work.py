"""A worker: keeps one model in memory and measures cells one after another, from the storage into the storage.

Both engines use it, in a process of its own. An error in a cell is written into its folder and does not stop the next.
"""

from __future__ import annotations

import gc
import platform
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posleak import errors
from posleak.errors import PosleakError, error_line
from posleak.files import remove, remove_leftovers, sha256_of
from posleak.models.sources import content_sha256, file_stamp
from posleak.runs.folder import HEADS_FILE, RECORD_FILE, RESULTS_FILE
from posleak.runs.software import now, versions
from posleak.text import visible

from . import state
from .cells import LONG, MEASURE, Cell
from .state import CELL_FILE, ERROR_FILE, Outcome, State
from .storage import Storage

OnStatus = Callable[[str], None]
"""A callback that receives a status line."""

LoadedModel = tuple[Any, Any, tuple[str | None, str | None]]
"""Group, subject, and stamp and content of the model's files (posleak.models.sources)."""


@dataclass
class Worker:
    """Worker of a sweep, with one model in memory. Its fields are the options that hold for all cells.

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
        self._loaded: LoadedModel | None = None

    def hold(self, cell: Cell, subject: Any) -> None:
        """Use this subject for cells with the same model."""
        self._loaded = cell.group, subject, (file_stamp(cell.model), content_sha256(cell.model))

    def run(
        self, storage: Storage, cell: Cell, attempt: int = 1, on_status: OnStatus = lambda status: None,
        expected: str | None = None,
    ) -> Outcome:  # fmt: skip
        """Measure one cell.

        attempt    the number of workers that have started it, with this one
        expected   the cell's id in the process that started the sweep: another one means other software
        """
        try:
            if expected is not None and expected != cell.id:
                here = ", ".join(f"{name} {version}" for name, version in versions().items())
                cell = cell.with_id(expected)  # the failure is written where the driver looks for it
                raise errors.CheckError(
                    "the worker's software or texts differ from those of the machine that started the sweep",
                    where=cell.details, got=f"{here}, Python {platform.python_version()}",
                    remedy="install the same versions on all machines, and use paths of texts that all machines share",
                )  # fmt: skip
            with storage.work_folder(cell.path) as folder:
                status = state.status_of(storage, cell, verify=self.verify)
                if status.record is not None or (status.error is not None and not self.retry_failed):
                    return Outcome(cell.id, status.state, status.why, reused=True)
                if status.why and status.error is None:  # damaged or outdated: no longer finished
                    storage.remove(f"{cell.path}/{CELL_FILE}")
                    for path in [*folder.rglob(RESULTS_FILE), *folder.rglob(HEADS_FILE)]:
                        if not (path.parent / RECORD_FILE).exists():  # results without a record belong to no run
                            remove(path)
                record = self._measure(storage, cell, folder, attempt, on_status)
                storage.write(f"{cell.path}/{CELL_FILE}", state.FINISHED.text(record).encode())
                storage.remove(f"{cell.path}/{ERROR_FILE}")
                return Outcome(cell.id, State.finished)
        except errors.BusyError as error:
            return Outcome(cell.id, State.running, f"another worker has it: {error.got}")
        except errors.StorageError as error:
            return Outcome(cell.id, None, error_line(error))
        except Exception as error:
            return write_failure(storage, cell, error, attempt)

    def _measure(self, storage: Storage, cell: Cell, folder: Path, attempt: int, on_status: OnStatus) -> state.Finished:
        """Measure the cell into the folder, upload the files to an object store, and return the cell's record."""
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", errors.PosleakWarning)
            on_status("loading")
            (_, subject, model_stamps), loading = self._load(cell, on_status)
            begun = time.perf_counter()
            try:
                results = self._results(subject, cell, folder, on_status)
            except errors.RunError:  # what the folder has cannot be resumed
                results = self._results(subject, cell, folder, on_status, fresh=True)
            measuring = time.perf_counter() - begun
            on_status("writing")
            results.write(folder)
        remove_leftovers(folder, state.RECORD_FILES.__contains__)
        paths = [path for path in folder.rglob("[!.]*") if path.is_file() and path.name not in state.RECORD_FILES]
        names = sorted(path.relative_to(folder).as_posix() for path in paths)
        place = storage.upload(cell.path, folder, names)
        stamps = {name: storage.stamp(f"{cell.path}/{place}{name}") or "" for name in names}
        run, identity = results.run.record, results.run.record.identity
        notes = [str(each.message) for each in caught if issubclass(each.category, errors.PosleakWarning)]
        return state.Finished(
            id=cell.id, cell=cell, place=place, inputs=run.inputs, attempts=attempt, threads=run.machine.threads,
            files={name: state.FileFacts(sha256_of(folder / name), stamps[name]) for name in names},
            model=state.ModelFacts(
                *model_stamps, identity.weights_sha256, identity.architecture, identity.dtype,
                identity.device, identity.layers, identity.heads, identity.revision,
            ),
            seconds=state.Seconds(loading, measuring, time.perf_counter() - started - loading - measuring),
            host=platform.node(), versions=versions(), finished=now(), warnings=tuple(dict.fromkeys(notes)),
        )  # fmt: skip

    def _results(self, subject: Any, cell: Cell, folder: Path, on_status: OnStatus, *, fresh: bool = False) -> Any:
        """Measure or trace into the folder, and resume what it has unless `fresh`."""
        from posleak.analyses.trace.trace import traced
        from posleak.runs.conditions import Conditions
        from posleak.runs.prepared import PreparedRun

        from .numbers import CellResults

        if cell.kind == MEASURE:
            ready = PreparedRun.of(subject, cell.spec, max_memory=self.max_memory)
            run = ready.run_with_warnings(folder, fresh=fresh, on_progress=lambda progress: on_status(progress.text))
            return CellResults(run)
        conditions = Conditions(subject, cell.spec, folder, fresh, self.max_memory, on_status)
        with conditions.writing():
            trace = traced(conditions, long_donor=cell.donor == LONG)
        return CellResults(trace.ordinary, trace)

    def _load(self, cell: Cell, on_status: OnStatus) -> tuple[LoadedModel, float]:
        """Return the cell's model, loaded if it is not in memory, and the seconds that loading took.

        If it does not fit in float32 and the cell names no dtype, it is loaded in bfloat16.
        """
        if self._loaded is not None and self._loaded[0] == cell.group:
            return self._loaded, 0.0
        self._loaded = None
        gc.collect()
        started = time.perf_counter()
        import torch

        from posleak.models import load

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        trust: Any = {"trust_remote_code": self.trust_remote_code, "allow_pickle": self.allow_pickle}
        options: Any = {**cell.loading, **trust, "progress": on_status, "notice": on_status}
        stamp = file_stamp(cell.model)
        try:
            subject = load(cell.model, **options)
        except errors.TooLargeError:
            if cell.dtype is not None:
                raise
            errors.warn(f"{cell.model} does not fit into memory in float32: it is loaded in bfloat16")
            subject = load(cell.model, **{**options, "dtype": "bfloat16"})
        self._loaded = cell.group, subject, (stamp, content_sha256(cell.model))  # read now: the files may change later
        return self._loaded, time.perf_counter() - started


def write_failure(storage: Storage, cell: Cell, error: Exception, attempt: int) -> Outcome:
    """Write error.json: why a cell has no results, with the traceback of an error that is not posleak's own."""
    what, left_out = error_line(error), isinstance(error, errors.NoEffectError)
    trace = None if isinstance(error, PosleakError) else visible("".join(traceback.format_exception(error)))
    record = state.Failed(cell.id, cell, left_out, what, visible(str(error)), trace, attempt, platform.node(), now())
    try:
        storage.write(f"{cell.path}/{ERROR_FILE}", state.FAILED.text(record).encode())
    except PosleakError as unwritten:
        return Outcome(cell.id, None, f"{what}; and error.json cannot be written: {unwritten.got or unwritten.what}")
    return Outcome(cell.id, State.left_out if left_out else State.failed, what)


def worker_died(storage: Storage, tracker: state.Tracker, cell: Cell, how: str, retries: int) -> bool:
    """Return whether to start a cell again whose worker died; after `retries` times, write its failure."""
    attempts = tracker.attempts[cell.id]
    if attempts <= retries:
        tracker.stopped(cell)
        return True
    times = "once" if attempts == 1 else f"{attempts} times"
    remedy = "the machine may have run out of memory: use a shorter length or a smaller batch"
    error = errors.CheckError(f"its worker died {times} ({how})", remedy=remedy)
    tracker.ended(write_failure(storage, cell, error, attempts))
    return False
