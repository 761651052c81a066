"""`posleak trace`: where position comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import RUNS, emit, out, spoken_warnings, working
from .options import Bos, Fresh, Inputs, Json, Length, MaxMemory, Metrics, OriginWidth, Profiled, RunFolder, Seed
from .profile import TimeProfile
from .subject import Load, model_command


@model_command("trace")
def trace_command(
    load: Load,
    inputs: Inputs = "random",
    bos: Bos = "auto",
    length: Length = 256,
    prompts: Annotated[int, typer.Option(help="Prompts; both passes read the same ones.")] = 16,
    seed: Seed = 0,
    origin: OriginWidth = 4,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Lend up to layer K, too, for K = 0, 1, 2, 4, …: one more pass for each.")
    ] = False,
    metrics: Metrics = "none",
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    profile: Profiled = False,
    as_json: Json = False,
) -> None:
    """Where position comes from: here (a layer's own mask), earlier (masks of earlier layers), origin (position 0).

    Example: `posleak trace smollm2-135m --length 256 --prompts 16`
    """
    with TimeProfile(profile) as spent:
        from posleak.inputs import require_source
        from posleak.runs.spec import MeasureSpec, parse_bytes

        spec = MeasureSpec(inputs, bos, length, prompts, seed, origin=origin, metrics=(metrics,))
        require_source(inputs)
        parse_bytes(max_memory)
        subject = load()
        from posleak.analyses.trace.trace import traced
        from posleak.runs.conditions import Conditions

        with spent.measuring(subject), spoken_warnings(), working("trace") as update:
            conditions = Conditions(subject, spec, folder, fresh, max_memory, update)
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
