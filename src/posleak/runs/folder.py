"""A run folder on disk: written atomically, verified when read, and never half there.

run.json        what was asked, of which model, with which software, and how it ended; sha256 of the files beside it
results.nc      labelled per-prompt arrays (netCDF)
heads.parquet   tidy per-head numbers
batches/        finished batches of an unfinished run; gone when it is finished
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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from posleak.errors import PosleakError, RunError
from posleak.typed import from_json, plain

T = TypeVar("T")

RECORD, RESULTS, HEADS, BATCHES = "run.json", "results.nc", "heads.parquet", "batches"


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
            remedy="free some space or choose another place with --out; finished prompts are kept: start it again",
        ) from error  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def read_json(kind: type[T], path: Path, remedy: str) -> T:
    """A JSON file as the dataclass it was written from, or an error that names it and what is wrong."""
    try:
        return from_json(kind, path.read_bytes())
    except PosleakError as error:
        raise RunError(
            f"{path.name} names something that this posleak does not know", where=str(path),
            got=f"{error.what}: {error.got}" if error.got is not None else error.what,
            remedy=f"if it came from a plugin, name the plugin in POSLEAK_PLUGINS; else {remedy}",
        ) from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise RunError(f"{path.name} is corrupt", where=str(path), got=str(error), remedy=remedy) from error


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


def batch_path(folder: Path, prompts: range) -> Path:
    return folder / BATCHES / f"{prompts.start:06d}-{prompts.stop - 1:06d}.npz"


def write_batch(folder: Path, prompts: range, arrays: dict[str, NDArray[Any]]) -> None:
    """One finished batch. Zip members carry checksums, so that damage is seen when it is read."""

    def save(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(batch_path(folder, prompts), save)


def read_batch(folder: Path, prompts: range) -> dict[str, NDArray[Any]] | None:
    """A finished batch, or None where there is none yet."""
    path = batch_path(folder, prompts)
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


def remove_batches(folder: Path) -> None:
    shutil.rmtree(folder / BATCHES, ignore_errors=True)


def remove_run(folder: Path) -> None:
    """Remove a run's own files and nothing else; run.json goes last: without it the other files belong to no run."""
    remove_batches(folder)
    for name in (RESULTS, HEADS, RECORD):
        (folder / name).unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a killed process left behind."""
    for pattern in (*(f".{name}.*.tmp" for name in (RECORD, RESULTS, HEADS)), f"{BATCHES}/.*.tmp"):
        for leftover in folder.glob(pattern):
            leftover.unlink(missing_ok=True)


def require_unused(folder: Path) -> None:
    """Refuse a place where a run would overwrite files that no run.json accounts for: they are somebody else's."""
    taken = [name for name in (RESULTS, HEADS, BATCHES) if (folder / name).exists()]
    if taken:
        raise RunError(
            "the folder has no run.json, but files that a run would overwrite", where=str(folder),
            got=", ".join(taken), remedy="choose another --out, or move these files away",
        )  # fmt: skip
