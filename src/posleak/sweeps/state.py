"""The state of a cell, read from the storage: finished, failed, left out, running or open; and a sweep's progress.

A finished cell is checked: its files must be those that were written, and its model the one that was measured. Files
whose size and time are unchanged are trusted; others are hashed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from posleak.errors import RunError
from posleak.files import Sealed
from posleak.inputs import InputFacts
from posleak.models.sources import content_sha256, file_stamp
from posleak.typed import Number

from .cells import Cell
from .storage import Storage

_model_stamp, _model_content = cache(file_stamp), cache(content_sha256)

RECORD_FILES = CELL_FILE, ERROR_FILE = "cell.json", "error.json"


class State(StrEnum):
    """The state of a cell."""

    finished = "finished"
    failed = "failed"
    left_out = "left out"
    running = "running"
    open = "open"


@dataclass(frozen=True)
class FileFacts:
    """A file of a cell as it was written. `stamp`: its size and time."""

    sha256: str
    stamp: str


@dataclass(frozen=True)
class ModelFacts:
    """The model that was measured. `stamp` and `content` (posleak.models.sources) show whether its files have changed;
    None where that is unknown."""

    stamp: str | None
    content: str | None
    weights_sha256: str
    architecture: str
    dtype: str
    device: str
    layers: int
    heads: int
    revision: str | None


@dataclass(frozen=True)
class Seconds:
    """The time that a cell took. `loading` is 0 if the model was in memory already."""

    loading: Number
    measuring: Number
    writing: Number


@dataclass(frozen=True)
class Finished:
    """cell.json: a finished cell.

    place   subfolder of the cell's folder that has the files; "" on a disk
    files   by name;  host: the machine that measured it;  threads: of torch
    """

    id: str
    cell: Cell
    place: str
    files: dict[str, FileFacts]
    inputs: InputFacts
    model: ModelFacts
    seconds: Seconds
    attempts: int
    threads: int
    host: str
    versions: dict[str, str]
    finished: str
    warnings: tuple[str, ...]

    def __post_init__(self) -> None:
        """Keep the id, and so the folder, that the cell had with the software of that time."""
        object.__setattr__(self, "cell", self.cell.with_id(self.id))


@dataclass(frozen=True)
class Failed:
    """error.json: why a cell has no results. `left_out`: its edits have no effect, which is not a failure."""

    id: str
    cell: Cell
    left_out: bool
    what: str
    message: str
    traceback: str | None
    attempts: int
    host: str
    when: str


FINISHED = Sealed("posleak cell", 1, Finished, "run the sweep again to measure the cell again")
FAILED = Sealed("posleak cell error", 1, Failed, "run the sweep again with --retry-failed")


@dataclass(frozen=True)
class CellStatus:
    """A cell and its state in the storage. `why`: the reason why it failed, was left out, or is open again."""

    cell: Cell
    state: State
    why: str = ""
    record: Finished | None = field(default=None, repr=False)
    error: Failed | None = field(default=None, repr=False)


def statuses(storage: Storage, cells: Iterable[Cell], *, verify: bool = False) -> list[CellStatus]:
    """Return the status of every cell. `verify`: hash every file, even if its size and time are unchanged."""
    _model_stamp.cache_clear()
    _model_content.cache_clear()
    cells, present = list(cells), set(storage.cell_folders())
    now = storage.snapshot(f"{cell.path}/{name}" for cell in cells if cell.folder in present for name in RECORD_FILES)
    return [
        status_of(now, cell, verify=verify) if cell.folder in present else CellStatus(cell, State.open)
        for cell in cells
    ]


def status_of(storage: Storage, cell: Cell, *, verify: bool = False) -> CellStatus:
    """Return the status of one cell."""
    before, unsettled = "it was finished", State.running if storage.is_locked(cell.path) else State.open
    try:
        if (record := read_sealed(storage, FINISHED, f"{cell.path}/{CELL_FILE}")) is not None:
            if (damage := _damage(storage, cell, record, verify)) is None:
                return CellStatus(cell, State.finished, record=record)
            return CellStatus(cell, unsettled, f"{before}, but {damage}")
        before = "it failed"
        error = read_sealed(storage, FAILED, f"{cell.path}/{ERROR_FILE}")
        if error is not None and unsettled is State.open:
            return CellStatus(cell, State.left_out if error.left_out else State.failed, error.what, error=error)
    except RunError as damaged:
        return CellStatus(cell, unsettled, f"{before}, but {damaged.what}")
    return CellStatus(cell, unsettled)


def read_sealed(storage: Storage, kind: Sealed[Any], name: str) -> Any:
    """Return the record in a sealed file; None if there is no such file."""
    text = storage.read(name)
    return None if text is None else kind.parse(text, storage.path(name))


def _damage(storage: Storage, cell: Cell, record: Finished, verify: bool) -> str | None:
    """Return what is wrong with a finished cell; None if nothing is."""
    if record.id != cell.id:
        return "its record belongs to another cell"
    for name, facts in record.files.items():
        path = f"{cell.path}/{record.place}{name}"
        current = storage.stamp(path)
        if current is None:
            return f"{name} is missing"
        if (verify or current != facts.stamp) and storage.sha256(path) != facts.sha256:
            return f"{name} is damaged or was changed"
    measured = record.model
    if measured.stamp is None or _model_stamp(cell.model) in (None, measured.stamp):  # None: gone, or cannot be read
        return None
    has_changed = measured.content is None or _model_content(cell.model) != measured.content
    return "the model's files have changed since" if has_changed else None


# -- the progress of a sweep -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a worker did with a cell.

    state    None: its results cannot be written;  running: another worker has the cell
    reused   it was finished, or had failed, before
    """

    id: str
    state: State | None
    why: str = ""
    reused: bool = False


