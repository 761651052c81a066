"""The header of a GGUF file: its metadata and its table of tensors, read within the bounds of the file.

Whoever reads a GGUF file loops over counts and lengths that the file itself states. Here each is compared with what is
left of the file before it is believed, so that a few bytes cannot cost hours or all memory. What passes is safe to give
to other readers.

The layout: magic, version, number of tensors, number of keys; the keys with their values; the table of tensors; data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from posleak.errors import ModelError
from posleak.models.library_errors import FETCH_AGAIN, translate_errors

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_DIMENSIONS = 8
MOST_KEY, MOST_TEXT = 1 << 16, 1 << 24
"""Bytes of a name, and of a text: chat templates are the longest."""
MOST_THINGS = 1 << 21
"""Tensors, keys and items of arrays together: a vocabulary of 262,144 tokens takes about 1,300,000."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEY_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8
"""The least that a key and an entry in the table of tensors take."""


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the table: `kind` is the number of its ggml type."""

    name: str
    shape: tuple[int, ...]
    kind: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The metadata by key, without the items of arrays of strings (only how many there are), and the tensors."""

    fields: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read(path: Path) -> Header:
    """The header of a GGUF file, or an error that says where it contradicts the file."""
    with translate_errors("the file is not a whole GGUF file", path, FETCH_AGAIN), path.open("rb") as file:
        if path.stat().st_size < 24:
            _refuse(path, f"{path.stat().st_size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).header()


def _refuse(path: Path, got: str, expected: str | None = None) -> NoReturn:
    raise ModelError(
        "the file is not a whole GGUF file", where=str(path), got=got, expected=expected, remedy=FETCH_AGAIN
    )


class _Walk:
    """A place in the file that only moves forward, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.end = path, data, 0, len(data)
        self.things = 0

    def header(self) -> Header:
        magic, version = self.take(4), self.number("I")
        if magic != MAGIC or version not in VERSIONS:
            _refuse(self.path, f"{magic!r}, version {version}", f"{MAGIC!r}, version 2 or 3, little-endian")
        tensors = self.count("tensors", self.number("Q"), _TENSOR_BYTES)
        keys = self.count("keys", self.number("Q"), _KEY_BYTES)
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text(MOST_KEY)
            if key in fields:
                _refuse(self.path, f"the key {key!r} twice")
            fields[key] = self.value(self.number("I"))
        table = [self.tensor() for _ in range(tensors)]
        self.require_held(table, fields.get("general.alignment", 32))
        return Header(fields, tuple(tensor for tensor, _ in table))

    def take(self, length: int) -> bytes:
        """The next bytes."""
        if length > self.end - self.at:
            _refuse(self.path, f"{length} bytes announced at byte {self.at}", f"at most {self.end - self.at}")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, kind: str) -> Any:
        """The next number of a type of `struct`."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]

    def count(self, what: str, stated: int, least: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        most = min((self.end - self.at) // least, MOST_THINGS - self.things)
        if stated > most:
            _refuse(self.path, f"{stated} {what} at byte {self.at}", f"at most {most}")
        self.things += stated
        return stated

    def text(self, most: int) -> str:
        length = self.number("Q")
        if length > most:
            _refuse(self.path, f"a text of {length} bytes at byte {self.at}", f"at most {most}")
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        """The next value; of an array of strings only its length."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(MOST_TEXT)
        if kind == _ARRAY:
            return self.array(self.number("I"))
        _refuse(self.path, f"a value of type {kind} at byte {self.at}", "a type of GGUF")

    def array(self, kind: int) -> list[Any] | int:
        if kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            items = self.count("items", self.number("Q"), width)
            return list(struct.unpack(f"<{items}{_SCALARS[kind]}", self.take(items * width)))
        if kind != _STRING:
            _refuse(self.path, f"an array of type {kind} at byte {self.at}", "an array of numbers or of strings")
        items = int(self.count("strings", self.number("Q"), 8))
        for _ in range(items):
            self.take(self.number("Q"))
        return items

    def tensor(self) -> tuple[GGUFTensor, int]:
        """One entry of the table, and where in the data it begins."""
        name, dimensions = self.text(MOST_KEY), self.number("I")
        if dimensions > MOST_DIMENSIONS:
            _refuse(self.path, f"{name!r} with {dimensions} dimensions", f"at most {MOST_DIMENSIONS}")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return GGUFTensor(name, shape, self.number("I")), self.number("Q")

    def require_held(self, table: list[tuple[GGUFTensor, int]], alignment: object) -> None:
        """Every tensor is in the file, and all of them together are no more than the file."""
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            _refuse(self.path, f"general.alignment {alignment!r}", "a small number")
        start = -(-self.at // alignment) * alignment
        room = left = self.end - start
        names = set[str]()
        for tensor, offset in table:
            taken = self.bytes_of(tensor)
            left -= taken
            if taken > room - offset or left < 0 or tensor.name in names:
                _refuse(
                    self.path, f"{tensor.name!r} of shape {tensor.shape} at byte {offset} of the data",
                    f"tensors of different names that fit into {room} bytes",
                )  # fmt: skip
            names.add(tensor.name)

    def bytes_of(self, tensor: GGUFTensor) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if tensor.kind not in GGMLQuantizationType._value2member_map_:
            _refuse(self.path, f"{tensor.name!r} of type {tensor.kind}", "a type of ggml")
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        return -(-tensor.numbers // block) * width
