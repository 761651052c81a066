"""Read the header of a GGUF file, and reject files whose positions transformers would silently drop.

A reader of a GGUF file loops over counts and lengths that the file states. Here each is first compared with the size of
the rest of the file, so that a few bytes cannot cost hours or all memory. Files that pass are safe for other readers.
Layout: magic, version, number of tensors, number of keys; the keys with their values; the table of tensors; data.

transformers reads the RoPE base from a GGUF file, but neither `rope.scaling.*` (for most families) nor the tensors that
carry Llama-3 and LongRoPE frequencies, nor a window that its config class lacks. Such a model loads and writes text,
but encodes positions differently from the original. Therefore the file is compared with the config that transformers
derives from it, and rejected if they differ.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from posleak.errors import FETCH_AGAIN, ModelError, translate_errors
from posleak.models import memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAGIC = b"GGUF"
VERSIONS = (2, 3)
UNQUANTISED = ("F32", "F16", "BF16", "F64")
MAX_DIMENSIONS = 8
MAX_KEY, MAX_STRING = 1 << 16, 1 << 24
"""Bytes of a name, and of a string: chat templates are the longest."""
MAX_ENTRIES = 1 << 21
"""Tensors, keys and items of arrays in total: a vocabulary of 262,144 tokens takes about 1,300,000."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the table of tensors: `kind` is the number of its ggml type, `offset` its first byte in the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata of a GGUF file by key (for an array of strings, only its length), and its tensors."""

    path: Path
    fields: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def field(self, name: str) -> Any:
        """Return the value of a key of the architecture, such as `rope.freq_base`."""
        return self.fields.get(f"{self.architecture}.{name}")

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def quantisation(self) -> str:
        """The quantisation of the stored weights: the file type that the file states, else the most common type; and
        the mean number of bits per weight."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

        stated: Any = self.fields.get("general.file_type")
        types = Counter(GGMLQuantizationType(tensor.kind).name for tensor in self.tensors if len(tensor.shape) > 1)
        name = types.most_common(1)[0][0] if types else "unknown"
        if stated in LlamaFileType._value2member_map_:
            name = LlamaFileType(stated).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        if name in UNQUANTISED:
            return f"GGUF {name} (converted to float32)"
        blocks = ((tensor.elements, *GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]) for tensor in self.tensors)
        bits = 8 * sum(elements / size * stored for elements, size, stored in blocks) / max(1, self.elements)
        return f"GGUF {name}: {bits:.2g} bits per weight (dequantised to float32)"


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file. Raise if the file is not GGUF, is truncated, or contradicts itself."""
    about = translate_errors("the file is not a complete GGUF file", path, FETCH_AGAIN)
    with about, path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _HeaderReader(path, data).header()
    with translate_errors("the GGUF file's metadata cannot be read", path, FETCH_AGAIN):
        _ = header.quantisation  # raises if the types are invalid
        _require_consistent(header)
    return header


