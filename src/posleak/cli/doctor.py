"""`posleak doctor`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import posleak
from posleak.defaults import BOS, DOCTOR_PROMPTS, SEED

from .app import present, spoken_warnings, working
from .failures import BY_DESIGN, FAILED, SUCCESS
from .options import Bos, Json, MaxMemory, Seed
from .subject import ModelRequest, model_command

EXIT_STATUSES = {"sound": SUCCESS, "by design": BY_DESIGN, "wrong": FAILED}


@model_command("doctor")
def doctor_command(
    model: ModelRequest,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 96, or longer than the model's attention windows.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Number of prompts for the statistical laws.")] = DOCTOR_PROMPTS,
    seed: Seed = SEED,
    bos: Bos = BOS,
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Check that this model can be measured and that the results are correct on this machine.

    The exit status is 0 if every law holds, 3 if the model violates a law by design and the results are correct, 1 if
    a check fails for an unknown reason. With `--bos auto`, a BOS outside of the vocabulary is omitted, with a note.

    Example: `posleak doctor smollm2-135m`
    """
    spec: dict[str, Any] = {"length": length, "prompts": prompts, "seed": seed, "bos": bos}
    subject = model.load(max_memory=max_memory, **spec)
    with spoken_warnings(), working("checking") as status:
        diagnosis = posleak.doctor(subject, **spec, max_memory=max_memory, progress=status)
    from posleak.reports.terminal.doctor import doctor_tables

    present(diagnosis, doctor_tables, as_json)
    raise typer.Exit(EXIT_STATUSES[diagnosis.verdict.value])
