"""Models of the zoo that come with posleak: trained, small, and there without a network.

Each is a folder below `posleak/shipped` in Hugging Face's layout, with the record of its training (training.json).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import posleak
from posleak.files import read_json

ROOT = Path(posleak.__file__).parent / "shipped"
SOURCE, LICENCE = "shipped with posleak", "Apache-2.0"
RECORD = "training.json"


@cache
def names() -> tuple[str, ...]:
    """Names under which shipped models are loaded."""
    return tuple(sorted(path.parent.name for path in ROOT.glob("*/config.json")))


def folder(name: str) -> Path:
    return ROOT / name


@dataclass(frozen=True)
class _Data:
    data: str


@dataclass(frozen=True)
class _Training:
    """What is said here of a training's record."""

    about: str
    data: _Data


def about(name: str) -> str:
    """What it stands for, as the record of its training says."""
    found = read_json(_Training, folder(name) / RECORD, "install posleak again")
    return f"trained on {found.data.data}: {found.about}"
