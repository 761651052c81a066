"""Standard output and standard error that accept any text in any encoding, also after they were closed."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from posleak.text import ascii_fallback

OUT, ERR = "standard output", "standard error"
HANDLER = "posleak"
"""Name of `ascii_fallback` as an error handler of codecs."""


def prepare_streams() -> None:
    """Replace characters that the encoding lacks, and redirect a closed stream to the null device."""
    codecs.register_error(HANDLER, ascii_fallback)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors=HANDLER))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def is_unicode(stream: IO[str]) -> bool:
    """Return whether the encoding of a stream covers Unicode."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


@contextmanager
def writing_to(name: str) -> Iterator[None]:
    """Add the name of the stream to an OSError that names no file. A broken pipe is passed on unchanged."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            error.filename = name
        raise


def gone(stream: IO[str]) -> bool:
    """Return whether a stream can no longer be written: broken pipe, full disk, closed."""
    try:
        stream.flush()
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except (AttributeError, io.UnsupportedOperation):  # no poll here, or a stream in memory
        return False
    except (OSError, ValueError):
        return True


def give_up(stream: IO[str]) -> None:
    """Discard unwritten output, so that Python reports no error at exit."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, stream.fileno())
        finally:
            os.close(sink)
