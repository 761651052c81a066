"""The command line. Modules of commands register themselves on the app when they are imported."""

from . import claims as _claims  # noqa: F401
from . import origin as _origin  # noqa: F401
from . import report as _report  # noqa: F401
from . import study as _study  # noqa: F401
from .app import main

__all__ = ["main"]
