"""Where posleak keeps what it fetched. One rule: a folder under `models/` is whole, or it is not there.

<root>/models/<key>/   converted models, only ever put there by one rename
<root>/unfinished/<key>-*/  work under way; whoever holds the lock of <key> may delete it
<root>/locks/<key>     one lock per key, so that two processes do not convert the same model at once
<root>/hashes/         sha256 of files already read, keyed by path, size and time
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posleak.errors import ModelError

ENVIRONMENT = "POSLEAK_CACHE"


def root(cache: str | os.PathLike[str] | None = None) -> Path:
    """The cache: what the caller passed, else $POSLEAK_CACHE, else the platform's cache folder."""
    chosen = cache or os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_cache_dir("posleak"))


def model_folder(cache: Path, key: str) -> Path:
    """Where the converted model `key` stands once it is whole."""
    return cache / "models" / key


def make_folder(folder: Path) -> Path:
    """Make `folder`, or say which setting points at a place that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            "the cache folder cannot be made",
            where=str(folder),
            got=error,
            remedy=f"set {ENVIRONMENT} to a folder that can be written",
        ) from error
    return folder


@contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Hold the lock of `key`; the kernel releases it when the process dies, so that no lock is ever stale."""
    path = make_folder(cache / "locks") / key
    with path.open("w") as handle:
        try:
            import fcntl
        except ModuleNotFoundError:  # not POSIX: publication is still atomic, only the work may be done twice
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def workspace(cache: Path, key: str) -> Iterator[Path]:
    """A folder for unfinished work on `key`, removed afterwards. Hold the lock of `key`: older folders are deleted."""
    parent = make_folder(cache / "unfinished")
    for stale in parent.glob(f"{key}-*.work"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{key}-", suffix=".work", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def publish(finished: Path, final: Path, trash: Path) -> None:
    """Flush `finished` to disk, then put it at `final` by one rename; what stood there before goes to `trash`."""
    for path in sorted(finished.rglob("*")):
        _flush(path)
    _flush(finished)
    make_folder(final.parent)
    if final.exists():
        os.replace(final, trash)
    os.replace(finished, final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    """fsync a file or, where the platform can open one, a folder."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_disk(folder: Path, need: int, what: str) -> None:
    """Refuse work that would fill the disk, before the first byte is fetched."""
    free = shutil.disk_usage(make_folder(folder)).free
    if free < need:
        raise ModelError(
            f"not enough disk space for {what}",
            where=str(folder),
            got=f"{free / 1e6:.0f} MB free",
            expected=f"{need / 1e6:.0f} MB",
            remedy=f"free some space, or set {ENVIRONMENT} to a folder on a larger disk",
        )
