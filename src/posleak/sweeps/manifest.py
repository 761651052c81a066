"""A manifest: a YAML file that lists the cells of a sweep. Every list is an axis of a grid.

    name: ntk
    models: [smollm2-135m, {checkpoints: runs/zoo/text/rope-0}, {model: org/name, revisions: [step1, step512]}]
    edits: [none, rope=ntk:4, [rope=ntk:4, window=64]]
    length: [256, 512]
    seed: [0, 1]

    grids:                     # several grids: each has the keys from above, and its own
      - {kind: trace, models: [zoo-text-rope]}

docs/sweeps.md has every key. Everything is checked before a model is loaded. Manifests that ship with posleak are in
the folder `named`, and `posleak sweep NAME` runs them.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml

from posleak.defaults import TRACED
from posleak.errors import InputError, PosleakError, did_you_mean
from posleak.files import read_regular, stays_in_folder
from posleak.models.sources import checkpoints, split_revision
from posleak.runs.spec import MeasureSpec
from posleak.text import visible

from .cells import TRACE, Cell, Resources, split_fields
from .schema import MOST, MOST_DIGITS, GridKeys, Loader, ManifestKeys, ModelKeys, absolute_model, validated

MOST_BYTES = 10**6
NAMED = Path(__file__).parent / "named"

AXES = ("edits", "length", "prompts", "seed", "inputs", "bos", "dtype", "origin", "density", "donor")
"""Keys, in addition to `models`, that may have several values: a grid has every combination."""

_STEP = re.compile(r"(?:step|iter|checkpoint|ckpt)[-_]?(\d+)|(\d+)$", re.IGNORECASE)
"""The training step in the name of a revision or a checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """The cells of a sweep, without duplicates and in the order of the file.

    out        where its results go by default
    question   purpose of the comparison; if there is one, the sweep ends with a balance table
    """

    name: str
    cells: tuple[Cell, ...]
    out: str | None = None
    question: str | None = None

    def changed(self, models: Sequence[str] = (), **spec: Any) -> Manifest:
        """Return the same manifest for other models, in the order of its own, or with other values of `spec`.

        With fewer models than the manifest has, only the cells of the first ones remain.
        """
        own = list(dict.fromkeys(cell.model for cell in self.cells))
        if len(models) > len(own):
            raise InputError(
                "the manifest has fewer models than were passed", where=self.name, got=", ".join(models),
                expected=f"at most {len(own)}, instead of {', '.join(own)}",
            )  # fmt: skip
        new = dict(zip(own, map(absolute_model, models)))
        cells = [replace(cell, spec=replace(cell.spec, **spec)) for cell in self.cells]
        if models:
            kept = [cell for cell in cells if cell.model in new]
            cells = [replace(cell, model=new[cell.model], title=None, series=None, step=None) for cell in kept]
        return replace(self, cells=titled({cell.id: cell for cell in cells}.values()))


def named_manifests() -> list[str]:
    """Return the names of the manifests that ship with posleak."""
    return sorted(path.stem for path in NAMED.glob("*.yaml"))


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest in a YAML file or, if there is no such file, the one of this name that ships with posleak."""
    file = Path(path)
    if not file.exists() and str(path) in named_manifests():
        file = NAMED / f"{path}.yaml"
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        near = did_you_mean(str(path), named_manifests())
        raise InputError(
            "the manifest cannot be read", where=str(path), got=error.strerror or str(error),
            remedy=f"pass a YAML file (docs/sweeps.md shows one) or the name of a manifest: {near}",
        ) from error  # fmt: skip
    if len(content) > MOST_BYTES:
        raise InputError("the manifest is too large", where=str(file), expected=f"at most {MOST_BYTES:,} bytes")
    try:
        value = yaml.load(content, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError("not valid YAML", where=str(file), got=visible(str(error))[:300]) from error
    return manifest(value, name=file.stem, where=str(file))


def manifest(value: Any, *, name: str = "sweep", where: str = "manifest") -> Manifest:
    """Return the manifest that a mapping describes: the content of a YAML file, as in docs/sweeps.md."""
    top = validated(ManifestKeys, value, where)
    if not stays_in_folder(top.name or name):
        remedy = "use a name without a path"
        raise InputError("the name is a path outside the folder", where=f"{where}, name", got=top.name, remedy=remedy)
    general = {key: value[key] for key in value if key in GridKeys.model_fields}
    cells = dict[str, Cell]()
    for number, grid in enumerate(top.grids, 1):
        place = f"{where}, grid {number}" if "grids" in value else where
        keys = {**general, **grid} if isinstance(grid, Mapping) else grid
        for cell in _cells(validated(GridKeys, keys, place), place):
            cells.setdefault(cell.id, cell)
            if len(cells) > MOST:
                raise _too_many(f"more than {MOST:,}", where)
    if not cells:
        raise InputError("the manifest has no cells", where=where, remedy="add at least one model under `models`")
    return Manifest(top.name or name, titled(cells.values()), top.out, top.question)


def _cells(grid: GridKeys, where: str) -> Iterator[Cell]:
    """Yield every combination of the grid's axes, model by model."""
    if grid.models is None:
        raise InputError("the grid has no models", where=where, remedy="list them under `models`")
    models = list[dict[str, Any]]()
    for number, entry in enumerate(grid.models, 1):
        named = [keys.model_dump(exclude_none=True) for keys in (grid.resources, entry.resources)]
        resources = Resources(**(named[0] | named[1]))
        models += [{**model, "resources": resources} for model in _models(entry, f"{where}, models, {number}")]
    axes = grid.model_dump(include=set(AXES), exclude_unset=True)
    if grid.kind == TRACE:
        axes.setdefault("length", [TRACED])
    if (count := len(models) * prod(map(len, axes.values()))) > MOST:
        raise _too_many(f"{count:,}", where)
    shared = grid.model_dump(exclude={"models", "resources", *AXES}, exclude_unset=True)
    for model in models:
        for values in product(*axes.values()):
            own, spec = split_fields({**shared, **dict(zip(axes, values, strict=True)), **model})
            try:
                yield Cell(spec=MeasureSpec(**spec), **own)
            except PosleakError as error:
                raise error.at(where) from error


