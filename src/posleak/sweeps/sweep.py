"""A sweep: many cells, measured by an engine, with results in one place. Finished cells are never measured again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posleak.defaults import RUNS
from posleak.errors import InputError, did_you_mean
from posleak.files import json_text
from posleak.runs.software import measurement_hash
from posleak.runs.spec import parse_bytes, require_between
from posleak.signatures import checked

from .cells import Cell, Guess, guesses
from .local import InMemory, Local
from .manifest import Manifest, manifest as manifest_from, read_manifest
from .state import CellStatus, Finished, State, SweepProgress, Tracker, statuses
from .storage import Storage
from .work import Worker

if TYPE_CHECKING:
    from posleak.models import AnyModel, Subject

    from .collect import BalanceTable

ENGINES = ("local", "ray")


class Engine(Protocol):
    """Scheduler of a sweep: measures the open cells of a tracker, and reports to it how each ended."""

    def run(self, storage: Storage, tracker: Tracker) -> None: ...


@dataclass(frozen=True, repr=False)
class Sweep:
    """The cells of a sweep with their states in the storage.

    computed    ids of the cells that were measured by this call
    question    of the manifest
    guesses     id -> estimated memory and time of open cells in a dry run; None if cells were measured
    """

    name: str
    root: str
    cells: list[CellStatus]
    computed: tuple[str, ...] = ()
    question: str | None = None
    guesses: dict[str, Guess] | None = None

    def of(self, *states: State) -> list[CellStatus]:
        """Return the cells in these states."""
        return [status for status in self.cells if status.state in states]

    @property
    def finished(self) -> list[Finished]:
        """The records of the finished cells."""
        return [status.record for status in self.of(State.finished) if status.record is not None]

    @property
    def complete(self) -> bool:
        """Whether every cell is finished or left out."""
        return len(self.of(State.finished, State.left_out)) == len(self.cells)

    @cached_property
    def balance(self) -> BalanceTable:
        """Mask, drift and sink in every finished cell, read from the runs."""
        from .collect import balance_table

        left_out = {status.cell.label: status.why for status in self.of(State.left_out)}
        return balance_table(Storage(self.root), self.finished, left_out, self.question)

    @property
    def counts(self) -> str:
        """Return the number of cells in each state, such as `3 finished, 1 failed`."""
        return ", ".join(f"{len(cells)} {state}" for state in State if (cells := self.of(state)))

    def __repr__(self) -> str:
        return f"Sweep({self.name}: {self.counts}; {self.root})"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak sweep --json` (docs/json.md)."""
        dry_run = self.guesses is not None
        return {
            "sweep": self.name, "root": self.root, "dry_run": dry_run, "complete": self.complete,
            "counts": {state.value: len(self.of(state)) for state in State}, "computed": len(self.computed),
            "cells": [self._cell_dict(status) for status in self.cells],
            "balance": self.balance if self.question is not None and not dry_run else None,
        }  # fmt: skip

    def _cell_dict(self, status: CellStatus) -> dict[str, Any]:
        cell = status.cell
        return {
            "id": cell.id, "label": cell.details, "state": status.state, "why": status.why,
            "run": Storage(self.root).path(cell.path), "computed": cell.id in self.computed,
            "seconds": None if status.record is None else status.record.seconds,
            "guess": (self.guesses or {}).get(cell.id),
        }  # fmt: skip


@checked
def sweep(
    manifest: str | os.PathLike[str] | Mapping[str, Any] | Iterable[Cell] | Manifest,
    *,
    models: AnyModel | Iterable[AnyModel] = (),
    length: int | None = None,
    prompts: int | None = None,
    seed: int | None = None,
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
    progress: Callable[[SweepProgress], None] | None = None,
) -> Sweep:
    """Measure many cells: models × checkpoints × edits × lengths × seeds, on this machine or on a Ray cluster.

    manifest           a YAML file, the name of a manifest that ships with posleak ("architectures", "knobs", "lengths",
                       "first-token", "dtypes", "robustness"), a dict as in docs/sweeps.md, or your own cells
    models             names, subjects or transformers models that replace those of the manifest, in its order
    length             tokens per prompt; replaces the value of the manifest
    prompts            number of prompts; replaces the value of the manifest
    seed               random seed for the prompts; replaces the value of the manifest
    out                a folder, or an address such as s3://bucket/sweep (default: `out` of the manifest, or runs/NAME)
    engine             "local": one cell after another; "ray": on a Ray cluster; or an object with
                       `run(storage, tracker)`
    address            address of the Ray cluster; the default starts one on this machine
    workers            maximum number of Ray workers
    retries            maximum number of restarts of a cell whose worker died
    retry_failed       measure failed cells again
    verify             hash every file of finished cells, even if its size and time are unchanged
    max_memory         memory limit of a worker, as in `measure`
    trust_remote_code  as in `load`, for every model
    allow_pickle       as in `load`, for every model
    progress           callback that receives a SweepProgress at every change

    Example: `sweep("architectures", models=["smollm2-135m"]).balance`
    """
    cells, subjects = with_changes(as_manifest(manifest), models, length=length, prompts=prompts, seed=seed)
    storage = storage_for(cells, out)
    require_between("retries", retries, 0)
    if workers is not None:
        require_between("workers", workers, 1)
    limit = parse_bytes(max_memory)
    worker = Worker(retry_failed, retries, None, limit, trust_remote_code, allow_pickle, verify)
    chosen = engine if not isinstance(engine, str) else engine_named(engine, worker, address, workers)
    if subjects:
        chosen = InMemory(subjects, worker)
    tracker = Tracker(statuses(storage, cells.cells, verify=verify), progress or (lambda reached: None), retry_failed)
    tracker.show()
    if tracker.open:
        storage.require_writable()
        chosen.run(storage, tracker)
    outcomes = tracker.outcomes.values()
    computed = tuple(each.id for each in outcomes if each.state is not None and not each.reused)
    unwritten = {each.id: each.why for each in outcomes if each.state is None}
    result = status(cells, storage)
    explained = [replace(each, why=each.why or unwritten.get(each.cell.id, "")) for each in result.cells]
    result = replace(result, cells=explained, computed=computed)
    if result.question is not None and result.complete:
        from .collect import BALANCE_FILE

        storage.write(BALANCE_FILE, json_text(result.balance).encode())
    return result


