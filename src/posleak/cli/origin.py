"""`posleak origin`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import posleak
from posleak.defaults import BATCH, BOS, ORIGIN_PROMPTS, ORIGIN_TOKENS, SEED, TRACED

from .app import present, spoken_warnings, working
from .failures import FAILED, SUCCESS
from .options import Bos, Json, Length, MaxMemory, Seed
from .subject import ModelRequest, model_command


@model_command("origin")
def origin_command(
    model: ModelRequest,
    length: Length = TRACED,
    prompts: Annotated[
        int, typer.Option(min=3, help="Number of prompts of random tokens; at least 3.")
    ] = ORIGIN_PROMPTS,
    tokens: Annotated[
        int, typer.Option(min=2, help="Number of first tokens compared in the portrait.")
    ] = ORIGIN_TOKENS,
    bos: Bos = BOS,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass; 0: about 2048 tokens.")] = BATCH,
    seed: Seed = SEED,
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Analyse position 0: its state by depth, the heads that read it, and what they write.

    The exit status is 1 if position 0 is not closed, that is, if its state depends on later tokens.

    Example: `posleak origin smollm2-135m --tokens 4096`
    """
    from posleak.runs.spec import require_between

    spec: dict[str, Any] = {"length": length, "prompts": prompts, "seed": seed, "bos": bos, "batch": batch}
    require_between("tokens", tokens, 2)
    subject = model.load(max_memory=max_memory, **spec)
    with spoken_warnings(), working("position 0") as status:
        origin = posleak.origin(subject, **spec, tokens=tokens, max_memory=max_memory, progress=status)
    from posleak.reports.terminal.origin import origin_tables

    present(origin, origin_tables, as_json)
    raise typer.Exit(SUCCESS if origin.closure.ok else FAILED)
