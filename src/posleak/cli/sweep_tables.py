"""Tables of sweeps: how one ended, its plan, and its balance of mask, drift and sink."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from posleak.show.lines import prose
from posleak.show.terminal import cell as number, share, table
from posleak.sweeps.state import State
from posleak.text import format_bytes

if TYPE_CHECKING:
    from posleak.sweeps.collect import BalanceTable
    from posleak.sweeps.estimate import Guess
    from posleak.sweeps.sweep import Sweep

MAX_LISTED = 40
"""Cells that a dry run lists one by one."""

POWERS, SHARES = ("total", "mask", "drift", "sink", "residual"), ("mask", "drift", "sink")

BALANCE_LEGEND = (
    "total and residual: powers in nats², all queries; mask, drift, sink: shares of the total; slope: change of the "
    "residual per relative depth, divided by its mean; removed: 1 − residual power / that of the model's first cell; "
    "95% jackknife intervals over prompts; early queries: --markdown or --json"
)


def minutes(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def summary(result: Sweep) -> Iterator[RenderableType]:
    """How a sweep ended: counts, and every cell without results with the reason."""
    counts, computed = _state_counts(result), len(result.computed)
    yield prose(f"{result.name}: {counts} of {len(result.cells)} cells; {computed} measured now", style="bold")
    unwritten = result.unwritten or {}
    for status in result.cells:
        why = status.why or unwritten.get(status.cell.id, "")
        if status.state is not State.finished and why:
            word = "not written" if status.cell.id in unwritten else status.state.value
            yield prose(f"{word}: {status.cell.details}: {why}")
    if result.of(State.failed):
        yield prose("measure failed cells again with --retry-failed; their folders have error.json", style="dim")
    yield prose(f"results in {result.root}; `posleak collect {result.root}` makes a table and a page", style="dim")


def _state_counts(result: Sweep) -> str:
    return ", ".join(f"{len(cells)} {state}" for state in State if (cells := result.of(state)))


def plan_table(result: Sweep, guessed: dict[str, Guess]) -> Iterator[RenderableType]:
    """A dry run: cells, their states, and estimates of time and memory for those that are open."""
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
    cells = f"{len(result.cells)} cells: {_state_counts(result)}"
    yield prose(f"{result.name}: {cells}; into {result.root}", style="bold")
    if guessed:
        yield prose("; ".join(_totals(list(guessed.values()))), style="dim")


def _totals(guessed: list[Guess]) -> Iterator[str]:
    """The time of all open cells together, and the memory of the largest."""
    known = [guess for guess in guessed if guess.seconds is not None]
    if known:
        seen = all(guess.seen for guess in known)
        basis = "from finished cells of the same models" if seen else "estimated from the models' sizes"
        yield f"about {minutes(sum(guess.seconds or 0.0 for guess in known))} on one worker ({basis})"
    if most := max((guess.memory or 0 for guess in guessed), default=0):
        yield f"a worker needs about {format_bytes(most)}"
    if unknown := len(guessed) - len(known):
        yield f"no estimate for {unknown} cells, whose models are not on this machine yet"


def balance_tables(balance: BalanceTable) -> Iterator[RenderableType]:
    """Shares, residual power, its slope with depth, and what an edit removed, for all queries."""
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
    yield prose(BALANCE_LEGEND, style="dim")


def balance_markdown(balance: BalanceTable) -> str:
    """Return every number of the balance, early and all queries, with its interval, as a Markdown table."""
    shares = [f"{name} share" for name in SHARES]
    lines = [["cell", "N", "n", "queries", *POWERS, *shares, "at 0", "slope", "removed"]]
    for row in balance.rows:
        for queries in ("early", "all"):
            numbers, spec, whole = row.balance.numbers[queries], row.cell.spec, queries == "all"
            slopes = [f"{kind} {number(value).plain.strip()}" for kind, value in row.balance.relative.items()]
            lines.append([
                row.cell.label, str(spec.length), str(spec.prompts), queries,
                *(number(numbers.power[name]).plain.strip() for name in POWERS),
                *(share(numbers.share[name]).plain for name in SHARES),
                number(row.balance.sink_attention).plain.strip() if whole else "", "; ".join(slopes) if whole else "",
                share(row.removed[f"residual, {queries}"]).plain if row.removed else "",
            ])  # fmt: skip
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
