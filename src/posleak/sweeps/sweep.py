"""A sweep: many cells, done by an engine, with results kept in one place. What is finished is never done again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posleak.errors import InputError, did_you_mean
from posleak.runs.spec import parse_bytes, require_between
from posleak.signatures import checked

from .board import Board, Reached
from .cells import Cell
from .local import Local, Settings
from .manifest import Manifest, manifest, read_manifest
from .state import Finished, Known, State, known
from .storage import CELLS, Storage

ENGINES = ("local", "ray")
OUT = "runs"
"""Where the folder of a sweep is made, which has its name."""


class Engine(Protocol):
    """Does the open cells of a board, and tells it how each ended. A new engine needs nothing else."""

    def run(self, storage: Storage, board: Board) -> None: ...


@dataclass(frozen=True, repr=False)
class Sweep:
    """How a sweep stands, read off its storage: every cell with its state.

    computed   ids of the cells that were measured this time;  unwritten: why, of those that could not be kept
    """

    name: str
    root: str
    cells: list[Known]
    computed: tuple[str, ...] = ()
    unwritten: dict[str, str] | None = None

    def of(self, *states: State) -> list[Known]:
        """Cells in these states."""
        return [each for each in self.cells if each.state in states]

    @property
    def finished(self) -> list[Finished]:
        """Records of the finished cells."""
        return [each.record for each in self.cells if each.record is not None and each.state is State.finished]

    @property
    def complete(self) -> bool:
        """Has every cell its numbers, or a reason why there can be none?"""
        return len(self.of(State.finished, State.left_out)) == len(self.cells)

    def __repr__(self) -> str:
        counts = [f"{len(found)} {state}" for state in State if (found := self.of(state))]
        return f"Sweep({self.name}: {', '.join(counts)}; {self.root})"

    def as_dict(self, guesses: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON contract of `posleak sweep --json` (docs/json.md). `guesses`: of a dry run, by the cells' ids."""
        storage, unwritten = Storage(self.root), self.unwritten or {}
        return {
            "sweep": self.name, "root": self.root, "dry_run": guesses is not None, "complete": self.complete,
            "counts": {state.value: len(self.of(state)) for state in State}, "computed": len(self.computed),
            "cells": [
                {
                    "id": each.cell.id, "label": each.cell.details, "state": each.state,
                    "why": each.why or unwritten.get(each.cell.id, ""),
                    "run": storage.path(f"{CELLS}/{each.cell.folder}"), "computed": each.cell.id in self.computed,
                    "seconds": None if each.record is None else each.record.seconds,
                    "guess": None if guesses is None else guesses.get(each.cell.id),
                }
                for each in self.cells
            ],
        }  # fmt: skip


@checked
def sweep(
    manifest: str | os.PathLike[str] | Mapping[str, Any] | Iterable[Cell] | Manifest,
    *,
    out: str | os.PathLike[str] | None = None,
    engine: str | Engine = "local",
    address: str | None = None,
    workers: int | None = None,
    retries: int = 2,
    retry_failed: bool = False,
    verify: bool = False,
    max_memory: str | int | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[Reached], None] | None = None,
) -> Sweep:
    """Measure many cells: models × checkpoints × edits × lengths × seeds, on this machine or on a Ray cluster.

    manifest           a YAML file, what it would say as a dict (docs/sweeps.md), or cells of your own
    out                a folder, or an address such as s3://bucket/sweep; else the manifest's, else runs/NAME
    engine             "local": one cell after another; "ray": on a Ray cluster; or an object with `run(storage, board)`
    address            of the Ray cluster; without it, one is started on this machine
    workers            how many at most at the same time, with "ray"
    retries            how often a cell whose worker died is tried again
    retry_failed       measure again what failed before
    verify             read every file of finished cells, even where it looks unchanged
    max_memory         what a worker may hold, as in `measure`
    trust_remote_code  as in `load`, for every model of the sweep
    allow_pickle       the same
    progress           called with how far it is, at every change
    """
    asked = as_manifest(manifest)
    storage = storage_for(asked, out)
    require_between("retries", retries, 0)
    if workers is not None:
        require_between("workers", workers, 1)
    settings = Settings(retry_failed, retries, parse_bytes(max_memory), trust_remote_code, allow_pickle, verify)
    chosen = engine if not isinstance(engine, str) else engine_named(engine, settings, address, workers)
    board = Board(known(storage, asked.cells, verify=verify), progress or (lambda reached: None))
    if retry_failed:
        board.retry([State.failed])
    board.show()
    if board.open:
        storage.require_writable()
        chosen.run(storage, board)
    return _ended(asked, storage, board)


def status(manifest: Manifest, storage: Storage, *, verify: bool = False) -> Sweep:
    """How a sweep stands, without doing anything."""
    return Sweep(manifest.name, storage.path("").rstrip("/"), known(storage, manifest.cells, verify=verify))


def as_manifest(said: Any) -> Manifest:
    """A manifest from whatever `sweep` takes."""
    if isinstance(said, Manifest):
        return said
    if isinstance(said, str | os.PathLike):
        return read_manifest(said)
    if isinstance(said, Mapping):
        return manifest(said)
    cells = list(said) if isinstance(said, Iterable) else []
    if not cells or not all(isinstance(cell, Cell) for cell in cells):
        raise InputError(
            "this is no manifest", where="sweep", got=f"{said!r:.80}",
            expected="a YAML file, a dict as it would hold, or a list of Cell",
        )  # fmt: skip
    return Manifest("sweep", tuple({cell.id: cell for cell in cells}.values()))


def storage_for(asked: Manifest, out: str | os.PathLike[str] | None) -> Storage:
    """Where the results go."""
    return Storage(os.fspath(out) if out is not None else asked.out or str(Path(OUT) / asked.name))


def engine_named(name: str, settings: Settings, address: str | None, workers: int | None) -> Engine:
    """An engine by its name; one that is not installed is refused here, before anything is done."""
    if name not in ENGINES:
        raise InputError("no such engine", where="--engine", got=name, remedy=did_you_mean(name, ENGINES))
    if name == "local":
        if address is not None or workers is not None:
            raise InputError(
                "--address and --workers are for a cluster", where="--engine local", remedy="use --engine ray"
            )
        return Local(settings)
    from .on_ray import OnRay, require_ray

    require_ray()
    return OnRay(settings, address, workers)


def _ended(asked: Manifest, storage: Storage, board: Board) -> Sweep:
    """The state that the storage has now, and not the one that was reported: what is shown is true."""
    computed = tuple(each.id for each in board.outcomes.values() if each.state is not None and not each.reused)
    unwritten = {each.id: each.why for each in board.outcomes.values() if each.state is None}
    found = status(asked, storage)
    return Sweep(found.name, found.root, found.cells, computed, unwritten)
