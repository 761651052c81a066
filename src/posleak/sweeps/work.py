"""A worker: keeps one model in memory and does cells in turn, from the storage into the storage.

Both engines use the same worker, in a process of its own. Whatever goes wrong in a cell is written into its folder and
does not stop the next one.
"""

from __future__ import annotations

import gc
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posleak.errors import BusyError, CheckError, NoEffectError, PosleakError, PosleakWarning, RunError, StorageError
from posleak.files import remove, remove_leftovers, sha256_of
from posleak.models.stamps import content_sha256, file_stamp
from posleak.runs.folder import HEADS_FILE, RECORD_FILE, RESULTS_FILE
from posleak.runs.software import now, versions
from posleak.text import one_line, visible

from .cells import MEASURE, Cell
from .state import CELL, ERROR, FAILED, FINISHED, Failed, FileFacts, Finished, ModelFacts, Seconds, State, look
from .storage import CELLS, Storage

Say = Callable[[str], None]
Loaded = tuple[Any, tuple[str | None, str | None]]
"""A subject, and stamp and content of its model's files (posleak.models.stamps)."""


NO_TIME = Seconds(0, 0, 0)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. `state` None: nothing was decided, because somebody else is at it (`busy`) or because it cannot
    be written; then the storage says nothing of it either.

    reused   it was finished already
    """

    id: str
    state: State | None
    why: str = ""
    busy: bool = False
    reused: bool = False
    seconds: Seconds = NO_TIME


@dataclass
class Worker:
    """Does cells. `again`: cells that failed before are tried again; `verify`: as in `look`.

    threads      of torch; None: as many as torch takes
    max_memory   what the process may hold, as in `measure`
    """

    storage: Storage
    again: bool = False
    threads: int | None = None
    max_memory: int | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    verify: bool = False
    _loaded: tuple[Any, Loaded] | None = field(default=None, repr=False)

    @classmethod
    def having(cls, storage: Storage, cell: Cell, subject: Any) -> Worker:
        """A worker that has the model of this cell in memory already."""
        return cls(storage, _loaded=(cell.group, (subject, (file_stamp(cell.model), content_sha256(cell.model)))))

    def run(self, cell: Cell, attempt: int = 1, say: Say = lambda what: None, expected: str | None = None) -> Outcome:
        """One cell. `attempt`: how many workers have begun it, with this one; `expected`: its id at the driver."""
        started = time.perf_counter()
        try:
            if expected not in (None, cell.id):
                raise _other_software(cell)
            with self.storage.workplace(cell.folder) as place:
                found = look(self.storage, cell, verify=self.verify)
                if found.state is State.finished and found.record is not None:
                    return Outcome(cell.id, State.finished, reused=True, seconds=found.record.seconds)
                if found.error is not None and not self.again:
                    return Outcome(cell.id, found.state, found.why, reused=True)
                if found.why and found.error is None:  # it was finished once: from here on it is not
                    self.storage.remove(f"{CELLS}/{cell.folder}/{CELL}")
                    _remove_strays(place)
                return self._done(cell, place, attempt, say, started)
        except BusyError as error:
            return Outcome(cell.id, None, f"somebody else is at work on it: {error.got}", busy=True)
        except StorageError as error:
            return Outcome(cell.id, None, said(error))
        except Exception as error:
            return self._failed(cell, error, attempt)

    def _done(self, cell: Cell, place: Path, attempt: int, say: Say, started: float) -> Outcome:
        with _noted() as notes:
            say("loading")
            (subject, marks), loading = self._subject(cell, say)
            begun = time.perf_counter()
            measured = _measured(subject, cell, place, self.max_memory, say)
            ended = time.perf_counter()
            say("writing")
            measured.write(place)
        remove_leftovers(place, (CELL, ERROR).__contains__)
        names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if _is_result(path))
        below = self.storage.send(cell.folder, place, names)
        run, home = measured.run.record, f"{CELLS}/{cell.folder}"
        stamps = {name: self.storage.stamp(f"{home}/{below}{name}") or "" for name in names}
        files = {name: FileFacts(sha256_of(place / name), stamps[name]) for name in names}
        seconds = Seconds(loading, ended - begun, time.perf_counter() - started - loading - (ended - begun))
        identity = run.identity
        record = Finished(
            id=cell.id, cell=cell, place=below, files=files, inputs=run.inputs,
            model=ModelFacts(
                *marks, identity.weights_sha256, identity.architecture, identity.dtype,
                identity.device, identity.layers, identity.heads, identity.revision,
            ),
            seconds=seconds, attempts=attempt, threads=run.machine.threads, host=platform.node(), versions=versions(),
            finished=now(), warnings=tuple(dict.fromkeys(notes)),
        )  # fmt: skip
        self.storage.write(f"{home}/{CELL}", FINISHED.text(record).encode())
        self.storage.remove(f"{home}/{ERROR}")
        return Outcome(cell.id, State.finished, seconds=seconds)

    def _subject(self, cell: Cell, say: Say) -> tuple[Loaded, float]:
        """The cell's model with what its files were when it was loaded, and the seconds that loading took."""
        if self._loaded is not None and self._loaded[0] == cell.group:
            return self._loaded[1], 0.0
        self._loaded = None
        gc.collect()
        started = time.perf_counter()
        import torch

        from posleak.models import load

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        mark = file_stamp(cell.model)
        subject = load(
            cell.model, dtype=cell.dtype, device=cell.device, device_map=cell.device_map, progress=say, notice=say,
            trust_remote_code=self.trust_remote_code, allow_pickle=self.allow_pickle,
        )  # fmt: skip
        found: Loaded = (
            subject,
            (mark, content_sha256(cell.model)),
        )  # taken now: files may change before the cell ends
        self._loaded = (cell.group, found)
        return found, time.perf_counter() - started

    def _failed(self, cell: Cell, error: Exception, attempt: int) -> Outcome:
        """Keep the error in the cell's folder. What nobody foresaw is kept with its traceback."""
        left_out = isinstance(error, NoEffectError)
        trace = None if isinstance(error, PosleakError) else visible("".join(traceback.format_exception(error)))
        return keep_failure(self.storage, cell, said(error), trace, attempt, left_out=left_out, message=str(error))


