"""All commands: a module registers its commands on the app when it is imported, in the order of `posleak --help`.

Here: `posleak report`, `posleak compare`, and commands that have moved.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import posleak
from posleak.errors import InputError
from posleak.files import is_stream

from . import analyses as _analyses  # noqa: F401  isort: skip
from . import sweep as _sweep  # noqa: F401  isort: skip
from .app import app, emit, emit_text, main, out, tell, working
from .options import Json, Runs, path_option

__all__ = ["app", "main"]

MOVED = {
    "bench": "run `python -m benchmarks MODEL` in a checkout of the repository; it has the same options and JSON",
    "study": "run `posleak sweep NAME`, which has the same named comparisons and options",
    "zoo": "run `python -m zoo train`, `measure` or `list` in a checkout of the repository; `posleak models` lists the "
    "trained models that ship with posleak",
}
"""Commands that have moved: for one version they name the new place and exit with status 2."""


class Format(StrEnum):
    table = "table"
    markdown = "markdown"
    latex = "latex"
    json = "json"


class By(StrEnum):
    model = "model"
    layer = "layer"
    head = "head"


@app.command(name="report")
def report_command(
    runs: Runs,
    page: Annotated[Path, path_option("--out", help="The HTML file to write.")] = Path("report.html"),
    assets: Annotated[
        Path | None, path_option(help="Also write figures (PNG, SVG) and tables (CSV, Parquet) into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page of these runs, which needs no network and can be printed.

    Example: `posleak report runs/smollm2-135m-6be9177967 --out report.html --assets figures`
    """
    from posleak.reports.page import write_report

    with working("report"):
        written = write_report(runs, page, assets)
    for refused in written.refused:
        tell("warning", f"not shown: {refused.name}: {refused.reason}")
    if as_json:
        emit(written.as_dict())
        return
    if not is_stream(written.page):  # standard output gets the page alone
        size = written.page.stat().st_size / 1e6
        out.print(f"{written.page.resolve()} ({size:.1f} MB)", soft_wrap=True)
    if assets is not None:
        out.print(f"{len(written.assets)} files in {assets.resolve()}", soft_wrap=True)


@app.command(name="compare")
def compare_command(
    runs: Runs,
    by: Annotated[
        By, typer.Option(help="Compare means over all heads; or each layer or head, in runs of one architecture.")
    ] = By.model,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    as_json: Json = False,
) -> None:
    """Compare runs: all quantities of each run, and differences from the first run with intervals.

    Example: `posleak compare runs/smollm2-135m runs/gemma3-270m --format latex`
    """
    from posleak.reports.comparison_text import FORMATS, as_table

    comparison = posleak.compare(runs, by=by.value)
    if as_json or format is Format.json:
        emit(comparison.as_dict())
    elif format is Format.table:
        out.print(as_table(comparison))
    else:
        emit_text(FORMATS[format.value](comparison))


def moved_command(context: typer.Context) -> None:
    name = context.info_name or ""
    raise InputError("this command has moved", where=f"posleak {name}", remedy=MOVED[name])


for _name in MOVED:
    app.command(
        name=_name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(moved_command)  # fmt: skip
