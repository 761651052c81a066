"""The models of a manifest: revisions of a hub id, folders of checkpoints, and the names under which they are shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from posleak.errors import InputError, PosleakError
from posleak.files import read_regular
from posleak.models.sources import checkpoints, split_revision

from .cells import Cell
from .schema import MOST_DIGITS, ModelKeys

_STEP = re.compile(r"(?:step|iter|checkpoint|ckpt)[-_]?(\d+)|(\d+)$", re.IGNORECASE)
"""The training step in the name of a revision or a checkpoint."""

Fields = dict[str, Any]
"""Fields of a cell."""


def models_of(entry: ModelKeys, where: str) -> list[Fields]:
    """Return the fields that decide the model of a cell, for every model that an entry stands for."""
    if (entry.model is None) == (entry.checkpoints is None):
        raise InputError("an entry needs either `model` or `checkpoints`", where=where)
    if entry.revisions is not None and "@" in (entry.model or ""):
        remedy = "leave out that one, or `revisions`"
        raise InputError("the model has a revision already", where=where, got=entry.model, remedy=remedy)
    if entry.checkpoints is not None:
        models = _checkpoints(entry.checkpoints, entry.title, where)
    elif entry.revisions is not None:
        series = entry.title or entry.model
        models = [{"model": f"{entry.model}@{name}", "series": series, "step": _step(name)} for name in entry.revisions]
    else:
        models = [{"model": entry.model, "title": entry.title}]
    if entry.steps is not None:
        models = _at_steps(models, entry.steps, f"{where}, steps")
    return [{**model, **entry.given("dtype", "device", "device_map")} for model in models]


def _checkpoints(folder: str, title: str | None, where: str) -> list[Fields]:
    """The checkpoints in a folder and, if its number of steps is recorded, the model in the folder itself."""
    try:
        paths = checkpoints(folder)
    except PosleakError as error:
        raise error.at(where) from error
    parent = paths[0].parent.absolute()
    steps = {_step(path.name): str(path.absolute()) for path in paths}
    if (parent / "config.json").is_file() and (last := trained_steps(parent)) is not None:
        steps.setdefault(last, str(parent))
    return [{"model": path, "series": title or str(parent), "step": step} for step, path in steps.items()]


def trained_steps(folder: Path) -> int | None:
    """Return the number of training steps that transformers' Trainer or the zoo recorded in a model's folder."""
    for name, keys in (("trainer_state.json", ("global_step",)), ("training.json", ("recipe", "steps"))):
        value: Any = None
        with suppress(OSError, ValueError, RecursionError):
            value = json.loads(read_regular(folder / name))
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int):
            return value
    return None


def _step(name: str) -> int | None:
    """`step1000-tokens4B` → 1000; `checkpoint-32` → 32; `main` → None"""
    match = _STEP.search(name)
    digits = re.findall(r"\d+", name) if match is None else [match[1] or match[2]]
    return int(digits[0]) if len(digits) == 1 and len(digits[0]) <= MOST_DIGITS else None


def _at_steps(models: list[Fields], steps: list[int], where: str) -> list[Fields]:
    by_step = {model.get("step"): model for model in models}
    for step in steps:
        if step not in by_step:
            known = ", ".join(str(each) for each in by_step)
            raise InputError("there is no such checkpoint", where=where, got=step, expected=f"some of {known}")
    return [by_step[step] for step in steps]


def titled(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return the cells with display names: of a path, as many of its last parts as make it unique."""
    cells = list(cells)
    series = _short({cell.series for cell in cells if cell.series is not None})
    models = _short({cell.model for cell in cells if cell.title is None and cell.series is None})
    return tuple(_titled(cell, series, models) for cell in cells)


def _titled(cell: Cell, series: dict[str, str], models: dict[str, str]) -> Cell:
    if cell.series is None:
        return replace(cell, title=cell.title or models[cell.model])
    name, revision = series[cell.series], split_revision(cell.model)[1]
    return replace(cell, series=name, title=f"{name}, step {cell.step}" if revision is None else f"{name}@{revision}")


def _short(names: set[str]) -> dict[str, str]:
    short = {name: name for name in names if not Path(name).is_absolute()}
    paths = {name: Path(name).parts for name in names if name not in short}
    for length in range(1, 1 + max(map(len, paths.values()), default=0)):
        tails = {name: "/".join(paths[name][-length:]) for name in paths if name not in short}
        counts = Counter([*tails.values(), *short.values()])
        short |= {name: tail for name, tail in tails.items() if counts[tail] == 1}
    return short | {name: name for name in names if name not in short}
