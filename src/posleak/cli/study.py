"""`posleak study`: named comparisons of many measurements, as a balance table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from posleak.plain import plain

from .app import Json, app, emit, err, out, spoken_warnings
from .tables import COLOURS, number, percent

if TYPE_CHECKING:
    from posleak.runs.study import Row
    from posleak.studies.cells import Study


@app.command(name="study")
def study_command(
    name: Annotated[
        str, typer.Argument(help="architectures, knobs, lengths, first-token or dtypes.")
    ] = "architectures",
    models: Annotated[list[str] | None, typer.Option("--model", help="Other models, in the study's order.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per prompt, instead of the study's own.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts, instead of the study's own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of tokens and of intervals.")] = 0,
    root: Annotated[Path, typer.Option("--out", help="Where runs are kept and reused.")] = Path("runs"),
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown, all numbers in it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare many measurements: the balance of mask, drift and sink across architectures, knobs or lengths.

    Example: `posleak study architectures`
    """
    from posleak.runs.study import run_study
    from posleak.studies.cells import study

    changes = {
        key: value for key, value in (("length", length), ("prompts", prompts), ("seed", seed)) if value is not None
    }
    chosen = study(name).at(models=models or (), **changes)
    with spoken_warnings(), err.status(name) as status:
        rows = run_study(chosen, root, status.update)
    if as_json:
        emit({"study": chosen.name, "question": chosen.question, "rows": [plain(row.as_dict()) for row in rows]})
    elif markdown:
        out.print(study_markdown(rows), soft_wrap=True, highlight=False, markup=False)
    else:
        out.print(study_table(chosen, rows))


def study_table(chosen: Study, rows: list[Row]) -> Group:
    """The balance table: shares, residual power, its slope with depth, and what an edit removed."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("cell", "N", "total", "mask", "drift", "sink", "residual", "slope", "removed"):
        table.add_column(name, style=COLOURS.get(name, ""), no_wrap=name != "cell")
    for row in rows:
        numbers = row.balance.numbers["all"]
        shares = [percent(numbers.share[part]) for part in ("mask", "drift", "sink")]
        table.add_row(
            escape(row.cell.label), str(row.cell.length), number(numbers.power["total"]), *shares,
            number(numbers.power["residual"]), number(row.balance.relative["all"]),
            percent(row.removed["residual, all"]) if row.removed else "",
        )  # fmt: skip
    return Group(
        Text(chosen.question, style="bold"),
        table,
        Text(
            "total and residual: powers in nats², all queries; mask, drift, sink: shares of the total; slope: of the "
            "residual per relative depth, over its mean; removed: residual against the first cell of the model; "
            "95% bootstrap intervals over prompts, early queries in study.json",
            style="dim",
        ),
    )


def study_markdown(rows: list[Row]) -> str:
    """Every number of the balance, early and all queries, with its interval: a table for a document."""
    names = ("total", "mask", "drift", "sink", "residual")
    head = ["cell", "N", "n", "queries", *names, "mask share", "drift share", "sink share", "at 0", "slope", "removed"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        for queries in ("early", "all"):
            numbers = row.balance.numbers[queries]
            cells = [row.cell.label, str(row.cell.length), str(row.cell.prompts), queries]
            cells += [number(numbers.power[name]).plain.strip() for name in names]
            cells += [percent(numbers.share[name]).plain for name in ("mask", "drift", "sink")]
            cells.append(number(row.balance.sink_attention).plain.strip() if queries == "all" else "")
            slopes = [f"{kind} {number(value).plain.strip()}" for kind, value in row.balance.relative.items()]
            cells.append("; ".join(slopes) if queries == "all" else "")
            cells.append(percent(row.removed[f"residual, {queries}"]).plain if row.removed else "")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
