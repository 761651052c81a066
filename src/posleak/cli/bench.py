"""`posleak bench`: what a measurement costs, against the plain forward pass and against the peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .app import Json, emit, err, out, spoken_warnings
from .subject import Load, model_command

if TYPE_CHECKING:
    from posleak.bench import Benchmark


@model_command("bench")
def bench_command(
    load: Load,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of the prompt; repeatable. Default: 1024, 2048, 4096 and 8192.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Contestants; repeatable. Default: all whose packages are installed.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved rounds; peers take part in the first three.")] = 5,
    peers_up_to: Annotated[
        int, typer.Option(help="The longest prompt that peers and edits are given, to save time.")
    ] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    as_json: Json = False,
) -> None:
    """Time and memory of a measurement, as ratios to the plain forward pass, beside the peers'.

    Example: `posleak bench smollm2-135m --length 1024 --repeats 3`
    """
    from posleak.bench import LENGTHS, bench, chosen_cases
    from posleak.probe import default_plan

    lengths = tuple(length or LENGTHS)
    for asked in lengths:
        default_plan(asked)
    chosen_cases(case or ())
    subject = load()
    with spoken_warnings(), err.status("bench") as status:
        found = bench(
            subject, reload=reloading(load), lengths=lengths, names=case or (), repeats=repeats,
            peers_up_to=peers_up_to, batch=batch, seed=seed, progress=status.update,
        )  # fmt: skip
    if as_json:
        emit(found.as_dict())
    else:
        out.print(bench_table(found))


def reloading(load: Any) -> dict[str, Any]:
    """What a process of its own needs in order to load the same model: `load` is a partial of it."""
    return {"model": load.args[0], "loading": load.keywords}


def bench_table(found: Benchmark) -> Group:
    """One line a contestant and length: medians, with the smallest and the largest repeat."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("tokens", "contestant", "seconds", "of a forward pass", "MB", "n"):
        table.add_column(name, justify="left" if name == "contestant" else "right")
    for row in found.as_dict()["cases"]:
        table.add_row(str(row["length"]), row["name"], *_cells(row))
    about = found.machine
    return Group(
        Text(found.identity["name"], style="bold"),
        Text(f"{about['processor']}, {about['threads']} threads · {found.identity['dtype']}", style="dim"),
        table,
        Text("medians of interleaved rounds (smallest–largest); MB: peak above the loaded model, alone", style="dim"),
    )


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    if row["seconds"] is None:
        return "–", row["error"] or "not timed", _megabytes(row), "0"
    (low, high), (least, most) = row["seconds_range"], row["ratio_range"]
    seconds = f"{row['seconds']:.2f} ({low:.2f}–{high:.2f})"
    return seconds, f"{row['ratio_to_forward']:.3f} ({least:.3f}–{most:.3f})", _megabytes(row), str(row["n"])


def _megabytes(row: dict[str, Any]) -> str:
    return "–" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
