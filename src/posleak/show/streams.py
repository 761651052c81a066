"""Standard output and standard error that take any text, whatever the terminal's encoding and whoever closed them."""

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
"""The name under which Python's codecs know `ascii_fallback`."""


def prepare_streams() -> None:
    """Make both streams fit: what their encoding lacks is replaced, and one that is closed becomes a sink."""
    codecs.register_error(HANDLER, ascii_fallback)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors=HANDLER))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def is_unicode(stream: IO[str]) -> bool:
    """Can every character be written to it?"""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


@contextmanager
def writing_to(name: str) -> Iterator[None]:
    """An error of the system that names no file is about this stream: whoever shows it can say so."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            error.filename = name
        raise


def gone(stream: IO[str]) -> bool:
    """Can nothing be written to it any more? As when its reader went away, or its disk is full."""
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
    """Let everything that is still unwritten vanish; or Python would complain about it when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, stream.fileno())
        finally:
            os.close(sink)