class _HeaderReader:
    """Reader of a header: a position in the file that only moves forward, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.end = path, data, 0, len(data)
        self.entries = 0

    def reject(self, got: str, expected: str | None = None) -> NoReturn:
        what = "the file is not a complete GGUF file"
        raise ModelError(what, where=str(self.path), got=got, expected=expected, remedy=FETCH_AGAIN)

    def header(self) -> GGUFHeader:
        magic, version = self.take(4), self.scalar("I")
        if magic != MAGIC or version not in VERSIONS:
            self.reject(f"{magic!r}, version {version}", f"{MAGIC!r}, version 2 or 3, little-endian")
        tensors = self.count("tensors", _MIN_TENSOR_BYTES)
        keys = self.count("keys", _MIN_KEY_BYTES)
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string(MAX_KEY)
            if key in fields:
                self.reject(f"the key {key!r} twice")
            fields[key] = self.value(self.scalar("I"))
        header = GGUFHeader(self.path, fields, tuple(self.tensor() for _ in range(tensors)))
        self.require_data(header.tensors, fields.get("general.alignment", 32))
        return header

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        left = self.end - self.position
        if length > left:
            self.reject(f"{length} bytes announced at byte {self.position}", f"at most {left}")
        self.position += length
        return self.data[self.position - length : self.position]

    def scalar(self, kind: str) -> Any:
        """Return the next number; `kind` is a format character of `struct`."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]

    def count(self, what: str, min_bytes: int) -> int:
        """Return the next number, as a count of entries that take at least `min_bytes` each."""
        stated: int = self.scalar("Q")
        limit = min((self.end - self.position) // min_bytes, MAX_ENTRIES - self.entries)
        if stated > limit:
            self.reject(f"{stated} {what} at byte {self.position}", f"at most {limit}")
        self.entries += stated
        return stated

    def string(self, limit: int) -> str:
        length = self.scalar("Q")
        if length > limit:
            self.reject(f"a text of {length} bytes at byte {self.position}", f"at most {limit}")
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        """Return the next value; for an array of strings, only its length."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string(MAX_STRING)
        if kind != _ARRAY:
            self.reject(f"a value of type {kind} at byte {self.position}", "a type of GGUF")
        kind = self.scalar("I")
        if kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            items = self.count("items", width)
            return list(struct.unpack(f"<{items}{_SCALARS[kind]}", self.take(items * width)))
        if kind != _STRING:
            self.reject(f"an array of type {kind} at byte {self.position}", "an array of numbers or of strings")
        items = self.count("strings", 8)
        for _ in range(items):
            self.take(self.scalar("Q"))
        return items

    def tensor(self) -> GGUFTensor:
        """Return the next entry of the table."""
        name, dimensions = self.string(MAX_KEY), self.scalar("I")
        if dimensions > MAX_DIMENSIONS:
            self.reject(f"{name!r} with {dimensions} dimensions", f"at most {MAX_DIMENSIONS}")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))
        return GGUFTensor(name, shape, self.scalar("I"), self.scalar("Q"))

    def require_data(self, tensors: tuple[GGUFTensor, ...], alignment: object) -> None:
        """Reject tensors that exceed the file, one by one or in total, and repeated names."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            self.reject(f"general.alignment {alignment!r}", "a small number")
        room = left = self.end - -(-self.position // alignment) * alignment
        names = set[str]()
        for tensor in tensors:
            if tensor.kind not in GGMLQuantizationType._value2member_map_:
                self.reject(f"{tensor.name!r} of type {tensor.kind}", "a type of ggml")
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
            taken = -(-tensor.elements // block) * int(width)
            left -= taken
            if taken > room - tensor.offset or left < 0 or tensor.name in names:
                got = f"{tensor.name!r} of shape {tensor.shape} at byte {tensor.offset} of the data"
                self.reject(got, f"tensors of different names that fit into {room} bytes")
            names.add(tensor.name)


def _require_consistent(header: GGUFHeader) -> None:
    """Reject a block count that differs from the tensors; heads for speculative decoding may be counted or not."""
    stated, extra = header.field("block_count") or 0, header.field("nextn_predict_layers") or 0
    blocks = len({match[1] for tensor in header.tensors if (match := _BLOCK.match(tensor.name))})
    if stated not in (blocks, blocks - extra):
        raise ModelError(
            "the GGUF file contradicts itself", where=str(header.path),
            got=f"{header.architecture}.block_count = {stated}",
            expected=f"{blocks}, the number of blocks in its tensors", remedy=FETCH_AGAIN,
        )  # fmt: skip
    sizes = {key: value for key, value in header.fields.items() if not key.startswith("tokenizer.")}
    memory.require_plausible(header.path, sizes)


def require_positions_kept(header: GGUFHeader, config: PreTrainedConfig) -> None:
    """Reject a file whose position encoding differs from that of `config`, which transformers derived from it."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]  # by layer type in some families
    ropes = nested or ([parameters] if parameters else [])
    if tensors := [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")]:
        raise _dropped_error(header, "the tensor " + ", ".join(tensors), "frequencies without them")
    scaling = header.field("rope.scaling.type")
    if scaling not in (None, "none") and all(rope.get("rope_type", "default") == "default" for rope in ropes):
        raise _dropped_error(header, f"rope.scaling.type = {scaling}", "rope_type default")
    base, bases = header.field("rope.freq_base"), [float(r["rope_theta"]) for r in ropes if "rope_theta" in r]
    if base is not None and not any(math.isclose(base, other, rel_tol=1e-6) for other in bases):
        raise _dropped_error(header, f"rope.freq_base = {base}", f"rope_theta {bases}")
    window = header.field("attention.sliding_window")
    if isinstance(window, int) and window > 0 and getattr(text, "sliding_window", None) != window:
        raise _dropped_error(header, f"attention.sliding_window = {window}", "no such window")
    rotated = header.field("rope.dimension_count")
    if rotated is not None and rotated not in (dims := _rotary_dims(text, ropes)):
        raise _dropped_error(header, f"rope.dimension_count = {rotated}", f"{dims} dimensions")


def _rotary_dims(text: PreTrainedConfig, ropes: list[dict[str, Any]]) -> list[int]:
    """Return how many dimensions of a head are rotated, by each key that the config may use."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    factor = getattr(text, "partial_rotary_factor", None) or 1.0
    dims = {int(head * rope.get("partial_rotary_factor", factor)) for rope in ropes or [{}]}
    latent = getattr(text, "qk_rope_head_dim", None)
    return sorted(dims | ({int(latent)} if latent else set()))


def _dropped_error(header: GGUFHeader, stated: str, got: str) -> ModelError:
    return ModelError(
        "transformers ignores a position setting of this GGUF file, so the results would be wrong",
        where=str(header.path), got=got, expected=f"{stated} (architecture {header.architecture})",
        remedy="use the model's original safetensors: a hub id, or a folder",
    )  # fmt: skip
