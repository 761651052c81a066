"""The last error handler of the command line: every error becomes a short message on standard error and an exit status.

Unexpected errors are reported in a few lines, and their traceback is written to a file; with POSLEAK_DEBUG=1 tracebacks
are also printed. This module imports nothing heavy: it must be in place before the command line itself is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from posleak.errors import PosleakError, causes, resource_error
from posleak.show.streams import OUT, give_up, gone, prepare_streams, writing_to
from posleak.show.unexpected import DEBUG_VARIABLE, describe_unexpected, format_traceback
from posleak.spelling import command_line
from posleak.text import visible

SUCCESS, FAILED, WRONG, BY_DESIGN, UNEXPECTED, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 70, 130, 141
STATUSES = {
    SUCCESS: "success",
    FAILED: "a check failed: the results would be wrong, `doctor` or `origin` found a violated law of unknown cause, "
    "or cells of a `sweep` failed",
    WRONG: "invalid call or input: the message states the place, the value, the expected value and the remedy",
    BY_DESIGN: "`doctor` only: the results are correct; the model violates a law by design, and the cause is named",
    UNEXPECTED: "unexpected error: please report it; the message names a file with the traceback",
    INTERRUPTED: "interrupted with Ctrl-C; finished work is kept",
    BROKEN_PIPE: "broken pipe, as in `posleak models | head -1`",
}
"""Exit statuses of the command line and their meaning."""

ShowMessage = Callable[[str, str], None]
"""Prints a message after a label, which is `error` or empty."""


class CarriedError(BaseException):
    """Carries an error through typer, which would convert it into an exit status of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Failure:
    """Exit status and message of a failed command. Without a message, the command ends silently."""

    status: int
    message: str = ""
    label: str = "error"


@contextmanager
def error_handler(show: ShowMessage | None = None) -> Iterator[None]:
    """Convert every exception raised inside into a message and an exit status."""
    prepare_streams()
    with command_line():
        yield from _handled(show)


def _handled(show: ShowMessage | None) -> Iterator[None]:
    try:
        try:
            yield
        except SystemExit:
            with writing_to(OUT):  # flush now: an error at interpreter exit could not be reported
                sys.stdout.flush()
            raise
        with writing_to(OUT):
            sys.stdout.flush()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich exits with status 1 while it prints typer's help
            sys.exit(BROKEN_PIPE)
        raise
    except BaseException as raised:
        error = raised.error if isinstance(raised, CarriedError) else raised
        reported = failure(error)
        _report(reported, error, show or print_plainly)
        sys.exit(reported.status)


def failure(error: BaseException) -> Failure:
    """Return the message and the exit status for an error."""
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):  # or an error in the cleanup after it
        return Failure(INTERRUPTED, "stopped; finished work is kept: run the same command again to resume", label="")
    if isinstance(error, PosleakError):
        return Failure(error.exit_status, str(error))
    if isinstance(error, BrokenPipeError) and (gone(sys.stdout) or gone(sys.stderr)):
        return Failure(BROKEN_PIPE)
    if (translated := resource_error(error, OUT if gone(sys.stdout) else None)) is not None:
        return Failure(WRONG, str(translated))
    return Failure(UNEXPECTED, describe_unexpected(error))


def _report(reported: Failure, error: BaseException, show: ShowMessage) -> None:
    """Print the message on standard error if possible, then discard output that can no longer be written."""
    if reported.message:
        with contextlib.suppress(Exception):
            if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
                print_plainly("", format_traceback(error).rstrip())
        try:
            show(reported.label, reported.message)
        except Exception:
            with contextlib.suppress(Exception):
                print_plainly(reported.label, reported.message)
    for stream in (sys.stdout, sys.stderr):
        if gone(stream):
            give_up(stream)


def print_plainly(label: str, message: str) -> None:
    """Print a message on standard error without colours."""
    sys.stderr.write(visible(f"{label} {message}" if label else message) + "\n")
    sys.stderr.flush()
