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
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posleak.arrays import read_npz
from posleak.errors import RunError
from posleak.files import (
    LOCK_FILE,
    open_regular,
    remove,
    remove_leftovers,
    sha256_of,
    translate_read_errors,
    write_atomically,
    write_error,
)

if TYPE_CHECKING:
    from posleak.leakage.dataset import Chunk

RECORD_FILE, RESULTS_FILE, HEADS_FILE, BATCHES = "run.json", "results.nc", "heads.parquet", "batches"

_BATCH = re.compile(r"\d{6,}-\d{6,}\.npz")
_SEAL = ".seal"
"""The array in a batch that describes it."""

REMEASURE = "delete this file and start again: only its prompts are measured anew"


def has_record(folder: Path) -> bool:
    """Return whether the folder has a run.json; one that cannot be searched is a StorageError."""
    try:
        return (folder / RECORD_FILE).exists()
    except OSError as error:
        raise write_error(folder, error) from error


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


def write_batch(folder: Path, prompts: range, arrays: Chunk, digest: str) -> None:
    """Write one finished batch of the run with this digest, with a seal that tells it from every other batch."""

    def save(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **{_SEAL: np.array(_seal(prompts, arrays, digest))})

    write_atomically(batch_path(folder, prompts), save)


def read_batch(folder: Path, prompts: range, digest: str) -> Chunk | None:
    """Read a finished batch of the run with this digest; None where there is none yet. Any other batch is refused."""
    path = batch_path(folder, prompts)
    if not path.exists():
        return None
    with translate_read_errors(path, REMEASURE), open_regular(path) as file:
        arrays = read_npz(file, path, REMEASURE)
    found = [str(each) for each in arrays.pop(_SEAL, np.array([])).flat]
    if found != (expected := _seal(prompts, arrays, digest)):
        differing = [pair for pair in zip(found, expected) if pair[0] != pair[1]] or [("a batch without a seal", "one")]
        raise RunError(
            "a finished batch does not belong here, or was changed after it was written", where=str(path),
            got="; ".join(got for got, _ in differing), expected="; ".join(wanted for _, wanted in differing),
            remedy=REMEASURE,
        )  # fmt: skip
    return arrays


def _seal(prompts: range, arrays: Chunk, digest: str) -> list[str]:
    """Describe a batch: its prompts, its run, and a checksum of every array's name, type, shape and content."""
    checksum = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        checksum.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        checksum.update(np.ascontiguousarray(array).data)
    return [
        f"prompts {prompts.start} to {prompts.stop - 1}",
        f"the run {digest}",
        f"arrays of sha256 {checksum.hexdigest()}",
    ]


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
    for name in (RESULTS_FILE, HEADS_FILE, RECORD_FILE):
        remove(folder / name)


def remove_unwritten(folder: Path, names: Iterable[str] = (RECORD_FILE, RESULTS_FILE, HEADS_FILE)) -> None:
    """Remove temporary files that a killed process left behind."""
    remove_leftovers(folder, set(names).__contains__)
    remove_leftovers(folder / BATCHES, _BATCH.fullmatch)


def has_leftovers(folder: Path) -> bool:
    """Return whether a finished run has batches, unwritten files or a lock: a process killed at its end leaves them."""
    return (folder / BATCHES).exists() or (folder / LOCK_FILE).exists() or any(folder.glob(".*.tmp"))


def require_unused(folder: Path, names: Iterable[str] = (RESULTS_FILE, HEADS_FILE, BATCHES)) -> None:
    """Refuse a place where a run would overwrite files that no run.json accounts for: they are somebody else's."""
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise RunError(
            "the folder has no run.json, but files that a run would overwrite", where=str(folder),
            got=", ".join(taken), remedy="choose another --out, or move these files away",
        )  # fmt: skip
