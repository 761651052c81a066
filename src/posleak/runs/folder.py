"""A run folder on disk: written atomically, verified when read, and never half there.

run.json        what was asked, of what, with what, and how it ended; sha256 of the files beside it
results.nc      labelled per-prompt arrays (netCDF)
heads.parquet   tidy per-head numbers
parts/          finished batches of an unfinished run; gone when it is finished
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posleak.errors import RunError

RECORD, RESULTS, HEADS, PARTS = "run.json", "results.nc", "heads.parquet", "parts"
FORMAT, FORMAT_VERSION = "posleak run", 1
REQUIRED = ("status", "fingerprint", "spec", "identity", "versions", "inputs", "created", "files")
"""Keys of run.json that reading relies on."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a file beside `path`, flush it to the disk and put it in place; a full disk leaves nothing behind.

    Not for HDF5: its library crashes where a write fails, so that netCDF is made in memory and written as bytes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(
            "the run cannot be written", where=str(path), got=error.strerror or str(error),
            remedy="free some space or choose another place with --out; finished prompts are kept, start it again",
        ) from error  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_record(folder: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / RECORD, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    if not path.is_file():
        raise RunError(
            "this is no run folder: it has no run.json", where=str(folder), remedy="give a folder that `measure` wrote"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(
            "run.json is corrupt", where=str(path), got=str(error), remedy="measure again with --fresh"
        ) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RunError("run.json is not posleak's", where=str(path), remedy="give a folder that `measure` wrote")
    if record.get("format_version") != FORMAT_VERSION:
        raise RunError(
            "the run was written by another version of posleak", where=str(path),
            got=f"format version {record.get('format_version')}", expected=f"format version {FORMAT_VERSION}",
            remedy="read it with that version, or measure again with --fresh",
        )  # fmt: skip
    if missing := [name for name in REQUIRED if name not in record]:
        raise RunError(
            "run.json is corrupt", where=str(path), got=f"no {', '.join(missing)}", remedy="measure again with --fresh"
        )
    return record


def verify_file(folder: Path, name: str, expected: str) -> Path:
    """The path of a file whose content is what run.json says, or an error that names it."""
    path = folder / name
    if not path.is_file():
        raise RunError("a file of the run is missing", where=str(path), remedy="measure again with --fresh")
    if (found := sha256_of(path)) != expected:
        raise RunError(
            "a file of the run is corrupt or was changed", where=str(path), got=f"sha256 {found}",
            expected=f"sha256 {expected}", remedy="restore it from a copy, or measure again with --fresh",
        )  # fmt: skip
    return path


def part_path(folder: Path, prompts: range) -> Path:
    return folder / PARTS / f"{prompts.start:06d}-{prompts.stop - 1:06d}.npz"


def write_part(folder: Path, prompts: range, arrays: dict[str, NDArray[Any]]) -> None:
    """One finished batch. Zip members carry checksums, so that damage is seen when it is read."""

    def save(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(part_path(folder, prompts), save)


def read_part(folder: Path, prompts: range) -> dict[str, NDArray[Any]] | None:
    """A finished batch, or None where there is none yet."""
    path = part_path(folder, prompts)
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
        raise RunError(
            "a finished batch of this run is corrupt or truncated", where=str(path), got=str(error),
            remedy="delete this file and start again: only its prompts are measured anew",
        ) from error  # fmt: skip


def remove_parts(folder: Path) -> None:
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def remove_run(folder: Path) -> None:
    """Remove a run's own files and nothing else; the record goes last, since it says whose the others are."""
    remove_parts(folder)
    for name in (RESULTS, HEADS, RECORD):
        (folder / name).unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was about to put in place."""
    for pattern in (*(f".{name}.*.tmp" for name in (RECORD, RESULTS, HEADS)), f"{PARTS}/.*.tmp"):
        for leftover in folder.glob(pattern):
            leftover.unlink(missing_ok=True)


def require_unused(folder: Path) -> None:
    """Refuse a place where a run would overwrite files that no run.json accounts for: they are somebody else's."""
    taken = [name for name in (RESULTS, HEADS, PARTS) if (folder / name).exists()]
    if taken:
        raise RunError(
            "the folder has no run.json, but files that a run would overwrite", where=str(folder),
            got=", ".join(taken), remedy="choose another --out, or move these files away",
        )  # fmt: skip
