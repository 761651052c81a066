"""Find the weight files that transformers will read, and check their headers before any weight is read.

Exactly these files are hashed. safetensors itself rejects headers with lengths beyond the file, or with shapes that do
not match their bytes, so that no later code loops over them or allocates the memory that they state.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import FETCH_AGAIN, ModelError, translate_errors
from posleak.files import read_regular, stays_in_folder

if TYPE_CHECKING:
    import torch

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files that transformers reads instead of model.safetensors if there are any."""
MAX_INDEX = 1 << 25
"""Bytes of an index: a model of 200,000 tensors needs about that many."""
CAST_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that from_pretrained(dtype=...) casts; 8-bit floats and integers keep theirs."""


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder, by their relative paths, and what their headers state.

    tensors         number of tensors; None if only unpickling would tell
    elements        number of elements, at most
    bytes           bytes of all tensors as stored
    cast_elements   number of elements that are cast on loading, which take `cast_bytes` as stored
    """

    names: tuple[str, ...]
    tensors: int | None
    elements: int
    bytes: int
    cast_elements: int = 0
    cast_bytes: int = 0

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Return the bytes in memory after loading as `dtype` (None: as stored)."""
        if dtype is None:
            return self.bytes
        return self.bytes - self.cast_bytes + self.cast_elements * dtype.itemsize


def read_headers(folder: Path, *, allow_pickle: bool = False) -> Weights:
    """Return the folder's weights. Reject pickles unless they are allowed: reading a pickle can run code."""
    names = weight_files(folder, allow_pickle=allow_pickle)
    if not names:
        raise _no_weights(folder)
    stored = sum((folder / name).stat().st_size for name in names)
    if not all(name.endswith(".safetensors") for name in names):
        return Weights(tuple(names), None, stored, stored)
    headers = [_read_header(folder / name) for name in names]
    counts = [(dtype, elements) for tensors, _ in headers for dtype, elements in tensors]
    cast = [(elements, CAST_BYTES[dtype]) for dtype, elements in counts if dtype in CAST_BYTES]
    return Weights(
        tuple(names), len(counts), sum(elements for _, elements in counts), stored - sum(size for _, size in headers),
        sum(elements for elements, _ in cast), sum(math.prod(pair) for pair in cast),
    )  # fmt: skip


def _read_header(path: Path) -> tuple[list[tuple[str, int]], int]:
    """Return dtype and number of elements of each tensor in a safetensors file, and the bytes of the header."""
    from safetensors import safe_open

    with translate_errors("a weight file is not a complete safetensors file", path, FETCH_AGAIN):
        with safe_open(path, framework="np") as file:
            slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118  not a dict
            tensors = [(str(part.get_dtype()), math.prod(part.get_shape())) for part in slices]
        with path.open("rb") as start:
            return tensors, 8 + int.from_bytes(start.read(8), "little")


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[str]:
    """Return the relative paths of the files that from_pretrained reads; [] if there are none that it may read."""
    shards = sorted(path.name for path in folder.iterdir() if DISTRIBUTED.fullmatch(path.name))
    if shards:
        raise ModelError(
            "the folder holds a distributed checkpoint, which transformers would read instead of its other weights",
            where=str(folder / shards[0]), expected=f"{SAFETENSORS}, or {SAFETENSORS_INDEX} and the files it names",
            remedy="save the model with save_pretrained, or move those files away",
        )  # fmt: skip
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (PICKLE, PICKLE_INDEX))[: 2 if allow_pickle else 1]:
        if (folder / single).is_file():
            return [single]
        if (folder / index).is_file():
            return _indexed_files(folder, index)
    return []


def _indexed_files(folder: Path, index: str) -> list[str]:
    """Return the files that an index names; each must exist, inside the folder."""
    path = folder / index
    try:
        named = sorted(set(json.loads(read_regular(path, MAX_INDEX))["weight_map"].values()))
        outside = [name for name in named if not stays_in_folder(name)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(
            "the index of the weights cannot be read", where=str(path), got=f"{path.stat().st_size} bytes",
            expected="JSON with a weight_map from tensors to files", remedy=FETCH_AGAIN,
        ) from None  # fmt: skip
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


def _no_weights(folder: Path) -> ModelError:
    pickles = weight_files(folder, allow_pickle=True)
    if pickles:
        return ModelError(
            "the weights are pickles, which can run code when they are read", where=str(folder),
            got=", ".join(pickles), expected="*.safetensors",
            remedy="convert them to safetensors, or pass --allow-pickle (allow_pickle=True) if you trust their author",
        )  # fmt: skip
    return ModelError(
        "the folder has a config but no weights", where=str(folder),
        got=", ".join(sorted(path.name for path in folder.iterdir())[:12]),
        expected=f"{SAFETENSORS}, or {SAFETENSORS_INDEX} and the files that it names",
        remedy="fetch the weights again; an interrupted download or an unfinished save looks like this",
    )  # fmt: skip
