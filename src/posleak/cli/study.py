"""`posleak study`: named comparisons of many measurements, as a balance table."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posleak.errors import NoEffectError

from .app import RUNS, app, emit, out, spoken_warnings, working
from .options import Json, MaxMemory, Seed, named, named_path

if TYPE_CHECKING:
    from rich.console import Group

    from posleak.sweeps.studies.run import Table


@app.command(name="study")
def study_command(
    name: Annotated[
        str, typer.Argument(help="architectures, knobs, lengths, first-token or dtypes.")
    ] = "architectures",
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", parser=named, metavar="<str>", help="Models instead of the study's, in its order; repeatable."
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per prompt, instead of the study's own.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts, instead of the study's own.")] = None,
    seed: Seed = 0,
    root: Annotated[
        Path, typer.Option("--out", parser=named_path, metavar="<path>", help="Where runs are kept and reused.")
    ] = RUNS,
    max_memory: MaxMemory = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table with all numbers.")] = False,
    as_json: Json = False,
) -> None:
    """Compare many measurements: the balance of mask, drift and sink across architectures, lengths or settings.

    `knobs` changes the rotation or the window on the same weights; `first-token` takes the BOS away.

    Example: `posleak study architectures`
    """
    from posleak.runs.spec import parse_bytes
    from posleak.sweeps.studies.cells import study_named

    changes = {
        key: value for key, value in (("length", length), ("prompts", prompts), ("seed", seed)) if value is not None
    }
    chosen = study_named(name).at(models=models or (), **changes)
    for cell in chosen.cells:
        with suppress(NoEffectError):  # such a cell is left out, and the table says so
            _ = cell.spec  # refuses what cannot be measured before a model is loaded
    parse_bytes(max_memory)
    from posleak.sweeps.studies.run import run_study

    with spoken_warnings(), working(name) as update:
        found = run_study(chosen, root, update, max_memory=max_memory)
    if as_json:
        emit(found)
    elif markdown:
        out.print(study_markdown(found), soft_wrap=True)
    else:
        out.print(study_table(found))


def study_table(found: Table) -> Group:
    """The balance table: shares, residual power, its slope with depth, and what an edit removed."""
    from rich.console import Group

    from posleak.show.lines import prose
    from posleak.show.terminal import cell, share, table

    names = ("cell", "N", "total", "mask", "drift", "sink", "residual", "slope", "removed")
    made = table(names, wrap=["cell"])
    for row in found.rows:
        numbers = row.balance.numbers["all"]
        made.add_row(
            row.cell.label, str(row.cell.length), cell(numbers.power["total"]),
            *(share(numbers.share[part]) for part in ("mask", "drift", "sink")), cell(numbers.power["residual"]),
            cell(row.balance.relative["all"]), share(row.removed["residual, all"]) if row.removed else "",
        )  # fmt: skip
    return Group(
        prose(found.question, style="bold"),
        made,
        *(prose(f"left out: {label}: {why}", style="dim") for label, why in found.left_out.items()),
        prose(
            "total and residual: powers in nats², all queries; mask, drift, sink: shares of the total; slope: change "
            "of the residual per relative depth, divided by its mean; removed: 1 − residual power / that of the "
            "model's first cell; 95% jackknife intervals over prompts; early queries are in study.json",
            style="dim",
        ),
    )


def study_markdown(found: Table) -> str:
    """Every number of the balance, early and all queries, with its interval: a table for a document."""
    from posleak.show.terminal import cell, share

    names = ("total", "mask", "drift", "sink", "residual")
    head = ["cell", "N", "n", "queries", *names, "mask share", "drift share", "sink share", "at 0", "slope", "removed"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in found.rows:
        for queries in ("early", "all"):
            numbers, whole = row.balance.numbers[queries], queries == "all"
            cells = [row.cell.label, str(row.cell.length), str(row.cell.prompts), queries]
            cells += [cell(numbers.power[name]).plain.strip() for name in names]
            cells += [share(numbers.share[name]).plain for name in ("mask", "drift", "sink")]
            cells.append(cell(row.balance.sink_attention).plain.strip() if whole else "")
            slopes = [f"{kind} {cell(value).plain.strip()}" for kind, value in row.balance.relative.items()]
            cells.append("; ".join(slopes) if whole else "")
            cells.append(share(row.removed[f"residual, {queries}"]).plain if row.removed else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
