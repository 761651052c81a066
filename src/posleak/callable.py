"""Packages that share their name with their one function: `posleak.claims` is both, so importing one must not hide the
other."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def call_as(module: str, function: Callable[..., Any]) -> None:
    """Let the package be called: `posleak.report(runs, "page.html")` is `posleak.report.report(runs, "page.html")`."""
    package: Any = sys.modules[module]
    package.__class__ = type("CallablePackage", (ModuleType,), {"__call__": staticmethod(function)})
    package.__signature__ = inspect.signature(function)
