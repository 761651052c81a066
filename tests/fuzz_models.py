"""Damaged and lying model files, made at random: whatever they are, `load` gives a model or says what is wrong.

`cases` makes one case for each kind of file: a copy of a tiny model in which one file was changed. The thunk of a case
loads it. It may return, or raise a PosleakError; anything else, and taking long or much memory, is a finding.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inputs_subject import byte_tokenizer
from models_tiny import WORDS, save, tiny, write_gguf
from posleak.models import load

Mutate = Callable[[random.Random, bytes], bytes]

EXTREMES = [0, 1, -1, 3, 255, 65_536, 10**6, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**63 - 1, 2**63, 2**64 - 1]
ODD_VALUES: list[Any] = [None, True, "", "x", [], {}, 0.5, -1.5, 1e300, float("nan"), float("inf"), *EXTREMES, 10**30]
GGUF_KEYS = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "vocab_size",
]  # fmt: skip


def cases(rng: random.Random, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """One case for each kind of file: (its name, a function that loads it). A case's files are removed after it."""
    base = _base(folder)
    for target, (kind, name, mutators) in TARGETS.items():
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
    """The models as they were before anything was changed, made once."""
    base = folder / "base"
    if not base.exists():
        made = folder / "being-made"
        words = byte_tokenizer()
        words.save_pretrained(str(save(tiny(vocab_size=len(words)), made / "llama")))
        save(tiny("Gemma3", sliding_window=7), made / "gemma3")
        (made / "gguf").mkdir()
        write_gguf(tiny(), made / "gguf" / "tiny.gguf", WORDS)
        made.rename(base)
    return base


# -- bytes ----------------------------------------------------------------------------------------------------------


def _flip(rng: random.Random, data: bytes) -> bytes:
    """Change one bit, or a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 8])):
        place = rng.randrange(len(changed))
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _insert(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.choice([1, 2, 8, 1000])) + data[place:]


def _remove(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.choice([1, 2, 8, 1000]) :]


BYTES: list[Mutate] = [_flip, _cut, _insert, _remove]


# -- JSON -----------------------------------------------------------------------------------------------------------


def _json(rng: random.Random, data: bytes) -> bytes:
    """Change one value somewhere in a JSON file."""
    return json.dumps(_changed(rng, json.loads(data))).encode()


def _changed(rng: random.Random, value: Any) -> Any:
    """The same value with one place in it changed; every level is as likely as the next."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = _changed(rng, value[key])
        return value
    return rng.choice([_odd, _odd, _odd, _nested, _repeated])(rng, value)


def _odd(rng: random.Random, value: Any) -> Any:
    return rng.choice(ODD_VALUES)


def _nested(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice([1, 10, 150, 900])):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value


def _repeated(rng: random.Random, value: Any) -> Any:
    return [value] * rng.choice([2, 1000, 100_000]) if not isinstance(value, dict | list) else [value] * 2


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
    """Change the header's JSON, and let the length before it be true."""
    (length,) = struct.unpack("<Q", data[:8])
    header = rng.choice([_json, _json, _flip])(rng, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


TARGETS: dict[str, tuple[str, str, list[Mutate]]] = {
    "config.json": ("llama", "config.json", [*BYTES, _json, _json, _json, _json]),
    "config.json of gemma3": ("gemma3", "config.json", [_json]),
    "tokenizer.json": ("llama", "tokenizer.json", [*BYTES, _json, _json, _json, _json]),
    "tokenizer_config.json": ("llama", "tokenizer_config.json", [*BYTES, _json, _json, _json]),
    "gguf": ("gguf", "tiny.gguf", [*BYTES, _gguf_count, _gguf_anywhere, _gguf_anywhere, _gguf_value, _gguf_value]),
    "safetensors": ("llama", "model.safetensors", [*BYTES, _safetensors_length, _safetensors_header]),
}
"""By the name of the kind: which model, which file of it, and how it may be changed."""
