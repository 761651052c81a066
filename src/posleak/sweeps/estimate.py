"""Estimates of the memory and time of cells, without loading a model.

Memory: the weights, by the headers of their files, the libraries, and the tensors of a batch. Time: that of finished
cells of the same model, per token; without any, the model's arithmetic at the speed of this machine's matrix products.
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
from posleak.models import builtin, pretrained
from posleak.models.sources import snapshot_folder, split_revision
from posleak.runs.memory import LIBRARY_BYTES, ROW_COPIES, ModelSizes
from posleak.runs.spec import TOKENS_AT_ONCE

from .cells import TRACE, Cell
from .state import Finished

RATE = 0.3
"""Speed of a measured forward pass relative to that of a large matrix product."""

CELL_SECONDS, LOADING_SECONDS = 0.5, 5.0
"""Time that does not depend on the number of tokens: per cell, and for the first cell of a model."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Guess:
    """Estimated bytes and seconds of a cell; None if unknown. `seen`: seconds are from finished cells of the model."""

    memory: int | None
    seconds: float | None
    seen: bool


def guesses(cells: Sequence[Cell], finished: Iterable[Finished]) -> list[Guess]:
    """Return an estimate for every cell; the time is based on `finished` cells of the same model."""
    rates = dict[Any, list[float]]()
    for record in finished:
        rates.setdefault(record.cell.group, []).append(record.seconds.measuring / record.cell.work)
    speed = _speed() if any(cell.group not in rates for cell in cells) else 1.0
    first = {cell.group: cell.id for cell in reversed(cells)}
    loading = {cell.id: LOADING_SECONDS if first[cell.group] == cell.id else 0.0 for cell in cells}
    return [_guess(cell, rates.get(cell.group), speed, loading[cell.id]) for cell in cells]


def _guess(cell: Cell, rates: list[float] | None, speed: float, loading: float) -> Guess:
    memory = memory_of(cell)
    if rates:
        return Guess(memory, loading + cell.work * sum(rates) / len(rates), True)
    shape = shape_of(cell.model)
    if shape is None:
        return Guess(memory, None, False)
    return Guess(memory, loading + CELL_SECONDS + 2 * shape.parameters * cell.work / (RATE * speed), False)


def memory_of(cell: Cell) -> int | None:
    """Return the estimated bytes of a worker with this cell; None if the model's files are not on this machine."""
    shape = shape_of(cell.model)
    if shape is None:
        return None
    spec, item = cell.spec, ITEM_BYTES.get(cell.dtype or "float32", 4)
    read = spec.length * (3 if cell.kind == TRACE or spec.borrowed else 1)
    batch = min(spec.prompts, spec.batch or max(1, TOKENS_AT_ONCE // spec.length))
    tokens = batch * read
    rows = shape.logits(tokens, len(spec.plan.rows), item, ROW_COPIES if not spec.edits else 2 * ROW_COPIES)
    results = 8 * spec.prompts * shape.layers * shape.heads * 3_000
    return shape.parameters * item + LIBRARY_BYTES + shape.forward(tokens, item) + rows + results


@cache
def shape_of(model: str) -> ModelSizes | None:
    """Return the model's sizes from its files; None if they are not on this machine or cannot be read."""
    folder = _folder(model)
    if folder is None:
        return None
    with suppress(PosleakError, OSError, ValueError, KeyError, TypeError):
        config = json.loads(read_regular(folder / "config.json"))
        config = config.get("text_config") or config
        headers = pretrained.read_headers(folder, allow_pickle=True)
        width = int(config.get("hidden_size") or config.get("n_embd") or config["d_model"])
        inner = config.get("intermediate_size") or 4 * width
        return ModelSizes(
            headers.elements, int(config.get("num_hidden_layers") or config.get("n_layer") or 1), width,
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

    path_of_config = try_to_load_from_cache(text, "config.json", revision=revision)
    return Path(path_of_config).parent if isinstance(path_of_config, str) else None


@cache
def _speed() -> float:
    """Return the floating-point operations per second of this machine in a float32 matrix product."""
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    a @ a
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() - started < 0.1:
        a @ a
        rounds += 1
    return 2 * 1024**3 * rounds / (time.perf_counter() - started)
