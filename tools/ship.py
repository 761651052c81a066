"""Copy the trained models that ship with posleak from a trained zoo: `python -m tools.ship runs/zoo`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from posleak.errors import RunError
from posleak.models import builtin
from zoo.training import RECORD, read_training
from zoo.variants import VARIANTS

CHOSEN = {"text": ("rope", "window"), "backcopy": tuple(VARIANTS)}
"""Shipped variants by kind of data: backcopy models are small enough to ship all of them."""

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", RECORD)
MOST = 20_000_000
"""Limit of their total size in bytes."""


def ship(root: Path) -> int:
    """Copy the models of seed 0 to the folder in which `load` finds them by name; return their total size in bytes."""
    chosen = {
        f"zoo-{data}-{variant}": root / data / f"{variant}-0" for data, names in CHOSEN.items() for variant in names
    }
    for folder in chosen.values():
        record = read_training(folder)
        if record is None or not record.finished:
            raise RunError("the model is not trained", where=str(folder), remedy="python -m zoo train --all")
    files = [(folder / name, builtin.shipped_folder(own) / name) for own, folder in chosen.items() for name in FILES]
    files = [(source, place) for source, place in files if source.is_file()]
    size = sum(source.stat().st_size for source, _ in files)
    if size > MOST:
        raise RunError("the models are too large to be shipped", where=str(root), got=size, expected=MOST)
    shutil.rmtree(builtin.SHIPPED_ROOT, ignore_errors=True)
    for source, place in files:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
    return size


if __name__ == "__main__":
    print(f"{ship(Path(sys.argv[1])) / 1e6:.1f} MB in {builtin.SHIPPED_ROOT}")
