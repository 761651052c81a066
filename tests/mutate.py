"""Mutations of files, for fuzzing: bytes of any file, and values of JSON. Everything comes from one random.Random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**12, -(10**12), 10**400, 0.5, -0.0, 1e308, 1e-300, "", "x" * 5000,
    "[/x]", "\x1b]0;title\x07", "../../etc/passwd", "<script>", "\u202e", "\ud800", [], {}, [None], [[]], [0] * 2000,
    {"": None}, "NaN", "9" * 400,
)  # fmt: skip
"""Values that no field expects."""


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """One to eight changes: bits flipped, bytes put in, taken out, repeated; or the end cut off."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        if not found:
            break
        at = rng.randrange(len(found))
        kind = rng.choice(("flip", "flip", "byte", "cut", "insert", "delete", "repeat"))
        if kind == "flip":
            found[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            found[at] = rng.randrange(256)
        elif kind == "cut":
            del found[at:]
        elif kind == "insert":
            found[at:at] = rng.randbytes(rng.randrange(1, 16))
        elif kind == "delete":
            del found[at : at + rng.randrange(1, 64)]
        else:
            found[at:at] = found[at : at + rng.randrange(1, 64)]
    return bytes(found)


def mutated_json(rng: random.Random, content: bytes, seal: Callable[[dict[str, Any]], str] | None = None) -> bytes:
    """One to three values changed, removed or nested deeply; with `seal`, sealed again as a deceiver would."""
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(rng, value)
    text = seal(value) if seal is not None and isinstance(value, dict) else json.dumps(value)
    if rng.random() < 0.05:
        depth = rng.choice((50, 300, 2000, 100_000))
        text = text.replace(": ", ": " + "[" * depth + "]" * depth + ', "x": ', 1)
    return text.encode("utf-8", "surrogatepass")


def _change(rng: random.Random, value: Any) -> None:
    """Somewhere inside: another value, a missing key, an item more."""
    inside = value
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(inside[key], dict | list) and inside[key] and rng.random() < 0.8:
            inside = inside[key]
            continue
        kind = rng.choice(("value", "value", "value", "near", "delete", "more"))
        if kind == "delete":
            del inside[key]
        elif kind == "near" and isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
            inside[key] += rng.choice((-1, 1, 0.5, 1000))
        elif kind == "more" and isinstance(inside, list):
            inside.insert(key, rng.choice((inside[key], rng.choice(STRANGE))))
        else:
            inside[key] = rng.choice(STRANGE)
        return
