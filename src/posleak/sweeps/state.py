"""What is known of a cell, read off the storage and never off somebody's memory: finished, failed, left out, or open.

A finished cell is looked at again: its files must be those that were written, and its model must be the one that was
measured. What looks unchanged (size and time) is believed; what does not is read and compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from posleak.errors import RunError
from posleak.files import Sealed
from posleak.inputs import InputFacts
from posleak.models.stamps import content_sha256, file_stamp
from posleak.typed import Number

from .cells import Cell
from .storage import CELLS, Storage

CELL, ERROR, NUMBERS = "cell.json", "error.json", "numbers.parquet"


class State(StrEnum):
    """Of a cell."""

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
    """The model that was measured. `stamp` and `content` tell whether its files have changed (posleak.models.stamps);
    None: they say nothing."""

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
    """Where the time of a cell went. `loading` is 0 where the model was in memory already."""

    loading: Number
    measuring: Number
    writing: Number


@dataclass(frozen=True)
class Finished:
    """cell.json: a finished cell.

    place   where its files are below its folder: "" on a disk;  files: by name
    host    the machine that measured it;  threads: of torch
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


@dataclass(frozen=True)
class Failed:
    """error.json: why a cell has no numbers. `left_out`: its edits would change nothing, which is no failure."""

    id: str
    cell: Cell
    left_out: bool
    what: str
    message: str
    traceback: str | None
    attempts: int
    host: str
    when: str


FINISHED = Sealed("posleak cell", 1, Finished, "start the sweep again: it is measured anew")
FAILED = Sealed("posleak cell error", 1, Failed, "start the sweep again with --retry-failed")


@dataclass(frozen=True)
class Known:
    """A cell and what the storage says of it. `why`: why it failed or was left out, or what is wrong with a cell that
    was finished once and must be measured again."""

    cell: Cell
    state: State
    why: str = ""
    record: Finished | None = field(default=None, repr=False)
    error: Failed | None = field(default=None, repr=False)


def known(storage: Storage, cells: Iterable[Cell], *, verify: bool = False) -> list[Known]:
    """What the storage says of every cell. `verify`: read every file, even where it looks unchanged."""
    _model_stamp.cache_clear()
    _model_content.cache_clear()
    asked, there = list(cells), set(storage.names())
    records = [f"{CELLS}/{cell.folder}/{name}" for cell in asked if cell.folder in there for name in (CELL, ERROR)]
    now = storage.snapshot(records)
    return [look(now, cell, verify=verify) if cell.folder in there else Known(cell, State.open) for cell in asked]


def look(storage: Storage, cell: Cell, *, verify: bool = False) -> Known:
    """What the storage says of one cell, now."""
    place, before = f"{CELLS}/{cell.folder}", "it was finished"
    try:
        record = read_sealed(storage, FINISHED, f"{place}/{CELL}")
        if record is not None:
            wrong = _wrong(storage, cell, record, verify)
            if wrong is None:
                return Known(cell, State.finished, record=record)
            return Known(cell, _running(storage, cell), f"{before}, but {wrong}")
        before = "it failed"
        error = read_sealed(storage, FAILED, f"{place}/{ERROR}")
        if error is not None and not storage.is_held(cell.folder):
            return Known(cell, State.left_out if error.left_out else State.failed, error.what, error=error)
    except RunError as damaged:
        return Known(cell, _running(storage, cell), f"{before}, but {damaged.what}")
    return Known(cell, _running(storage, cell))


def read_sealed(storage: Storage, kind: Sealed[Any], name: str) -> Any:
    """The record in a sealed file; None if it is not there."""
    text = storage.read(name)
    return None if text is None else kind.parse(text, storage.path(name))


def _running(storage: Storage, cell: Cell) -> State:
    return State.running if storage.is_held(cell.folder) else State.open


def _wrong(storage: Storage, cell: Cell, record: Finished, verify: bool) -> str | None:
    """What is wrong with a finished cell, in words."""
    if record.id != cell.id:
        return "its record is of another cell"
    place = f"{CELLS}/{cell.folder}/{record.place}"
    for name, facts in record.files.items():
        found = storage.stamp(place + name)
        if found is None:
            return f"{name} is gone"
        if (verify or found != facts.stamp) and storage.sha256(place + name) != facts.sha256:
            return f"{name} is damaged or was changed"
    return _moved(record.model, cell.model)


def _moved(measured: ModelFacts, name: str) -> str | None:
    """Has the model changed since? One that is gone, or cannot be looked at, has not."""
    if measured.stamp is None or _model_stamp(name) in (None, measured.stamp):
        return None
    if measured.content is not None and _model_content(name) == measured.content:
        return None
    return "the model's files have changed since"


@cache
def _model_stamp(name: str) -> str | None:
    return file_stamp(name)


@cache
def _model_content(name: str) -> str | None:
    return content_sha256(name)
