"""Names that a package imports when they are first used: torch is slow to load, and not every use needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562); `homes`: the public names in each of its modules.

    A module that has the name of one of its functions hides it as soon as it is imported: let it be called (callable).
    """
    where = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{where[name]}"), name)

    return find
