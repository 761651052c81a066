"""What stands under `models` in a manifest: models, revisions of a hub id, and folders of checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posleak.errors import PosleakError
from posleak.models.names import is_path
from posleak.models.steps import checkpoints

from .cells import Cell, Resources
from .pieces import listed, mapping, resources, text, whole, wrong

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
    place = Path(folder).expanduser().absolute()
    try:
        found = checkpoints(place)
    except PosleakError as error:
        raise error.at(where) from error
    series = title or place.name
    steps = {_step(path.name): str(path) for path in found}
    if (place / "config.json").is_file() and (last := _trained_for(place)) is not None:
        steps.setdefault(last, str(place))
    return [Model(path, f"{series}, step {step}", series, step) for step, path in steps.items()]


def _trained_for(folder: Path) -> int | None:
    """Steps of a training, as transformers' Trainer and the zoo write them down."""
    for name, keys in (("trainer_state.json", ("global_step",)), ("training.json", ("recipe", "steps"))):
        found: Any = None
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads((folder / name).read_bytes())
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
    series = title or (Path(model).name if is_path(model) else model)
    names = [text(each, f"{where}, revisions") for each in listed(given["revisions"], f"{where}, revisions")]
    return [Model(f"{model}@{name}", f"{series}@{name}", series, _step(name)) for name in names]


def _step(name: str) -> int | None:
    """`step1000-tokens4B` → 1000; `checkpoint-32` → 32; `main` → None"""
    found = _STEP.search(name)
    if found is None:
        digits = re.findall(r"\d+", name)
        return int(digits[0]) if len(digits) == 1 else None
    return int(found[1] or found[2])


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
    path = Path(name).expanduser()
    with suppress(OSError, ValueError, RuntimeError):
        if path.exists() and not _is_known(name):
            return str(path.absolute())
    return name


def _is_known(name: str) -> bool:
    from posleak.models.sources import known

    return name in known()


def titled(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Models that would be called alike are called by as much of their paths as tells them apart."""
    found = list(cells)
    models = dict.fromkeys((cell.model, cell.name) for cell in found)
    alike = [name for _, name in models]
    longer = {model: _tail(model) for model, name in models if alike.count(name) > 1}
    return tuple(replace(c, title=longer[c.model]) if c.model in longer else c for c in found)


def _tail(model: str) -> str:
    """The last three parts of a path."""
    return "/".join(Path(model).parts[-3:]) if is_path(model) else model
