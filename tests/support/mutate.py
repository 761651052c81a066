"""Mutations of files for fuzzing: bytes of any file, and values of JSON. All randomness is from one random.Random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

EXTREMES = [0, 1, -1, 3, 255, 65_536, 10**6, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**63 - 1, 2**63, 2**64 - 1]
STRANGE: list[Any] = [
    *EXTREMES, 10**30, None, True, False, 0.5, -1.5, -0.0, 1e300, 1e-300, float("nan"), float("inf"), "", "x",
    "x" * 5000, "[/x]", "\x1b]0;title\x07", "../../etc/passwd", "<script>", "\u202e", "\ud800", "9" * 400, [], {},
    [None], [[]], {"": None},
]  # fmt: skip
"""Values that no field expects."""


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Make one to eight changes: flip bits, insert, remove or repeat bytes, or truncate."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        if not found:
            break
        at, length = rng.randrange(len(found)), rng.choice((1, 2, 8, 64, 1000))
        kind = rng.choice(("flip", "flip", "cut", "insert", "delete", "repeat"))
        if kind == "flip":
            found[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del found[at:]
        elif kind == "insert":
            found[at:at] = rng.randbytes(length)
        elif kind == "delete":
            del found[at : at + length]
        else:
            found[at:at] = found[at : at + length]
    return bytes(found)


def mutated_json(rng: random.Random, data: bytes, seal: Callable[[dict[str, Any]], str] | None = None) -> bytes:
    """Change, remove, repeat or nest one to three values; with `seal`, update the checksum as a forger would.

    Sometimes all of it is put into more brackets than any reader can follow.
    """
    if rng.random() < 0.02:
        depth = rng.choice((900, 2_000, 100_000))
        return b"[" * depth + data + b"]" * depth
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(rng, value)
    sealed = seal is not None and isinstance(value, dict)
    text = seal(value) if sealed and seal is not None else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def _changed(rng: random.Random, value: Any) -> Any:
    """Return the value with one place in it changed; all levels are equally likely."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = _changed(rng, value[key])
        return value
    kind = rng.choice(("strange", "strange", "strange", "near", "nested", "repeated"))
    if kind == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        return value + rng.choice((-1, 1, 0.5, 1000))
    if kind == "nested":
        for _ in range(rng.choice((1, 10, 150, 300))):  # three of these can still be written as JSON
            value = [value] if rng.random() < 0.5 else {"x": value}
        return value
    if kind == "repeated":
        return [value] * (2 if isinstance(value, dict | list) else rng.choice((2, 1000, 100_000)))
    return rng.choice(STRANGE)