def planned_sweep(
    manifest: str, models: Sequence[str], out: str | None, *, verify: bool = False, **spec: int | None
) -> Sweep:
    """Return the state of the sweep that `sweep` would run, with estimates of memory and time for its open cells."""
    changed, _ = with_changes(as_manifest(manifest), models, **spec)
    result = status(changed, storage_for(changed, out), verify=verify)
    return replace(result, guesses=guesses([each.cell for each in result.of(State.open)], result.finished))


def status(manifest: Manifest, storage: Storage, *, verify: bool = False) -> Sweep:
    """Return the state of a sweep without measuring anything."""
    cells = statuses(storage, manifest.cells, verify=verify)
    return Sweep(manifest.name, storage.path("").rstrip("/"), cells, question=manifest.question)


def as_manifest(value: Any) -> Manifest:
    """Return the manifest from a path, a name, a mapping or a list of cells; raise InputError for other values."""
    if isinstance(value, Manifest):
        return value
    if isinstance(value, str | os.PathLike):
        return read_manifest(value)
    if isinstance(value, Mapping):
        return manifest_from(value)
    cells = list(value) if isinstance(value, Iterable) else []
    if not cells or not all(isinstance(cell, Cell) for cell in cells):
        raise InputError(
            "not a manifest", where="sweep", got=f"{value!r:.80}",
            expected="a YAML file, the name of a manifest, a dict, or a list of Cell",
            remedy='pass models separately: sweep("architectures", models=[model])',
        )  # fmt: skip
    return Manifest("sweep", tuple({cell.id: cell for cell in cells}.values()))


def with_changes(
    manifest: Manifest, models: AnyModel | Iterable[AnyModel] = (), **spec: int | None
) -> tuple[Manifest, dict[str, Subject]]:
    """Return the manifest with other models and other values of its spec, and the models that are in memory."""
    single = isinstance(models, str | os.PathLike) or not isinstance(models, Iterable)
    listed: list[Any] = [models] if single else list(models)  # type: ignore[arg-type]
    names = list[str]()
    subjects: dict[str, Subject] = {}  # by a name that is unique to their content
    for model in listed:
        if isinstance(model, str | os.PathLike):
            names.append(os.fsdecode(model))
            continue
        from posleak.models import subject_of
        from posleak.probe.fingerprint import identified
        from posleak.runs.record import IDENTITY_FIELDS

        subject = identified(subject_of(model))
        facts = {name: getattr(subject.identity, name) for name in IDENTITY_FIELDS}
        names.append(f"{subject.identity.name}-{measurement_hash(facts)[:12]}")
        subjects[names[-1]] = subject
    titles = {name: subject.identity.name for name, subject in subjects.items()}
    shown = [titles.get(name, name) for name in names]
    if len(set(shown)) < len(shown):
        raise InputError(
            "models of one sweep need different names", where="models", got=", ".join(shown),
            remedy='name those in memory: Subject.of(model, tokenizer, name="mine")',
        )  # fmt: skip
    changed = manifest.changed(names, **{name: value for name, value in spec.items() if value is not None})
    for cell in changed.cells:
        if cell.model in subjects and cell.dtype not in (None, dtype := subjects[cell.model].identity.dtype):
            raise InputError(
                "the dtype of a cell differs from that of the model in memory", where=titles[cell.model], got=dtype,
                expected=cell.dtype, remedy="pass the name of the model, or load the model in that dtype",
            )  # fmt: skip
    cells = [replace(cell, title=titles.get(cell.model, cell.title)) for cell in changed.cells]
    return replace(changed, cells=tuple(cells)), subjects


def storage_for(manifest: Manifest, out: str | os.PathLike[str] | None) -> Storage:
    """Return the storage for the results: `out`, else the manifest's, else runs/NAME."""
    return Storage(os.fspath(out) if out is not None else manifest.out or str(Path(RUNS) / manifest.name))


def engine_named(name: str, worker: Worker, address: str | None, workers: int | None) -> Engine:
    """Return an engine by its name; raise InputError if it is unknown or not installed."""
    if name not in ENGINES:
        raise InputError("unknown engine", where="--engine", got=name, remedy=did_you_mean(name, ENGINES))
    if name == "local" and (address is not None or workers is not None):
        raise InputError("--address and --workers are for a cluster", where="--engine local", remedy="use --engine ray")
    if name == "local":
        return Local(worker)
    from .on_ray import OnRay, require_ray

    require_ray()
    return OnRay(worker, address, workers)
