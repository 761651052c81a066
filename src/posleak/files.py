"""Read and write files: atomic writes, bounded reads, sealed JSON, and one writer per folder.

    write_atomically   write next to the target, flush to disk, then rename
    open_regular       open a regular file for reading, without blocking on a pipe;  read_regular: up to a limit
    Sealed             a JSON format that is written with a checksum and read back into its dataclass, or rejected
    sole_writer        let one process and one thread at a time write into a folder
    file_lock          the lock behind it; the kernel releases it when its owner dies

The seal is a sha256 of the content. It detects damage and manual changes. It is not a signature: anyone can compute it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Generic, NoReturn, TypeVar

from posleak.errors import DISK_FULL, BusyError, PosleakError, RunError, StorageError
from posleak.text import format_bytes, one_line
from posleak.typed import from_json, plain

T = TypeVar("T")

LOCK_FILE = ".lock"
SEAL_KEY = "sha256"

_MARK, _MARK_WITHIN = b'"format": "posleak ', 2**20
"""Marks a file that posleak wrote: in the first line, or in the first bytes of files of earlier versions."""

MAX_JSON = 1 << 26
"""Largest JSON file that is read, in bytes. A run.json with thousands of warnings has a few million."""
MAX_NAME = 200
"""Number of characters of a file's name that are part of the name of its temporary file."""

_TEMPORARY_NAME = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


# -- writing --------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path next to `path`, flush the file to disk, and rename it to `path`.

    A failed write leaves nothing behind. A symbolic link is kept, and its target is replaced. A device or a pipe is
    opened and written to. Do not pass an HDF5 writer: its library crashes if a write fails.
    """
    try:
        if is_stream(path):
            _write_into(path, write)
        else:
            _replace(Path(os.path.realpath(path)) if path.is_symlink() else path, write)
    except OSError as error:
        raise write_error(path, error) from error


def is_stream(path: Path) -> bool:
    """Return whether the path leads to something that can be written to but not replaced."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _write_into(path: Path, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(prefix="posleak-") as folder:
        complete = Path(folder) / path.name
        write(complete)
        descriptor = _descriptor(path)
        with complete.open("rb") as source, open(path if descriptor is None else os.dup(descriptor), "wb") as stream:
            shutil.copyfileobj(source, stream)


