"""Random damaged and inconsistent model files: `load` returns a model or raises a PosleakError.

`cases` makes cases for each kind of file in turn: a copy of a tiny model in which one file was changed. Its
function loads it. Other exceptions, long times and much memory are findings.
"""

from __future__ import annotations

import functools
import itertools
import random
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from posleak.models import load
from support.inputs_subject import byte_tokenizer
from support.models_tiny import WORDS, save, small_model, write_gguf
from support.mutate import EXTREMES, mutated_bytes, mutated_json

Mutate = Callable[[random.Random, bytes], bytes]

GGUF_KEYS = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "vocab_size",
]  # fmt: skip


def cases(rng: random.Random, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield endless cases: the kind of file, and a function that loads it. The files of a case are removed after it."""
    base = _base(folder)
    for target in itertools.cycle(TARGETS):
        kind, name, mutators = TARGETS[target]
        case = folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(base / kind, case)
        path = case / name
        path.write_bytes(rng.choice(mutators)(rng, path.read_bytes()))
        model = path if name.endswith(".gguf") else case
        yield target, functools.partial(_load, model, folder / "cache")
        shutil.rmtree(folder / "cache", ignore_errors=True)


def _load(model: Path, cache: Path) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(model, cache=cache, progress=lambda _message: None)


def _base(folder: Path) -> Path:
    """Return the undamaged models, which are made once."""
    base = folder / "base"
    if not base.exists():
        made = folder / "being-made"
        words = byte_tokenizer()
        words.save_pretrained(str(save(small_model(vocab_size=len(words)), made / "llama")))
        save(small_model("Gemma3", sliding_window=7), made / "gemma3")
        (made / "gguf").mkdir()
        write_gguf(small_model(), made / "gguf" / "tiny.gguf", WORDS)
        made.rename(base)
    return base


# -- binary headers -------------------------------------------------------------------------------------------------


def _integer(rng: random.Random, data: bytes, places: range) -> bytes:
    """Set an integer of 4 or 8 bytes at one of these places to an extreme."""
    place, width = rng.choice(places), rng.choice([4, 8])
    number = rng.choice(EXTREMES) % (1 << (8 * width))
    return data[:place] + number.to_bytes(width, "little") + data[place + width :]


def _gguf_count(rng: random.Random, data: bytes) -> bytes:
    return _integer(rng, data, range(4, 24, 4))


def _gguf_anywhere(rng: random.Random, data: bytes) -> bytes:
    return _integer(rng, data, range(24, data.index(b"blk.1")))


def _gguf_value(rng: random.Random, data: bytes) -> bytes:
    """Set the value of a key; its name is followed by 4 bytes for the type."""
    name = f"llama.{rng.choice(GGUF_KEYS)}".encode()
    place = data.index(name) + len(name) + 4
    return data[:place] + struct.pack("<I", rng.choice(EXTREMES) % (1 << 32)) + data[place + 4 :]


def _safetensors_length(rng: random.Random, data: bytes) -> bytes:
    return _integer(rng, data, range(1))


def _safetensors_header(rng: random.Random, data: bytes) -> bytes:
    """Change the JSON of the header and update the length before it."""
    (length,) = struct.unpack("<Q", data[:8])
    header = rng.choice([mutated_json, mutated_json, mutated_bytes])(rng, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


TARGETS: dict[str, tuple[str, str, list[Mutate]]] = {
    "config.json": ("llama", "config.json", [mutated_bytes, mutated_json]),
    "config.json of gemma3": ("gemma3", "config.json", [mutated_json]),
    "tokenizer.json": ("llama", "tokenizer.json", [mutated_bytes, mutated_json]),
    "tokenizer_config.json": ("llama", "tokenizer_config.json", [mutated_bytes, mutated_json]),
    "gguf": ("gguf", "tiny.gguf", [mutated_bytes, _gguf_count, _gguf_anywhere, _gguf_value]),
    "safetensors": ("llama", "model.safetensors", [mutated_bytes, _safetensors_length, _safetensors_header]),
}
"""For each kind: the model, its file, and the function that changes it."""
