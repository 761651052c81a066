"""`posleak claims`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import posleak
from posleak.defaults import BOS, INPUTS, PROMPTS, RUNS, SEED, TRACED
from posleak.papers import POSITION, named_papers

from .app import present, spoken_warnings, working
from .options import Bos, Fresh, Json, Length, MaxMemory, Profiled, RunFolder, Seed
from .profile import TimeProfile
from .subject import ModelRequest, model_command


@model_command("claims")
def claims_command(
    model: ModelRequest,
    paper: Annotated[
        str,
        typer.Option(
            help="Paper whose claims are tested: position (sources of positional information), sinks (attention sinks "
            "as reference frames), wavelets (heads as multi-resolution filters), a paper of a plugin, or all."
        ),
    ] = POSITION,
    length: Length = TRACED,
    prompts: Annotated[
        int, typer.Option(min=2, help="Number of prompts, the same in all conditions. A verdict needs 16.")
    ] = PROMPTS,
    seed: Seed = SEED,
    bos: Bos = BOS,
    inputs: Annotated[str, typer.Option(help="Source of the prompts: random, text:PATH or text:stdlib.")] = INPUTS,
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    profile: Profiled = False,
    as_json: Json = False,
) -> None:
    """Test the claims of a paper on this model: effect, interval, verdict and method of each claim.

    Example: `posleak claims smollm2-135m`
    """
    spec: dict[str, Any] = {"inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed}
    with TimeProfile(profile) as spent:
        named_papers(paper)
        subject = model.load(max_memory=max_memory, **spec)
        with spent.measuring(subject), spoken_warnings(), working("claims") as status:
            claims = posleak.claims(
                subject, **spec, paper=paper, out=folder, root=RUNS, fresh=fresh, max_memory=max_memory,
                progress=status,
            )  # fmt: skip
    from posleak.reports.terminal.claims import claims_tables

    present(claims, claims_tables, as_json, spent.as_dict(None))  # each condition has a memory plan of its own
