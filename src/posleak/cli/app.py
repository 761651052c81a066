"""The typer app, its consoles, and the display of status lines, errors and warnings.

torch is imported only when a model is loaded. Exit statuses: `cli.failures.STATUSES`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from posleak._version import __version__
from posleak.errors import PosleakWarning
from posleak.show.lines import PlainConsole
from posleak.show.streams import OUT, is_unicode, writing_to
from posleak.text import visible, visible_json

from .failures import STATUSES, CarriedError, error_handler

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""typer does not export it; depending on typer's version it is click's or a copy of click's."""

FILE_WIDTH = 120
"""Columns of output to a file or a pipe, unless COLUMNS is set."""

LABEL_STYLES = {"error": "bold red", "warning": "bold yellow"}


class Commands(TyperGroup):
    """A group of commands in which errors that typer would swallow reach the error handler of `run`."""

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
        raise CarriedError(error) from error
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


def _width() -> int | None:
    """Return the columns of standard output, None for the width of the terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return None if sys.stdout is not None and sys.stdout.isatty() else FILE_WIDTH


app = command_line("posleak", "Measure how absolute position leaks into the attention of decoder-only language models.")
out, err = PlainConsole(width=_width()), PlainConsole(stderr=True)


def run(commands: typer.Typer) -> None:
    """Run a command line. Every error becomes a message and an exit status, never a traceback."""
    with error_handler(_show_failure):
        commands()


def main() -> None:
    """Run `posleak`."""
    run(app)


def _show_failure(label: str, message: str) -> None:
    err.show_cursor(True)  # an interrupted status line may have hidden it
    tell(label, message)


def tell(label: str, message: str) -> None:
    """Print a message on standard error, without wrapping, after the label `error` or `warning` or none."""
    head = Text(f"{label} ", style=LABEL_STYLES.get(label, "")) if label else Text()
    err.print(Text.assemble(head, visible(message)), soft_wrap=True)


def silence() -> None:
    """Print nothing more: another process of this command prints the same."""
    out.quiet = err.quiet = True
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on standard error; yield a function that changes its text."""
    status = err.status(Text(visible(text)), spinner="dots" if is_unicode(err.file) else "line")
    try:
        status.start()
        yield lambda text: status.update(Text(visible(text)))
    finally:
        status.stop()


def emit(value: Any) -> None:
    """Print JSON on standard output. NaN and infinity become null."""
    from posleak.typed import plain

    text = json.dumps(plain(value), indent=2, ensure_ascii=not is_unicode(sys.stdout), allow_nan=False)
    with writing_to(OUT):
        sys.stdout.write(visible_json(text) + "\n")


def emit_text(text: str) -> None:
    """Print a document on standard output, without wrapping."""
    with writing_to(OUT):
        sys.stdout.write(visible(text))


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """Print each warning of posleak as one line on standard error."""

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, PosleakWarning):
            tell("warning", str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        warnings.simplefilter("always", PosleakWarning)
        yield


def _print_version(value: bool) -> None:
    if value:
        out.print(f"posleak {__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure how absolute position leaks into the attention of decoder-only language models."""
