"""Options in messages: `--max-memory 8GB` on the command line, `max_memory='8GB'` in Python.

Messages are written and stored with options. Where they are shown outside of the command line, errors and warnings are
translated. A command alone, `posleak doctor`, is then the function `posleak.doctor`; one with arguments is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

FLAGS = ("trust-remote-code", "allow-pickle", "verify", "fresh", "loss", "by-layer", "retry-failed")
OPTIONS = (
    "inputs", "bos", "length", "prompts", "batch", "seed", "origin", "density", "edit", "metrics", "out", "max-memory",
    "device", "dtype", "device-map", "revision", "tokenizer", "donor", "rank", "nodes", "tokens", "paper", "try",
    "model", "by", "adapter", "base", "offload", "parallel", "engine", "address", "workers", "retries", "assets",
    "page",
)  # fmt: skip
"""Options with a value that are parameters of public functions; others are shown as they are."""
RENAMED = {"edit": "edits", "try": "groups", "model": "models"}
"""Parameters with another name than their option."""

FUNCTIONS = (
    "measure", "trace", "circuit", "origin", "claims", "advise", "doctor", "report", "compare", "sweep", "collect",
)  # fmt: skip
"""Commands that are functions of the same name."""

CHOICES = (
    "all", "auto", "backcopy", "bfloat16", "constant", "cpu", "float16", "float32", "float64", "gradients", "intervene",
    "local", "long", "none", "plain", "random", "ray", "tokenizer",
)  # fmt: skip
"""Words that are values after an option; any other word continues the sentence."""

_NUMBER, _PLACEHOLDER = r"\d+(?:,\d{3})*(?!\w|\.\d)", r"[A-Z][A-Z.a-z]*"
_WRITTEN = rf"|'.*'|{_PLACEHOLDER}"
_END = r"(?![\w-])"
_TEXT = r"(?:[^\s,;()]|,(?=\d))"
_VALUE = rf"'[^']*'|{_NUMBER}|{_PLACEHOLDER}|{_TEXT}*[=:@\d]{_TEXT}*(?<![.:])|(?:{'|'.join(CHOICES)})\b"
_EDIT = rf"--(edit) ({_TEXT}+)(?<![.:])"
_OPTION = re.compile(
    rf"`posleak [^`]*`|--({'|'.join(FLAGS)}){_END}|{_EDIT}|--({'|'.join(OPTIONS)}){_END}(?: ({_VALUE}))?"
)

_on_command_line = False


@contextmanager
def command_line() -> Iterator[None]:
    """Show messages with options, as the command line does."""
    global _on_command_line
    before, _on_command_line = _on_command_line, True
    try:
        yield
    finally:
        _on_command_line = before


def spelled(message: str) -> str:
    """Return a message as it is shown: with options on the command line, with parameters in Python."""
    return message if _on_command_line else _OPTION.sub(_parameter, message)


def _parameter(match: re.Match[str]) -> str:
    flag, edit, text, option, value = match.groups()
    if flag:
        return f"{flag.replace('-', '_')}=True"
    if not edit and not option:
        return re.sub(rf"^`posleak ({'|'.join(FUNCTIONS)})`$", r"`posleak.\1`", match[0])
    name, value = RENAMED.get(edit or option, edit or option).replace("-", "_"), text or value or ""
    if re.fullmatch(_NUMBER, value):
        return f"{name}={value.replace(',', '')}"
    return f"{name}={value if re.fullmatch(_WRITTEN, value) else repr(value)}"
