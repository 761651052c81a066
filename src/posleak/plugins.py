"""Edits, claims and inputs of a user's own, without a fork: modules that register them when they are imported.

A package names its module in the entry-point group `posleak.plugins`; a script on the Python path is named in the
environment variable POSLEAK_PLUGINS (several, separated by commas). docs/extending.md has an example of each.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from posleak.errors import InputError

ENTRY_POINT_GROUP, ENVIRONMENT_VARIABLE = "posleak.plugins", "POSLEAK_PLUGINS"


@cache
def load_plugins() -> tuple[str, ...]:
    """Import every plugin once; returns their module names."""
    named = [name.strip() for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if name.strip()]
    modules = dict.fromkeys([*(found.module for found in entry_points(group=ENTRY_POINT_GROUP)), *named])
    for module in modules:
        _load(module)
    return tuple(modules)


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a plugin is somebody else's code, and may raise anything
        raise InputError(
            "a plugin cannot be imported", where=module, got=f"{type(error).__name__}: {error}",
            remedy=f"mend the module or put its folder on PYTHONPATH; or take its name out of {ENVIRONMENT_VARIABLE}",
        ) from error  # fmt: skip


def reject_builtin_name(what: str, name: str, there: Any, new: Any) -> None:
    """Refuse a plugin that takes the name of one of posleak's own; its own it may register again, as notebooks do."""
    if there is not None and _home(there).startswith("posleak.") and _home(new) != _home(there):
        raise InputError(
            f"posleak has {'an' if what[0] in 'aei' else 'a'} {what} of this name", where=_home(new), got=name,
            remedy="choose another name",
        )  # fmt: skip


def _home(registered: Any) -> str:
    """The module that the function behind a registration comes from."""
    return str(getattr(registered, "make", getattr(registered, "test", None)).__module__)
