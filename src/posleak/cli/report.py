"""`posleak report` and `posleak compare`: run folders as one page, and side by side."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from posleak.files import is_stream

from .app import app, emit, emit_text, out, tell, working
from .options import Json, Runs, named_path


class Format(StrEnum):
    table = "table"
    markdown = "markdown"
    latex = "latex"
    json = "json"


@app.command(name="report")
def report_command(
    runs: Runs,
    page: Annotated[
        Path, typer.Option("--out", parser=named_path, metavar="<path>", help="The page, one HTML file.")
    ] = Path("report.html"),
    assets: Annotated[
        Path | None,
        typer.Option(
            parser=named_path,
            metavar="<path>",
            help="Also write figures (PNG, SVG) and tables (CSV, Parquet) into this folder.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page of these runs: no network, opens anywhere, prints well.

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
    if not is_stream(written.page):  # a stream gets the page alone
        size = written.page.stat().st_size / 1e6
        out.print(f"{written.page.resolve()} ({size:.1f} MB)", soft_wrap=True)
    if assets is not None:
        out.print(f"{len(written.assets)} files in {assets.resolve()}", soft_wrap=True)


@app.command(name="compare")
def compare_command(
    runs: Runs,
    format: Annotated[Format, typer.Option(help="table, markdown, latex or json.")] = Format.table,
    as_json: Json = False,
) -> None:
    """Runs side by side: mask, drift and sink of each, and differences from the first with intervals.

    Example: `posleak compare runs/smollm2-135m runs/gemma3-270m --format latex`
    """
    from posleak.reports.compare import compare
    from posleak.reports.formats import FORMATS, as_table

    found = compare(runs)
    if as_json or format is Format.json:
        emit(found.as_dict())
    elif format is Format.table:
        out.print(as_table(found))
    else:
        emit_text(FORMATS[format.value](found))
