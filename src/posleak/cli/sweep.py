"""`posleak sweep` and `posleak collect`: many runs from a manifest, and all of them as one table and one page."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from posleak.show.lines import prose
from posleak.show.numbers import estimate
from posleak.show.terminal import cell as number, share, table
from posleak.text import format_bytes

from .app import app, emit, err, out, spoken_warnings, tell, working
from .failures import FAILED
from .options import Json, MaxMemory, named
from .progress import board_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from posleak.sweeps.collect import BalanceRow, BalanceTable
    from posleak.sweeps.state import SweepProgress
    from posleak.sweeps.sweep import Sweep

REPORT_INTERVAL = 30.0
"""Seconds between status lines without a terminal."""

MAX_RUNNING, MAX_NAMED, MAX_LISTED = 8, 3, 40
"""Maximum numbers of cells that are listed: running cells on a terminal, in a warning, in a dry run."""

POWERS, SHARES = ("total", "mask", "drift", "sink", "residual"), ("mask", "drift", "sink")

BALANCE_LEGEND = (
    "total and residual: powers in nats², all queries, weighted by attention; mask, drift, sink: shares of the total; "
    "slope: change of the residual per relative depth, divided by its mean; removed: 1 − residual power / residual "
    "power of the first cell of the model, weighted by the attention of that cell; 95% jackknife intervals over "
    "prompts; early queries and evenly weighted powers: --markdown or --json"
)


text_option, path_option = (partial(typer.Option, parser=named, metavar=kind) for kind in ("<str>", "<path>"))
"""Options whose value must not be empty."""


class EngineName(StrEnum):
    local = "local"
    ray = "ray"


Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print mask, drift and sink of every cell as a Markdown table.")
]


@app.command(name="sweep")
def sweep_command(
    manifest: Annotated[
        str,
        typer.Argument(
            metavar="MANIFEST",
            parser=named,
            help="A YAML file (docs/sweeps.md), or architectures, knobs, lengths, first-token, dtypes or robustness.",
        ),
    ],
    models: Annotated[
        list[str] | None, text_option("--model", help="Replace a model of the manifest, in its order; repeatable.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per prompt, instead of the manifest's.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Number of prompts, instead of the manifest's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for the prompts, instead of the manifest's.")] = None,
    engine: Annotated[EngineName, typer.Option(help="local: one cell after another; ray: on a Ray cluster.")] = (
        EngineName.local
    ),
    address: Annotated[str | None, text_option(help="Address of the Ray cluster. Default: start a local one.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Maximum number of Ray workers.")] = None,
    root: Annotated[
        str | None,
        path_option(
            "--out", help="A folder, or an address such as s3://bucket/sweep. Default: the manifest's, or runs/NAME."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the cells, their states, and estimates of time and memory.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed cells again.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="Maximum number of restarts of a cell whose worker died.")] = 2,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Hash every file of finished cells, even if size and time are unchanged."),
    ] = False,
    max_memory: MaxMemory = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code that comes with the models.")
    ] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Allow weights stored as pickle files.")] = False,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Measure many models, checkpoints, edits, lengths and seeds, on this machine or on a Ray cluster.

    A cell is one measurement of the sweep. To resume an interrupted sweep, run the same command again; finished cells
    are not measured again. An error in a cell is written to its folder, the other cells continue, and the exit status
    is 1. If the manifest has a `question`, the sweep ends with a balance table: mask, drift and sink in every cell.

    Manifests that ship with posleak: `architectures` compares models, `knobs` changes the rotation or the window,
    `lengths` changes the length, `first-token` removes the BOS token, `dtypes` changes the precision, and `robustness`
    changes every setting of a trace.

    Examples: `posleak sweep architectures`, `posleak sweep grid.yaml --engine ray --workers 4`
    """  # fmt: skip
    from posleak.sweeps.sweep import planned_sweep, sweep

    if dry_run:
        plan = planned_sweep(manifest, models or (), root, verify=verify, length=length, prompts=prompts, seed=seed)
        if as_json:
            emit(plan)
        else:
            for item in plan_table(plan):
                out.print(item)
        return
    with spoken_warnings(), _progress(as_json) as on_progress:
        result = sweep(
            manifest, models=models or (), length=length, prompts=prompts, seed=seed, out=root, engine=engine.value,
            address=address, workers=workers, retries=retries, retry_failed=retry_failed, verify=verify,
            max_memory=max_memory, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
            progress=on_progress,
        )  # fmt: skip
    if as_json:
        emit(result)
    elif markdown:
        out.print(balance_markdown(result.balance), soft_wrap=True)
    else:
        for item in balance_tables(result.balance) if result.question is not None else ():
            out.print(item)
        for item in summary(result):
            out.print(item, soft_wrap=True)
    if not result.complete:
        raise typer.Exit(FAILED)


