"""`posleak trace`: where position comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import RUNS, Json, emit, err, out, spoken_warnings
from .profile import MemoryOption, Profile, ProfileOption
from .subject import Load, model_command


@model_command("trace")
def trace_command(
    load: Load,
    inputs: Annotated[str, typer.Option(help="random, constant[:ID], text:PATH or text:stdlib.")] = "random",
    bos: Annotated[str, typer.Option(help="Position 0: auto, tokenizer, none, or a token.")] = "auto",
    length: Annotated[int, typer.Option(help="Tokens per prompt, position 0 included.")] = 256,
    prompts: Annotated[int, typer.Option(help="Prompts; both passes read the same ones.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    origin: Annotated[int, typer.Option(help="Width of the origin: how many first tokens count as it.")] = 4,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Lend up to layer K, too, for K = 0, 1, 2, 4, …: one more pass for each.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder. Default: runs/MODEL-DIGEST.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the folder has already.")] = False,
    max_memory: MemoryOption = None,
    profile: ProfileOption = False,
    as_json: Json = False,
) -> None:
    """Where position comes from: here (a layer's own mask), earlier (masks of earlier layers), origin (position 0).

    Example: `posleak trace smollm2-135m --length 256 --prompts 16`
    """
    with Profile(profile) as spent:
        from posleak.runs import MeasureSpec, parse_bytes
        from posleak.runs.conditions import Conditions
        from posleak.trace.trace import traced

        spec = MeasureSpec(inputs, bos, length, prompts, seed, origin=origin)
        parse_bytes(max_memory)
        subject = load()
        with spent.measuring(subject), spoken_warnings(), err.status("trace") as status:
            conditions = Conditions(subject, spec, folder, fresh, max_memory, status.update)
            conditions.folder = folder or RUNS / conditions.baseline.folder_name
            found = traced(conditions, by_layer=by_layer)
    cost = spent.as_dict(found.borrowed.record.memory.total)
    if as_json:
        emit(found.as_dict() | ({} if cost is None else {"profile": cost}))
        return
    from .tables import profile_table
    from .trace_tables import trace_tables

    for item in trace_tables(found):
        out.print(item)
    if cost is not None:
        out.print(profile_table(cost))
