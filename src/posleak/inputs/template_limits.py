"""Limits on the run time and the output of a chat template, which is a program written by the model's author.

transformers runs templates in a sandbox that limits each `range`, but neither nested loops nor the output length.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from posleak.errors import InputError

TEMPLATE_SECONDS = 10.0
"""CPU time limit for one chat; templates take milliseconds."""
TEMPLATE_CHARACTERS = 1 << 24


@contextmanager
def limited_template() -> Iterator[None]:
    """Raise InputError in the `with` block if a chat template takes too long or writes too much.

    A trace function of this thread is called for every line of the template, and for no other code. It cannot interrupt
    a single operation, such as a power of large numbers. The trace function of a debugger is restored on exit.
    """
    deadline, written, before = time.thread_time() + TEMPLATE_SECONDS, 0, sys.gettrace()

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal written
        if not _is_template(frame):
            return None
        if event == "return" and isinstance(value, str):  # values that a generator yields are included
            written += len(value)
        if written > TEMPLATE_CHARACTERS:
            raise _stopped("writes too much", f"more than {TEMPLATE_CHARACTERS:,} characters")
        if time.thread_time() > deadline:
            raise _stopped("takes too long", f"more than {TEMPLATE_SECONDS:g} s of CPU time for one chat")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_template(frame: FrameType) -> bool:
    """Return whether a frame belongs to a compiled template or to jinja2 itself."""
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename == "<template>" or module.partition(".")[0] == "jinja2"


def _stopped(what: str, got: str) -> InputError:
    return InputError(
        f"the chat template {what} and was stopped", where="inputs", got=got,
        remedy="check tokenizer.chat_template and set another one, or pass the chat as a text",
    )  # fmt: skip
