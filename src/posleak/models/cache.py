"""Where posleak keeps what it fetched. One rule: a folder under `models/` is whole, or it is not there.

<root>/models/<key>/   converted models, only ever put there by one rename
<root>/unfinished/<key>-*/  work under way; whoever holds the lock of <key> may delete it
<root>/locks/<key>     one lock per key, so that two processes do not convert the same model at once
<root>/hashes/         sha256 of files already read (hashing.py)
<root>/loaded/         checksums of the weights that such files load as (hashing.py)
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posleak.errors import ModelError, PosleakError, StorageError
from posleak.files import file_lock, flush
from posleak.models.library_errors import DISK_FULL, errno_of, translate_errors
from posleak.text import format_bytes, one_line

ENVIRONMENT = "POSLEAK_CACHE"
LONGEST = 100
"""Bytes of a key that can be part of a file's name; file systems allow 255."""

_SPACE, _RIGHTS, _IN_THE_WAY = "free some space", "make it writable for you", "move away what stands in the way"
_HELP: dict[int | None, str] = {
    **dict.fromkeys(DISK_FULL, _SPACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHTS),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _IN_THE_WAY),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "look after the disk",
}
"""What helps where the system refused to write, by its number for the reason."""


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The cache: what the caller passed, else $POSLEAK_CACHE, else the platform's cache folder."""
    chosen = cache or os.environ.get(ENVIRONMENT)
    if chosen:
        with translate_errors("the cache cannot be there", str(chosen), f"set {ENVIRONMENT} to another folder"):
            return Path(chosen).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_cache_dir("posleak"))


def model_folder(cache: Path, key: str) -> Path:
    """Where the converted model `key` stands once it is whole."""
    return cache / "models" / _file_name(key)


def _file_name(key: str) -> str:
    """The key, or its hash if it is too long for a file's name."""
    return key if len(os.fsencode(key)) <= LONGEST else hashlib.sha256(os.fsencode(key)).hexdigest()


@contextmanager
def writing(place: Path, setting: str = ENVIRONMENT) -> Iterator[None]:
    """Where files cannot be written to `place`, say why, and that `setting` chooses another."""
    try:
        yield
    except Exception as error:
        told = error.__cause__ if isinstance(error, StorageError) and error.__cause__ is not None else error
        number = None if isinstance(told, PosleakError) else errno_of(told)
        helps = _HELP | ({errno.ENOENT: "make the folder"} if not place.exists() else {})
        if number not in helps:
            raise
        raise ModelError(
            "the model cannot be written", where=str(place), got=one_line(told),
            remedy=f"{helps[number]}, or set {setting} to another folder",
        ) from error  # fmt: skip


@contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Hold the lock of `key`; the kernel releases it when the process dies, so that no lock is ever stale."""
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    with file_lock(cache / "locks" / _file_name(key), wait=True):
        yield


@contextmanager
def workspace(cache: Path, key: str) -> Iterator[Path]:
    """A folder for unfinished work on `key`, removed afterwards. Hold the lock of `key`: older folders are deleted."""
    parent, name = cache / "unfinished", _file_name(key)
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{name}-*.work"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", suffix=".work", dir=parent, ignore_cleanup_errors=True) as made:
        yield Path(made)


def publish(finished: Path, final: Path, trash: Path) -> None:
    """Flush `finished` to disk, then put it at `final` by one rename; what stood there before goes to `trash`."""
    for path in sorted(finished.rglob("*")):
        flush(path)
    flush(finished)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        os.replace(final, trash)
    os.replace(finished, final)
    flush(final.parent)


def require_disk(folder: Path, need: int, what: str) -> None:
    """Refuse work that would fill the disk, before the first byte is fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"not enough disk space for {what}",
            where=str(folder),
            got=f"{format_bytes(free)} free",
            expected=format_bytes(need),
            remedy=f"free some space, or set {ENVIRONMENT} to a folder on a larger disk",
        )
