"""Plugins: user modules that register their own edits, claims, metrics and prompt sources when they are imported.

An installed package names its module in the entry-point group `posleak.plugins`. A module on the Python path is named
in the environment variable POSLEAK_PLUGINS (several names are separated by commas). Examples: docs/extending.md.
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
    """Import all plugin modules, once per process, and return their names."""
    from_environment = [name.strip() for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if name.strip()]
    installed = [entry_point.module for entry_point in entry_points(group=ENTRY_POINT_GROUP)]
    modules = tuple(dict.fromkeys([*installed, *from_environment]))
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # foreign code may raise anything
            raise InputError(
                "cannot import a plugin", where=module, got=f"{type(error).__name__}: {error}",
                remedy=f"fix the module, add its folder to PYTHONPATH, or remove its name from {ENVIRONMENT_VARIABLE}",
            ) from error  # fmt: skip
    return modules


def reject_builtin_name(what: str, name: str, registered: Any, new: Any) -> None:
    """Raise InputError if a plugin registers `new` under the name of a built-in edit, claim or source (`registered`).

    A plugin may register its own name again, which happens when a notebook cell is run twice.
    """
    if registered is not None and _module(registered).startswith("posleak.") and _module(new) != _module(registered):
        raise InputError(
            f"the name of this {what} is already used by posleak", where=_module(new), got=name,
            remedy="choose another name",
        )  # fmt: skip


def _module(registered: Any) -> str:
    """Return the module that defines the function of a registration."""
    return str(getattr(registered, "make", getattr(registered, "test", None)).__module__)