def _descriptor(path: Path) -> int | None:
    """Return the open file descriptor that the path names, if any; it may be a file to append to."""
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", str(path))
    return int(match[1]) if match else {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:MAX_NAME]}.{secrets.token_hex(4)}.tmp")
    try:
        with _locked(temporary):
            write(temporary)
            flush(temporary)
            os.replace(temporary, path)
        flush(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """Create a file and lock it, so that `remove_leftovers` sees that its owner is alive."""
    try:
        import fcntl
    except ImportError:  # on Windows an open file can be neither renamed nor removed
        yield
        return
    with temporary.open("xb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_left_over(temporary: Path) -> bool:
    """Return whether no process is writing this file any more."""
    try:
        import fcntl

        with open_regular(temporary) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError:
        return False
    return True


def flush(path: Path) -> None:
    """Flush a file to disk (fsync), or a folder where the platform can open one."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError, action: str = "written") -> StorageError:
    """Return the error for a file that cannot be written or removed, with the system's message and a remedy."""
    wanted = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else path
    remedies = [write_remedy(error.errno, wanted), "choose another folder with --out"]
    return StorageError(
        f"the file cannot be {action}", where=str(path), got=error.strerror or str(error),
        remedy=f"{', or '.join(filter(None, remedies))}; finished work is kept: run the command again to resume",
    )  # fmt: skip


def write_remedy(code: int | None, path: Path) -> str | None:
    """Return a remedy for a failed write to `path`, given the system's error number; None if none is known."""
    if code in DISK_FULL:
        return "free some disk space"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "grant yourself write permission"
    if code in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"move or rename {_obstacle(code, path)}"
    return {errno.ENAMETOOLONG: "choose a shorter name", errno.EIO: "check the disk"}.get(code or 0)


def _obstacle(code: int | None, path: Path) -> str:
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            if place.is_dir() and code == errno.EISDIR:
                return f"the folder {place}, where a file is needed"
            if place.exists() and not place.is_dir():
                return f"the file {place}, where a folder is needed"
    return str(path)


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error, "removed") from error


def is_posleak_file(path: Path) -> bool:
    """Return whether posleak wrote this JSON file to read it back; also True if it was damaged or truncated later."""
    try:
        with open_regular(path) as file:
            return _MARK in file.read(_MARK_WITHIN)
    except OSError:
        return False


def remove_posleak_file(path: Path) -> None:
    """Remove a file that posleak wrote, if it exists; raise a StorageError for JSON that posleak did not write."""
    if path.suffix == ".json" and path.exists() and not is_posleak_file(path):
        raise foreign_file_error(path)
    remove(path)


def foreign_file_error(path: Path) -> StorageError:
    """Return the error for a file or folder that posleak did not write and will not replace."""
    return StorageError(
        f"a {'folder' if path.is_dir() else 'file'} that posleak did not write would be overwritten", where=str(path),
        remedy="move or rename it, or choose another folder with --out",
    )  # fmt: skip


def remove_leftovers(folder: Path, is_expected: Callable[[str], object]) -> None:
    """Remove temporary files of processes that died, if `is_expected(name of the target)`; keep those in use."""
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match is not None and is_expected(match[1]) and _is_left_over(path):
            remove(path)


# -- reading --------------------------------------------------------------------------------------------------------


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file for reading. Raise OSError for anything else: opening a pipe would block."""
    nonblocking = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | nonblocking)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def read_regular(path: Path, limit: int = MAX_JSON) -> bytes:
    """Return the content of a regular file. Raise OSError for anything else, and for more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            total = max(os.fstat(file.fileno()).st_size, len(content))
            text = f"the file has {format_bytes(total)}, the limit is {format_bytes(limit)}"
            raise OSError(errno.EINVAL, text, str(path))
    return content


@contextmanager
def translate_read_errors(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn any exception of a library about a damaged file into a RunError that names the file and the remedy."""
    try:
        yield
    except (PosleakError, MemoryError):
        raise
    except Exception as error:
        raise RunError(
            f"{Path(path).name} is corrupt: it cannot be read", where=str(path), got=one_line(error), remedy=remedy
        ) from error


def stays_in_folder(name: str) -> bool:
    """Return whether a path that a file names is relative and cannot leave the folder that it is relative to."""
    path = PurePosixPath(name.replace("\\", "/"))
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set(name) & set(":\0")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- sealed JSON ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sealed(Generic[T]):
    """A JSON format that posleak writes and reads back into the dataclass `type`.

    `format` ("posleak ...") is stored under the first key, by which posleak recognises its own files. `version` counts
    changes of the fields. `remedy` is what a user can do about a damaged file.
    """

    format: str
    version: int
    type: type[T]
    remedy: str

    def write(self, path: Path, value: Any) -> None:
        """Write a value with a seal. Raise if `path` holds a file that posleak did not write."""
        if path.exists() and not is_posleak_file(path):
            raise foreign_file_error(path)
        text = self.text(value)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def text(self, value: Any) -> str:
        """Return the JSON text that `write` writes."""
        fields = {"format": self.format, "format_version": self.version, **plain(value)}
        return json_text({**fields, SEAL_KEY: _seal(fields)})

    def read(self, path: Path) -> T:
        """Return the value that was written, or raise an error that names the file and what is wrong with it."""
        return self.parse(_read_bytes(path, self.remedy), path)

    def parse(self, text: bytes, where: str | Path) -> T:
        """Return the value in the content of a file; `where` is the path for error messages."""
        path = Path(where)
        fields = self._fields(text, path)
        if fields.get("format_version") != self.version:
            raise RunError(
                "the file was written by another version of posleak", where=str(path),
                got=f"format version {fields.get('format_version')}", expected=f"format version {self.version}",
                remedy=f"read it with that version, or {self.remedy}",
            )  # fmt: skip
        seal = fields.pop(SEAL_KEY, None)
        if seal != _seal(fields):
            raise RunError(
                "the file was changed or damaged after it was written", where=str(path), got=f"sha256 {seal}",
                expected=f"sha256 {_seal(fields)}", remedy=f"restore it from a copy, or {self.remedy}",
            )  # fmt: skip
        return _read_value(self.type, path, json.dumps(fields), self.remedy)

    def fields(self, path: Path) -> dict[str, Any]:
        """Return the keys and values of a file; only its format is checked."""
        return self._fields(_read_bytes(path, self.remedy), path)

    def _fields(self, text: bytes, path: Path) -> dict[str, Any]:
        try:
            fields = json.loads(text, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            is_ours = _MARK in text[:_MARK_WITHIN]
            raise _corrupt(path, error, self.remedy if is_ours else "move it, and run the command again") from error
        if not isinstance(fields, dict) or fields.get("format") != self.format:
            raise RunError(
                f"{path.name} was not written by posleak", where=str(path),
                remedy="pass a folder written by `posleak measure`, `posleak trace` or `posleak claims`",
            )  # fmt: skip
        return fields


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _seal(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def json_text(value: Any) -> str:
    """Return the text of a JSON file."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON without a seal."""
    text = json_text(value)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(kind: type[T], path: Path, remedy: str) -> T:
    """Return an unsealed JSON file as the dataclass `kind`, or raise an error that names what is wrong."""
    return _read_value(kind, path, _read_bytes(path, remedy), remedy)


def _read_bytes(path: Path, remedy: str) -> bytes:
    with translate_read_errors(path, remedy):
        return read_regular(path)


def _read_value(kind: type[T], path: Path, text: str | bytes, remedy: str) -> T:
    try:
        return from_json(kind, text)
    except PosleakError as error:
        raise RunError(
            f"{path.name} contains a name that this version of posleak does not know", where=str(path),
            got=f"{error.what}: {error.got}" if error.got is not None else error.what,
            remedy=f"if a plugin defines it, add the plugin to POSLEAK_PLUGINS; otherwise {remedy}",
        ) from error  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, error, remedy) from error


def _corrupt(path: Path, error: Exception, remedy: str) -> RunError:
    return RunError(f"{path.name} is corrupt", where=str(path), got=str(error), remedy=remedy)


# -- locks ----------------------------------------------------------------------------------------------------------

_held = set[tuple[Path, int]]()
"""Locks that this process holds, each with the thread that holds it."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Create the folder and lock it for writing. Raise at once if another process or thread holds the lock.

    A folder that was created here and is still empty on exit is removed.
    """
    created = False
    try:
        created = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK_FILE, wait=False):
            yield
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock at `path`. If it is taken, wait, or without `wait` raise an error that names the owner.

    The thread that holds it may enter again.
    """
    import filelock

    key = place, _ = path.absolute(), threading.get_ident()
    if key in _held:
        yield
        return
    lock = filelock.FileLock(place, timeout=-1 if wait else 0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise BusyError(
            "another process or thread is writing here", where=str(path.parent), got=_owner(place),
            remedy="wait until it has finished and run the command again, or choose another folder with --out",
        ) from None  # fmt: skip
    try:
        _held.add(key)
        place.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        _held.discard(key)
        with contextlib.suppress(OSError):  # unlinked while held: a waiting process notices, and creates a new file
            place.unlink()
        lock.release()


def _owner(path: Path) -> str:
    try:
        return read_regular(path).decode().strip() or "another process"
    except (OSError, ValueError):
        return "another process"
