"""`posleak advise`: settings that can be changed without training, by what they do to leakage and to loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from .app import RUNS, emit, out, spoken_warnings, working
from .options import Bos, Fresh, Inputs, Json, MaxMemory, OriginWidth, RunFolder, Seed
from .subject import Load, model_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from posleak.analyses.advise.effects import Advice


@model_command("advise")
def advise_command(
    load: Load,
    inputs: Inputs = "text:stdlib",
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt: 512, or the model's context if that is shorter.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts.")] = 16,
    seed: Seed = 0,
    bos: Bos = "auto",
    origin: OriginWidth = 4,
    groups: Annotated[
        list[str] | None, typer.Option("--try", help="bos, window, rope, scale or dtype; repeatable. Default: all.")
    ] = None,
    edits: Annotated[
        list[str] | None, typer.Option("--edit", help="A setting of your own; several joined by commas. Repeatable.")
    ] = None,
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Which settings lower which part of the leakage without training, and what they cost in next-token loss.

    First token, windows and streaming caches, scalings of the rotation, logits scaled with log n, dtype: each is
    measured beside the model as it is, on the same text.

    Example: `posleak advise smollm2-135m --try window --edit sink=cut`
    """  # fmt: skip
    from posleak.analyses.advise.settings import GROUPS, LENGTH, of_edits, require_groups, usual_length
    from posleak.inputs import require_source
    from posleak.runs.spec import MeasureSpec, parse_bytes

    chosen = groups or list(GROUPS)
    require_groups(chosen)
    of_edits(edits or ())
    spec = MeasureSpec(inputs, bos, LENGTH if length is None else length, prompts, seed, origin=origin, loss=True)
    require_source(inputs)
    parse_bytes(max_memory)
    subject = load()
    if length is None:
        spec = replace(spec, length=usual_length(subject))
    from posleak.analyses.advise.effects import advise
    from posleak.runs.prepared import PreparedRun

    with spoken_warnings(), working("advise") as update:
        place = folder or RUNS / f"advice-{PreparedRun.of(subject, spec, max_memory=max_memory).folder_name}"
        found = advise(
            subject, inputs, length=spec.length, prompts=prompts, seed=seed, bos=bos, origin=origin, groups=chosen,
            edits=edits or (), out=place, fresh=fresh, max_memory=max_memory, progress=update,
        )  # fmt: skip
    if as_json:
        emit(found)
        return
    for item in advice_tables(found):
        out.print(item)


def advice_tables(found: Advice) -> Iterator[RenderableType]:
    """Every setting with its changes, then sentences."""
    from posleak.analyses.advise.effects import ADVICE_FILE, CHANGED, PLOT_FILE
    from posleak.axes import EARLY, SCALING
    from posleak.runs.loss import LOSS_SPANS, LOSS_UNIT
    from posleak.show.lines import prose
    from posleak.show.numbers import estimate
    from posleak.show.terminal import cell, table

    run = found.baseline
    assert run.loss is not None
    yield prose(run.name, style="bold")
    yield prose(" · ".join([*run.record.model_facts, *run.record.facts]), style="dim")
    shown = [part for part in CHANGED if part != SCALING or any(("all", part) in e.leakage for e in found.effects)]
    leakage = table(("setting", *shown), wrap=["setting"], title="leakage")
    for effect in found.effects:
        parts = (effect.leakage.get(("all", part)) for part in shown)
        leakage.add_row(effect.setting.name, *("" if part is None else cell(part) for part in parts))
    yield leakage
    before = ", ".join(f"{part} {estimate(run.summary.model['all'].power[part])}" for part in shown if part != SCALING)
    yield prose(
        f"change of the power in nats², all queries; as it is: {before} nats²."
        + (" scaling: what the factor by which queries are multiplied does by itself" if SCALING in shown else ""),
        style="dim",
    )
    where = [name for name in LOSS_SPANS if name in run.loss.numbers]
    losses = table(("setting", *where), wrap=["setting"], title="loss")
    for effect in found.effects:
        losses.add_row(effect.setting.name, *(cell(effect.loss[name]) for name in where))
    yield losses
    base = ", ".join(f"{name} {estimate(each)}" for name, each in run.loss.numbers.items())
    yield prose(
        f"change in {LOSS_UNIT}, at {run.loss.positions} positions of each prompt; first: before position {EARLY}, end: "
        f"the last quarter; as it is: {base} {LOSS_UNIT}", style="dim",
    )  # fmt: skip
    yield prose(f"95% jackknife intervals over n = {run.prompts} prompts, paired with the model as it is", style="dim")
    for sentence in found.sentences:
        yield prose(sentence)
    for name, why in found.left_out.items():
        yield prose(f"left out: {name}: {why}", style="dim")
    yield prose(
        "sentences use wider intervals, which hold for all settings together (Bonferroni, 95%); what does not clearly "
        "change may still change: the tables have its interval", style="dim",
    )  # fmt: skip
    if run.path is not None:
        yield prose(f"runs, {ADVICE_FILE} and {PLOT_FILE} in {run.path}", style="dim")
