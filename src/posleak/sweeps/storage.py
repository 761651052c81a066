"""Where a sweep keeps its cells: a folder, or a place that fsspec knows (s3://…, gs://…), the same for all workers.

    ROOT/cells/NAME-ID/cell.json       the cell is finished: what it is, and the sha256 of every file; written last
    ROOT/cells/NAME-ID/error.json      it failed, or was left out, and why
    ROOT/cells/NAME-ID/run.json …      the run, as `measure` or `trace` writes it

On a disk a worker measures in the cell's own folder, under its lock, and an interrupted cell goes on where it was. On
an object store it measures in a folder of its own and then sends the files, under a name that no other worker uses
(`place` in cell.json): there are no locks there, and two workers at one cell must not mix their files.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posleak.errors import BusyError, InputError, PosleakError, StorageError
from posleak.files import LOCK_FILE, MAX_JSON, file_lock, read_regular, sha256_of, sole_writer, write_atomically
from posleak.text import one_line

CELLS = "cells"


@dataclass(frozen=True)
class Storage:
    """A place for cells. `root` is a folder or a URL; names are relative to it, with slashes."""

    root: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """fsspec's file system, and the root in it."""
        import fsspec

        try:
            fs, path = fsspec.core.url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            raise InputError(
                "this place cannot be written to", where=self.root, got=one_line(error),
                remedy="give a folder, or install what fsspec needs for it: s3fs for s3://, gcsfs for gs://",
            ) from error  # fmt: skip
        return fs, str(path).rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @cached_property
    def local(self) -> Path | None:
        """The folder, if it is one on a disk."""
        if "://" not in self.root and "::" not in self.root:
            return Path(self.root).expanduser().absolute()
        fs, path = self._opened
        return Path(path) if "file" in fs.protocol else None

    @property
    def everywhere(self) -> Storage:
        """The same place, written so that processes in other folders find it."""
        return self if self.local is None else Storage(str(self.local))

    def path(self, name: str) -> str:
        """As people write it."""
        return str(self.local / name) if self.local is not None else f"{self.root.rstrip('/')}/{name}"

    # -- reading ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of the cells' folders."""
        place = self._at(CELLS)
        with _about(self.path(CELLS)):
            self._fs.invalidate_cache()
            if not self._fs.isdir(place):
                return []
            return sorted(Path(found).name for found in self._fs.ls(place, detail=False))

    def read(self, name: str, most: int = MAX_JSON) -> bytes | None:
        """Return a file's content; None if it is not there. On a disk, of at most so many bytes."""
        if self.local is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), _about(self.path(name)):
                return read_regular(self.local / name, most)
            return None
        with contextlib.suppress(FileNotFoundError), _about(self.path(name)):
            return bytes(self._fs.cat_file(self._at(name)))
        return None

    def stamp(self, name: str) -> str | None:
        """Size and time of a file, or what its store says of its content: cheap, and another one after a change."""
        if self.local is not None:
            with contextlib.suppress(OSError):
                found = (self.local / name).stat()
                return f"{found.st_size} {found.st_mtime_ns}"
            return None
        with contextlib.suppress(FileNotFoundError), _about(self.path(name)):
            return _stamp(self._fs.info(self._at(name)))
        return None

    def sha256(self, name: str) -> str | None:
        """Of a file's content; None if it is not there."""
        if self.local is not None:
            with contextlib.suppress(OSError):
                return sha256_of(self.local / name)
            return None
        found = self.read(name)
        return None if found is None else hashlib.sha256(found).hexdigest()

    def snapshot(self, names: Sequence[str]) -> Storage:
        """The same place, to look at many cells at once: on a store, one listing and all of `names` read side by side.

        What it says of stamps and of these files is what was there when it was made.
        """
        if self.local is not None:
            return self
        with _about(self.path(CELLS)):
            self._fs.invalidate_cache()
            found = self._fs.find(self._at(CELLS), detail=True)
            stamps = {self._below(path): _stamp(info) for path, info in found.items()}
            there = [self._at(name) for name in names if name in stamps]
            contents = self._fs.cat(there, on_error="omit") if there else {}
        return _Snapshot(self.root, stamps, {self._below(path): bytes(text) for path, text in contents.items()})

    def _below(self, path: str) -> str:
        """A path of the store as a name."""
        return path.strip("/").removeprefix(self._opened[1].strip("/") + "/")

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        if self.local is not None:
            write_atomically(self.local / name, lambda temporary: temporary.write_bytes(content))
            return
        with _about(self.path(name)):
            self._fs.pipe_file(self._at(name), content)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _about(self.path(name)):
            if self.local is not None:
                (self.local / name).unlink()
            else:
                self._fs.rm_file(self._at(name))

    @contextmanager
    def workplace(self, folder: str) -> Iterator[Path]:
        """Where a worker measures a cell: its own folder, held so that nobody else does, or one for the time being."""
        if self.local is not None:
            place = self.local / CELLS / folder
            with sole_writer(place):
                yield place
            return
        with tempfile.TemporaryDirectory(prefix="posleak-") as made:
            yield Path(made)

    def send(self, folder: str, place: Path, names: list[str]) -> str:
        """Bring a worker's files to the store; gives their place below the cell's folder. On a disk they are there."""
        if self.local is not None:
            return ""
        token = secrets.token_hex(4)
        for name in names:
            with _about(self.path(f"{CELLS}/{folder}")):
                self._fs.pipe_file(self._at(f"{CELLS}/{folder}/{token}/{name}"), (place / name).read_bytes())
        return f"{token}/"

    def is_held(self, folder: str) -> bool:
        """Is somebody at work on this cell? On an object store nobody can tell. A lock whose owner died is none."""
        if self.local is None or not (lock := self.local / CELLS / folder / LOCK_FILE).exists():
            return False
        try:
            with file_lock(lock, wait=False):
                return False
        except BusyError:
            return True
        except OSError:
            return False

    def require_writable(self) -> None:
        """Refuse a place that cannot be written to, before anything is computed."""
        name = f".{secrets.token_hex(4)}.probe"
        self.write(name, b"")
        self.remove(name)

    def _at(self, name: str) -> str:
        return f"{self._opened[1]}/{name}"


@dataclass(frozen=True)
class _Snapshot(Storage):
    """What a store held at one moment: stamps of all files, and some files whole."""

    stamps: Mapping[str, str]
    contents: Mapping[str, bytes]

    def read(self, name: str, most: int = MAX_JSON) -> bytes | None:
        if name in self.contents or name not in self.stamps:
            return self.contents.get(name)
        return super().read(name, most)

    def stamp(self, name: str) -> str | None:
        return self.stamps.get(name)


def _stamp(info: Mapping[str, Any]) -> str:
    known = next(
        (info[key] for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created") if key in info), ""
    )
    return f"{info.get('size')} {known}"


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Whatever a store says goes out as one error that names the place. What is not there passes."""
    try:
        yield
    except (FileNotFoundError, PosleakError):
        raise
    except Exception as error:
        raise StorageError(
            "the storage does not answer as it should", where=where, got=one_line(error),
            remedy="check the address, your rights there and the connection; what is finished is kept: start it again",
        ) from error  # fmt: skip
