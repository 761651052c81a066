"""What a report is made from: run folders as they are found, each whole, partial, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import xarray as xr

from posleak.errors import PosleakError, RunError
from posleak.leakage import assemble, batches
from posleak.probe import default_plan
from posleak.runs import Run
from posleak.runs.examination import ORIGIN, ORIGIN_ARRAYS, read_claims
from posleak.runs.folder import read_part, read_record
from posleak.runs.spec import DEFINITIONS_VERSION

from .curves import Curves, curves

DOCTOR = "doctor.json"
"""`posleak doctor MODEL --json`, where somebody has put it beside the run."""


@dataclass(frozen=True)
class Source:
    """One run and what its folder holds beside it; None: not there. `notes` say what could not be used, and why."""

    run: Run
    label: str
    claims: list[dict[str, Any]] | None = None
    origin: dict[str, Any] | None = None
    arrays: xr.Dataset | None = None
    doctor: dict[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def curves(self) -> Curves:
        """Every head's curves: the page and the tables draw on the same ones."""
        return curves(self.run.data, self.run.record["spec"]["seed"])

    @property
    def prompts(self) -> int:
        """Prompts that there are numbers of."""
        return self.run.data.sizes["prompt"]

    @property
    def asked(self) -> int:
        return int(self.run.record["spec"]["prompts"])

    @property
    def partial(self) -> bool:
        return self.prompts < self.asked


@dataclass(frozen=True)
class Refused:
    """A run that is not shown."""

    name: str
    reason: str


def gather(runs: Iterable[Run | str | Path], *, partial: bool = True) -> tuple[list[Source], list[Refused]]:
    """Every run that can be shown, in order, and every one that cannot. Without `partial` an unfinished run cannot."""
    found, refused = list[Source](), list[Refused]()
    for given in runs:
        name = str(given.path or given.record["identity"]["name"]) if isinstance(given, Run) else str(given)
        try:
            run = given if isinstance(given, Run) else _load(Path(given), partial)
            _require_same_definitions(run)
            found.append(_beside(run))
        except PosleakError as error:
            refused.append(Refused(name, _reason(error)))
        except (OSError, ValueError, KeyError) as error:
            refused.append(Refused(name, f"the run cannot be read: {type(error).__name__}: {error}"))
    return _labelled(found), refused


def require_some(found: Sequence[Source], refused: Sequence[Refused], least: int, what: str) -> None:
    """Refuse to go on with fewer than `least` runs, naming those that were refused."""
    if len(found) < least:
        raise RunError(
            f"{what} needs {least} run{'s' if least > 1 else ''} that can be read", got=f"{len(found)}",
            expected="; ".join(f"{each.name}: {each.reason}" for each in refused) or None,
            remedy="give folders that `posleak measure` or `posleak claims` wrote",
        )  # fmt: skip


def _load(folder: Path, partial: bool) -> Run:
    record = read_record(folder)
    if record["status"] == "finished":
        return Run.load(folder)
    spec = record["spec"]
    if record.get("definitions_version") != DEFINITIONS_VERSION:
        return Run(record, xr.Dataset(), folder)  # refused for that, by the caller
    done = [chunk for at in batches(spec["prompts"], spec["batch"]) if (chunk := read_part(folder, at)) is not None]
    prompts = sum(len(chunk["mask"]) for chunk in done)
    if not partial or prompts < 2:
        raise RunError(
            f"unfinished: {prompts} of {spec['prompts']} prompts are measured", where=str(folder),
            remedy="start the same `posleak measure` again: it resumes",
        )  # fmt: skip
    return Run(record, assemble(done, default_plan(spec["length"], spec["density"])), folder)


def _require_same_definitions(run: Run) -> None:
    if (version := run.record.get("definitions_version")) != DEFINITIONS_VERSION:
        raise RunError(
            f"its numbers follow version {version} of the definitions, this posleak version {DEFINITIONS_VERSION}: "
            "they cannot be compared",
            remedy="measure again, or read it with the posleak that wrote it",
        )  # fmt: skip


def _reason(error: PosleakError) -> str:
    """One line: what, got, and the remedy; the place is in the name already."""
    parts = [error.what, f"got {error.got}" if error.got is not None else "", error.remedy or ""]
    return "; ".join(part for part in parts if part)


def _beside(run: Run) -> Source:
    """The run with what lies beside it; a damaged file is left out and said so."""
    source = Source(run, run.record["identity"]["name"])
    if run.path is None:
        return source
    folder, notes = run.path, list[str]()
    try:
        claims = read_claims(folder, run) or None
    except PosleakError as error:
        claims = None
        notes.append(f"claims.json is left out: {_reason(error)}")
    origin, arrays = _read_origin(folder, run, notes)
    doctor = _read_json(folder / DOCTOR, notes)
    return replace(source, claims=claims, origin=origin, arrays=arrays, doctor=doctor, notes=tuple(notes))


def _read_origin(folder: Path, run: Run, notes: list[str]) -> tuple[dict[str, Any] | None, xr.Dataset | None]:
    origin = _read_json(folder / ORIGIN, notes)
    if origin is None:
        return None, None
    if origin.get("identity", {}).get("weights_sha256") != run.record["identity"]["weights_sha256"]:
        notes.append(f"{ORIGIN} is left out: it is about other weights")
        return None, None
    try:
        with xr.open_dataset(folder / ORIGIN_ARRAYS, engine="h5netcdf") as arrays:
            return origin, arrays.load()
    except (OSError, ValueError) as error:
        notes.append(f"{ORIGIN_ARRAYS} is left out: {error}")
        return origin, None


def _read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path.name} is left out: it is corrupt ({error})")
        return None
    return found if isinstance(found, dict) else None


def _labelled(found: list[Source]) -> list[Source]:
    """Names that tell the runs of one page apart: the model, then its edits, then its length, then a number."""

    def names(*parts: str) -> list[str]:
        return [" · ".join([s.label, *(text for part in parts if (text := _part(s, part)))]) for s in found]

    for parts in ((), ("edits",), ("edits", "length"), ("edits", "length", "folder")):
        labels = names(*parts)
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} ({k + 1})" for k, label in enumerate(labels)]
    return [replace(source, label=label) for source, label in zip(found, labels, strict=True)]


def _part(source: Source, part: str) -> str:
    spec = source.run.record["spec"]
    if part == "edits":
        return ", ".join(spec["edits"])
    if part == "length":
        return f"{spec['length']} tokens"
    return source.run.path.name if source.run.path is not None else ""
