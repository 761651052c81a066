"""`posleak advise`: settings that can be changed without training, by what they do to leakage and to loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .app import RUNS, emit, out, spoken_warnings, working
from .options import Bos, Fresh, Inputs, Json, Length, MaxMemory, OriginWidth, RunFolder, Seed
from .subject import Load, model_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from posleak.advice import Advice


@model_command("advise")
def advise_command(
    load: Load,
    inputs: Inputs = "text:stdlib",
    length: Length = 512,
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
    from posleak.advice.settings import GROUPS, of_edits, require_groups
    from posleak.runs.spec import MeasureSpec, parse_bytes

    chosen = groups or list(GROUPS)
    require_groups(chosen)
    of_edits(edits or ())
    spec = MeasureSpec(inputs, bos, length, prompts, seed, origin=origin, loss=True)
    parse_bytes(max_memory)
    subject = load()
    from posleak.advice import advise
    from posleak.runs.measure import Measurement

    with spoken_warnings(), working("advise") as update:
        place = folder or RUNS / f"advice-{Measurement.of(subject, spec).folder_name}"
        found = advise(
            subject, inputs, length=length, prompts=prompts, seed=seed, bos=bos, origin=origin, groups=chosen,
            edits=edits or (), out=place, fresh=fresh, max_memory=max_memory, progress=update,
        )  # fmt: skip
    if as_json:
        emit(found)
        return
    for item in advice_tables(found):
        out.print(item)


def advice_tables(found: Advice) -> Iterator[RenderableType]:
    """Every setting with its changes, then sentences."""
    from posleak.advice.effects import PLOT
    from posleak.runs.loss import UNIT
    from posleak.show.lines import prose
    from posleak.show.numbers import estimate
    from posleak.show.terminal import cell, table

    run = found.baseline
    assert run.loss is not None
    yield prose(run.name, style="bold")
    yield prose(" · ".join([*run.record.model_facts, *run.record.facts]), style="dim")
    parts = {"total": "total", "mask": "mask", "residual": "residual"}
    where = [name for name in ("first", "middle", "end") if name in run.loss.numbers]
    made = table(("setting", *parts, *(f"loss, {name}" for name in where), "loss, all"), wrap=["setting"])
    for effect in found.effects:
        made.add_row(
            effect.setting.name, *(cell(effect.leakage[f"all/{name}"]) for name in parts),
            *(cell(effect.loss[name]) for name in where), cell(effect.loss["all"]),
        )  # fmt: skip
    yield made
    base = ", ".join(f"{name} {estimate(each)}" for name, each in run.loss.numbers.items())
    yield prose(
        f"total, mask, residual: change of the power in nats², all queries; loss: change in {UNIT}, over the first 32 "
        f"tokens, the middle and the last quarter; 95% jackknife intervals over n = {run.prompts} prompts, paired. As "
        f"it is: leakage {estimate(run.summary.model['all'].power['total'])} nats², loss {base} {UNIT}", style="dim",
    )  # fmt: skip
    for sentence in found.sentences:
        yield prose(sentence)
    for name, why in found.left_out.items():
        yield prose(f"left out: {name}: {why}", style="dim")
    yield prose(
        "in these sentences intervals hold for all settings together (Bonferroni); what is not said is not known",
        style="dim",
    )
    if run.path is not None:
        yield prose(f"runs, advice.json and {PLOT} in {run.path}", style="dim")
