"""The app, where it prints, and how it shows errors and warnings. torch is imported only when a model is loaded."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from posleak._version import __version__
from posleak.errors import PosleakError, PosleakWarning

app = typer.Typer(
    name="posleak",
    help="Where does a decoder-only language model's sense of absolute position come from?",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
err = Console(stderr=True)
RUNS = Path("runs")
"""Where runs are kept unless `--out` says otherwise."""

out = Console(width=None if sys.stdout.isatty() else 120)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]


def main() -> None:
    """Entry point: posleak's own errors become a message and an exit status, never a traceback."""
    try:
        app()
    except PosleakError as error:
        err.print("[bold red]error[/bold red]", end=" ")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)


def emit(value: Any) -> None:
    """JSON on standard output, and nothing else there; null for what is not a finite number."""
    from posleak.typed import plain

    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """posleak's warnings as one line each on standard error."""
    with warnings.catch_warnings():
        warnings.showwarning = _speak  # type: ignore[assignment]
        warnings.simplefilter("always", PosleakWarning)
        yield


def _speak(message: Warning | str, category: type[Warning], *_: Any) -> None:
    if issubclass(category, PosleakWarning):
        err.print("[bold yellow]warning[/bold yellow]", end=" ")
        err.print(str(message), markup=False, highlight=False, soft_wrap=True)


def version(value: bool) -> None:
    if value:
        out.print(f"posleak {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Where does a decoder-only language model's sense of absolute position come from?"""
