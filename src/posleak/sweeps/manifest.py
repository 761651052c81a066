"""A manifest: a YAML file that says which cells a sweep has. Every list is an axis of a grid.

    name: ntk
    models: [smollm2-135m, {checkpoints: runs/zoo/text/rope-0}, {model: org/name, revisions: [step1, step512]}]
    edits: [none, rope=ntk:4, [rope=ntk:4, window=64]]
    length: [256, 512]
    seed: [0, 1]

    grids:                     # more than one grid: each has the keys from above, and its own
      - {kind: trace, models: [zoo-text-rope]}

docs/sweeps.md has every key. Everything is checked before a model is loaded; a key that is not known is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from posleak.errors import InputError, NoEffectError, PosleakError, did_you_mean
from posleak.files import stays_in_folder
from posleak.inputs.corpus import STDLIB
from posleak.runs.spec import TRACED
from posleak.text import visible

from .cells import KINDS, MEASURE, TEXT, TRACE, Cell, Resources
from .entries import models_of, titled
from .pieces import MOST, listed, loader, mapping, resources, text, whole, wrong

MOST_BYTES, MOST_EDITS = 10**6, 100
"""Bytes of a manifest and edits of a cell that can be meant."""

AXES = ("edits", "length", "prompts", "seed", "inputs", "bos", "dtype", "origin", "density")
"""Keys that may have several values, besides `models`: a grid has every combination."""

SINGLE = ("kind", "batch", "metrics", "loss", "device", "device_map", "resources")
GRID = ("models", *AXES, *SINGLE)
TOP = ("name", "out", "grids", *GRID)
WHOLE = ("length", "prompts", "seed", "origin", "density", "batch")


@dataclass(frozen=True)
class Manifest:
    """What a manifest says: `cells`, each once, in the order of the file. `out`: where it wants its results."""

    name: str
    cells: tuple[Cell, ...]
    out: str | None = None


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """A manifest from a YAML file."""
    import yaml

    place = Path(path)
    try:
        with place.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(
            "the manifest cannot be read", where=str(place), got=error.strerror or str(error),
            remedy="name a YAML file; docs/sweeps.md shows one",
        ) from error  # fmt: skip
    if len(content) > MOST_BYTES:
        raise wrong(str(place), "the manifest is too large", "more than a million bytes", "one million bytes at most")
    try:
        said = yaml.load(content, Loader=loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise wrong(str(place), "this is no YAML", visible(str(error))) from error
    return manifest(said, name=place.stem, where=str(place))


def manifest(said: Any, *, name: str = "sweep", where: str = "manifest") -> Manifest:
    """A manifest from what its YAML says: a mapping as in docs/sweeps.md."""
    top = mapping(said, TOP, where)
    own = {key: value for key, value in top.items() if key in GRID}
    grids = listed(top.get("grids", [{}]), f"{where}, grids")
    found: dict[str, Cell] = {}
    for number, grid in enumerate(grids, 1):
        place = where if "grids" not in top else f"{where}, grid {number}"
        for cell in _cells({**own, **mapping(grid, GRID, place)}, place):
            found.setdefault(cell.id, cell)
            if len(found) > MOST:
                raise wrong(where, "these are too many cells", f"more than {MOST:,}", remedy="split it")
    if not found:
        raise wrong(where, "the manifest has no cells", remedy="give it at least one model under `models`")
    out = None if top.get("out") is None else text(top["out"], f"{where}, out")
    called = text(top.get("name", name), f"{where}, name")
    if not stays_in_folder(called):
        raise wrong(f"{where}, name", "the name leads out of the folder of results", called, remedy="use a plain name")
    return Manifest(called, titled(found.values()), out)


# -- one grid --------------------------------------------------------------------------------------------------------


def _cells(said: Mapping[str, Any], where: str) -> Iterator[Cell]:
    """Every combination of the grid's axes, model by model."""
    if "models" not in said:
        raise wrong(where, "the grid has no models", remedy="list them under `models`")
    models = [one for each in listed(said["models"], f"{where}, models") for one in models_of(each, f"{where}, models")]
    kind = text(said.get("kind", MEASURE), f"{where}, kind")
    if kind not in KINDS:
        raise wrong(f"{where}, kind", "no such kind of run", kind, remedy=did_you_mean(kind, KINDS))
    axes = {key: list(_axis(key, said[key], where)) for key in AXES if key in said}
    if kind == TRACE and "length" not in axes:
        axes["length"] = [TRACED]
    fixed: dict[str, Any] = {"kind": kind}
    if "batch" in said:
        fixed["batch"] = _one("batch", said["batch"], where)
    fixed |= {key: text(said[key], f"{where}, {key}") for key in ("device", "device_map") if said.get(key) is not None}
    if "loss" in said:
        if not isinstance(said["loss"], bool):
            raise wrong(f"{where}, loss", "not true or false", said["loss"])
        fixed["loss"] = said["loss"]
    if "metrics" in said:
        from posleak.metrics.names import parse_metrics

        fixed["metrics"] = parse_metrics(said["metrics"])
    common = resources(said.get("resources", {}), f"{where}, resources")
    if (count := len(models) * prod(len(values) for values in axes.values())) > MOST:
        raise wrong(where, "these are too many cells", f"{count:,}", f"at most {MOST:,}", "split it")
    for model in models:
        own = {key: value for key, value in vars(model).items() if value is not None and key != "resources"}
        held = _over(common, model.resources)
        for values in product(*axes.values()):
            asked = {**fixed, **dict(zip(axes, values, strict=True)), **own}
            try:
                yield _checked(Cell(**asked, resources=held))
            except PosleakError as error:
                raise error.at(where) from error


def _checked(cell: Cell) -> Cell:
    """The cell, with its edits spelled as posleak spells them; one that would change nothing is found out later."""
    with suppress(NoEffectError):
        return replace(cell, edits=cell.spec.edit_texts)
    return cell


def _axis(key: str, said: Any, where: str) -> Iterator[Any]:
    values = listed(said, f"{where}, {key}")
    if not values:
        raise wrong(f"{where}, {key}", "the list is empty", remedy="leave the key out, or name a value")
    for value in values:
        yield _edits(value, f"{where}, edits") if key == "edits" else _one(key, value, where)


def _one(key: str, value: Any, where: str) -> Any:
    """One value of a key that is a number or a text."""
    if key in WHOLE:
        return whole(value, f"{where}, {key}")
    if key == "bos" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if key == "dtype" and value is None:
        return None
    said = text(value, f"{where}, {key}")
    return _whole_path(said) if key == "inputs" else said


def _whole_path(inputs: str) -> str:
    """`text:PATH` with the whole path, for workers start in folders of their own."""
    path = inputs.removeprefix(TEXT)
    if not inputs.startswith(TEXT) or path == STDLIB:
        return inputs
    with suppress(OSError, ValueError, RuntimeError):
        if (place := Path(path).expanduser()).exists():
            return f"{TEXT}{place.absolute()}"
    return inputs


def _edits(value: Any, where: str) -> tuple[str, ...]:
    """`none`, one edit, or several that act together."""
    if value is None or value == "none":
        return ()
    many = listed(value, where)
    if len(many) > MOST_EDITS:
        raise wrong(where, "these are too many edits for one cell", len(many), f"at most {MOST_EDITS}")
    return tuple(text(each, where) for each in many)


def _over(common: Resources, own: Resources | None) -> Resources:
    """A model's own wishes before those of its grid."""
    if own is None:
        return common
    return Resources(
        common.cpus if own.cpus is None else own.cpus, own.gpus or common.gpus,
        common.memory if own.memory is None else own.memory,
    )  # fmt: skip
