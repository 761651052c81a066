"""Models of the zoo that are shipped with posleak: trained, small, and available without a network.

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
RECORD_FILE = "training.json"


@cache
def names() -> tuple[str, ...]:
    """Return the names of the shipped models."""
    return tuple(sorted(path.parent.name for path in ROOT.glob("*/config.json")))


def folder(name: str) -> Path:
    return ROOT / name


@dataclass(frozen=True)
class _Data:
    data: str


@dataclass(frozen=True)
class _Training:
    """The part of a training record that is shown here."""

    about: str
    data: _Data


def about(name: str) -> str:
    """Return what a model was trained on, and what it is for."""
    record = read_json(_Training, folder(name) / RECORD_FILE, "install posleak again")
    return f"trained on {record.data.data}: {record.about}"
