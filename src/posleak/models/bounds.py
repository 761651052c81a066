"""Sizes that no model has, refused before transformers loops over them or asks for the memory.

A config may name any number. transformers builds one module for each layer and one label for each of `num_labels`, and
fills weights that the files lack with random numbers: a few digits in a small file can take hours, or all memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError
from posleak.models.library_errors import FETCH_AGAIN
from posleak.text import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from posleak.models.memory import MemoryNeed
    from posleak.models.weights import Weights

MOST_CONFIG = 1 << 25
"""Bytes of a config; most have a few thousand, but some list their whole vocabulary."""

MOST_WORDS = 1 << 27
"""Bytes of a tokenizer's file; 262,144 tokens take 33 MB. Reading takes several times as much memory."""

COUNTS = (
    (re.compile(r"layers$|^n_layer$|^num_layer$"), 2_000),
    (re.compile(r"(experts|labels|heads?|groups|blocks|codebooks|channels|stages|_count)$"), 100_000),
)
"""Numbers that something is built for, one by one."""
MOST_LISTED = 1_000_000
"""The largest number inside a list: GPT-Neo repeats kinds of layers as often as a list says."""
MOST_ITEMS, MOST_NUMBERS = 100_000, 10_000
"""The longest list, and the longest that begins with a number: quantised models list thousands of modules by name."""

SPARE_NUMBERS = 1 << 26
"""By how much a model may be larger than its weights before it is refused unread: transformers then names what is
missing, but makes it up first."""
SPARE_TABLES = 1 << 28
"""Bytes of tables (masks, frequencies) that a model may make for itself, besides as many as its weights have."""


def require_size(path: Path, most: int) -> None:
    """Refuse a file that is larger than any of its kind, before it is read."""
    found = path.stat().st_size
    if found > most:
        raise ModelError(
            f"{path.name} is too large", where=str(path), got=format_bytes(found),
            expected=f"at most {format_bytes(most)}", remedy=FETCH_AGAIN,
        )  # fmt: skip


def require_sane(path: Path, raw: Any) -> None:
    """Refuse a config that counts what no model has so many of. `path` is the file that it came from."""
    for name, value, most in _counts(raw):
        if value > most:
            raise ModelError(
                "the config asks for more than any model has", where=str(path), got=f"{name} = {value}",
                expected=f"at most {most:,}", remedy="correct that number, or fetch the file again",
            )  # fmt: skip


def _counts(raw: Any) -> Iterator[tuple[str, int, int]]:
    """Every number and every list's length that is bounded: its name, the number, and the bound."""
    open_ends: list[tuple[str, Any]] = [("", raw)]
    while open_ends:
        name, value = open_ends.pop()
        if isinstance(value, dict):
            open_ends += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            numbers = bool(value) and type(value[0]) is int
            yield f"items of {name or 'a list'}", len(value), MOST_NUMBERS if numbers else MOST_ITEMS
            open_ends += [("", item) for item in value]
        elif isinstance(value, int):
            bounds = [most for pattern, most in COUNTS if pattern.search(name)] if name else [MOST_LISTED]
            yield from ((name or "a number in a list", value, most) for most in bounds)


def require_layers(folder: Path, config: PreTrainedConfig, weights: Weights) -> None:
    """Every layer has a tensor of its own."""
    text = config.get_text_config(decoder=True)
    kinds = [getattr(text, name, None) or [] for name in ("layer_types", "attention_layers")]
    layers = max(int(getattr(text, "num_hidden_layers", None) or 0), *map(len, kinds))
    if weights.tensors is not None and layers > weights.tensors:
        raise ModelError(
            "the config has more layers than the weight files have tensors", where=str(folder / "config.json"),
            got=f"{layers} layers", expected=f"at most {weights.tensors}, in {', '.join(weights.names[:3])}",
            remedy="fetch both again: they do not belong together",
        )  # fmt: skip


def require_held(where: Path, need: MemoryNeed, numbers: int, spare: int = SPARE_NUMBERS) -> None:
    """Refuse a config of a model that is larger than the `numbers` in its files and some, or makes huge tables."""
    if need.numbers > numbers + spare:
        raise ModelError(
            "the config describes a larger model than its files hold", where=str(where),
            got=f"a model of {need.numbers:,} numbers", expected=f"at most {numbers:,}",
            remedy="fetch them again: config and weights do not belong together",
        )  # fmt: skip
    most = SPARE_TABLES + 4 * numbers
    if need.tables > most:
        raise ModelError(
            "the config asks for huge tables beside the weights", where=str(where), got=format_bytes(need.tables),
            expected=f"at most {format_bytes(most)}", remedy="correct max_position_embeddings, or fetch the file again",
        )  # fmt: skip
