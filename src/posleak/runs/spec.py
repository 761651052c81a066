"""What was asked: a measurement as a frozen value, as passed and as defaulted."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from posleak.errors import InputError
from posleak.leakage import TOKENS_AT_ONCE

DEFINITIONS_VERSION = 1
"""Raised when the mathematics changes: runs with different ones cannot be compared."""


@dataclass(frozen=True)
class MeasureSpec:
    """One measurement. `batch` prompts go through the model at once; `density` refines the plan of rows."""

    inputs: str = "random"
    bos: str = "auto"
    length: int = 512
    prompts: int = 16
    seed: int = 0
    batch: int = 0
    density: int = 1
    edits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("prompts", 1), ("seed", 0), ("batch", 0), ("density", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is too small", got=getattr(self, name), expected=f"at least {least}")

    def resolved(self) -> MeasureSpec:
        """With every default filled in."""
        batch = self.batch or max(1, TOKENS_AT_ONCE // self.length)
        return MeasureSpec(**{**asdict(self), "batch": min(batch, self.prompts), "edits": tuple(self.edits)})

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "edits": list(self.edits)}


def versions() -> dict[str, str]:
    """What computed the numbers."""
    return {name: version(name) for name in ("posleak", "torch", "transformers", "numpy", "xarray")}


COMPUTED_WITH = ("posleak", "torch", "transformers")
SUBJECT = ("weights_sha256", "config_sha256", "architecture", "dtype", "device")


def fingerprint(
    spec: MeasureSpec, identity: dict[str, Any], inputs: dict[str, Any], computed_with: dict[str, str]
) -> str:
    """Runs with the same fingerprint give the same numbers: what was asked, of which model, on which tokens, with what.

    `inputs` is what `Prompts.describe` says: a text that was changed under the same name has another hash there.
    """
    subject = {name: identity[name] for name in SUBJECT}
    bits = {name: computed_with[name] for name in COMPUTED_WITH}
    text = json.dumps([DEFINITIONS_VERSION, spec.as_dict(), subject, inputs, bits], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def slug(name: str) -> str:
    """A model's name as a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
