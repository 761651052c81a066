"""Train and measure small models that differ in one setting: `python -m zoo train | measure | list`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posleak.cli.app import command_line, emit, err, out, run, spoken_warnings, tell, working
from posleak.cli.options import Json, named, named_path
from posleak.cli.progress import bar
from posleak.defaults import RUNS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zoo.jobs import Job
    from zoo.training import OnTrainingProgress, Training, TrainingProgress

app = command_line("zoo", "Train small models that differ in one setting, and measure what it does to leakage.")

ROOT = Path(RUNS) / "zoo"
Zoo = Annotated[
    Path, typer.Option("--out", parser=named_path, metavar="<path>", help="Folder of the models and their records.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Training data: text (documentation on this machine) or backcopy (a task in which sinks form); repeatable."
    ),
]
STATUS_INTERVAL = 60.0
"""Seconds between status lines without a terminal."""


@app.command(name="train")
def train_command(
    variants: Annotated[
        list[str] | None, typer.Argument(metavar="VARIANT...", parser=named, help="Names, as in `python -m zoo list`.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Train the full zoo: every variant with two seeds on both kinds of data.")
    ] = False,
    data: Data = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Seed of initial weights and data order; repeatable. Default: 0.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimiser steps, instead of the recipe's.")] = None,
    text: Annotated[
        str | None,
        typer.Option(
            parser=named, metavar="<path>", help="File or folder of text to train on, instead of the documentation."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of threads. The same number gives the same weights.")
    ] = None,
    root: Zoo = ROOT,
    as_json: Json = False,
) -> None:
    """Train models, or resume interrupted trainings. Finished models are not trained again.

    Models that another process is training are skipped, so that two processes can share the work.

    Example: `python -m zoo train rope window --seed 0 --seed 1`
    """
    from zoo.jobs import SEEDS, plan_jobs, train_all
    from zoo.recipe import RECIPES

    if bool(variants) == everything:
        raise typer.BadParameter("name variants (`python -m zoo list` shows them), or use --all")
    kinds = data or (list(RECIPES) if everything else ["text"])
    jobs = plan_jobs(variants or (), kinds, seeds or (SEEDS if everything else [0]), steps)
    if text is not None:
        from posleak.inputs.corpus import require_text

        require_text(text)
        if "text" not in kinds:
            raise typer.BadParameter("--text is read by models on text: leave it out, or use --data text")

    def on_finished(job: Job, record: Training | None) -> None:
        if record is None:
            tell("", f"{job.recipe.data} {job.name}: another process is training it")
        elif not as_json:
            out.print(_summary(record), soft_wrap=True)

    with spoken_warnings(), _progress(jobs) as on_progress:
        records = train_all(jobs, root, text=text, threads=threads, on_progress=on_progress, on_finished=on_finished)
    if as_json:
        emit({"trainings": records})


def _summary(record: Training) -> str:
    """Describe a finished training in one line."""
    from posleak.show.numbers import number

    first, last, data = record.held_out[0], record.held_out[-1], record.data
    return (
        f"{data.data} {record.name}: held-out loss {number(first.loss)} → {number(last.loss)} nats per token in "
        f"{last.step} steps, {record.seconds:.0f} s; unigram entropy {number(data.unigram_nats)}"
    )


@contextmanager
def _progress(jobs: Sequence[Job]) -> Iterator[OnTrainingProgress]:
    """Show loss and time left: a bar over all models on a terminal, otherwise a line per minute."""
    first_steps, total = dict[tuple[str, str], int](), 0
    for job in jobs:
        first_steps[job.recipe.data, job.name] = total
        total += job.recipe.steps
    last_line = 0.0

    def label(progress: TrainingProgress) -> str:
        number = list(first_steps).index((progress.data, progress.name)) + 1
        return f"{progress.data} {progress.name}, model {number} of {len(first_steps)}"

    def print_line(progress: TrainingProgress) -> None:
        nonlocal last_line
        if time.monotonic() - last_line > STATUS_INTERVAL:
            last_line = time.monotonic()
            status = f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}"
            tell("", f"{label(progress)}: {status}, {progress.left / 60:.1f} minutes left")

    if not err.is_terminal:
        yield print_line
        return
    with bar(err) as show:
        yield lambda progress: show(
            f"{label(progress)}: loss {progress.loss:.3f}",
            first_steps[progress.data, progress.name] + progress.step,
            total,
        )


@app.command(name="measure")
def measure_command(
    data: Data = None,
    prompts: Annotated[
        int | None, typer.Option(min=4, help="Number of prompts. Default: 32 of text, 64 of backcopy.")
    ] = None,
    with_checkpoints: Annotated[
        bool, typer.Option("--checkpoints/--no-checkpoints", help="Also measure checkpoints.")
    ] = True,
    root: Zoo = ROOT,
    as_json: Json = False,
) -> None:
    """Measure leakage, sinks and position 0 of every trained model and compare variants with standard RoPE.

    Intervals are over models. Stored results are not measured again. ROOT/DATA/zoo.json contains all results.

    Example: `python -m zoo measure --data text`
    """
    from zoo.jobs import trained
    from zoo.measuring import QUANTITIES, measure_models
    from zoo.recipe import RECIPES, recipe_named
    from zoo.table import finished, write_table, zoo_table
    from zoo.verdicts import verdicts

    present = [kind for kind in RECIPES if any(trained(root, kind))]
    kinds = [recipe_named(each).data for each in data or present or RECIPES]
    tables = []
    for kind in kinds:
        with spoken_warnings(), working(f"zoo: {kind}") as update:
            for model in finished(root, kind):
                measure_models(
                    model.folder, model.record, prompts=prompts, with_checkpoints=with_checkpoints, progress=update
                )
        tables.append(zoo_table(root, kind, prompts))
        write_table(root, tables[-1])
    if as_json:
        emit({"quantities": QUANTITIES, "tables": [{**vars(table), "verdicts": verdicts(table)} for table in tables]})
        return
    from zoo.terminal import zoo_tables

    for table in tables:
        for item in zoo_tables(table):
            out.print(item)


@app.command(name="list")
def list_command(root: Zoo = ROOT, as_json: Json = False) -> None:
    """List the variants, their trained models, and the trained models that ship with posleak.

    Example: `python -m zoo list`
    """
    from posleak.models.builtin import shipped_names
    from zoo.jobs import trained
    from zoo.variants import VARIANTS

    if not as_json:
        for item in _listing(root):
            out.print(item)
        return
    trainings = [{"folder": str(folder), **vars(record)} for folder, record in trained(root)]
    variants = {name: each.about for name, each in VARIANTS.items()}
    emit({"variants": variants, "shipped": shipped_names(), "trainings": trainings})


def _listing(root: Path) -> Iterator[RenderableType]:
    """Yield the table of variants and a legend."""
    from posleak.models.builtin import shipped_names
    from posleak.show.lines import prose
    from posleak.show.terminal import table
    from zoo.jobs import trained
    from zoo.recipe import RECIPES
    from zoo.variants import VARIANTS

    rows = table(("variant", "setting", *RECIPES), wrap=["setting"])
    records = [record for _, record in trained(root)]
    for name, variant in VARIANTS.items():
        own = [[each for each in records if (each.variant, each.data.data) == (name, data)] for data in RECIPES]
        rows.add_row(name, variant.about, *(", ".join(map(_status, each)) or "–" for each in own))
    yield rows
    yield prose(
        f"{root}: held-out loss of each seed in nats per token, or its current step; –: not trained. "
        f"Trained models that ship with posleak: {', '.join(shipped_names())}", style="dim",
    )  # fmt: skip


def _status(record: Training) -> str:
    """Return seed and final loss (`0: 1.623`), or seed and current step (`1: step 200 of 1500`)."""
    last = record.curve[-1].step if record.curve else 0
    return f"{record.seed}: " + (
        f"{record.final_loss:.3f}" if record.finished else f"step {last} of {record.recipe.steps}"
    )


if __name__ == "__main__":
    run(app)