def keep_failure(
    storage: Storage, cell: Cell, what: str, trace: str | None, attempt: int, *, left_out: bool = False,
    message: str | None = None,
) -> Outcome:  # fmt: skip
    """Write why a cell has no numbers into its folder."""
    record = Failed(cell.id, cell, left_out, what, visible(message or what), trace, attempt, platform.node(), now())
    state = State.left_out if left_out else State.failed
    try:
        storage.write(f"{CELLS}/{cell.folder}/{ERROR}", FAILED.text(record).encode())
    except PosleakError as error:
        return Outcome(cell.id, None, f"{what}; and that could not be written: {error.got or error.what}")
    return Outcome(cell.id, state, what)


def _measured(subject: Any, cell: Cell, place: Path, max_memory: int | None, say: Say) -> Any:
    """Measure or trace into the folder. What is there and cannot be gone on with is measured anew."""
    try:
        return _work(subject, cell, place, max_memory, say, fresh=False)
    except RunError:
        return _work(subject, cell, place, max_memory, say, fresh=True)


def _work(subject: Any, cell: Cell, place: Path, max_memory: int | None, say: Say, *, fresh: bool) -> Any:
    from posleak.analyses.trace.trace import traced
    from posleak.runs.conditions import Conditions
    from posleak.runs.prepared import PreparedRun

    from .numbers import Measured

    if cell.kind == MEASURE:
        ready = PreparedRun.of(subject, cell.spec, max_memory=max_memory)
        return Measured(ready.run_with_warnings(place, fresh=fresh, on_progress=lambda reached: say(reached.text)))
    found = traced(Conditions(subject, cell.spec, place, fresh, max_memory, say))
    return Measured(found.ordinary, found)


def _remove_strays(place: Path) -> None:
    """Remove results whose run.json is gone from the folder of a cell that was finished: they belong to no run."""
    for name in (RESULTS_FILE, HEADS_FILE):
        for path in place.rglob(name):
            if not (path.parent / RECORD_FILE).exists():
                remove(path)


def _is_result(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name not in (CELL, ERROR)


def said(error: Exception) -> str:
    """An error in one line: what, where it was seen, and the remedy."""
    if not isinstance(error, PosleakError):
        return one_line(error)
    parts = [error.what, f"got {error.got}" if error.got is not None else "", error.remedy or ""]
    return visible("; ".join(part for part in parts if part)).replace("\n", " ")


def _other_software(cell: Cell) -> CheckError:
    here = ", ".join(f"{name} {version}" for name, version in versions().items())
    return CheckError(
        "the worker would measure another cell than it was given: its software or its texts differ from those where "
        "the sweep was started", where=cell.details, got=f"{here}, Python {platform.python_version()}",
        remedy="install the same versions everywhere, and give texts by a path that all machines share",
    )  # fmt: skip


@contextmanager
def _noted() -> Iterator[list[str]]:
    """posleak's warnings, kept for the cell's record."""
    notes = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("always", PosleakWarning)
        warnings.showwarning = lambda message, category, *_: (
            notes.append(str(message)) if issubclass(category, PosleakWarning) else None
        )
        yield notes
