"""With which software a number was made, and when; and folder names. Imported without torch."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from functools import cache
from importlib.metadata import version
from typing import Any

from posleak.typed import plain

DEFINITIONS_VERSION = 2
"""Increased when the mathematics changes: runs with different versions cannot be compared."""

COMPUTED_WITH = ("posleak", "torch", "transformers")
"""Of all packages, those that decide the numbers."""


def versions() -> dict[str, str]:
    """Versions of the packages that computed the numbers."""
    return {name: _version(name) for name in (*COMPUTED_WITH, "numpy", "xarray")}


@cache
def _version(name: str) -> str:
    """Reading it off a package's metadata takes a millisecond, and every cell of a sweep asks."""
    return version(name)


def measurement_hash(*parts: Any, salt: str = "") -> str:
    """Return the sha256 that identifies a measurement: of the version of the definitions and of `parts`, as JSON."""
    text = json.dumps(plain([DEFINITIONS_VERSION, *parts]), sort_keys=True)
    return hashlib.sha256((text + salt).encode()).hexdigest()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def slug(name: str, most: int = 100) -> str:
    """A name as a folder's name. A long one is cut, and a hash of the whole keeps it apart from others."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
    return found if len(found) <= most else f"{found[:most]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
