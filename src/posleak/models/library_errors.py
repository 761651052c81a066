"""Translate errors that other libraries raise about model files into one error that names the file.

transformers, tokenizers, gguf, safetensors and torch raise almost anything about a damaged file: OSError and
ValueError, but also TypeError, ZeroDivisionError, plain Exception, and Rust panics, which are not Exceptions.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posleak.errors import ModelError, PosleakError, TooLargeError
from posleak.files import DISK_FULL
from posleak.text import one_line, visible

_OUT_OF_MEMORY = re.compile(r"allocate memory|out of memory|not enough memory|unable to allocate", re.I)
_SURROGATES = re.compile("[\ud800-\udfff]+")
_SYSTEM_REMEDIES: dict[int | None, str] = {
    errno.EACCES: "make it readable for you",
    errno.EPERM: "make it readable for you",
    errno.ENAMETOOLONG: "choose a shorter name",
}

FETCH_AGAIN = "fetch the file again; an interrupted download or a damaged disk looks like this"
USE_LESS_MEMORY = "load it with dtype bfloat16, spread it with device_map='auto', or use a smaller model"


@contextmanager
def translate_errors(what: str, where: str | Path | Callable[[], Path], remedy: str) -> Iterator[None]:
    """Turn any error inside into a ModelError with these parts, or into a TooLargeError if memory ran out.

    `where` may be a function that looks for the damaged file. posleak's own errors and interruptions pass unchanged.
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
    got = one_line(error)
    if any(_is_out_of_memory(cause) for cause in _causes(error)):
        return TooLargeError("memory ran out while the model was read", where=where, got=got, remedy=USE_LESS_MEMORY)
    if is_disk_full(error):
        return ModelError("the disk is full", where=where, got=got, remedy="free some space on it")
    return ModelError(what, where=where, got=got, remedy=_SYSTEM_REMEDIES.get(errno_of(error), remedy))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    return errno_of(error) == errno.ENOMEM or isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def errno_of(error: BaseException) -> int | None:
    """Return the system's error number; Rust libraries only write it into their message."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def is_disk_full(error: BaseException) -> bool:
    return any(errno_of(cause) in DISK_FULL for cause in _causes(error))


def escape_surrogates(name: str) -> str:
    """Return the name with bytes that are not UTF-8 escaped, so that it can be written to a file."""
    return _SURROGATES.sub(lambda match: visible(match[0]), name)
