"""Texts to crop from: a file, a folder of files, or the standard library's documentation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from posleak.errors import InputError
from posleak.inputs.stdlib import standard_library_text

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
"""What counts as text in a folder; a single file may have any name."""

STDLIB = "stdlib"
"""Written instead of a path: the documentation strings of Python's standard library."""


@dataclass(frozen=True)
class Corpus:
    """Named documents in a fixed order, with the hash that identifies them."""

    names: tuple[str, ...]
    documents: tuple[str, ...]
    python: str | None = None
    """The Python whose library this is, for the text differs between versions."""

    @property
    def characters(self) -> int:
        return sum(map(len, self.documents))

    @property
    def sha256(self) -> str:
        """One document: of its UTF-8. Several: of the lines `sha256  name`, as `sha256sum` would list them."""
        each = [_sha256(document) for document in self.documents]
        if len(each) == 1:
            return each[0]
        return _sha256("".join(f"{digest}  {name}\n" for digest, name in zip(each, self.names)))


def read_corpus(path: str, max_characters: int | None = None) -> Corpus:
    """The documents at `path`; an error names a file or folder that cannot be used, and says what to do.

    max_characters: of the standard library, only about so many characters.
    """
    if path == STDLIB:
        version, text = standard_library_text(max_characters)
        return Corpus((STDLIB,), (text,), python=version)
    place = require_text(path)
    return _read_folder(place) if place.is_dir() else Corpus((place.name,), (_read(place),))


def require_text(path: str) -> Path:
    """The file or folder at `path`; refused if there is none."""
    place = Path(path).expanduser()
    if place.is_file() or place.is_dir() or path == STDLIB:
        return place
    raise InputError(
        "no such text",
        where="inputs",
        got=path,
        expected="a file or a folder",
        remedy="check the path; text:stdlib needs no file",
    )


def _read_folder(folder: Path) -> Corpus:
    """Every text file below `folder`, in the order of relative names, hidden ones left out."""
    found = {
        file.relative_to(folder).as_posix(): file
        for file in folder.rglob("*")
        if file.suffix.lower() in TEXT_SUFFIXES and file.is_file()
    }
    names = tuple(sorted(name for name in found if not any(part.startswith(".") for part in name.split("/"))))
    if not names:
        raise InputError(
            "the folder holds no text",
            where="inputs",
            got=str(folder),
            expected="files ending in " + ", ".join(TEXT_SUFFIXES),
            remedy="name one file instead: a single file may have any name",
        )
    return Corpus(names, tuple(_read(found[name]) for name in names))


def _read(file: Path) -> str:
    """UTF-8 with `\\n` line ends, whatever system wrote it, so that ids and hashes agree between machines."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            "the file is not UTF-8 text",
            where=str(file),
            got=f"byte 0x{error.object[error.start]:02x} at {error.start}",
            expected="UTF-8",
            remedy="convert it to UTF-8, or leave it out of the folder",
        ) from error
    except OSError as error:
        raise InputError("the file cannot be read", where=str(file), got=error.strerror) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
