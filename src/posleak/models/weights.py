"""The weights of a folder: which files transformers will read, and what their headers say, before a number is read.

Exactly these files are hashed. A header that lies (lengths beyond the file, shapes that do not match their bytes) is
refused here, so that nobody loops over it or asks for the memory that it promises.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError
from posleak.files import read_regular, stays_in_folder
from posleak.models.library_errors import FETCH_AGAIN
from posleak.text import format_bytes

if TYPE_CHECKING:
    import torch

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""transformers reads these instead of model.safetensors wherever it finds one."""

MOST_HEADER = 1 << 25
"""Bytes of a safetensors header or of an index: a model of 200,000 tensors needs about that."""

_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}
_CAST = ("F64", "F32", "F16", "BF16")
"""Header dtypes that from_pretrained(dtype=...) casts; the others (8-bit floats, integers) keep their size."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a header states it."""

    dtype: str
    elements: int
    bytes: int

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Its bytes in memory once loaded as `dtype` (None: as stored)."""
        return self.elements * dtype.itemsize if dtype is not None and self.dtype in _CAST else self.bytes


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder by their relative paths, and what they hold.

    tensors     how many there are; None where only unpickling would tell
    elements     how many elements they can hold at most
    """

    names: tuple[str, ...]
    stored: tuple[TensorHeader, ...]
    tensors: int | None

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.stored)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.stored)

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Bytes of all of them once loaded as `dtype` (None: as stored)."""
        return sum(tensor.bytes_as(dtype) for tensor in self.stored)


def read_headers(folder: Path, *, allow_pickle: bool = False) -> Weights:
    """The folder's weights; pickles only where they are allowed, since reading a pickle can run code."""
    names = files(folder, allow_pickle=allow_pickle)
    if not names:
        raise _no_weights(folder)
    if not all(name.endswith(".safetensors") for name in names):
        sizes = [(folder / name).stat().st_size for name in names]
        return Weights(tuple(names), tuple(TensorHeader("pickle", count, count) for count in sizes), None)
    stored = tuple(tensor for name in names for tensor in _header(folder / name))
    return Weights(tuple(names), stored, len(stored))


# -- which files ----------------------------------------------------------------------------------------------------


def files(folder: Path, *, allow_pickle: bool = False) -> list[str]:
    """The files that from_pretrained reads, by their relative paths; none if there are none that it may read."""
    _require_not_distributed(folder)
    for whole, index in ((SAFE, SAFE_INDEX), (PICKLE, PICKLE_INDEX))[: 2 if allow_pickle else 1]:
        if (folder / whole).is_file():
            return [whole]
        if (folder / index).is_file():
            return _indexed(folder, index)
    return []


def _require_not_distributed(folder: Path) -> None:
    shards = sorted(path.name for path in folder.iterdir() if DISTRIBUTED.fullmatch(path.name))
    if shards:
        raise ModelError(
            "the folder holds a distributed checkpoint, which transformers would read instead of its other weights",
            where=str(folder / shards[0]), expected=f"{SAFE}, or {SAFE_INDEX} and the files that it names",
            remedy="save the model with save_pretrained, or move those files away",
        )  # fmt: skip


def _indexed(folder: Path, index: str) -> list[str]:
    """The files that an index names; each must be inside the folder, by name, and there."""
    path = folder / index
    named = _weight_map(path)
    outside = [name for name in named if not stays_in_folder(name)]
    if outside:
        raise ModelError(
            "the index names a file outside the model's folder, which is not read", where=str(path), got=outside[0],
            expected="names relative to the folder", remedy="fetch the index again, or correct it",
        )  # fmt: skip
    missing = [name for name in named if not (folder / name).is_file()]
    if missing or not named:
        raise ModelError(
            "weight files that the index names are missing", where=str(path),
            got=", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "") or "no names",
            remedy="fetch them again; an interrupted download or an unfinished save looks like this",
        )  # fmt: skip
    return named


def _weight_map(path: Path) -> list[str]:
    try:
        named = sorted(set(json.loads(read_regular(path, MOST_HEADER))["weight_map"].values()))
        if all(isinstance(name, str) for name in named):
            return named
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ModelError(
        "the index of the weights cannot be read", where=str(path), got=f"{path.stat().st_size} bytes",
        expected="JSON with a weight_map from tensors to files", remedy=FETCH_AGAIN,
    )  # fmt: skip


def _no_weights(folder: Path) -> ModelError:
    pickles = files(folder, allow_pickle=True)
    if pickles:
        return ModelError(
            "the weights are pickles, which can run code when they are read",
            where=str(folder),
            got=", ".join(pickles),
            expected="*.safetensors",
            remedy="convert them to safetensors, or pass --allow-pickle (allow_pickle=True) if you trust their author",
        )
    return ModelError(
        "the folder has a config but no weights",
        where=str(folder),
        got=", ".join(sorted(path.name for path in folder.iterdir())[:12]),
        expected=f"{SAFE}, or {SAFE_INDEX} and the files that it names",
        remedy="fetch the weights again; an interrupted download or an unfinished save looks like this",
    )


# -- what their headers say -----------------------------------------------------------------------------------------


def _header(path: Path) -> Iterator[TensorHeader]:
    """Every tensor of a safetensors file; an error if the file cannot hold what its header states."""
    whole = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or length > whole - 8:
            raise _broken(path, f"{whole} bytes without a readable header")
        if length > MOST_HEADER:
            raise _broken(path, f"a header of {format_bytes(length)}", f"at most {format_bytes(MOST_HEADER)}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise _broken(path, f"{whole} bytes without a readable header") from error
    entries = header.items() if isinstance(header, dict) else []
    tensors = [_tensor(path, name, entry, whole - 8 - length) for name, entry in entries if name != "__metadata__"]
    held = sum(tensor.bytes for tensor in tensors)
    if held != whole - 8 - length:
        raise _broken(path, f"{whole - 8 - length} bytes of data", f"{held} bytes, by its header")
    yield from tensors


def _tensor(path: Path, name: str, entry: Any, room: int) -> TensorHeader:
    """One entry of a header; its shape must take exactly the bytes that it says are its own."""
    try:
        dtype, shape, (start, end) = str(entry["dtype"]), list(entry["shape"]), entry["data_offsets"]
        sizes = all(type(number) is int and 0 <= number < 1 << 64 for number in (*shape, start, end))
        true = sizes and len(shape) <= 16 and start <= end <= room and _takes(dtype, math.prod(shape), end - start)
    except (TypeError, KeyError, ValueError):
        true = False
    if not true:
        raise _broken(path, f"{name}: {entry!r:.200}", f"a shape and offsets that fit {format_bytes(room)} of data")
    return TensorHeader(dtype, math.prod(shape), end - start)


def _takes(dtype: str, elements: int, taken: int) -> bool:
    """Do so many elements take so many bytes? Of a dtype that is not known here, a bit each at least."""
    bits = _BITS.get(dtype, 8 if dtype.startswith("F8") else None)
    return elements <= 8 * taken if bits is None else elements * bits == 8 * taken


def _broken(path: Path, got: str, expected: str | None = None) -> ModelError:
    return ModelError(
        "a weight file is not a whole safetensors file", where=str(path), got=got, expected=expected, remedy=FETCH_AGAIN
    )
