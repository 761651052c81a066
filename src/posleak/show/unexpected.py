"""Unexpected errors: a message for the user, and a file with the traceback for a bug report."""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from posleak._version import __version__
from posleak.text import one_line, visible

DEBUG_VARIABLE = "POSLEAK_DEBUG"
"""Environment variable; with the value 1, tracebacks are also printed."""

UNEXPECTED = "unexpected error in posleak"
"""How the message of an unexpected error begins."""

TRACEBACKS_KEPT = 20


def describe_unexpected(error: BaseException) -> str:
    """Write the traceback to a file and return the message: error, version, path of that file, how to report it."""
    return (
        f"{UNEXPECTED}: {one_line(error)}\n"
        f"  version: posleak {__version__}\n"
        f"  traceback: {_stored(error)}\n"
        "  remedy: please report this to the authors of posleak, with the version and the traceback"
    )


def format_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it."""
    return "".join(traceback.format_exception(error))


def _stored(error: BaseException) -> str:
    """Return the path of the file with the traceback, or how to see the traceback if no file could be written."""
    for folder in (_cache_errors, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(Exception):  # a failure here must not hide the error itself
            text = (
                f"posleak {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
                f"command: {sys.argv!r}\ntime: {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n{format_traceback(error)}"
            )
            prefix = f"traceback-{time.strftime('%Y%m%d-%H%M%S')}-"
            descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".txt", dir=folder())
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(visible(text))
            return name
    return f"no file could be written for it; set {DEBUG_VARIABLE}=1 and run the command again to see it"


def _cache_errors() -> Path:
    """Return the folder of tracebacks in the cache, with room for one more: only the newest are kept."""
    from posleak.models.cache import cache_folder

    folder = cache_folder() / "errors"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another process may be removing the same files
        files = sorted(folder.glob("traceback-*.txt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for old in files[TRACEBACKS_KEPT - 1 :]:
            old.unlink(missing_ok=True)
    return folder
