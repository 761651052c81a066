"""`posleak trace`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import posleak
from posleak.defaults import BOS, DEFAULT_ORIGIN, INPUTS, PROMPTS, RUNS, SEED, TRACED

from .app import present, spoken_warnings, working
from .options import Bos, Fresh, Inputs, Json, Length, MaxMemory, Metrics, OriginWidth, Profiled, RunFolder, Seed
from .profile import TimeProfile
from .subject import ModelRequest, model_command


@model_command("trace")
def trace_command(
    model: ModelRequest,
    inputs: Inputs = INPUTS,
    bos: Bos = BOS,
    length: Length = TRACED,
    prompts: Annotated[int, typer.Option(help="Number of prompts. Both passes use the same prompts.")] = PROMPTS,
    seed: Seed = SEED,
    origin: OriginWidth = DEFAULT_ORIGIN,
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer", help="Also lend the context up to layer K only, for K = 0, 1, 2, 4, …: one more pass each."
        ),
    ] = False,
    metrics: Metrics = "none",
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    profile: Profiled = False,
    as_json: Json = False,
) -> None:
    """Trace where position comes from: a layer's own mask (here), masks of earlier layers (earlier), position 0 (origin).

    A second pass reads each prompt after a borrowed context, so that position cannot be inferred from the number of
    visible keys.

    Example: `posleak trace smollm2-135m --length 256 --prompts 16`
    """  # fmt: skip
    spec: dict[str, Any] = {
        "inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed, "origin": origin,
        "metrics": metrics,
    }  # fmt: skip
    with TimeProfile(profile) as spent:
        subject = model.load(max_memory=max_memory, **spec)
        with spent.measuring(subject), spoken_warnings(), working("trace") as status:
            trace = posleak.trace(
                subject, **spec, by_layer=by_layer, out=folder, root=RUNS, fresh=fresh, max_memory=max_memory,
                progress=status,
            )  # fmt: skip
    from posleak.reports.terminal.trace import trace_tables

    present(trace, trace_tables, as_json, spent.as_dict(trace.borrowed.record.memory.total))
