"""The app, where it prints, and how it shows work, errors and warnings. torch is imported only when a model is loaded.

Exit statuses are in `posleak.show.failures`: 0 success, 1 a check failed, 2 a call that cannot work, 3 a law that the
model breaks on purpose, 70 an error that nobody foresaw, 130 stopped with Ctrl-C, 141 nobody reads the output any more.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from posleak._version import __version__
from posleak.errors import PosleakWarning
from posleak.show.console import PlainConsole
from posleak.show.failures import STATUSES, Passed, net
from posleak.show.streams import OUT, is_unicode, writing_to
from posleak.text import visible, visible_json

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""typer does not export it, and it is click's or typer's own copy of click's, by typer's version."""


class Commands(TyperGroup):
    """All commands. What typer would end the process for without a word reaches the net of `main`."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _not_swallowed():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _not_swallowed():
            return super().invoke(ctx)


@contextmanager
def _not_swallowed() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, EOFError, OSError) as error:
        raise Passed(error) from error
    except UsageError as error:  # its message quotes the arguments
        error.message = visible(str(error.message))  # type: ignore[attr-defined]
        raise


def command_line(name: str, help: str) -> typer.Typer:
    """Return a command line with posleak's handling of errors and output."""
    statuses = "; ".join(f"{status} {meaning}" for status, meaning in STATUSES.items())
    return typer.Typer(
        name=name, cls=Commands, help=help, epilog=f"Exit status: {statuses}.", no_args_is_help=True,
        rich_markup_mode="markdown", pretty_exceptions_enable=False,
    )  # fmt: skip


app = command_line("posleak", "Where does a decoder-only language model's sense of absolute position come from?")
RUNS = Path("runs")
"""Where runs are kept unless `--out` says otherwise."""

err = PlainConsole(stderr=True)
FILE_WIDTH = 120
"""Columns of what is written into a file or a pipe, unless COLUMNS says otherwise."""


def _width() -> int | None:
    """Columns of standard output; None: as many as the terminal has."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return None if sys.stdout is not None and sys.stdout.isatty() else FILE_WIDTH


out = PlainConsole(width=_width())

STYLES = {"error": "bold red", "warning": "bold yellow"}


def run(commands: typer.Typer) -> None:
    """Run a command line. Every error becomes a message and an exit status, never a traceback."""
    with net(_last_words):
        commands()


def main() -> None:
    """Run `posleak`."""
    run(app)


def _last_words(word: str, message: str) -> None:
    err.show_cursor(True)  # a line of status that was interrupted while it began would leave it hidden
    tell(word, message)


def tell(word: str, message: str) -> None:
    """A message on standard error after `error`, `warning` or nothing; as it is, in lines as long as they are."""
    head = Text(f"{word} ", style=STYLES.get(word, "")) if word else Text()
    err.print(Text.assemble(head, visible(message)), soft_wrap=True)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A line of status on standard error while something takes long; gives a function that changes its text."""
    status = err.status(Text(visible(text)), spinner="dots" if is_unicode(err.file) else "line")
    try:
        status.start()
        yield lambda text: status.update(Text(visible(text)))
    finally:
        status.stop()


def emit(value: Any) -> None:
    """JSON on standard output, and nothing else there; null for what is not a finite number."""
    from posleak.typed import plain

    text = json.dumps(plain(value), indent=2, ensure_ascii=not is_unicode(sys.stdout), allow_nan=False)
    with writing_to(OUT):
        sys.stdout.write(visible_json(text) + "\n")


def emit_text(text: str) -> None:
    """Text for a document on standard output, in lines as long as they are."""
    with writing_to(OUT):
        sys.stdout.write(visible(text))


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """posleak's warnings as one line each on standard error."""
    with warnings.catch_warnings():
        warnings.showwarning = _speak  # type: ignore[assignment]
        warnings.simplefilter("always", PosleakWarning)
        yield


def _speak(message: Warning | str, category: type[Warning], *_: Any) -> None:
    if issubclass(category, PosleakWarning):
        tell("warning", str(message))


def version(value: bool) -> None:
    if value:
        out.print(f"posleak {__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Where does a decoder-only language model's sense of absolute position come from?"""
