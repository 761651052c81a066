"""Versions of the software that computes results, hashes of measurements, time, and folder names; without torch."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from functools import cache
from importlib.metadata import version
from typing import Any

from posleak.typed import plain

DEFINITIONS_VERSION = 3
"""Increased when the mathematics changes. Runs with different versions cannot be compared."""

COMPUTED_WITH = ("posleak", "torch", "transformers")
"""Packages whose versions determine results."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute results."""
    return {name: _version(name) for name in (*COMPUTED_WITH, "numpy", "xarray")}


_version = cache(version)
"""Reading a version takes a millisecond, and every cell of a sweep needs it."""


def measurement_hash(*parts: Any, salt: str = "") -> str:
    """Return the sha256 that identifies a measurement: of the version of the definitions and of `parts`, as JSON."""
    text = json.dumps(plain([DEFINITIONS_VERSION, *parts]), sort_keys=True)
    return hashlib.sha256((text + salt).encode()).hexdigest()


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def slug(name: str, most: int = 100) -> str:
    """Return a name for a folder. A name of more than `most` characters is cut and gets a hash of the whole name."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
    return text if len(text) <= most else f"{text[:most]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
