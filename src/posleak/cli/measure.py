"""`posleak measure`, `posleak doctor` and `posleak models`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import RUNS, app, emit, err, out, spoken_warnings, working
from .failures import BY_DESIGN, FAILED, SUCCESS
from .options import Bos, Fresh, Inputs, Json, Length, Loss, MaxMemory, Metrics, OriginWidth, Profiled, RunFolder, Seed
from .profile import TimeProfile
from .subject import Load, model_command

if TYPE_CHECKING:
    from posleak.runs.run import Run


@model_command("measure")
def measure_command(
    load: Load,
    inputs: Inputs = "random",
    bos: Bos = "auto",
    length: Length = 512,
    prompts: Annotated[int, typer.Option(help="Prompts; expectations and intervals are taken over them.")] = 16,
    batch: Annotated[int, typer.Option(help="Prompts at once; 0 chooses about 4096 tokens.")] = 0,
    seed: Seed = 0,
    origin: OriginWidth = 4,
    density: Annotated[int, typer.Option(help="Multiplies the numbers of queries, references and offsets.")] = 1,
    edit: Annotated[
        list[str] | None, typer.Option(help="A what-if change: bos=zero, sink=cut, … (docs/edits.md); repeatable.")
    ] = None,
    metrics: Metrics = "none",
    loss: Loss = False,
    folder: RunFolder = None,
    fresh: Fresh = False,
    max_memory: MaxMemory = None,
    profile: Profiled = False,
    as_json: Json = False,
) -> None:
    """Measure absolute-position leakage and split it into mask, drift and sink.

    Example: `posleak measure smollm2-135m --length 512 --prompts 16`
    """
    with TimeProfile(profile) as spent:
        from posleak.edits import parse_edits
        from posleak.inputs import require_source
        from posleak.runs.spec import MeasureSpec, parse_bytes

        # What can be refused without the model is refused before it is loaded, and before torch is imported.
        edits = parse_edits(edit or ())
        spec = MeasureSpec(inputs, bos, length, prompts, seed, batch, density, origin, edits, (metrics,), loss)
        spec.require_effect()
        require_source(inputs)
        parse_bytes(max_memory)
        subject = load()
        from posleak.runs.prepared import PreparedRun

        from .progress import prompt_progress

        with spent.measuring(subject), spoken_warnings(), prompt_progress(err) as watch:
            ready = PreparedRun.of(subject, spec, max_memory=max_memory)
            run = ready.run_with_warnings(folder or RUNS / ready.folder_name, fresh=fresh, on_progress=watch)
    found = spent.as_dict(run.record.memory.total)
    if as_json:
        emit(run.as_dict() | ({} if found is None else {"profile": found}))
    else:
        show_run(run, found)


def show_run(run: Run, spent: dict[str, Any] | None) -> None:
    from .tables import profile_table, run_tables

    for item in run_tables(run):
        out.print(item)
    if spent is not None:
        out.print(profile_table(spent))


@model_command("doctor")
def doctor_command(
    load: Load,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 96, or longer than the model's windows.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts for the statistical laws.")] = 12,
    seed: Seed = 0,
    bos: Bos = "auto",
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Can this model be measured, and are the numbers right on this machine?

    Exit status 0 if every law holds, 3 if the model breaks some on purpose and the numbers are right, 1 if a check
    fails and no cause is known. With `--bos auto`, a BOS that the model cannot embed is left out, and a note says so.

    Example: `posleak doctor smollm2-135m`
    """
    from posleak.runs.spec import LENGTH, MeasureSpec, parse_bytes

    MeasureSpec(length=LENGTH if length is None else length, prompts=prompts, seed=seed, bos=bos)
    parse_bytes(max_memory)
    subject = load()
    from posleak.analyses.doctor.check import DoctorVerdict
    from posleak.analyses.doctor.doctor import doctor

    from .tables import doctor_table

    with spoken_warnings(), working("checking") as update:
        diagnosis = doctor(
            subject, length=length, prompts=prompts, seed=seed, bos=bos, max_memory=max_memory, progress=update
        )
    if as_json:
        emit(diagnosis.as_dict())
    else:
        out.print(doctor_table(diagnosis))
    statuses = {DoctorVerdict.SOUND: SUCCESS, DoctorVerdict.BY_DESIGN: BY_DESIGN, DoctorVerdict.WRONG: FAILED}
    raise typer.Exit(statuses[diagnosis.verdict])


@app.command(name="models")
def models_command(as_json: Json = False) -> None:
    """Built-in models: where their weights come from, and what is in the cache.

    Example: `posleak models`
    """
    from posleak.models import builtin

    from .tables import models_table

    if as_json:
        emit({"models": [asdict(entry) for entry in builtin.list_models()]})
    else:
        out.print(models_table(builtin.list_models()))
