"""What stands under `models` in a manifest: models, revisions of a hub id, and folders of checkpoints."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posleak.errors import PosleakError
from posleak.files import read_regular
from posleak.models.sources import checkpoints, known_names, split_revision

from .cells import Cell, Resources
from .pieces import MOST_DIGITS, listed, mapping, resources, text, whole, wrong

OF_MODEL = ("model", "revisions", "checkpoints", "steps", "title", "dtype", "device", "device_map", "resources")

_STEP = re.compile(r"(?:step|iter|checkpoint|ckpt)[-_]?(\d+)|(\d+)$", re.IGNORECASE)
"""The step in the name of a revision."""


@dataclass(frozen=True)
class Model:
    """One model of a grid, with the fields of a cell that it decides; None: the grid decides."""

    model: str
    title: str | None = None
    series: str | None = None
    step: int | None = None
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    resources: Resources | None = None


def models_of(said: Any, where: str) -> list[Model]:
    """What one entry under `models` stands for: a model, its revisions, or a folder of checkpoints."""
    if isinstance(said, str):
        return [Model(_absolute(said, where))]
    given = mapping(said, OF_MODEL, where)
    if ("model" in given) == ("checkpoints" in given):
        raise wrong(where, "an entry needs either `model` or `checkpoints`", given)
    own: dict[str, Any] = {
        key: text(given[key], f"{where}, {key}") for key in ("dtype", "device", "device_map") if key in given
    }
    held = resources(given["resources"], f"{where}, resources") if "resources" in given else None
    title = text(given["title"], f"{where}, title") if "title" in given else None
    if "checkpoints" in given:
        found = _checkpoints(text(given["checkpoints"], f"{where}, checkpoints"), title, where)
    else:
        found = _revisions(_absolute(given["model"], f"{where}, model"), given, title, where)
    if "steps" in given:
        found = _chosen(found, [whole(step, f"{where}, steps") for step in listed(given["steps"], where)], where)
    return [replace(model, **own, resources=held) for model in found]


def _checkpoints(folder: str, title: str | None, where: str) -> list[Model]:
    """The models in a folder that are named by their step, and the folder itself, if it says after how many."""
    try:
        found = checkpoints(folder)
    except PosleakError as error:
        raise error.at(where) from error
    place = found[0].parent.absolute()
    steps = {_step(path.name): str(path.absolute()) for path in found}
    if (place / "config.json").is_file() and (last := _trained_for(place)) is not None:
        steps.setdefault(last, str(place))
    return [Model(path, None, title or str(place), step) for step, path in steps.items()]


def _trained_for(folder: Path) -> int | None:
    """Steps of a training, as transformers' Trainer and the zoo write them down."""
    for name, keys in (("trainer_state.json", ("global_step",)), ("training.json", ("recipe", "steps"))):
        found: Any = None
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_regular(folder / name))
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, int):
            return found
    return None


def _revisions(model: str, given: Mapping[str, Any], title: str | None, where: str) -> list[Model]:
    if "revisions" not in given:
        return [Model(model, title)]
    if "@" in model:
        raise wrong(where, "the model has a revision already", model, remedy="leave it out, or `revisions`")
    names = [text(each, f"{where}, revisions") for each in listed(given["revisions"], f"{where}, revisions")]
    return [Model(f"{model}@{name}", None, title or model, _step(name)) for name in names]


def _step(name: str) -> int | None:
    """`step1000-tokens4B` → 1000; `checkpoint-32` → 32; `main` → None"""
    found = _STEP.search(name)
    digits = re.findall(r"\d+", name) if found is None else [found[1] or found[2]]
    return int(digits[0]) if len(digits) == 1 and len(digits[0]) <= MOST_DIGITS else None


def _chosen(found: Sequence[Model], steps: Sequence[int], where: str) -> list[Model]:
    """The checkpoints of these steps."""
    known = {model.step: model for model in found}
    missing = [step for step in steps if step not in known]
    if missing:
        have = ", ".join(str(step) for step in known)
        raise wrong(f"{where}, steps", "there is no such checkpoint", missing[0], f"some of {have}")
    return [known[step] for step in steps]


def _absolute(said: Any, where: str) -> str:
    """The model's name; of a file or folder its whole path, for workers start in folders of their own."""
    name = text(said, where)
    if _is_known(name):
        return name
    before, revision = split_revision(name)
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(before).expanduser()
        if path.exists():
            return f"{path.absolute()}@{revision}" if revision else str(path.absolute())
    return name


def _is_known(name: str) -> bool:
    return name in known_names()


def titled(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Models and series with the names that people see: of paths, as much of their ends as tells them apart."""
    found = list(cells)
    series = _short({cell.series for cell in found if cell.series is not None})
    models = _short({cell.model for cell in found if cell.title is None and cell.series is None})
    return tuple(_named(cell, series, models) for cell in found)


def _named(cell: Cell, series: dict[str, str], models: dict[str, str]) -> Cell:
    if cell.series is None:
        return replace(cell, title=cell.title or models[cell.model])
    name = series[cell.series]
    revision = split_revision(cell.model)[1]
    step = f"{name}, step {cell.step}" if revision is None else f"{name}@{revision}"
    return replace(cell, series=name, title=step)


def _short(names: set[str]) -> dict[str, str]:
    """The last parts of each path, as many as no other of the names ends with; other names as they are."""
    found = {name: name for name in names if not Path(name).is_absolute()}
    paths = {name: Path(name).parts for name in names if name not in found}
    for parts in range(1, 1 + max(map(len, paths.values()), default=0)):
        tails = {name: "/".join(paths[name][-parts:]) for name in paths if name not in found}
        taken = Counter([*tails.values(), *found.values()])
        found |= {name: tail for name, tail in tails.items() if taken[tail] == 1}
    return found | {name: name for name in names if name not in found}
