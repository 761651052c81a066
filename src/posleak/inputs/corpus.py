"""Texts from which crops are taken: a file, a folder of files, or the docstrings of Python's standard library.

`text:stdlib` is English prose that every Python installation has. Source files are parsed, never imported. The text
depends on the Python version, and on files that a distribution may omit; results record its hash.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from posleak.errors import InputError

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
"""Suffixes of text files in a folder. A single file may have any name."""

STDLIB = "stdlib"
"""Used in place of a path: the docstrings of Python's standard library."""

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})
"""Folders below the standard library that are not part of it: installed packages, tests, intentionally broken files."""

_warning_filters = threading.Lock()
"""Python's warning filters are shared by all threads."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Corpus:
    """Named documents in a fixed order. python: the Python version, if the corpus is its standard library."""

    names: tuple[str, ...]
    documents: tuple[str, ...]
    python: str | None = None

    @property
    def characters(self) -> int:
        return sum(map(len, self.documents))

    @property
    def sha256(self) -> str:
        """Hash of the UTF-8 text of one document; of several, the hash of the lines that `sha256sum` would print."""
        hashes = [_sha256(document) for document in self.documents]
        if len(hashes) == 1:
            return hashes[0]
        return _sha256("".join(f"{digest}  {name}\n" for digest, name in zip(hashes, self.names)))


def read_corpus(path: str, max_characters: int | None = None) -> Corpus:
    """Read the documents at `path`: a file, a folder, or `stdlib`. Raise InputError for a path that cannot be read.

    max_characters: read only about this much of the standard library.
    """
    if path == STDLIB:
        version, text = standard_library_text(max_characters)
        return Corpus((STDLIB,), (text,), python=version)
    place = require_text(path)
    return _read_folder(place) if place.is_dir() else Corpus((place.name,), (_read(place),))


def require_text(path: str) -> Path:
    """Return the path of a text file or folder. Raise InputError if it does not exist."""
    place = Path(path).expanduser()
    if place.is_file() or place.is_dir() or path == STDLIB:
        return place
    raise InputError(
        "text file or folder not found", where="inputs", got=path, expected="an existing file or folder",
        remedy="check the path, or use text:stdlib, which needs no file",
    )  # fmt: skip


def _read_folder(folder: Path) -> Corpus:
    """Read all text files below `folder`, sorted by relative path, without hidden ones."""
    files = {
        file.relative_to(folder).as_posix(): file
        for file in folder.rglob("*")
        if file.suffix.lower() in TEXT_SUFFIXES and file.is_file()
    }
    names = tuple(sorted(name for name in files if not any(part.startswith(".") for part in name.split("/"))))
    if not names:
        raise InputError(
            "the folder contains no text files", where="inputs", got=str(folder),
            expected="files ending in " + ", ".join(TEXT_SUFFIXES),
            remedy="name a single file, which may have any suffix: text:FOLDER/FILE",
        )  # fmt: skip
    return Corpus(names, tuple(_read(files[name]) for name in names))


def _read(file: Path) -> str:
    """Read UTF-8 text with line ends converted to `\\n`, so that ids and hashes agree between operating systems."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            "the file is not UTF-8 text", where=str(file),
            got=f"byte 0x{error.object[error.start]:02x} at offset {error.start}", expected="UTF-8",
            remedy="convert the file to UTF-8, or remove it from the folder",
        ) from error  # fmt: skip
    except OSError as error:
        raise InputError("cannot read the file", where=str(file), got=error.strerror) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@cache
def standard_library_text(max_characters: int | None = None) -> tuple[str, str]:
    """Return the Python version and the docstrings by file and source order, cleaned, joined by blank lines.

    max_characters: stop after the file in which this number is reached.
    """
    texts, length = list[str](), 0
    for file in library_files(Path(sysconfig.get_paths()["stdlib"])):
        if max_characters is not None and length >= max_characters:
            break
        texts += (of_file := list(file_docstrings(file)))
        length += sum(map(len, of_file))
    text = "\n\n".join(texts)
    if not text:
        raise InputError(
            "the source files of Python's standard library are not installed", where="inputs text:stdlib",
            got="no docstrings", expected=".py files with docstrings",
            remedy="use a text of your own, text:PATH, or --inputs random",
        )  # fmt: skip
    return platform.python_version(), text


def library_files(root: Path) -> list[Path]:
    """Return the .py files below `root` that belong to the standard library, sorted by relative path."""
    names = list[str]()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]  # os.walk does not enter them
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return [root / name for name in sorted(names)]


def file_docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a source file; nothing if it is not valid Python (templates, other versions)."""
    try:
        with _warning_filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escape sequences
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # ValueError: null bytes, or UnicodeDecodeError
        return
    yield from docstrings(tree)


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of `node` and of definitions inside it in source order, also below `if` and `try`."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
        yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from docstrings(child)
