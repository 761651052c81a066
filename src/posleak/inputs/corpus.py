"""Crops from the inside of texts: a file, a folder of files, or the docstrings of Python's standard library.

The start of a document has its own statistics (titles, imports, capital letters), from which a model can recognise it;
content would then be mistaken for position. A crop therefore begins at a uniformly drawn character other than the
first, and its first few tokens are dropped: they may be fragments of a word, on which no tokenizer was trained.

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
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from posleak.errors import InputError, shorter_prompts

from .bodies import draw
from .vocabulary import Vocabulary

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
"""Suffixes of text files in a folder. A single file may have any name."""

STDLIB = "stdlib"
"""Used in place of a path: the docstrings of Python's standard library."""

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})
"""Folders below the standard library that are not part of it: installed packages, tests, intentionally broken files."""

SAMPLED_CROPS = 8
"""Number of crops from which the mean number of characters per token is estimated."""

DROPPED_TOKENS = 4
"""Tokens that are dropped at either end of a slice of text, where a word may be cut."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_warning_filters = threading.Lock()
"""Python's warning filters are shared by all threads."""


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

    All text files below a folder are read, sorted by relative path, without hidden ones.
    max_characters: read only about this much of the standard library.
    """
    if path == STDLIB:
        return Corpus((STDLIB,), (standard_library_text(max_characters),), python=platform.python_version())
    place = require_text(path)
    if place.is_file():
        return Corpus((place.name,), (_read(place),))
    files = {
        file.relative_to(place).as_posix(): file
        for file in place.rglob("*")
        if file.suffix.lower() in TEXT_SUFFIXES and file.is_file()
    }
    names = tuple(sorted(name for name in files if not any(part.startswith(".") for part in name.split("/"))))
    if not names:
        raise InputError(
            "the folder contains no text files", where="inputs", got=str(place),
            expected="files ending in " + ", ".join(TEXT_SUFFIXES),
            remedy="pass a single file, which may have any suffix: text:FOLDER/FILE",
        )  # fmt: skip
    return Corpus(names, tuple(_read(files[name]) for name in names))


def require_text(path: str) -> Path:
    """Return the path of a text file or folder. Raise InputError if it does not exist."""
    place = Path(path).expanduser()
    if place.is_file() or place.is_dir() or path == STDLIB:
        return place
    raise InputError(
        "text file or folder not found", where="inputs", got=path, expected="an existing file or folder",
        remedy="check the path, or use text:stdlib, which needs no file",
    )  # fmt: skip


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
def standard_library_text(max_characters: int | None = None) -> str:
    """Return the docstrings of the standard library by file and source order, cleaned, joined by blank lines.

    max_characters: stop after the file in which this number is reached.
    """
    texts, length = list[str](), 0
    for file in library_files(Path(sysconfig.get_paths()["stdlib"])):
        if max_characters is not None and length >= max_characters:
            break
        texts += (added := list(file_docstrings(file)))
        length += sum(map(len, added))
    text = "\n\n".join(texts)
    if not text:
        raise InputError(
            "the source files of Python's standard library are not installed", where="inputs text:stdlib",
            got="no docstrings", expected=".py files with docstrings",
            remedy="use a text of your own, text:PATH, or --inputs random",
        )  # fmt: skip
    return text


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


@dataclass(frozen=True, eq=False)
class CropBody:
    """Crops of a corpus. All starts that leave room for a crop are equally likely, so long documents have more crops.

    reach: [documents + 1], starting with 0: cumulative number of characters at which a crop may begin
    """

    corpus: Corpus
    vocabulary: Vocabulary
    reach: tuple[int, ...]

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        """Return `length` ordinary tokens from the crop's start on, from a slice that is doubled until it has them.

        If the document ends too early (a slice may be tokenized differently from the whole), the crop begins earlier.
        """
        number, start = self._place(seed, index)
        document = self.corpus.documents[number]
        width = 6 * (length + 2 * DROPPED_TOKENS)
        while True:
            ids = inner_tokens(document[start : start + width], self.vocabulary)
            if len(ids) >= length:
                return ids[:length]
            if start + width < len(document):
                width *= 2
            elif start > 1:
                start = max(1, start - 8 * (length - len(ids)))
            else:
                raise _too_short(self.corpus, len(ids), length)

    def _place(self, seed: int, index: int) -> tuple[int, int]:
        """Return the index of the document of a crop, and the character at which the crop begins."""
        place = int(draw(seed, index, 1, below=self.reach[-1])[0])
        document = bisect_right(self.reach, place) - 1
        return document, 1 + place - self.reach[document]

    def spans(self, seed: int, count: int, length: int) -> tuple[np.ndarray, int]:
        """Estimate the spans of the first crops as fractions of the corpus, [count, 2], and its number of tokens.

        The number of characters per token is estimated from a few crops.
        """
        before = list(accumulate(map(len, self.corpus.documents), initial=0))
        places = [self._place(seed, index) for index in range(count)]
        pieces = [self.corpus.documents[number][start : start + 6 * length] for number, start in places[:SAMPLED_CROPS]]
        tokens = sum(len(inner_tokens(piece, self.vocabulary)) + 2 * DROPPED_TOKENS for piece in pieces)
        width = sum(map(len, pieces)) / tokens
        starts = np.array([before[number] + start for number, start in places], dtype=float)
        ends = np.minimum(starts + width * (length + DROPPED_TOKENS), [before[number + 1] for number, _ in places])
        return np.stack([starts, ends], axis=1) / self.corpus.characters, round(self.corpus.characters / width)

    def describe(self) -> dict[str, Any]:
        return {
            "text_sha256": self.corpus.sha256,
            "text_documents": len(self.corpus.documents),
            "text_characters": self.corpus.characters,
            "text_python": self.corpus.python,
        }


@dataclass(frozen=True)
class TextCrops:
    """Crops from random places inside texts: natural statistics without document starts.

    path             a file, a folder, or `stdlib` (write `./stdlib` for a file of that name)
    max_characters   read only about this much of the standard library, which is faster
    """

    path: str
    max_characters: int | None = None

    @property
    def text(self) -> str:
        return f"text:{self.path}"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> CropBody:
        if vocabulary.tokenizer is None:
            raise InputError(
                "text inputs need a tokenizer, and the model has none", where="inputs", got=self.text,
                expected="a model with a tokenizer",
                remedy="pass one with --tokenizer PATH, or use --inputs random, which needs none",
            )  # fmt: skip
        corpus = read_corpus(self.path, self.max_characters)
        rooms = [_room(document, length, vocabulary) for document in corpus.documents]
        reach = tuple(accumulate((starts for starts, _ in rooms), initial=0))
        if reach[-1] == 0:
            raise _too_short(corpus, max(tokens for _, tokens in rooms), length)
        if reach[-1] >= 2**32:
            raise InputError(
                "the text is too long", where="inputs", got=f"{reach[-1]:,} characters",
                expected=f"fewer than {2**32:,}", remedy="use a smaller file or folder",
            )  # fmt: skip
        return CropBody(corpus, vocabulary, reach)


def _room(document: str, length: int, vocabulary: Vocabulary) -> tuple[int, int]:
    """Return the number of characters at which a crop may begin, and the number of tokens of the longest tail tried.

    The tail of the document is lengthened by a quarter until it has `length` inner tokens. A crop may begin where the
    tail does or earlier: at characters 1 … start. A document with too few tokens has no such character.
    """
    width = 2 * (length + 2 * DROPPED_TOKENS)
    while True:
        start = max(1, len(document) - width)
        tokens = len(inner_tokens(document[start:], vocabulary))
        if tokens >= length:
            return start, tokens
        if start == 1:
            return 0, tokens
        width += width // 4


def inner_tokens(text: str, vocabulary: Vocabulary) -> np.ndarray:
    """Return the ordinary tokens of `text` without DROPPED_TOKENS at either end, int64."""
    # verbose=False: no warning about slices that are longer than the model's context
    ids = vocabulary.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return vocabulary.keep_ordinary(np.asarray(ids[DROPPED_TOKENS:-DROPPED_TOKENS], dtype=np.int64))


def _too_short(corpus: Corpus, tokens: int, length: int) -> InputError:
    documents = len(corpus.documents)
    remedies = ("use a longer text", shorter_prompts(tokens), "join the files into one" if documents > 1 else None)
    return InputError(
        "all documents are too short for a prompt" if documents > 1 else "the text is too short for a prompt",
        where="inputs", got=f"{tokens} tokens" + (f" in the longest of {documents} documents" if documents > 1 else ""),
        expected=f"at least {length} tokens, not counting {DROPPED_TOKENS} at either end",
        remedy=", or ".join(remedy for remedy in remedies if remedy),
    )  # fmt: skip
