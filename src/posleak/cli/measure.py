"""`posleak measure`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import posleak
from posleak.defaults import BATCH, BOS, DEFAULT_ORIGIN, DENSITY, INPUTS, LENGTH, PROMPTS, RUNS, SEED

from .app import err, present, spoken_warnings
from .options import (
    Bos,
    Fresh,
    Inputs,
    Json,
    Length,
    Loss,
    MaxMemory,
    Metrics,
    OriginWidth,
    Profiled,
    Prompts,
    RunFolder,
    Seed,
)
from .profile import TimeProfile
from .progress import prompt_progress
from .subject import ModelRequest, model_command


@model_command("measure")
def measure_command(
    model: ModelRequest,
    inputs: Inputs = INPUTS,
    bos: Bos = BOS,
    length: Length = LENGTH,
    prompts: Prompts = PROMPTS,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass; 0: about 4096 tokens.")] = BATCH,
    seed: Seed = SEED,
    origin: OriginWidth = DEFAULT_ORIGIN,
    density: Annotated[
        int, typer.Option(help="Factor on the numbers of sampled queries, references and offsets.")
    ] = DENSITY,
    edit: Annotated[
        list[str] | None,
        typer.Option(help="Intervention on the model, e.g. bos=zero or sink=cut (docs/edits.md); repeatable."),
    ] = None,
    metrics: Metrics = "none",
    loss: Loss = False,
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    profile: Profiled = False,
    as_json: Json = False,
) -> None:
    """Measure the leakage of absolute position and decompose it into mask, drift and sink.

    Example: `posleak measure smollm2-135m --length 512 --prompts 16`
    """
    spec: dict[str, Any] = {
        "inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed, "batch": batch,
        "density": density, "origin": origin, "edits": edit or (), "metrics": metrics, "loss": loss,
    }  # fmt: skip
    with TimeProfile(profile) as spent:
        subject = model.load(max_memory=max_memory, **spec)
        with spent.measuring(subject), spoken_warnings(), prompt_progress(err) as on_progress:
            run = posleak.measure(
                subject, **spec, out=folder, root=RUNS, fresh=fresh, max_memory=max_memory, on_progress=on_progress
            )
    from posleak.reports.terminal.run import run_tables

    present(run, run_tables, as_json, spent.as_dict(run.record.memory.total))
