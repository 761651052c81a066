"""Folders of checkpoints, so that leakage can be followed through training: `checkpoint-100`, `step2000`, `iter_3` …

Checkpoints of a hub id are its revisions: `load(name, revision=...)`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from posleak.errors import ModelError
from posleak.models.border import border

_STEP = re.compile(r"\D*?(\d+)\D*")
"""One number in the name, which is the step."""


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The model folders inside `folder` that are named by a training step, in the order of their steps."""
    found: dict[int, Path] = {}
    with border("the folder cannot be read", str(folder), "name the folder above the checkpoints"):
        place = Path(folder).expanduser()
        models = (
            [path for path in sorted(place.iterdir()) if (path / "config.json").is_file()] if place.is_dir() else []
        )
    for path in models:
        match = _STEP.fullmatch(path.name)
        if match is None:
            continue
        step = int(match[1])
        if step in found:
            raise ModelError(
                "two checkpoints have the same step", where=str(folder), got=f"{found[step].name} and {path.name}",
                remedy="load them one by one, or move one away",
            )  # fmt: skip
        found[step] = path
    if not found:
        raise ModelError(
            "the folder holds no checkpoints", where=str(folder),
            expected="subfolders such as checkpoint-100 and checkpoint-200, each with config.json and *.safetensors",
            remedy="name the folder above the checkpoints, or load one model folder by itself",
        )  # fmt: skip
    return [found[step] for step in sorted(found)]
