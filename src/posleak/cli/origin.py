"""`posleak origin`: position 0 of a model, as a page for people or JSON for machines."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import Json, emit, err, out, spoken_warnings
from .subject import Load, model_command


@model_command("origin")
def origin_command(
    load: Load,
    length: Annotated[int, typer.Option(help="Tokens per prompt, position 0 included.")] = 256,
    prompts: Annotated[int, typer.Option(help="Prompts of random tokens; 3 or more.")] = 8,
    tokens: Annotated[int, typer.Option(help="How many first tokens are compared in the portrait.")] = 1024,
    bos: Annotated[str, typer.Option(help="Position 0: auto, tokenizer, none, or a token.")] = "auto",
    batch: Annotated[int, typer.Option(help="Prompts at once; 0 chooses about 2048 tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    as_json: Json = False,
) -> None:
    """Position 0: is it closed, how does its state change with depth, who reads it, what does that tell later tokens?

    Closed means that its state does not depend on later tokens. Exit status 1 if it is not closed.

    Example: `posleak origin smollm2-135m --tokens 4096`
    """
    from posleak.origin import origin

    from .origin_tables import origin_page

    subject = load()
    with spoken_warnings(), err.status("position 0") as status:
        found = origin(
            subject, length=length, prompts=prompts, tokens=tokens, seed=seed, bos=bos, batch=batch,
            progress=status.update,
        )  # fmt: skip
    if as_json:
        emit(found.as_dict())
    else:
        for item in origin_page(found):
            out.print(item)
    raise typer.Exit(0 if found.closure.ok else 1)
