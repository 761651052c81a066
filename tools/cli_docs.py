"""docs/cli.md, made from the commands themselves: `python -m tools.cli_docs > docs/cli.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, ParameterInfo

from posleak.cli.commands import app
from posleak.cli.failures import STATUSES

HEAD = """\
# Command line

Every command of posleak with every option, to look things up; `posleak COMMAND --help` shows the same. A command prints
a table for people on standard output, or JSON with `--json` ([json.md](json.md)); progress, warnings and errors go to
standard error. Made by `python -m tools.cli_docs`, and checked by a test to be current.

| exit status | means |
|---|---|
"""


def page() -> str:
    """The whole page, ending in one newline."""
    statuses = [f"| {status} | {cell(meaning)} |\n" for status, meaning in STATUSES.items()]
    lines = (line for command in app.registered_commands if not command.hidden for line in section(command))
    return "\n".join(["".join([HEAD, *statuses]), *lines])


def section(command: CommandInfo) -> Iterator[str]:
    """Yield the lines about one command: its help, and a table of its options with their defaults."""
    assert command.callback is not None
    yield f"## `posleak {command.name}`\n"
    yield inspect.cleandoc(command.callback.__doc__ or "") + "\n"
    yield "| option | default | does |"
    yield "|---|---|---|"
    hints = get_type_hints(command.callback, include_extras=True)
    for name, parameter in inspect.signature(command.callback).parameters.items():
        kind, about = get_args(hints[name])
        absent = any(parameter.default is nothing for nothing in (None, False, parameter.empty))
        default = "" if absent else f"`{parameter.default}`"
        written = spelled(name, kind, about)
        written = written.strip("[]") if parameter.default is parameter.empty else written  # required
        yield f"| `{written}` | {default} | {cell(about.help or '')} |"
    yield ""


def spelled(name: str, kind: Any, about: ParameterInfo) -> str:
    """How it is written: `[MODEL]`, `--json`, `--length INT`, `--edit STR …`."""
    if isinstance(about, ArgumentInfo):
        return f"[{about.metavar or name.upper()}]"
    # Inside Annotated an option has no default: typer keeps its first spelling in that place.
    spellings = [text for text in (about.default, *(about.param_decls or ())) if isinstance(text, str)]
    written = ", ".join(spellings) or f"--{name.replace('_', '-')}"
    plain = next((item for item in get_args(kind) if item is not type(None)), kind)  # `X | None` -> X
    if plain is bool:
        return written
    repeated = get_args(plain) if get_origin(plain) is list else ()
    return f"{written} {(repeated or (plain,))[0].__name__.upper()}" + (" …" if repeated else "")


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
