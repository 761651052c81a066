"""The border with other people's files: whatever another library raises about one becomes an error that names it.

transformers, tokenizers, gguf, safetensors and torch raise almost anything when a file is damaged or lies: OSError and
ValueError, but also TypeError, ZeroDivisionError, plain Exception, and panics from Rust that are no Exception at all.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posleak.errors import ModelError, PosleakError, TooLargeError
from posleak.text import one_line, visible

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_MEMORY = re.compile(r"allocate memory|out of memory|not enough memory|unable to allocate", re.I)
_SURROGATES = re.compile("[\ud800-\udfff]+")

_HELP: dict[int | None, str] = {
    errno.EACCES: "make it readable for you",
    errno.EPERM: "make it readable for you",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""What helps where the system is in the way, and the file itself may be fine."""

FETCH_AGAIN = "fetch the file again; an interrupted download or a damaged disk looks like this"
USE_LESS_MEMORY = "load it with dtype bfloat16, spread it with device_map='auto', or take a smaller model"


@contextmanager
def translate_errors(what: str, where: str | Path | Callable[[], Path], remedy: str) -> Iterator[None]:
    """Turn any error inside into a ModelError: `what` happened to `where`, and the `remedy`.

    `where` may be a function that looks for the culprit. posleak's own errors and interruptions pass. Memory that ran
    out becomes a TooLargeError.
    """
    try:
        yield
    except PosleakError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _translated(error, what, str(where() if callable(where) else where), remedy) from error


def _translated(error: BaseException, what: str, where: str, remedy: str) -> ModelError:
    if any(_is_about_memory(step) for step in _causes(error)):
        return TooLargeError(
            "memory ran out while the model was read", where=where, got=one_line(error), remedy=USE_LESS_MEMORY
        )
    if disk_is_full(error):
        return ModelError("the disk is full", where=where, got=one_line(error), remedy="free some space on it")
    return ModelError(what, where=where, got=one_line(error), remedy=_HELP.get(errno_of(error), remedy))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_about_memory(error: BaseException) -> bool:
    return errno_of(error) == errno.ENOMEM or isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))


def errno_of(error: BaseException) -> int | None:
    """The system's number of an error; Rust libraries only write it into their message."""
    if isinstance(error, OSError):
        return error.errno
    hidden = re.search(r"\(os error (\d+)\)", str(error))
    return int(hidden[1]) if hidden else None


def disk_is_full(error: BaseException) -> bool:
    return any(errno_of(step) in DISK_FULL for step in _causes(error))


def escape_surrogates(name: str) -> str:
    """The name with bytes that are not UTF-8 spelled out, so that it can be written."""
    return _SURROGATES.sub(lambda found: visible(found[0]), name)