def _too_many(count: str, where: str) -> InputError:
    return InputError("too many cells", where=where, got=count, expected=f"at most {MOST:,}", remedy="split the grid")


# -- models ------------------------------------------------------------------------------------------------------------


def _models(entry: ModelKeys, where: str) -> list[dict[str, Any]]:
    """Return, for every model of an entry, the fields of a cell that determine how it is named and loaded."""
    if (entry.model is None) == (entry.checkpoints is None):
        raise InputError("an entry needs either `model` or `checkpoints`", where=where)
    if entry.revisions is not None and "@" in (entry.model or ""):
        remedy = "remove the part from @ on, or remove `revisions`"
        raise InputError("the model already has a revision", where=where, got=entry.model, remedy=remedy)
    if entry.checkpoints is not None:
        try:
            paths = checkpoints(entry.checkpoints)
        except PosleakError as error:
            raise error.at(where) from error
        parent = paths[0].parent.absolute()
        steps = {_step(path.name): str(path.absolute()) for path in paths}
        if (parent / "config.json").is_file() and (last := trained_steps(parent)) is not None:
            steps.setdefault(last, str(parent))  # the model in the folder itself, if its number of steps is recorded
        name = entry.title or str(parent)
        models = [{"model": path, "series": name, "step": step} for step, path in steps.items()]
    elif entry.revisions is not None:
        series = entry.title or str(entry.model)
        models = [{"model": f"{entry.model}@{name}", "series": series, "step": _step(name)} for name in entry.revisions]
    else:
        models = [{"model": entry.model, "title": entry.title}]
    if entry.steps is not None:
        by_step = {model.get("step"): model for model in models}
        if (missing := next((step for step in entry.steps if step not in by_step), None)) is not None:
            expected = f"some of {', '.join(map(str, by_step))}"
            raise InputError("unknown checkpoint step", where=f"{where}, steps", got=missing, expected=expected)
        models = [by_step[step] for step in entry.steps]
    loading = entry.model_dump(include={"dtype", "device", "device_map"}, exclude_unset=True)
    return [{**model, **loading} for model in models]


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
    """Return the training step in a name: 1000 for `step1000-tokens4B`, 32 for `checkpoint-32`, None for `main`."""
    match = _STEP.search(name)
    digits = re.findall(r"\d+", name) if match is None else [match[1] or match[2]]
    return int(digits[0]) if len(digits) == 1 and len(digits[0]) <= MOST_DIGITS else None


def titled(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return the cells with display names that are short and unique."""
    cells, named = list(cells), list[Cell]()
    series = _short({cell.series for cell in cells if cell.series is not None})
    models = _short({cell.model for cell in cells if cell.title is None and cell.series is None})
    for cell in cells:
        if cell.series is None:
            named.append(replace(cell, title=cell.title or models[cell.model]))
            continue
        name, revision = series[cell.series], split_revision(cell.model)[1]
        title = f"{name}, step {cell.step}" if revision is None else f"{name}@{revision}"
        named.append(replace(cell, series=name, title=title))
    return tuple(named)


def _short(names: set[str]) -> dict[str, str]:
    """Return a display name for every name: of a path, as few of its last parts as are unique among all names."""
    short = {name: name for name in names if not Path(name).is_absolute()}
    paths = {name: Path(name).parts for name in names if name not in short}
    for length in range(1, 1 + max(map(len, paths.values()), default=0)):
        tails = {name: "/".join(paths[name][-length:]) for name in paths if name not in short}
        counts = Counter([*tails.values(), *short.values()])
        short |= {name: tail for name, tail in tails.items() if counts[tail] == 1}
    return short | {name: name for name in names if name not in short}
