"""Where a sweep keeps its cells: a folder, or an address that fsspec opens (s3://…, gs://…), shared by all workers.

    ROOT/cells/NAME-ID/cell.json       the cell is finished: its description and the sha256 of every file; written last
    ROOT/cells/NAME-ID/error.json      the cell failed or was left out, and why
    ROOT/cells/NAME-ID/run.json …      the run, as `measure` or `trace` writes it

On a disk a worker measures in the cell's own folder, under its lock, and an interrupted cell is resumed. An object
store has no locks. There a worker measures in a temporary folder and uploads the files into a subfolder of its own
(`place` in cell.json), so that two workers on one cell do not mix their files.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posleak.errors import BusyError, InputError, PosleakError, StorageError
from posleak.files import LOCK_FILE, MAX_JSON, file_lock, read_regular, sha256_of, sole_writer, write_atomically
from posleak.text import one_line

CELLS_FOLDER = "cells"


@dataclass(frozen=True)
class Storage:
    """Storage of cells. `root` is a folder or a URL; names of files and folders are relative to it, with slashes."""

    root: str

    @cached_property
    def _fs(self) -> Any:
        """fsspec's file system below the root."""
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        try:
            fs, path = fsspec.core.url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            raise InputError(
                "the storage cannot be opened", where=self.root, got=one_line(error),
                remedy="pass a folder, or install the package that fsspec needs: s3fs for s3://, gcsfs for gs://",
            ) from error  # fmt: skip
        return DirFileSystem(str(path).rstrip("/") or "/", fs)

    @cached_property
    def local(self) -> Path | None:
        """The folder on a disk; None for an object store."""
        if "://" not in self.root and "::" not in self.root:
            return Path(self.root).expanduser().absolute()
        return Path(self._fs.path) if "file" in self._fs.fs.protocol else None

    @property
    def absolute(self) -> Storage:
        """The same storage, for processes with another working directory."""
        return self if self.local is None else Storage(str(self.local))

    def path(self, name: str) -> str:
        """Return the path or URL of a file."""
        return str(self.local / name) if self.local is not None else f"{self.root.rstrip('/')}/{name}"

    # -- reading ------------------------------------------------------------------------------------------------------

    def cell_folders(self) -> list[str]:
        """Return the names of the cells' folders."""
        with _translated_errors(self.path(CELLS_FOLDER)):
            self._fs.invalidate_cache()
            if not self._fs.isdir(CELLS_FOLDER):
                return []
            return sorted(Path(path).name for path in self._fs.ls(CELLS_FOLDER, detail=False))

    def read(self, name: str, most: int = MAX_JSON) -> bytes | None:
        """Return a file's content, on a disk of at most `most` bytes; None if there is no such file."""
        with suppress(FileNotFoundError, NotADirectoryError), _translated_errors(self.path(name)):
            if self.local is not None:
                return read_regular(self.local / name, most)
            return bytes(self._fs.cat_file(name))
        return None

    def stamp(self, name: str) -> str | None:
        """Return size and time of a file, or the store's own tag of its content; None if there is no such file."""
        if self.local is not None:
            with suppress(OSError):
                facts = (self.local / name).stat()
                return f"{facts.st_size} {facts.st_mtime_ns}"
            return None
        with suppress(FileNotFoundError), _translated_errors(self.path(name)):
            return _stamp(self._fs.info(name))
        return None

    def sha256(self, name: str) -> str | None:
        """Return the hash of a file's content; None if there is no such file."""
        if self.local is not None:
            with suppress(OSError):
                return sha256_of(self.local / name)
            return None
        content = self.read(name)
        return None if content is None else hashlib.sha256(content).hexdigest()

    def snapshot(self, names: Iterable[str]) -> Storage:
        """Return a view for reading many cells: on an object store, one listing, with all of `names` read at once."""
        if self.local is not None:
            return self
        with _translated_errors(self.path(CELLS_FOLDER)):
            self._fs.invalidate_cache()
            stamps = {name: _stamp(info) for name, info in self._fs.find(CELLS_FOLDER, detail=True).items()}
            wanted = [name for name in names if name in stamps]
            contents = self._fs.cat(wanted, on_error="omit") if wanted else {}
        return _Snapshot(self.root, stamps, {name: bytes(content) for name, content in contents.items()})

    @contextmanager
    def cell_files(self, folder: str, place: str, names: Iterable[str]) -> Iterator[Path]:
        """Yield a folder on a disk with the files of a finished cell: its own `folder`, or a temporary copy."""
        if self.local is not None:
            yield self.local / folder
            return
        with tempfile.TemporaryDirectory(prefix="posleak-") as copies:
            for name in names:
                target = Path(copies) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.read(f"{folder}/{place}{name}") or b"")
            yield Path(copies)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Write a file; on a disk it appears whole or not at all."""
        if self.local is not None:
            write_atomically(self.local / name, lambda temporary: temporary.write_bytes(content))
            return
        with _translated_errors(self.path(name)):
            self._fs.pipe_file(name, content)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError), _translated_errors(self.path(name)):
            self._fs.rm_file(name)

    @contextmanager
    def work_folder(self, folder: str) -> Iterator[Path]:
        """Yield the folder in which a worker measures a cell: its own `folder`, locked, or a temporary one."""
        if self.local is not None:
            with sole_writer(self.local / folder):
                yield self.local / folder
            return
        with tempfile.TemporaryDirectory(prefix="posleak-") as temporary:
            yield Path(temporary)

    def upload(self, folder: str, source: Path, names: Iterable[str]) -> str:
        """Copy a worker's files to an object store, and return their subfolder; on a disk do nothing, and return ""."""
        if self.local is not None:
            return ""
        place = f"{secrets.token_hex(4)}/"
        for name in names:
            self.write(f"{folder}/{place}{name}", (source / name).read_bytes())
        return place

    def is_locked(self, folder: str) -> bool:
        """Return whether a live worker has this cell; always False on an object store, which has no locks."""
        if self.local is None or not (lock := self.local / folder / LOCK_FILE).exists():
            return False
        try:
            with file_lock(lock, wait=False):
                return False
        except (BusyError, OSError) as error:
            return isinstance(error, BusyError)

    def require_writable(self) -> None:
        """Raise StorageError if nothing can be written here."""
        name = f".{secrets.token_hex(4)}.probe"
        self.write(name, b"")
        self.remove(name)


@dataclass(frozen=True)
class _Snapshot(Storage):
    """An object store at one moment: stamps of all files, and the content of some."""

    stamps: Mapping[str, str]
    contents: Mapping[str, bytes]

    def read(self, name: str, most: int = MAX_JSON) -> bytes | None:
        if name in self.contents or name not in self.stamps:
            return self.contents.get(name)
        return super().read(name, most)

    def stamp(self, name: str) -> str | None:
        return self.stamps.get(name)


def _stamp(info: Mapping[str, Any]) -> str:
    tags = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    return f"{info.get('size')} {next((info[key] for key in tags if key in info), '')}"


@contextmanager
def _translated_errors(where: str) -> Iterator[None]:
    """Turn what a file system raises into a StorageError that names the place; FileNotFoundError passes."""
    try:
        yield
    except (FileNotFoundError, PosleakError):
        raise
    except Exception as error:
        raise StorageError(
            "the storage failed", where=where, got=one_line(error),
            remedy="check the address, your permissions and the connection, then run the sweep again",
        ) from error  # fmt: skip
