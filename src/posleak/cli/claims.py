"""`posleak claims`: the claims of papers on one model, each with effect, interval and verdict."""

from __future__ import annotations

from typing import Annotated

import typer

from posleak.papers import POSITION, named_papers

from .app import RUNS, emit, out, spoken_warnings, working
from .options import Bos, Json, Length, MaxMemory, Profiled, RunFolder, Seed
from .profile import TimeProfile
from .subject import Load, model_command


@model_command("claims")
def claims_command(
    load: Load,
    paper: Annotated[
        str,
        typer.Option(
            help="Whose claims: position (where position comes from), sinks (attention sinks as reference frames), "
            "wavelets (heads as filters of many resolutions), a paper of a plugin's, or all."
        ),
    ] = POSITION,
    length: Length = 256,
    prompts: Annotated[
        int, typer.Option(min=2, help="Prompts; all conditions read the same ones. A verdict needs 16.")
    ] = 16,
    seed: Seed = 0,
    bos: Bos = "auto",
    inputs: Annotated[str, typer.Option(help="random, or text:PATH, or text:stdlib.")] = "random",
    folder: RunFolder = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Test again what the folder has already.")] = False,
    max_memory: MaxMemory = None,
    profile: Profiled = False,
    as_json: Json = False,
) -> None:
    """Every claim of a paper on this model: effect, interval, verdict, and how it was tested.

    Example: `posleak claims smollm2-135m`
    """
    with TimeProfile(profile) as spent:
        from posleak.inputs import require_source
        from posleak.runs.spec import MeasureSpec, parse_bytes

        named_papers(paper)
        spec = MeasureSpec(inputs, bos, length, prompts, seed)
        require_source(inputs)
        parse_bytes(max_memory)
        subject = load()
        from posleak.analyses.claims.examination import examined
        from posleak.analyses.claims.lab import Lab

        with spent.measuring(subject), spoken_warnings(), working("claims") as update:
            lab = Lab(subject, spec, folder, fresh, max_memory, update)
            lab.folder = folder or RUNS / lab.baseline.folder_name
            found = examined(lab, paper)
    cost = spent.as_dict(None)  # no planned memory: each condition has a plan of its own
    if as_json:
        emit(found.as_dict() | ({} if cost is None else {"profile": cost}))
        return
    from .tables import claims_table, profile_table

    out.print(claims_table(found))
    if cost is not None:
        out.print(profile_table(cost))