@dataclass(frozen=True)
class SweepProgress:
    """The counts of a sweep's cells at one moment.

    running     description of a cell -> what is done in it now
    elsewhere   cells that another sweep is working on
    left        estimated seconds; None if unknown
    """

    total: int
    finished: int
    failed: int
    left_out: int
    unwritten: int
    running: dict[str, str]
    elsewhere: int
    left: float | None

    @property
    def done(self) -> int:
        return self.finished + self.failed + self.left_out + self.unwritten

    @property
    def text(self) -> str:
        """`12 of 24 cells finished, 2 running, 1 failed`"""
        more = [(len(self.running), "running"), (self.failed, "failed"), (self.left_out, "left out")]
        more += [(self.unwritten, "not written"), (self.elsewhere, "left to another sweep")]
        return ", ".join([f"{self.finished} of {self.total} cells finished", *(f"{n} {what}" for n, what in more if n)])


@dataclass
class Tracker:
    """The cells of a sweep and how each ended. Engines report to it; the callback receives every change.

    retry_failed   treat cells that failed before as open
    """

    statuses: list[CellStatus]
    callback: Callable[[SweepProgress], None] = lambda progress: None
    retry_failed: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    elsewhere: int = 0
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.cells = {status.cell.id: status.cell for status in self.statuses}
        settled = [State.finished, State.left_out, *([] if self.retry_failed else [State.failed])]
        self.before = {status.cell.id: status.state for status in self.statuses if status.state in settled}

    @property
    def open(self) -> list[Cell]:
        """The cells that are to be measured, in the order of the manifest."""
        return [cell for cell in self.cells.values() if cell.id not in self.before and cell.id not in self.outcomes]

    def started(self, cell: Cell, what: str = "starting") -> None:
        """Report that a cell is being measured, and what is done in it now."""
        self.running[cell.id] = what
        self.show()

    def attempt(self, cell: Cell, what: str = "starting") -> int:
        """Report that a worker starts a cell, and return how many workers have started it."""
        self.attempts[cell.id] += 1
        self.started(cell, what)
        return self.attempts[cell.id]

    def stopped(self, cell: Cell) -> None:
        """Report that a cell is no longer being measured, and is still open."""
        self.running.pop(cell.id, None)
        self.show()

    def ended(self, outcome: Outcome) -> None:
        """Report what a worker returned. A cell that another worker has stays open, and the attempt does not count."""
        self.running.pop(outcome.id, None)
        if outcome.state is State.running:
            self.attempts[outcome.id] -= 1
        else:
            self.outcomes[outcome.id] = outcome
        self.show()

    def show(self) -> None:
        """Call the callback."""
        states = [*self.before.values(), *(outcome.state for outcome in self.outcomes.values())]
        running = {self.cells[cell].details: what for cell, what in self.running.items()}
        # The time left is estimated by tokens: models of one sweep are similar.
        done = sum(self.cells[outcome.id].work for outcome in self.outcomes.values() if not outcome.reused)
        rest = sum(cell.work for cell in self.open)
        left = (time.monotonic() - self._started) * rest / done if done else None
        finished, failed, left_out, unwritten = map(states.count, (State.finished, State.failed, State.left_out, None))
        total, elsewhere = len(self.cells), self.elsewhere
        self.callback(SweepProgress(total, finished, failed, left_out, unwritten, running, elsewhere, left))
