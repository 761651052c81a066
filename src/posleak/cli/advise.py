"""`posleak advise`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import posleak
from posleak.defaults import BOS, DEFAULT_ORIGIN, PROMPTS, RUNS, SEED, TEXT_INPUTS

from .app import present, spoken_warnings, working
from .options import Bos, Fresh, Inputs, Json, MaxMemory, OriginWidth, Prompts, RunFolder, Seed
from .subject import ModelRequest, model_command


@model_command("advise")
def advise_command(
    model: ModelRequest,
    inputs: Inputs = TEXT_INPUTS,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 512, or the model's context if it is shorter.")
    ] = None,
    prompts: Prompts = PROMPTS,
    seed: Seed = SEED,
    bos: Bos = BOS,
    origin: OriginWidth = DEFAULT_ORIGIN,
    groups: Annotated[
        list[str] | None,
        typer.Option("--try", help="Settings to try: bos, window, rope, scale or dtype; repeatable. Default: all."),
    ] = None,
    edits: Annotated[
        list[str] | None,
        typer.Option("--edit", help="Another setting to try: an edit, or several joined by commas; repeatable."),
    ] = None,
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Compare settings that need no training by their effect on leakage and on next-token loss.

    Settings: first token, windows and streaming caches, RoPE scaling, logits scaled with log n, dtype. Each is
    compared with the unchanged model on the same prompts.

    Example: `posleak advise smollm2-135m --try window --edit sink=cut`
    """
    from posleak.analyses.advise.settings import GROUPS, of_edits, require_groups

    spec: dict[str, Any] = {
        "inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed, "origin": origin,
    }  # fmt: skip
    require_groups(groups or ())
    of_edits(edits or ())
    subject = model.load(max_memory=max_memory, loss=True, **spec)
    with spoken_warnings(), working("advise") as status:
        advice = posleak.advise(
            subject, **spec, groups=groups or GROUPS, edits=edits or (), out=folder, root=RUNS, fresh=fresh,
            max_memory=max_memory, progress=status,
        )  # fmt: skip
    from posleak.reports.terminal.advice import advice_tables

    present(advice, advice_tables, as_json)
