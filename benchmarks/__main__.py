"""Measure what posleak costs, relative to the plain forward pass and to other tools: `python -m benchmarks MODEL`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from posleak.cli.app import command_line, emit, out, run, spoken_warnings, working
from posleak.cli.options import ModelRequest, Seed, model_command, require_valid
from posleak.show.numbers import NAN

if TYPE_CHECKING:
    from rich.console import Group

    from benchmarks import Benchmark, BenchResult
    from benchmarks.timing import Spread
    from posleak.show.terminal import TableCell


app = command_line("benchmarks", "Measure what posleak costs.")


@model_command("bench", app)
def bench_command(
    model: ModelRequest,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens per prompt; repeatable. Default: 1024, 2048, 4096 and 8192.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Case to run, e.g. eager; repeatable. Default: all that are installed.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds; peers run in the first three only.")] = 5,
    peers_up_to: Annotated[int, typer.Option(help="Longest prompt for peers and edits, to save time.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Prompts per forward pass.")] = 1,
    seed: Seed = 0,
) -> None:
    """Measure time and memory of posleak, of the plain forward pass, and of other tools (peers).

    Example: `python -m benchmarks smollm2-135m --length 1024 --repeats 3`
    """
    for tokens in length or (None,):
        require_valid(model.max_memory, length=tokens, prompts=batch, batch=batch, seed=seed)
    from benchmarks import LENGTHS, bench, chosen_cases

    lengths = tuple(length or LENGTHS)
    chosen_cases(case or ())
    subject = model.load()
    with spoken_warnings(), working("bench") as update:
        result = bench(
            subject, reload={"model": model.name, "loading": model.loading}, lengths=lengths, names=case or (),
            repeats=repeats, peers_up_to=peers_up_to, batch=batch, seed=seed, max_memory=model.max_memory,
            progress=update,
        )  # fmt: skip
    if model.as_json:
        emit(result.as_dict())
    else:
        out.print(bench_table(result))


def bench_table(benchmark: Benchmark) -> Group:
    """Return one row per case and length: medians, with the smallest and the largest round."""
    from rich.console import Group

    from posleak.show.lines import prose
    from posleak.show.terminal import table

    names = ("tokens", "case", "seconds", "of a forward pass", "MB", "n")
    rows = table(names, right=[name for name in names if name != "case"], wrap=["of a forward pass"])
    for result in benchmark.results:
        rows.add_row(str(result.length), result.name, *_cells(result))
    machine = benchmark.machine
    return Group(
        prose(benchmark.identity.name, style="bold"),
        prose(f"{machine['processor']}, {machine['threads']} threads · {benchmark.identity.dtype}", style="dim"),
        rows,
        prose("medians of rounds (smallest–largest); MB: peak above the loaded model, in its own process", style="dim"),
        *(
            prose(f"{result.name} at {result.length}: {_spread(ratio).plain} of {result.base}, n={ratio.n}")
            for result in benchmark.results
            if (ratio := result.ratio_to_base) is not None
        ),
    )


def _cells(result: BenchResult) -> tuple[str | TableCell, str | TableCell, str, str]:
    """Return seconds, ratio, memory and number of rounds; the error instead of the ratio if there is one."""
    memory = NAN if result.peak_mb is None else f"{result.peak_mb:.0f}"
    if result.seconds is None or result.ratio is None:
        return NAN, result.error or "not timed", memory, "0"
    return _spread(result.seconds, ".2f"), _spread(result.ratio), memory, str(result.seconds.n)


def _spread(spread: Spread, form: str = ".3f") -> TableCell:
    """Return the median with the range of the rounds."""
    from rich.text import Text

    from posleak.show.terminal import TableCell

    return TableCell(Text(f"{spread.median:{form}}"), f"({spread.low:{form}}–{spread.high:{form}})")


if __name__ == "__main__":
    run(app)
