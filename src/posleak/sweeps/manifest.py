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

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from posleak.errors import InputError, PosleakError, did_you_mean
from posleak.files import stays_in_folder
from posleak.runs.spec import TRACED, MeasureSpec
from posleak.text import visible

from .cells import TRACE, Cell
from .entries import models_of, titled
from .schema import MOST, GridKeys, ManifestKeys, absolute_model, validated, yaml_loader

MOST_BYTES = 10**6
NAMED = Path(__file__).parent / "named"

AXES = ("edits", "length", "prompts", "seed", "inputs", "bos", "dtype", "origin", "density")
"""Keys that may have several values, besides `models`: a grid has every combination."""


@dataclass(frozen=True)
class Manifest:
    """The cells of a sweep, without duplicates and in the order of the file.

    out        where its results go by default
    question   what the cells are compared for; if there is one, the sweep ends with a balance table
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
                "the manifest has fewer models than were given", where=self.name, got=", ".join(models),
                expected=f"at most {len(own)}, instead of {', '.join(own)}",
            )  # fmt: skip
        new = dict(zip(own, map(absolute_model, models)))
        cells = [replace(cell, spec=replace(cell.spec, **spec)) for cell in self.cells]
        if models:
            none: dict[str, Any] = {"title": None, "series": None, "step": None}
            cells = [replace(cell, model=new[cell.model], **none) for cell in cells if cell.model in new]
        return replace(self, cells=titled({cell.id: cell for cell in cells}.values()))


def named_manifests() -> list[str]:
    """Return the names of the manifests that ship with posleak."""
    return sorted(path.stem for path in NAMED.glob("*.yaml"))


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest in a YAML file or, if there is no such file, the one of this name that ships with posleak."""
    import yaml

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
            remedy=f"give a YAML file (docs/sweeps.md shows one) or the name of a manifest: {near}",
        ) from error  # fmt: skip
    if len(content) > MOST_BYTES:
        raise InputError("the manifest is too large", where=str(file), expected=f"at most {MOST_BYTES:,} bytes")
    try:
        value = yaml.load(content, Loader=yaml_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError("not valid YAML", where=str(file), got=visible(str(error))[:300]) from error
    return manifest(value, name=file.stem, where=str(file))


def manifest(value: Any, *, name: str = "sweep", where: str = "manifest") -> Manifest:
    """Return the manifest that a mapping describes: the content of a YAML file, as in docs/sweeps.md."""
    top = validated(ManifestKeys, value, where)
    if not stays_in_folder(top.name or name):
        remedy = "use a plain name"
        raise InputError("the name leads out of the folder", where=f"{where}, name", got=top.name, remedy=remedy)
    general = {key: value[key] for key in value if key in GridKeys.model_fields}
    cells: dict[str, Cell] = {}
    for number, grid in enumerate(top.grids, 1):
        place = f"{where}, grid {number}" if "grids" in value else where
        keys = {**general, **grid} if isinstance(grid, Mapping) else grid
        for cell in _cells(validated(GridKeys, keys, place), place):
            cells.setdefault(cell.id, cell)
            if len(cells) > MOST:
                raise _too_many(f"more than {MOST:,}", where)
    if not cells:
        raise InputError("the manifest has no cells", where=where, remedy="give it at least one model under `models`")
    return Manifest(top.name or name, titled(cells.values()), top.out, top.question)


def _cells(grid: GridKeys, where: str) -> Iterator[Cell]:
    """Every combination of the grid's axes, model by model."""
    if grid.models is None:
        raise InputError("the grid has no models", where=where, remedy="list them under `models`")
    models = [
        (fields, entry.resources.over(grid.resources))
        for number, entry in enumerate(grid.models, 1)
        for fields in models_of(entry, f"{where}, models, {number}")
    ]
    axes = grid.given(*AXES)
    if grid.kind == TRACE:
        axes.setdefault("length", [TRACED])
    if (count := len(models) * prod(map(len, axes.values()))) > MOST:
        raise _too_many(f"{count:,}", where)
    loading = grid.given("device", "device_map")
    for fields, resources in models:
        for values in product(*axes.values()):
            spec = {**grid.given("batch", "metrics", "loss"), **dict(zip(axes, values, strict=True))}
            own = {**loading, **({"dtype": spec.pop("dtype")} if "dtype" in spec else {}), **fields}
            try:
                yield Cell(spec=MeasureSpec(**spec), kind=grid.kind, resources=resources, **own)
            except PosleakError as error:
                raise error.at(where) from error


def _too_many(count: str, where: str) -> InputError:
    return InputError("too many cells", where=where, got=count, expected=f"at most {MOST:,}", remedy="split it")
