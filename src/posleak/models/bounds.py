"""Reject sizes that no model has, before transformers loops over them or allocates memory for them.

A config may state any number. transformers builds one module per layer and one label per `num_labels`, and initialises
weights that the files lack: a few digits in a small file can cost hours, or all memory.
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

MAX_CONFIG = 1 << 25
"""Bytes of a config. Most have a few thousand, but some list their whole vocabulary."""
MAX_TOKENIZER = 1 << 27
"""Bytes of a tokenizer file. 262,144 tokens take 33 MB; reading them takes several times as much memory."""

MAX_COUNTS = (
    (re.compile(r"layers$|^n_layer$|^num_layer$"), 2_000),
    (re.compile(r"(experts|labels|heads?|groups|blocks|codebooks|channels|stages|_count)$"), 100_000),
)
"""Largest values of keys for which transformers builds one object per unit."""
MAX_LISTED = 1_000_000
"""Largest integer inside a list: GPT-Neo repeats layer types as often as a list says."""
MAX_ITEMS, MAX_INTEGERS = 100_000, 10_000
"""Longest list, and longest list of integers. Quantised models list thousands of modules by name."""

EXTRA_PARAMETERS = 1 << 26
"""Parameters that a model may have in addition to those in its files. transformers initialises them before it can
report which tensors are missing."""
EXTRA_BUFFER_BYTES = 1 << 28
"""Bytes of buffers (masks, frequencies) that a model may create, in addition to 4 bytes per parameter."""


def require_max_size(path: Path, limit: int) -> None:
    """Reject a file that is larger than any of its kind, before it is read."""
    if (stored := path.stat().st_size) > limit:
        raise ModelError(
            f"{path.name} is too large", where=str(path), got=format_bytes(stored),
            expected=f"at most {format_bytes(limit)}", remedy=FETCH_AGAIN,
        )  # fmt: skip


def require_plausible(path: Path, raw: Any) -> None:
    """Reject a config with counts or lists that are larger than those of any model. `path` is its file."""
    for name, value, limit in _bounded_values(raw):
        if value > limit:
            raise ModelError(
                "the config states more than any model has", where=str(path), got=f"{name} = {value}",
                expected=f"at most {limit:,}", remedy="correct that number, or fetch the file again",
            )  # fmt: skip


def _bounded_values(raw: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (name, value, limit) for every bounded integer, and for the length of every list."""
    pending: list[tuple[str, Any]] = [("", raw)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            is_numeric = bool(value) and type(value[0]) is int
            yield f"items of {name or 'a list'}", len(value), MAX_INTEGERS if is_numeric else MAX_ITEMS
            pending += [("", item) for item in value]
        elif isinstance(value, int):
            limits = [limit for pattern, limit in MAX_COUNTS if pattern.search(name)] if name else [MAX_LISTED]
            yield from ((name or "a number in a list", value, limit) for limit in limits)


def require_tensors_for_layers(folder: Path, config: PreTrainedConfig, weights: Weights) -> None:
    """Reject a config with more layers than the weight files have tensors."""
    text = config.get_text_config(decoder=True)
    types = [getattr(text, name, None) or [] for name in ("layer_types", "attention_layers")]
    layers = max(int(getattr(text, "num_hidden_layers", None) or 0), *map(len, types))
    if weights.tensors is not None and layers > weights.tensors:
        raise ModelError(
            "the config has more layers than the weight files have tensors", where=str(folder / "config.json"),
            got=f"{layers} layers", expected=f"at most {weights.tensors}, in {', '.join(weights.names[:3])}",
            remedy="fetch both again: they do not belong together",
        )  # fmt: skip


def require_backed_by_files(path: Path, need: MemoryNeed, stored: int, extra: int = EXTRA_PARAMETERS) -> None:
    """Reject a config whose model has more parameters than the `stored` ones plus `extra`, or huge buffers."""
    if need.parameters > stored + extra:
        raise ModelError(
            "the config describes a larger model than its files hold", where=str(path),
            got=f"a model of {need.parameters:,} parameters", expected=f"at most {stored:,}",
            remedy="fetch them again: config and weights do not belong together",
        )  # fmt: skip
    limit = EXTRA_BUFFER_BYTES + 4 * stored
    if need.buffer_bytes > limit:
        raise ModelError(
            "the config asks for huge tables in addition to the weights", where=str(path),
            got=format_bytes(need.buffer_bytes), expected=f"at most {format_bytes(limit)}",
            remedy="correct max_position_embeddings, or fetch the file again",
        )  # fmt: skip
