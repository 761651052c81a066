"""What can go wrong, in one form: where, what, got, expected, remedy.

Every error that posleak raises on purpose is a `PosleakError`. Its subclasses say what was refused, and carry the exit
status of the command line: 2 for a call that cannot work as written, 1 for a check that failed.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Self

from posleak.axes import MIN_LENGTH


class PosleakError(Exception):
    """Root of posleak's errors; the message is built from its parts, so that every error reads alike."""

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
        head = f"{where}: {what}" if where else what
        lines = [head]
        if got is not None:
            lines.append(f"  got: {got}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if remedy is not None:
            lines.append(f"  remedy: {remedy}")
        super().__init__("\n".join(lines))

    def at(self, where: str) -> Self:
        """The same error, with an outer place put before its own."""
        place = f"{where}, {self.where}" if self.where else where
        return type(self)(self.what, where=place, got=self.got, expected=self.expected, remedy=self.remedy)


class ModelError(PosleakError):
    """A model cannot be found, read or trusted."""


class TooLargeError(ModelError):
    """A model does not fit into memory."""


class InputError(PosleakError):
    """The tokens that were asked for cannot be made."""


class NoEffectError(InputError):
    """An edit would change nothing: the plain numbers would stand under its name."""


class UnsupportedError(PosleakError):
    """The model does something that posleak does not understand; it is refused rather than approximated."""


class CheckError(PosleakError):
    """A run-time check failed: the numbers would have been wrong."""

    exit_status = 1


class RunError(PosleakError):
    """A run folder is unfinished, damaged, or belongs to another measurement."""


class StorageError(PosleakError):
    """A file cannot be written, or somebody else is writing it."""


class BusyError(StorageError):
    """Another process or thread is writing there."""


class PosleakWarning(UserWarning):
    """Something the user should know about numbers that are still correct."""


def shorter_prompts(most: int, why: str = "") -> str | None:
    """The remedy against prompts of more than `most` tokens; None if so short ones cannot be measured."""
    return f"use --length {most} or less{why}" if most >= MIN_LENGTH else None


def warn(note: str) -> None:
    """Issue a PosleakWarning at the line of the caller's own code: Python shows one text once for each line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "posleak":
        frame, level = frame.f_back, level + 1
    warnings.warn(note, PosleakWarning, stacklevel=level)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`, or the list of all known names if none is similar."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(repr(candidate) for candidate in near) + "?"
    return "known names: " + ", ".join(known)
