"""Errors and warnings of posleak, and the classification of errors of other libraries.

Every error that posleak raises on purpose is a `PosleakError`, whose message states where, what, got, expected, remedy.
Its `exit_status` is that of the command line: 2 for a call that cannot work as written, 1 for a failed check. Messages
name options as the command line does (`--length 64`); in Python, they are shown as parameters (spelling.py).
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from posleak.axes import MIN_LENGTH
from posleak.spelling import spelled
from posleak.text import one_line, visible

OUT_OF_MEMORY = re.compile(r"(out of|not enough|allocate) memory|unable to allocate|bad[_ ]alloc", re.IGNORECASE)
"""Messages of failed allocations. On a CPU, torch raises a plain RuntimeError with such a message."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

FETCH_AGAIN = "download the file again; it may be truncated by an interrupted download, or the disk may be damaged"
USE_LESS_MEMORY = (
    "load it with --dtype bfloat16, keep its weights on disk with --offload FOLDER, distribute it with --device-map "
    "auto, or use a smaller model"
)
_SYSTEM_REMEDIES: dict[int | None, str] = {
    errno.EACCES: "grant yourself read permission",
    errno.EPERM: "grant yourself read permission",
    errno.ENAMETOOLONG: "choose a shorter name",
}


class PosleakError(Exception):
    """Base class of posleak's errors. The message is built from its parts, so that all errors have the same form.

    The parts name options as the command line does; str(error) names parameters in Python.
    """

    exit_status = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.remedy = what, where, got, expected, remedy
        details = {"got": got, "expected": expected, "remedy": remedy}
        head = f"{where}: {what}" if where else what
        super().__init__("\n".join([head, *(f"  {name}: {it}" for name, it in details.items() if it is not None)]))

    def __str__(self) -> str:
        return spelled(super().__str__())

    def at(self, where: str) -> Self:
        """Return the same error with `where` put before its own place."""
        place = f"{where}, {self.where}" if self.where else where
        return type(self)(self.what, where=place, got=self.got, expected=self.expected, remedy=self.remedy)


class ModelError(PosleakError):
    """Raised when a model cannot be found, read or trusted."""


class TooLargeError(ModelError):
    """Raised when a model does not fit into memory."""


class InputError(PosleakError):
    """Raised when an argument is invalid or the requested prompts cannot be made."""


class NoEffectError(InputError):
    """Raised when an edit would change nothing, so that its results would be those of the unedited model."""


class UnsupportedError(PosleakError):
    """Raised when a model does something that posleak does not support. It is rejected rather than approximated."""


class CheckError(PosleakError):
    """Raised when a run-time check fails, so that the results would be wrong."""

    exit_status = 1


class RunError(PosleakError):
    """Raised when a run folder is unfinished, damaged, or belongs to another measurement."""


class StorageError(PosleakError):
    """Raised when a file cannot be written."""


class BusyError(StorageError):
    """Raised when another process or thread is writing to the same place."""


class PosleakWarning(UserWarning):
    """Warns about something that the user should know. The results are still correct."""


def shorter_prompts(most: int, why: str = "") -> str | None:
    """Return the remedy for prompts longer than `most` tokens, None if prompts of `most` tokens are too short."""
    return f"use --length {most} or less{why}" if most >= MIN_LENGTH else None


def warn(note: str) -> None:
    """Issue a PosleakWarning that points to the caller's line outside of posleak."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "posleak":
        frame, level = frame.f_back, level + 1
    warnings.warn(spelled(note), PosleakWarning, stacklevel=level)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'a' or 'b'?`, or the list of all known names if none is similar."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(repr(candidate) for candidate in near) + "?"
    return "known names: " + ", ".join(known)


def is_out_of_memory(error: BaseException, kind: type[BaseException] = RuntimeError) -> bool:
    """Return whether an allocation failed; errors of a `kind` may state it in their message only, as torch's do."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, kind) and OUT_OF_MEMORY.search(one_line(error, 10_000)) is not None


def is_recoverable(error: Exception) -> bool:
    """Return False for out-of-memory and I/O errors: further work with the same model would fail in the same way."""
    return not (is_out_of_memory(error) or isinstance(error, OSError))


def resource_error(error: BaseException, stream: str | None = None) -> PosleakError | None:
    """Translate an out-of-memory or I/O error into a PosleakError; return None for other errors.

    stream      name of the output stream that failed, for an I/O error that names no file
    """
    if is_out_of_memory(error):
        return PosleakError(
            "out of memory: not enough memory for this command", got=one_line(error),
            remedy="use a shorter --length or a smaller --batch, set a limit with --max-memory, or load the model with "
            "--dtype bfloat16; finished work is kept",
        )  # fmt: skip
    if not isinstance(error, OSError):
        return None
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    reason = error.strerror if error.errno is not None and error.strerror else one_line(error)
    return PosleakError("I/O error", where=" -> ".join(names) or stream, got=reason)


def error_line(error: Exception) -> str:
    """Return an error in one line: what, got and remedy."""
    if not isinstance(error, PosleakError):
        return one_line(error)
    parts = [error.what, f"got {error.got}" if error.got is not None else "", error.remedy or ""]
    return visible("; ".join(part for part in parts if part)).replace("\n", " ")


@contextmanager
def translate_errors(what: str, where: str | Path | Callable[[], Path], remedy: str) -> Iterator[None]:
    """Turn any error of a library about a model's files into a ModelError, or a TooLargeError if memory ran out.

    transformers, tokenizers, gguf, safetensors and torch raise almost anything about a damaged file: OSError and
    ValueError, but also TypeError, ZeroDivisionError, plain Exception, and Rust panics, which are not Exceptions.
    `where` may be a function that looks for the damaged file. posleak's own errors and interruptions pass unchanged.
    """
    try:
        yield
    except PosleakError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        remedy = _SYSTEM_REMEDIES.get(errno_of(error), remedy)
        if is_disk_full(error):
            what, remedy = "the disk is full", "free some disk space"
        kind: type[ModelError] = ModelError
        if any(is_out_of_memory(cause, BaseException) for cause in causes(error)):
            kind, what, remedy = TooLargeError, "out of memory while loading the model", USE_LESS_MEMORY
        place = str(where() if callable(where) else where)
        raise kind(what, where=place, got=one_line(error), remedy=remedy) from error


def causes(error: BaseException) -> list[BaseException]:
    """Return the error, its causes, and the errors that were being handled when these were raised."""
    chain = [error]
    for link in chain:  # grows while it is read
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
    return chain


def errno_of(error: BaseException) -> int | None:
    """Return the system's error number; Rust libraries only write it into their message."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def is_disk_full(error: BaseException) -> bool:
    """Return whether the error, or one that led to it, is about a full disk or an exhausted quota."""
    return any(errno_of(cause) in DISK_FULL for cause in causes(error))