@app.command(name="collect")
def collect_command(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", parser=named, help="Folder of a sweep, as passed to its --out.")
    ],
    page: Annotated[str | None, path_option(help="Path of the HTML page. Default: FOLDER/collected.html.")] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Also show the balance of mask, drift and sink in every cell.")
    ] = False,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Collect all runs of a sweep into one table (Parquet) and one page: curves over checkpoints, maps of two settings.

    Example: `posleak collect runs/grid`
    """
    from posleak.reports.collected import gather_sweep

    with working("collecting"):
        gathered = gather_sweep(folder, page)
        collected = gathered.collected
        balances = collected.balance if balance or markdown else None
    _warn("not shown", [(each.label, each.why) for each in collected.omitted])
    _warn("incomplete", [(each.label, each.why) for each in collected.notes])
    _warn("failed, not shown", [(error.cell.details, error.what) for error in collected.failed])
    if as_json:
        emit({**gathered.as_dict(), "balance": balances})
        return
    if markdown and balances is not None:
        out.print(balance_markdown(balances), soft_wrap=True)
        return
    for item in balance_tables(balances) if balances is not None else ():
        out.print(item)
    out.print(f"{len(collected.finished)} finished cells, {len(collected.table):,} numbers", soft_wrap=True)
    out.print(gathered.table, soft_wrap=True)
    out.print(gathered.page, soft_wrap=True)


def _warn(what: str, cells: list[tuple[str, str]]) -> None:
    """Warn of cells without results, those with the same reason in one line."""
    reasons = dict[str, list[str]]()
    for label, why in cells:
        reasons.setdefault(why, []).append(label)
    for why, labels in reasons.items():
        more = f" and {len(labels) - MAX_NAMED} more cells" if len(labels) > MAX_NAMED else ""
        tell("warning", f"{what}: {', '.join(labels[:MAX_NAMED])}{more}: {why}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[SweepProgress], None]]:
    """Show cells done, running, failed, and the time left: a bar on a terminal, else a line every 30 seconds."""
    reported, last = time.monotonic(), (-1, -1)

    def report(at: SweepProgress) -> None:
        nonlocal reported, last
        now = time.monotonic()
        if now - reported >= REPORT_INTERVAL and (at.done, len(at.running)) != last:
            reported, last = now, (at.done, len(at.running))
            tell("", "; ".join([_counts(at), *_running(at, 1)]))

    if not err.is_terminal:
        yield (lambda at: None) if quiet else report
        return
    with board_view(err) as show:
        yield lambda at: show(_counts(at), at.done, at.total, _running(at, MAX_RUNNING))


def _counts(at: SweepProgress) -> str:
    """Return, for example, `12 of 24 cells finished, 2 running, 1 failed; about 3 minutes left`."""
    return at.text + ("" if at.left is None or not at.running else f"; about {minutes(at.left)} left")


def _running(at: SweepProgress, most: int) -> list[str]:
    """Return a line per running cell, such as `smollm2-135m, 512 tokens, seed 0: prompts 0–7 of 16`."""
    lines = [f"{cell}: {what}" for cell, what in at.running.items()]
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


# -- tables ------------------------------------------------------------------------------------------------------------


def minutes(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def summary(result: Sweep) -> Iterator[RenderableType]:
    """Yield how a sweep ended: counts, and every cell without results with the reason."""
    counted = f"{result.counts} of {len(result.cells)} cells; {len(result.computed)} measured now"
    yield prose(f"{result.name}: {counted}", style="bold")
    for status in result.cells:
        if status.state != "finished" and status.why:
            yield prose(f"{status.state.value}: {status.cell.details}: {status.why}")
    if any(status.state == "failed" for status in result.cells):
        yield prose("measure failed cells again with --retry-failed; their folders have error.json", style="dim")
    yield prose(f"results in {result.root}; `posleak collect {result.root}` makes a table and a page", style="dim")


def plan_table(result: Sweep) -> Iterator[RenderableType]:
    """Yield the table of a dry run: cells, their states, and estimates of time and memory for those that are open."""
    guessed = result.guesses or {}
    rows = table(("cell", "state", "time", "memory"), wrap=["cell", "state"])
    for status in result.cells[:MAX_LISTED]:
        guess = guessed.get(status.cell.id)
        took = None if status.record is None else minutes(status.record.seconds.measuring)
        about = None if guess is None or guess.seconds is None else f"~{minutes(guess.seconds)}"
        memory = None if guess is None or guess.memory is None else f"~{format_bytes(guess.memory)}"
        state = f"{status.state.value}: {status.why}" if status.why else status.state.value
        rows.add_row(status.cell.details, state, took or about or "–", memory or "–")
    yield rows
    if (more := len(result.cells) - MAX_LISTED) > 0:
        yield prose(f"and {more} more cells", style="dim")
    yield prose(f"{result.name}: {len(result.cells)} cells: {result.counts}; into {result.root}", style="bold")
    totals, known = list[str](), [guess for guess in guessed.values() if guess.seconds is not None]
    if known:
        seen = all(guess.seen for guess in known)
        basis = "from finished cells of the same models" if seen else "estimated from the models' sizes"
        totals.append(f"about {minutes(sum(guess.seconds or 0.0 for guess in known))} on one worker ({basis})")
    if most := max((guess.memory or 0 for guess in guessed.values()), default=0):
        totals.append(f"a worker needs about {format_bytes(most)}")
    if unknown := len(guessed) - len(known):
        totals.append(f"no estimate for {unknown} cells, whose models are not on this machine yet")
    if totals:
        yield prose("; ".join(totals), style="dim")


def balance_tables(balance: BalanceTable) -> Iterator[RenderableType]:
    """Yield a table of shares, residual power, its slope with depth, and what an edit removed, for all queries."""
    if balance.question is not None:
        yield prose(balance.question, style="bold")
    rows = table(("cell", "N", "total", *SHARES, "residual", "slope", "removed"), wrap=["cell"])
    for row in balance.rows:
        numbers, slopes = row.balance.numbers["all"], row.balance.relative
        rows.add_row(
            row.cell.label, str(row.cell.spec.length), number(numbers.power["total"]),
            *(share(numbers.share[part]) for part in SHARES), number(numbers.power["residual"]),
            number(slopes["all"]) if "all" in slopes else "",
            share(row.removed["residual, all"]) if row.removed else "",
        )  # fmt: skip
    yield rows
    for row in balance.rows:
        if even := _even_conclusions(row):
            yield prose(f"{row.cell.label}, N = {row.cell.spec.length}, evenly weighted: {', '.join(even)}")
    yield prose(BALANCE_LEGEND, style="dim")


def _even_conclusions(row: BalanceRow) -> list[str]:
    """Return the evenly weighted shares and what an edit removed, where they lead to other conclusions."""
    from posleak.leakage.summary import EVEN

    numbers, even = row.balance.numbers["all"], list[str]()
    if numbers.even is not None and numbers.disagreement(SHARES):
        even += [f"{part} {estimate(numbers.even.share[part], 'share')}" for part in SHARES]
    leading, other = (row.removed.get(f"residual, all{norm}") for norm in ("", f", {EVEN}"))
    if leading is not None and other is not None and (leading.low > other.high or other.low > leading.high):
        even.append(f"removed {estimate(other, 'share')}")
    return even


def balance_markdown(balance: BalanceTable) -> str:
    """Return every number of the balance, early and all queries, both norms, with its interval, as a Markdown table."""
    from posleak.leakage.summary import EVEN, LEADING

    shares = [f"{name} share" for name in SHARES]
    lines = [["cell", "N", "n", "queries", "norm", *POWERS, *shares, "at 0", "slope", "removed"]]
    for row, queries in itertools.product(balance.rows, ("early", "all")):
        for norm, numbers in row.balance.numbers[queries].norms.items():
            spec, whole = row.cell.spec, (queries, norm) == ("all", LEADING)
            slopes = [f"{kind} {number(value).plain.strip()}" for kind, value in row.balance.relative.items()]
            removed = row.removed.get(f"residual, {queries}" + (f", {EVEN}" if norm == EVEN else ""))
            lines.append([
                row.cell.label, str(spec.length), str(spec.prompts), queries, norm,
                *(number(numbers.power[name]).plain.strip() for name in POWERS),
                *(share(numbers.share[name]).plain for name in SHARES),
                number(row.balance.sink_attention).plain.strip() if whole else "", "; ".join(slopes) if whole else "",
                "" if removed is None else share(removed).plain,
            ])  # fmt: skip
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
