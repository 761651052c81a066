"""`posleak sweep` and `posleak collect`: many runs from a manifest, and all of them as one table and one page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from posleak.show.failures import FAILED

from .app import app, emit, err, out, spoken_warnings, tell, working
from .options import Json, MaxMemory, named
from .progress import board_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from posleak.sweeps.board import Reached
    from posleak.sweeps.estimate import Guess
    from posleak.sweeps.manifest import Manifest
    from posleak.sweeps.sweep import Sweep

SPOKEN = 30.0
"""Seconds between lines of progress where there is no terminal."""

MOST_RUNNING = 8
"""Running cells that are named on a terminal."""

FEW = 3
"""Cells that a warning names."""

MOST_LISTED = 40
"""Cells that a dry run lists one by one."""


class EngineName(StrEnum):
    local = "local"
    ray = "ray"


@app.command(name="sweep")
def sweep_command(
    manifest: Annotated[
        str, typer.Argument(metavar="MANIFEST", parser=named, help="A YAML file (docs/sweeps.md), or a study's name.")
    ],
    engine: Annotated[EngineName, typer.Option(help="local: one cell after another; ray: on a Ray cluster.")] = (
        EngineName.local
    ),
    address: Annotated[
        str | None, typer.Option(parser=named, metavar="<str>", help="Of a Ray cluster. Default: one is started here.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="With ray: how many at most at the same time.")] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--out",
            parser=named,
            metavar="<path>",
            help="A folder, or an address such as s3://bucket/sweep. Default: the manifest's, or runs/NAME.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which cells there are, their state, and what they may take.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure again what failed before.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="How often a cell whose worker died is tried again.")] = 2,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file of finished cells, even where it looks unchanged.")
    ] = False,
    max_memory: MaxMemory = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the models.")
    ] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read weights that are pickles.")] = False,
    as_json: Json = False,
) -> None:
    """Measure many models, checkpoints, edits, lengths and seeds, on this machine or on a Ray cluster.

    What is finished is never measured again: start the same command after an interruption, and it goes on. A cell that
    fails keeps its error in its folder and does not stop the others; the exit status is 1 then.

    Example: `posleak sweep grid.yaml --engine ray --workers 4`
    """  # fmt: skip
    from posleak.sweeps.sweep import status, storage_for, sweep

    asked = _manifest(manifest)
    storage = storage_for(asked, root)
    if dry_run:
        _look(status(asked, storage, verify=verify), as_json)
        return
    with spoken_warnings(), _progress(as_json) as watch:
        found = sweep(
            asked, out=root, engine=engine.value, address=address, workers=workers, retries=retries,
            retry_failed=retry_failed, verify=verify, max_memory=max_memory, trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle, progress=watch,
        )  # fmt: skip
    if as_json:
        emit(found)
    else:
        for item in summary(found):
            out.print(item, soft_wrap=True)
    if not found.complete:
        raise typer.Exit(FAILED)


@app.command(name="collect")
def collect_command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", parser=named, help="Of a sweep: what its --out was.")],
    page: Annotated[
        str | None,
        typer.Option(parser=named, metavar="<path>", help="Where the page goes. Default: FOLDER/collected.html."),
    ] = None,
    as_json: Json = False,
) -> None:
    """All runs of a sweep as one table (Parquet) and one page: curves over checkpoints, maps over two knobs.

    Example: `posleak collect runs/grid`
    """
    from posleak.reports.collected import gather_sweep

    with working("collecting"):
        found = gather_sweep(folder, page)
    _warn("not shown", [(each.label, each.why) for each in found.found.omitted])
    _warn("failed, not shown", [(error.cell.details, error.what) for error in found.found.failed])
    if as_json:
        emit(found)
        return
    cells, rows = len(found.found.finished), len(found.found.table)
    out.print(f"{cells} finished cells, {rows:,} numbers", soft_wrap=True)
    out.print(found.table, soft_wrap=True)
    out.print(found.page, soft_wrap=True)


def _warn(what: str, cells: list[tuple[str, str]]) -> None:
    """Cells without numbers, those with one reason in one line."""
    reasons = dict[str, list[str]]()
    for label, why in cells:
        reasons.setdefault(why, []).append(label)
    for why, labels in reasons.items():
        more = f" and {len(labels) - FEW} more cells" if len(labels) > FEW else ""
        tell("warning", f"{what}: {', '.join(labels[:FEW])}{more}: {why}")


def _look(found: Sweep, as_json: bool) -> None:
    """The dry run."""
    from posleak.sweeps.estimate import guesses
    from posleak.sweeps.state import State

    todo = [each.cell for each in found.of(State.open)]
    guessed = dict(zip((cell.id for cell in todo), guesses(todo, found.finished), strict=True))
    if as_json:
        emit(found.as_dict(guessed))
        return
    for item in plan_table(found, guessed):
        out.print(item)


def _manifest(name: str) -> Manifest:
    """A file; or, if there is none of this name, a study of this name, which is a sweep, too."""
    from pathlib import Path

    from posleak.sweeps.manifest import Manifest, read_manifest
    from posleak.sweeps.studies.cells import STUDIES

    if name in STUDIES and not Path(name).exists():
        return Manifest(f"study-{name}", STUDIES[name].cells)
    return read_manifest(name)


# -- what is shown ---------------------------------------------------------------------------------------------------


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Reached], None]]:
    """Cells done, running, failed, and the time left: a bar on a terminal, else a line now and then."""
    spoken, last = time.monotonic(), (-1, -1)

    def say(at: Reached) -> None:
        nonlocal spoken, last
        now = time.monotonic()
        if now - spoken >= SPOKEN and (at.done, len(at.running)) != last:
            spoken, last = now, (at.done, len(at.running))
            tell("", "; ".join([_counts(at), *_running(at, 1)]))

    if not err.is_terminal:
        yield (lambda at: None) if quiet else say
        return
    with board_view(err) as show:
        yield lambda at: show(_counts(at), at.done, at.total, _running(at, MOST_RUNNING))


def _counts(at: Reached) -> str:
    """`12 of 24 cells finished, 2 running, 1 failed; about 3 minutes left`"""
    left = "" if at.left is None or not at.running else f"; about {minutes(at.left)} left"
    return at.text + left


def _running(at: Reached, most: int) -> list[str]:
    """`smollm2-135m · window=64, 512 tokens, seed 0: prompts 0–7 of 16`"""
    now = [f"{cell}: {what}" for cell, what in at.running.items()]
    return [*now[:most], *([f"and {len(now) - most} more"] if len(now) > most else [])]


def minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def summary(found: Sweep) -> Iterator[RenderableType]:
    """How it ended: counts, and every cell that has no numbers with the reason."""
    from posleak.show.lines import prose
    from posleak.sweeps.state import State

    counts = [f"{len(cells)} {state}" for state in State if (cells := found.of(state))]
    computed = len(found.computed)
    yield prose(f"{found.name}: {', '.join(counts)} of {len(found.cells)} cells; {computed} measured now", style="bold")
    unwritten = found.unwritten or {}
    for each in found.cells:
        why = each.why or unwritten.get(each.cell.id, "")
        if each.state is not State.finished and why:
            word = "not written" if each.cell.id in unwritten else each.state.value
            yield prose(f"{word}: {each.cell.details}: {why}")
    if found.of(State.failed):
        yield prose("try those that failed again with --retry-failed; their folders have error.json", style="dim")
    yield prose(f"results in {found.root}; `posleak collect {found.root}` makes a table and a page", style="dim")


def plan_table(found: Sweep, guessed: dict[str, Guess]) -> Iterator[RenderableType]:
    """The dry run: cells, their states, and guesses of time and memory for those that are to be done."""
    from posleak.show.lines import prose
    from posleak.show.terminal import table
    from posleak.sweeps.state import State
    from posleak.text import format_bytes

    made = table(("cell", "state", "time", "memory"), wrap=["cell", "state"])
    for each in found.cells[:MOST_LISTED]:
        guess = guessed.get(each.cell.id)
        took = None if each.record is None else minutes(each.record.seconds.measuring)
        about = None if guess is None or guess.seconds is None else f"~{minutes(guess.seconds)}"
        memory = None if guess is None or guess.memory is None else f"~{format_bytes(guess.memory)}"
        state = f"{each.state.value}: {each.why}" if each.why else each.state.value
        made.add_row(each.cell.details, state, took or about or "–", memory or "–")
    yield made
    if (more := len(found.cells) - MOST_LISTED) > 0:
        yield prose(f"and {more} more cells", style="dim")
    counts = [f"{len(cells)} {state}" for state in State if (cells := found.of(state))]
    yield prose(f"{found.name}: {len(found.cells)} cells: {', '.join(counts)}; into {found.root}", style="bold")
    if guessed:
        yield prose("; ".join(_totals(list(guessed.values()))), style="dim")


def _totals(guessed: list[Guess]) -> Iterator[str]:
    """What all open cells may take together, and one worker at most."""
    from posleak.text import format_bytes

    known = [guess for guess in guessed if guess.seconds is not None]
    if known:
        seen = all(guess.seen for guess in known)
        basis = "from finished cells of the same models" if seen else "guessed from the models' sizes"
        total = sum(guess.seconds or 0.0 for guess in known)
        yield f"about {minutes(total)} on one worker ({basis})"
    if most := max((guess.memory or 0 for guess in guessed), default=0):
        yield f"a worker needs about {format_bytes(most)}"
    if unknown := len(guessed) - len(known):
        yield f"nothing is known of {unknown} cells, whose models are not on this machine yet"
