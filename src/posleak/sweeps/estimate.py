"""What cells may take: memory and time, guessed without loading a model, and called guesses where they are shown.

Memory is the weights, as their files' headers state them, what libraries take, and what a batch holds. Time is that of
finished cells of the same model, by tokens; where there are none, that of a machine that computes as fast as this one
multiplies matrices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from posleak.errors import PosleakError
from posleak.files import read_regular
from posleak.models import builtin, weights
from posleak.models.sources import snapshot_folder, split_revision
from posleak.runs.memory import LIBRARY_BYTES, ROW_COPIES, ModelSizes
from posleak.runs.spec import TOKENS_AT_ONCE

from .cells import TRACE, Cell
from .state import Finished

RATE = 0.3
"""Which part of a fast product's speed a forward pass reaches, with all that is done beside it."""

EXTRA, LOADING = 0.5, 5.0
"""Seconds of a cell, and of the first one of a model, that do not grow with its tokens."""

BITS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Guess:
    """What a cell may take: bytes and seconds; None where nothing is known. `seen`: the seconds are of finished cells
    of the same model, and not a guess from its size."""

    memory: int | None
    seconds: float | None
    seen: bool


def guesses(cells: Sequence[Cell], finished: Iterable[Finished]) -> list[Guess]:
    """Memory and time of every cell; `finished`: cells by whose times the others' are guessed."""
    rates = dict[Any, list[float]]()
    for record in finished:
        rates.setdefault(record.cell.group, []).append(record.seconds.measuring / record.cell.work)
    speed = _speed() if any(cell.group not in rates for cell in cells) else 1.0
    first = {cell.group: cell.id for cell in reversed(cells)}
    loading = {cell.id: LOADING if first[cell.group] == cell.id else 0.0 for cell in cells}
    return [_guess(cell, rates.get(cell.group), speed, loading[cell.id]) for cell in cells]


def _guess(cell: Cell, rates: list[float] | None, speed: float, loading: float) -> Guess:
    memory = memory_of(cell)
    if rates:
        return Guess(memory, loading + cell.work * sum(rates) / len(rates), True)
    shape = shape_of(cell.model)
    if shape is None:
        return Guess(memory, None, False)
    return Guess(memory, loading + EXTRA + 2 * shape.parameters * cell.work / (RATE * speed), False)


def memory_of(cell: Cell) -> int | None:
    """Bytes that a worker with this cell may hold; None if the model's files are not here yet."""
    shape = shape_of(cell.model)
    if shape is None:
        return None
    item = BITS.get(cell.dtype or "float32", 4)
    spec = cell.spec
    read = spec.length * (3 if cell.kind == TRACE or spec.borrowed else 1)
    batch = min(spec.prompts, spec.batch or max(1, TOKENS_AT_ONCE // spec.length))
    tokens = batch * read
    rows = shape.logits(tokens, len(spec.plan.rows), item, ROW_COPIES if not spec.edits else 2 * ROW_COPIES)
    results = 8 * spec.prompts * shape.layers * shape.heads * 3_000
    return shape.parameters * item + LIBRARY_BYTES + shape.forward(tokens, item) + rows + results


@cache
def shape_of(model: str) -> ModelSizes | None:
    """What the files say; None if they are not on this machine, or say nothing that can be read."""
    folder = _folder(model)
    if folder is None:
        return None
    with suppress(PosleakError, OSError, ValueError, KeyError, TypeError):
        config = json.loads(read_regular(folder / "config.json"))
        config = config.get("text_config") or config
        held = weights.read_headers(folder, allow_pickle=True)
        width = int(config.get("hidden_size") or config.get("n_embd") or config["d_model"])
        inner = config.get("intermediate_size") or 4 * width
        return ModelSizes(
            held.elements, int(config.get("num_hidden_layers") or config.get("n_layer") or 1), width,
            int(config.get("num_attention_heads") or config.get("n_head") or 1), width,
            int(max(inner) if isinstance(inner, list) else inner),
        )  # fmt: skip
    return None


def _folder(model: str) -> Path | None:
    text, revision = split_revision(model)
    if text in builtin.BUILTIN_MODELS:
        return builtin.cached_folder(text)
    if text in builtin.shipped_names():
        return builtin.shipped_folder(text)
    path = Path(text).expanduser()
    if path.is_dir():
        with suppress(PosleakError):
            return snapshot_folder(path, revision)
        return None
    if path.exists() or text.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(text, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


@cache
def _speed() -> float:
    """Products and sums per second of this machine, in float32."""
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    a @ a
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() - started < 0.1:
        a @ a
        rounds += 1
    return 2 * 1024**3 * rounds / (time.perf_counter() - started)
