"""All commands, in the order of `posleak --help`: a module registers its commands on the app when it is imported."""

from . import analyses as _analyses  # noqa: F401  isort: skip
from . import sweep as _sweep  # noqa: F401  isort: skip
from . import report as _report  # noqa: F401  isort: skip
from . import moved as _moved  # noqa: F401  isort: skip
from .app import app, main

__all__ = ["app", "main"]
