"""The cache of fetched and converted models. A folder under `models/` is complete, or it does not exist.

<cache>/models/<key>/       converted models, put there by a single rename
<cache>/unfinished/<key>-*/ unfinished work, which the holder of the lock of <key> may delete
<cache>/locks/<key>         one lock per key, so that two processes do not convert the same model at once
<cache>/hashes/             sha256 of files that were read (hashing.py)
<cache>/loaded/             checksums of the weights that such files load as (hashing.py)
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
from posleak.files import file_lock, flush, write_remedy
from posleak.models.library_errors import errno_of, translate_errors
from posleak.text import format_bytes, one_line

ENVIRONMENT = "POSLEAK_CACHE"
MAX_KEY_BYTES = 100
"""Longest key that is part of a file name; file systems allow 255 bytes."""


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache: the argument, else $POSLEAK_CACHE, else the platform's cache folder."""
    chosen = cache or os.environ.get(ENVIRONMENT)
    if chosen:
        with translate_errors("the cache cannot be there", str(chosen), f"set {ENVIRONMENT} to another folder"):
            return Path(chosen).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_cache_dir("posleak"))


def model_folder(cache: Path, key: str) -> Path:
    """Return the folder of the converted model `key`."""
    return cache / "models" / _file_name(key)


def _file_name(key: str) -> str:
    """Return the key, or its hash if it is too long for a file name."""
    return key if len(os.fsencode(key)) <= MAX_KEY_BYTES else hashlib.sha256(os.fsencode(key)).hexdigest()


@contextmanager
def translate_write_errors(folder: Path, setting: str = ENVIRONMENT) -> Iterator[None]:
    """Explain why files cannot be written to `folder`, and that `setting` chooses another."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StorageError) and error.__cause__ is not None else error
        code = None if isinstance(cause, PosleakError) else errno_of(cause)
        remedy = write_remedy(code, folder)
        if code == errno.ENOENT and not folder.exists():
            remedy = "create the folder"
        if remedy is None:
            raise
        raise ModelError(
            "the model cannot be written", where=str(folder), got=one_line(cause),
            remedy=f"{remedy}, or set {setting} to another folder",
        ) from error  # fmt: skip


@contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Hold the lock of `key`. The kernel releases it when the process dies, so that no lock is ever stale."""
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    with file_lock(cache / "locks" / _file_name(key), wait=True):
        yield


@contextmanager
def workspace(cache: Path, key: str) -> Iterator[Path]:
    """Create a folder for unfinished work on `key`, and remove it on exit. Hold the lock: older ones are deleted."""
    parent, name = cache / "unfinished", _file_name(key)
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{name}-*.work"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", suffix=".work", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)


def publish(finished: Path, target: Path, trash: Path) -> None:
    """Flush the folder `finished` to disk and rename it to `target`; an earlier `target` is moved to `trash`."""
    for path in sorted(finished.rglob("*")):
        flush(path)
    flush(finished)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.replace(target, trash)
    os.replace(finished, target)
    flush(target.parent)


def require_disk_space(folder: Path, need: int, what: str) -> None:
    """Reject work that would fill the disk, before the first byte is fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"not enough disk space for {what}", where=str(folder), got=f"{format_bytes(free)} free", expected=format_bytes(need),
            remedy=f"free some space, or set {ENVIRONMENT} to a folder on a larger disk",
        )  # fmt: skip
