"""Files that posleak writes: put in place whole or not at all, sealed where they are read back, one writer at a time.

    write_atomically   beside its place, flushed to the disk, then renamed
    open_regular       opens a file to read it, and never waits for a pipe;  read_regular: all of it, up to a bound
    Sealed             a sort of JSON file: written with a seal, read back as the dataclass it was, or refused
    sole_writer        one process and one thread at a time may write into a folder
    file_lock           the lock behind it; the kernel releases it when its owner dies

The seal is a sha256 over the content. It finds damage and changes by hand; it is no signature: whoever wants to deceive
can compute it.
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

from posleak.errors import BusyError, PosleakError, RunError, StorageError
from posleak.text import format_bytes, one_line
from posleak.typed import from_json, plain

T = TypeVar("T")

LOCK_FILE = ".lock"
SEAL = "sha256"

_MARK, MARKED_WITHIN = b'"format": "posleak ', 2**20
"""What tells a file of posleak's: in the first line, or somewhere in files of earlier versions."""

MAX_JSON = 1 << 26
"""Bytes of a JSON file that is read whole; a run.json with thousands of warnings has a few millions."""

MAX_NAME = 200
"""Characters of a file's name that stand in the name of its temporary file."""

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")
"""What `write_atomically` calls a file that is not in place yet."""


# -- writing --------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file next to `path`, flush it to the disk and rename it to `path`; a full disk leaves nothing behind.

    A symbolic link stays, and the file that it leads to is replaced. A device or a pipe is opened and written to.
    Not for HDF5: its library crashes where a write fails, so that netCDF is made in memory and written as bytes.
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
        whole = Path(folder) / path.name
        write(whole)
        number = _descriptor(path)
        with whole.open("rb") as source, open(path if number is None else os.dup(number), "wb") as stream:
            shutil.copyfileobj(source, stream)


def _descriptor(path: Path) -> int | None:
    """Return the number of an open descriptor of this process that the path names: it may be a file, to append to."""
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", str(path))
    return int(found[1]) if found else {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(path))


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
    """Make a file and hold a lock on it, so that `remove_leftovers` sees that its owner is alive."""
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
    """Return whether nobody is writing this file any more."""
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
    """fsync a file or, where the platform can open one, a folder."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> StorageError:
    """What the system said, and what helps against that."""
    return StorageError(
        "the file cannot be written", where=str(path), got=error.strerror or str(error),
        remedy=f"{_help(error, path)}; what is finished is kept: start it again",
    )  # fmt: skip


def _obstacle(error: OSError, path: Path) -> str:
    """What stands where a folder or a file is needed, said by its own name."""
    wanted = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else path
    for place in (wanted, *wanted.parents):
        with contextlib.suppress(OSError):
            if place.is_dir() and error.errno == errno.EISDIR:
                return f"the folder {place}, where a file is needed"
            if place.exists() and not place.is_dir():
                return f"the file {place}, where a folder is needed"
    return f"what stands in the way at {wanted}"


def _help(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space, or choose another place with --out"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a place with --out that you may write to"
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"move away {_obstacle(error, path)}, or choose another place with --out"
    if error.errno == errno.ENAMETOOLONG:
        return "choose a shorter name with --out"
    return "choose another place with --out"


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            "the file cannot be removed", where=str(path), got=error.strerror or str(error),
            remedy="choose a place with --out that you may write to",
        ) from error  # fmt: skip


def is_posleak_file(path: Path) -> bool:
    """Is this a JSON file that posleak wrote to be read back? Also true of one that was damaged or cut later."""
    try:
        with open_regular(path) as file:
            return _MARK in file.read(MARKED_WITHIN)
    except OSError:
        return False


def remove_posleak_file(path: Path) -> None:
    """Remove a file of posleak's, if it is there; JSON that posleak did not write is an error."""
    if path.suffix == ".json" and path.exists() and not is_posleak_file(path):
        raise foreign_file_error(path)
    remove(path)


def foreign_file_error(path: Path) -> StorageError:
    return StorageError(
        f"a {'folder' if path.is_dir() else 'file'} that posleak did not write is in the way", where=str(path),
        remedy="move it away, or choose another place with --out",
    )  # fmt: skip


def remove_leftovers(folder: Path, own: Callable[[str], object]) -> None:
    """Remove what processes that died left of files whose names are `own`; what is being written stays."""
    for path in folder.glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and own(found[1]) and _is_left_over(path):
            remove(path)


# -- reading --------------------------------------------------------------------------------------------------------


@contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file to read it. Anything else is an OSError: opening a pipe would wait for a writer."""
    wait_for_nobody = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | wait_for_nobody)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def read_regular(path: Path, most: int = MAX_JSON) -> bytes:
    """Return the content of a regular file of at most so many bytes; anything else is an OSError that says why."""
    with open_regular(path) as file:
        found = file.read(most + 1)
        if len(found) > most:
            there = max(os.fstat(file.fileno()).st_size, len(found))
            raise OSError(
                errno.EINVAL,
                f"the file has {format_bytes(there)}, and at most {format_bytes(most)} are read",
                str(path),
            )
    return found


@contextmanager
def translate_read_errors(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises about a damaged file into a RunError that names the file and the remedy."""
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
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- sealed JSON ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sealed(Generic[T]):
    """A sort of JSON file that posleak writes and reads back.

    format      `posleak …`, its first key, by which posleak knows its own files;  version: of its fields
    type        the dataclass that it holds
    remedy      what a user can do about a damaged one
    """

    format: str
    version: int
    type: type[T]
    remedy: str

    def write(self, path: Path, value: Any) -> None:
        """Write the fields, or what has them, with a seal. A file of somebody else's in its place is an error."""
        if path.exists() and not is_posleak_file(path):
            raise foreign_file_error(path)
        text = self.text(value)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def text(self, value: Any) -> str:
        """What `write` writes."""
        fields = {"format": self.format, "format_version": self.version, **plain(value)}
        return json_text({**fields, SEAL: _seal(fields)})

    def read(self, path: Path) -> T:
        """The value that was written, or an error that names the file and what is wrong with it."""
        return self._checked(self.fields(path), path)

    def parse(self, text: bytes, where: str) -> T:
        """The same from what a file holds; `where` it is."""
        return self._checked(self._fields(text, Path(where)), Path(where))

    def _checked(self, fields: dict[str, Any], path: Path) -> T:
        if fields.get("format_version") != self.version:
            raise RunError(
                "the file was written by another version of posleak", where=str(path),
                got=f"format version {fields.get('format_version')}", expected=f"format version {self.version}",
                remedy=f"read it with that version, or {self.remedy}",
            )  # fmt: skip
        seal = fields.pop(SEAL, None)
        if seal != _seal(fields):
            raise RunError(
                "the file was changed or damaged after it was written", where=str(path), got=f"sha256 {seal}",
                expected=f"sha256 {_seal(fields)}", remedy=f"restore it from a copy, or {self.remedy}",
            )  # fmt: skip
        return read_value(self.type, path, json.dumps(fields), self.remedy)

    def fields(self, path: Path) -> dict[str, Any]:
        """The file's keys and values, unchecked but for its format."""
        try:
            text = read_regular(path)
        except OSError as error:
            raise _corrupt(path, error, self.remedy) from error
        return self._fields(text, path)

    def _fields(self, text: bytes, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            own = _MARK in text[:MARKED_WITHIN]
            raise _corrupt(path, error, self.remedy if own else "move it away, and start again") from error
        if not isinstance(found, dict) or found.get("format") != self.format:
            raise RunError(
                f"{path.name} is not posleak's", where=str(path),
                remedy="give a folder that `posleak measure`, `posleak trace` or `posleak claims` wrote",
            )  # fmt: skip
        return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _seal(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def json_text(value: Any) -> str:
    """As posleak writes JSON into files."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    text = json_text(value)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(kind: type[T], path: Path, remedy: str) -> T:
    """A JSON file without a seal as the dataclass it was written from, or an error that names what is wrong."""
    try:
        text = read_regular(path)
    except OSError as error:
        raise _corrupt(path, error, remedy) from error
    return read_value(kind, path, text, remedy)


def read_value(kind: type[T], path: Path, text: str | bytes, remedy: str) -> T:
    """The text of a file as the dataclass it was written from."""
    try:
        return from_json(kind, text)
    except PosleakError as error:
        raise RunError(
            f"{path.name} names something that this posleak does not know", where=str(path),
            got=f"{error.what}: {error.got}" if error.got is not None else error.what,
            remedy=f"if it came from a plugin, name the plugin in POSLEAK_PLUGINS; else {remedy}",
        ) from error  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, error, remedy) from error


def _corrupt(path: Path, error: Exception, remedy: str) -> RunError:
    return RunError(f"{path.name} is corrupt", where=str(path), got=str(error), remedy=remedy)


# -- locks ----------------------------------------------------------------------------------------------------------

_owners: dict[Path, tuple[int, int]] = {}
"""Locks that this process holds: which thread, and how many times over."""
_owners_lock = threading.Lock()


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Make the folder and hold it while something is written there. Refused at once if another process or thread does.

    The same thread may hold it again inside. A folder that was made for this and stayed empty is removed.
    """
    made = False
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / LOCK_FILE, wait=False):
            yield
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock at `path`; without `wait` a lock that somebody else holds is an error that says who."""
    import filelock

    place, thread = path.absolute(), threading.get_ident()
    with _owners_lock:
        owner, depth = _owners.get(place, (thread, 0))
        if depth and owner == thread:
            _owners[place] = (thread, depth + 1)
    if depth and owner == thread:
        try:
            yield
        finally:
            with _owners_lock:
                _owners[place] = (thread, _owners[place][1] - 1)
        return
    lock = filelock.FileLock(place, timeout=-1 if wait else 0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise BusyError(
            "somebody else is writing here", where=str(path.parent), got=_owner(place),
            remedy="wait until it is finished and start again, or choose another place with --out",
        ) from None  # fmt: skip
    try:
        with _owners_lock:
            _owners[place] = (thread, 1)
        place.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        with _owners_lock:
            _owners.pop(place, None)
        with contextlib.suppress(OSError):  # while it is held: whoever waits sees that it is gone, and makes a new one
            place.unlink()
        lock.release()


def _owner(path: Path) -> str:
    try:
        return read_regular(path).decode().strip() or "another process"
    except (OSError, ValueError):
        return "another process"
