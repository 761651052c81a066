"""Copy the trained models that ship with posleak from a trained zoo: `python -m tools.ship runs/zoo`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from posleak.errors import RunError
from posleak.models import builtin
from zoo.training import RECORD, read_training
from zoo.variants import VARIANTS

SHIPPED = {"text": ("rope", "window"), "backcopy": tuple(VARIANTS)}
"""Shipped variants by kind of data: backcopy models are small enough to ship all of them."""

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", RECORD)
MAX_BYTES = 20_000_000
"""Limit of the total size."""


def ship(root: Path) -> int:
    """Copy the models of seed 0 to the folder in which `load` finds them by name; return their total size in bytes."""
    folders = {
        f"zoo-{data}-{variant}": root / data / f"{variant}-0" for data, names in SHIPPED.items() for variant in names
    }
    for folder in folders.values():
        record = read_training(folder)
        if record is None or not record.finished:
            raise RunError("the model is not trained", where=str(folder), remedy="python -m zoo train --all")
    files = [
        (folder / file, builtin.shipped_folder(model) / file) for model, folder in folders.items() for file in FILES
    ]
    files = [(source, target) for source, target in files if source.is_file()]
    size = sum(source.stat().st_size for source, _ in files)
    if size > MAX_BYTES:
        raise RunError("the models are too large to ship", where=str(root), got=size, expected=MAX_BYTES)
    shutil.rmtree(builtin.SHIPPED_ROOT, ignore_errors=True)
    for source, target in files:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return size


if __name__ == "__main__":
    print(f"{ship(Path(sys.argv[1])) / 1e6:.1f} MB in {builtin.SHIPPED_ROOT}")
