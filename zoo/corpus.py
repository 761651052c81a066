"""Real text that every machine with posleak has: the documentation inside Python and a few packages that posleak needs.

Docstrings of the standard library and of `PACKAGES`, and the packages' long descriptions; or any text that a user
names. Sources are parsed, never imported. What comes out depends only on the versions that are installed:

    1. characters   tabs become spaces, and paragraphs with characters outside of printable ASCII are left out
    2. paragraphs   one that stood somewhere before is left out, too: documentation repeats itself
    3. passages     what is left of a document, in pieces of about a thousand characters
    4. held out     one passage in twenty, chosen by its own sha256

Tokens are bytes: a character is a token, its index in `ALPHABET`; all of them occur in the documentation.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

from posleak.errors import InputError
from posleak.inputs.corpus import EXCLUDED_FOLDERS, STDLIB, file_docstrings, read_corpus

ALPHABET = "\n" + "".join(map(chr, range(0x20, 0x7F)))

PACKAGES = ("matplotlib", "numpy", "pandas", "scipy", "xarray")
"""Whose documentation is read: much prose, and little of it made by programs."""

PASSAGE, HELD_OUT = 1_000, 20
"""Characters of a passage, at least, where a document has so many; one in so many passages is held out."""

LEAST = 100_000
"""Characters that a text must have for training."""

_FOREIGN = re.compile(r"[^\n -~]")
_BLANK = re.compile(r"\n[ ]*\n\s*")
_CODES = np.full(256, 255, dtype=np.uint8)
_CODES[np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)] = np.arange(len(ALPHABET), dtype=np.uint8)


@dataclass(frozen=True)
class CorpusPart:
    """Where some of the text came from: a package or a file, its version, and how much is left of it."""

    name: str
    version: str
    characters: int


@dataclass(frozen=True, eq=False)
class CorpusText:
    """Tokens to train on and tokens that are held out, uint8; `sha256` is of both."""

    train: np.ndarray
    held_out: np.ndarray
    parts: tuple[CorpusPart, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.train.tobytes() + b"\xff" + self.held_out.tobytes()).hexdigest()

    @property
    def unigram_nats(self) -> float:
        """Entropy of single characters: the loss of a model that knows how often each occurs, and nothing else."""
        counts = np.bincount(self.train, minlength=len(ALPHABET))
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def encode(text: str) -> np.ndarray:
    """uint8 tokens of a text that is in the alphabet."""
    return np.asarray(_CODES[np.frombuffer(text.encode("ascii"), dtype=np.uint8)])


@cache
def read_text(path: str | None = None) -> CorpusText:
    """The documentation on this machine, or the text at `path`: a file, or a folder of files."""
    named = _documentation() if path is None else _given(path)
    seen: set[bytes] = set()
    train, held, parts = list[str](), list[str](), list[CorpusPart]()
    for name, version, documents in named:
        kept = [passage for document in documents for passage in passages(document, seen)]
        parts.append(CorpusPart(name, version, sum(map(len, kept))))
        for passage in kept:
            (held if _is_held_out(passage) else train).append(passage)
    for part, least in ((train, LEAST), (held, LEAST // (4 * HELD_OUT))):
        if sum(map(len, part)) < least:
            raise InputError(
                "the text is too short to train on", where="zoo",
                got=f"{sum(map(len, train)):,} characters, and {sum(map(len, held)):,} that are held out",
                expected=f"{LEAST:,} or more, without repeated paragraphs and those that are not plain ASCII",
                remedy="name a longer text",
            )  # fmt: skip
    return CorpusText(encode("\n\n".join(train)), encode("\n\n".join(held)), tuple(parts))


def passages(document: str, seen: set[bytes]) -> Iterator[str]:
    """Paragraphs of a document that were not `seen` before, joined to passages; they are seen now."""
    text = document.expandtabs(4).replace("\r\n", "\n")
    piece, length = list[str](), 0
    for paragraph in _BLANK.split(text.strip("\n")):
        key = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
        if not paragraph.strip() or _FOREIGN.search(paragraph) or key in seen:
            continue
        seen.add(key)
        piece.append(paragraph.rstrip())
        length += len(paragraph)
        if length >= PASSAGE:
            yield "\n\n".join(piece)
            piece, length = [], 0
    if piece:
        yield "\n\n".join(piece)


def _is_held_out(passage: str) -> bool:
    return int.from_bytes(hashlib.sha256(passage.encode()).digest()[:4], "big") % HELD_OUT == 0


Named = tuple[str, str, Iterable[str]]
"""A source of documents: name, version, documents."""


def _documentation() -> Iterator[Named]:
    yield "Python", platform.python_version(), read_corpus(STDLIB).documents
    for name in PACKAGES:
        try:
            found = distribution(name)
        except PackageNotFoundError as error:
            raise InputError(
                "a package whose documentation is read is not installed", where="zoo", got=name,
                remedy=f"pip install {name}, or train on a text of your own: --text PATH",
            ) from error  # fmt: skip
        files = sorted(str(file) for file in found.files or () if _is_documented(str(file)))
        docstrings = (text for file in files for text in file_docstrings(Path(str(found.locate_file(file)))))
        yield name, found.version, [*docstrings, str(found.metadata.json.get("description") or "")]


def _is_documented(file: str) -> bool:
    return file.endswith(".py") and not EXCLUDED_FOLDERS & set(file.split("/"))


def _given(path: str) -> Iterator[Named]:
    found = read_corpus(path)
    yield path, found.sha256[:12], ["\n\n".join(_short(document)) for document in found.documents]


def _short(document: str) -> Iterator[str]:
    """Paragraphs, long ones in pieces: a file may have no blank lines, or no lines at all."""
    for paragraph in _BLANK.split(document):
        for start in range(0, len(paragraph), PASSAGE):
            yield paragraph[start : start + PASSAGE]
