"""A run folder on disk: what is in it, and what of it may be removed.

run.json        what was asked, of which model, with which software, and how it ended; sha256 of the files beside it
results.nc      labelled per-prompt arrays (netCDF)
heads.parquet   tidy per-head numbers
batches/        finished batches of an unfinished run; gone when it is finished
.lock           while somebody writes (posleak.files)

Nothing is removed that posleak did not write.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posleak.errors import RunError
from posleak.files import remove, remove_leftovers, sha256_of, write_atomically

RECORD, RESULTS, HEADS, BATCHES = "run.json", "results.nc", "heads.parquet", "batches"

_BATCH = re.compile(r"\d{6,}-\d{6,}\.npz")


def verify_file(folder: Path, name: str, expected: str | None) -> Path:
    """The path of a file whose content is what the record beside it says, or an error that names it."""
    path = folder / name
    if expected is None:
        raise RunError(
            f"the record of the run does not list {name}", where=str(folder), remedy="measure again with --fresh"
        )
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
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, KeyError, NotImplementedError) as error:
        raise RunError(
            "a finished batch of this run is corrupt or truncated", where=str(path), got=str(error),
            remedy="delete this file and start again: only its prompts are measured anew",
        ) from error  # fmt: skip


def remove_batches(folder: Path) -> None:
    """Remove finished batches; a file of another name stays, and the folder with it."""
    place = folder / BATCHES
    for path in sorted(place.glob("*.npz")):
        if _BATCH.fullmatch(path.name):
            remove(path)
    remove_leftovers(place, _BATCH.fullmatch)
    remove_if_empty(place)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder, unless it holds something or is not there."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_run(folder: Path) -> None:
    """Remove a run's own files and nothing else; run.json goes last: without it the other files belong to no run."""
    remove_batches(folder)
    for name in (RESULTS, HEADS, RECORD):
        remove(folder / name)


def remove_unwritten(folder: Path, names: Iterable[str] = (RECORD, RESULTS, HEADS)) -> None:
    """Remove temporary files that a killed process left behind."""
    remove_leftovers(folder, set(names).__contains__)
    remove_leftovers(folder / BATCHES, _BATCH.fullmatch)


def has_leftovers(folder: Path) -> bool:
    """Does a finished run have batches or unwritten files beside it? A process killed at its end leaves them."""
    return (folder / BATCHES).exists() or any(folder.glob(".*.tmp"))


def require_unused(folder: Path, names: Iterable[str] = (RESULTS, HEADS, BATCHES)) -> None:
    """Refuse a place where a run would overwrite files that no run.json accounts for: they are somebody else's."""
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise RunError(
            "the folder has no run.json, but files that a run would overwrite", where=str(folder),
            got=", ".join(taken), remedy="choose another --out, or move these files away",
        )  # fmt: skip
