"""The files of a run folder.

run.json        the record: request, model, software, how the run ended, and sha256 of the other files
results.nc      labelled arrays per prompt (netCDF)
heads.parquet   powers and metrics by head, as a tidy table
batches/        finished batches of an unfinished run; removed at its end
steps/          finished steps of an unfinished analysis; removed at its end
.lock           held while a process writes (posleak.files)

Only files that posleak wrote are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
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
from posleak.models.parallel import ALONE, Ranks

if TYPE_CHECKING:
    from posleak.leakage.dataset import Chunk

RECORD_FILE, RESULTS_FILE, HEADS_FILE = "run.json", "results.nc", "heads.parquet"
BATCHES, STEPS = "batches", "steps"

_BATCH, _STEP = re.compile(r"\d{6,}-\d{6,}\.npz"), re.compile(r"[0-9a-f]{16}\.npz")
_SEAL = ".seal"
"""Name of the array in a batch file that describes the batch."""

REMEASURE = "delete this file and run the command again: only its prompts are measured again"


def chosen_folder(
    out: str | Path | None,
    root: str | Path | None,
    name: Callable[[], str],
    ranks: Ranks = ALONE,
    *,
    fresh: bool = False,
) -> Path | None:
    """Return `out`; or root/NAME, where `name` returns NAME; or None if neither is given, or another process writes."""
    if not ranks.writes or (out is None and root is None):
        return None
    folder = Path(out) if out is not None else Path(root or "") / name()
    if ranks.size > 1 and not fresh and has_record(folder):
        raise RunError(
            "a run in several processes cannot be resumed: only one of them would know what is finished",
            where=str(folder), remedy="continue it in one process, choose another --out, or pass --fresh",
        )  # fmt: skip
    return folder


def has_record(folder: Path) -> bool:
    """Return whether the folder has a run.json; raise a StorageError if the folder cannot be read."""
    try:
        return (folder / RECORD_FILE).exists()
    except OSError as error:
        raise write_error(folder, error) from error


def verify_file(folder: Path, name: str, expected: str | None) -> Path:
    """Return the path of a file of a run; raise a RunError if its sha256 is not the expected one."""
    path = folder / name
    if expected is None:
        raise RunError(
            f"the record of the run does not list {name}", where=str(folder), remedy="measure again with --fresh"
        )
    if not path.is_file():
        raise RunError("a file of the run is missing", where=str(path), remedy="measure again with --fresh")
    if (actual := sha256_of(path)) != expected:
        raise RunError(
            "a file of the run is corrupt or was changed", where=str(path), got=f"sha256 {actual}",
            expected=f"sha256 {expected}", remedy="restore it from a copy, or measure again with --fresh",
        )  # fmt: skip
    return path


def batch_path(folder: Path, prompts: range) -> Path:
    """Return the file of a batch."""
    return folder / BATCHES / f"{prompts.start:06d}-{prompts.stop - 1:06d}.npz"


def write_batch(folder: Path, prompts: range, arrays: Chunk, digest: str) -> None:
    """Write a finished batch of the run with this digest, with a seal that describes it."""
    write_arrays(batch_path(folder, prompts), _of_batch(prompts, digest), arrays)


def read_batch(folder: Path, prompts: range, digest: str) -> Chunk | None:
    """Return a finished batch; None if there is none. Raise a RunError if it is of another run or was changed."""
    return read_arrays(batch_path(folder, prompts), _of_batch(prompts, digest))


def _of_batch(prompts: range, digest: str) -> list[str]:
    return [f"prompts {prompts.start} to {prompts.stop - 1}", f"the run {digest}"]


def write_arrays(path: Path, contents: Sequence[str], arrays: Chunk) -> None:
    """Write arrays with a seal: the lines `contents`, which describe them, and a checksum."""

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **{_SEAL: np.array(_seal(contents, arrays))})

    write_atomically(path, save)


def read_arrays(path: Path, contents: Sequence[str]) -> Chunk | None:
    """Return arrays that `write_arrays` wrote with these contents; None if there is no such file."""
    if not path.exists():
        return None
    with translate_read_errors(path, REMEASURE), open_regular(path) as file:
        arrays = read_npz(file, path, REMEASURE)
    seal = [str(line) for line in arrays.pop(_SEAL, np.array([])).flat]
    if seal != (expected := _seal(contents, arrays)):
        differing = [pair for pair in zip(seal, expected) if pair[0] != pair[1]] or [("a batch without a seal", "one")]
        raise RunError(
            "a finished batch is of another run, or was changed after it was written", where=str(path),
            got="; ".join(got for got, _ in differing), expected="; ".join(wanted for _, wanted in differing),
            remedy=REMEASURE,
        )  # fmt: skip
    return arrays


def _seal(contents: Sequence[str], arrays: Chunk) -> list[str]:
    """Return lines that describe arrays: their contents, and a checksum of all of them."""
    checksum = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        checksum.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        checksum.update(np.ascontiguousarray(array).data)
    return [*contents, f"arrays of sha256 {checksum.hexdigest()}"]


def finished_step(folder: Path | None, contents: Sequence[str], make: Callable[[], Chunk]) -> Chunk:
    """Return the arrays of a step of an analysis, stored in the folder under the hash of `contents`, or make them.

    contents   describe everything that determines the arrays
    folder     None: make them, and do not store them
    """
    if folder is None:
        return make()
    path = folder / f"{hashlib.sha256(chr(10).join(contents).encode()).hexdigest()[:16]}.npz"
    if (arrays := read_arrays(path, contents)) is None:
        write_arrays(path, contents, arrays := make())
    return arrays


def remove_batches(folder: Path) -> None:
    """Remove finished batches, and their folder unless it has other files."""
    _remove_arrays(folder / BATCHES, _BATCH)


def clear_steps(folder: Path) -> None:
    """Remove the finished steps of an analysis, and their folder unless it has other files."""
    _remove_arrays(folder / STEPS, _STEP)


def _remove_arrays(folder: Path, name: re.Pattern[str]) -> None:
    for path in sorted(folder.glob("*.npz")):
        if name.fullmatch(path.name):
            remove(path)
    remove_leftovers(folder, name.fullmatch)
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it exists and is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_run(folder: Path) -> None:
    """Remove the files of a run, run.json last: the other files are recognised by it."""
    remove_batches(folder)
    for name in (RESULTS_FILE, HEADS_FILE, RECORD_FILE):
        remove(folder / name)


def remove_unwritten(folder: Path, extra_files: Iterable[str] = ()) -> None:
    """Remove temporary files of a run, and of `extra_files` next to it, that a killed process left behind."""
    remove_leftovers(folder, {RECORD_FILE, RESULTS_FILE, HEADS_FILE, *extra_files}.__contains__)
    remove_leftovers(folder / BATCHES, _BATCH.fullmatch)


def has_leftovers(folder: Path) -> bool:
    """Return whether a finished run has batches, temporary files or a lock of a process that was killed at its end."""
    return (folder / BATCHES).exists() or (folder / LOCK_FILE).exists() or any(folder.glob(".*.tmp"))


def require_unused(folder: Path, names: Iterable[str] = (RESULTS_FILE, HEADS_FILE, BATCHES)) -> None:
    """Raise a RunError if a folder without run.json has files that a run would overwrite."""
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise RunError(
            "the folder has no run.json, but contains files that a run would overwrite", where=str(folder),
            got=", ".join(taken), remedy="choose another --out, or move these files to another folder",
        )  # fmt: skip
