"""`posleak origin`: position 0 of a model, as a page for people or JSON for machines."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import emit, out, spoken_warnings, working
from .options import Bos, Json, Length, MaxMemory, Seed
from .subject import Load, model_command


@model_command("origin")
def origin_command(
    load: Load,
    length: Length = 256,
    prompts: Annotated[int, typer.Option(min=3, help="Prompts of random tokens; 3 or more.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="How many first tokens are compared in the portrait.")] = 1024,
    bos: Bos = "auto",
    batch: Annotated[int, typer.Option(help="Prompts at once; 0 chooses about 2048 tokens.")] = 0,
    seed: Seed = 0,
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Position 0: is it closed, how does its state change with depth, who reads it, what does that tell later tokens?

    Closed means that its state does not depend on later tokens. Exit status 1 if it is not closed.

    Example: `posleak origin smollm2-135m --tokens 4096`
    """
    from posleak.runs.spec import MeasureSpec, parse_bytes, require_between

    MeasureSpec("random", bos, length, prompts, seed, batch)
    require_between("tokens", tokens, 2)
    parse_bytes(max_memory)
    subject = load()
    from posleak.analyses.origin.origin import origin

    from .origin_tables import origin_page

    with spoken_warnings(), working("position 0") as update:
        found = origin(
            subject, length=length, prompts=prompts, tokens=tokens, seed=seed, bos=bos, batch=batch,
            max_memory=max_memory, progress=update,
        )  # fmt: skip
    if as_json:
        emit(found.as_dict())
    else:
        for item in origin_page(found):
            out.print(item)
    raise typer.Exit(0 if found.closure.ok else 1)
