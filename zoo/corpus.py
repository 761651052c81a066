"""Training text: the documentation of Python and of a few packages that posleak depends on, or a text of the user.

The documentation consists of the docstrings of the standard library and of `PACKAGES`, and of the long descriptions of
the packages. Sources are parsed, never imported. The text depends only on the installed versions:

    1. characters   tabs become spaces; paragraphs with characters other than printable ASCII are removed
    2. paragraphs   repeated paragraphs are removed
    3. passages     the rest of a document is split into pieces of about a thousand characters
    4. held out     one passage in twenty, chosen by its sha256

A token is a character: its index in `ALPHABET`. All of them occur in the documentation.
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
"""Packages whose documentation is read: much prose, little of it generated."""

PASSAGE, HELD_OUT = 1_000, 20
"""Minimum length of a passage in characters; one in HELD_OUT passages is held out."""

MIN_CHARACTERS = 100_000
"""Minimum length of a training text in characters."""

_FOREIGN = re.compile(r"[^\n -~]")
_BLANK = re.compile(r"\n[ ]*\n\s*")
_CODES = np.full(256, 255, dtype=np.uint8)
_CODES[np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)] = np.arange(len(ALPHABET), dtype=np.uint8)


@dataclass(frozen=True)
class CorpusPart:
    """One source of the text: a package or a file, its version, and the number of characters that are used."""

    name: str
    version: str
    characters: int


@dataclass(frozen=True, eq=False)
class CorpusText:
    """Training tokens and held-out tokens, uint8; `sha256` covers both."""

    train: np.ndarray
    held_out: np.ndarray
    parts: tuple[CorpusPart, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.train.tobytes() + b"\xff" + self.held_out.tobytes()).hexdigest()

    @property
    def unigram_nats(self) -> float:
        """Entropy of single characters: the loss of a model that knows only their frequencies."""
        counts = np.bincount(self.train, minlength=len(ALPHABET))
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def encode(text: str) -> np.ndarray:
    """Return the tokens (uint8) of a text whose characters are all in the alphabet."""
    return np.asarray(_CODES[np.frombuffer(text.encode("ascii"), dtype=np.uint8)])


@cache
def read_text(path: str | None = None) -> CorpusText:
    """Return the documentation on this machine, or the text at `path`, which is a file or a folder."""
    sources = _documentation() if path is None else _user_text(path)
    seen: set[bytes] = set()
    train, held_out, parts = list[str](), list[str](), list[CorpusPart]()
    for name, version, documents in sources:
        new = [passage for document in documents for passage in passages(document, seen)]
        parts.append(CorpusPart(name, version, sum(map(len, new))))
        for passage in new:
            (held_out if _is_held_out(passage) else train).append(passage)
    for split, minimum in ((train, MIN_CHARACTERS), (held_out, MIN_CHARACTERS // (4 * HELD_OUT))):
        if sum(map(len, split)) < minimum:
            raise InputError(
                "the text is too short to train on", where="zoo",
                got=f"{sum(map(len, train)):,} characters for training and {sum(map(len, held_out)):,} held out",
                expected=f"{MIN_CHARACTERS:,} or more, without repeated paragraphs and paragraphs that are not ASCII",
                remedy="use a longer text",
            )  # fmt: skip
    return CorpusText(encode("\n\n".join(train)), encode("\n\n".join(held_out)), tuple(parts))


def passages(document: str, seen: set[bytes]) -> Iterator[str]:
    """Yield passages made of the paragraphs that are not in `seen`, and add these paragraphs to it."""
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


Source = tuple[str, str, Iterable[str]]
"""A source of documents: name, version, documents."""


def _documentation() -> Iterator[Source]:
    yield "Python", platform.python_version(), read_corpus(STDLIB).documents
    for name in PACKAGES:
        try:
            package = distribution(name)
        except PackageNotFoundError as error:
            raise InputError(
                "a package whose documentation is read is not installed", where="zoo", got=name,
                remedy=f"pip install {name}, or train on your own text: --text PATH",
            ) from error  # fmt: skip
        files = sorted(str(file) for file in package.files or () if _has_docstrings(str(file)))
        docstrings = (text for file in files for text in file_docstrings(Path(str(package.locate_file(file)))))
        yield name, package.version, [*docstrings, str(package.metadata.json.get("description") or "")]


def _has_docstrings(file: str) -> bool:
    return file.endswith(".py") and not EXCLUDED_FOLDERS & set(file.split("/"))


def _user_text(path: str) -> Iterator[Source]:
    corpus = read_corpus(path)
    yield path, corpus.sha256[:12], ["\n\n".join(_short_paragraphs(document)) for document in corpus.documents]


def _short_paragraphs(document: str) -> Iterator[str]:
    """Yield paragraphs and split long ones, because a file may have no blank lines."""
    for paragraph in _BLANK.split(document):
        for start in range(0, len(paragraph), PASSAGE):
            yield paragraph[start : start + PASSAGE]
