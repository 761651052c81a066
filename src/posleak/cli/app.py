"""The handle: commands and their options. Thin: no arithmetic, and torch only when a model is loaded."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from posleak._version import __version__
from posleak.errors import PosleakError, PosleakWarning

if TYPE_CHECKING:
    from posleak.models import Subject

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    name="posleak",
    help="Where does a decoder-only language model's sense of absolute position come from?",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
err = Console(stderr=True)
out = Console(width=None if sys.stdout.isatty() else 120)

Model = Annotated[
    str,
    typer.Argument(help="A built-in name (`posleak models`), a hub id, a folder, or a .gguf file.", metavar="MODEL"),
]
Device = Annotated[str | None, typer.Option(help="Device, e.g. cpu or cuda:0. Default: a GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32 (default on a CPU), bfloat16, float16, float64 or auto.")]
DeviceMap = Annotated[str | None, typer.Option(help="Passed on to transformers; `auto` spreads a large model.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read weights that are stored as pickles.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]


def main() -> None:
    """Entry point: posleak's own errors become a message and an exit status, never a traceback."""
    try:
        app()
    except PosleakError as error:
        err.print("[bold red]error[/bold red]", end=" ")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)


def emit(value: Any) -> None:
    """JSON on standard output, and nothing else there; null for what is not a finite number."""
    from posleak.plain import plain

    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """posleak's warnings as one line each on standard error."""
    with warnings.catch_warnings():
        warnings.showwarning = _speak  # type: ignore[assignment]
        warnings.simplefilter("always", PosleakWarning)
        yield


def _speak(message: Warning | str, category: type[Warning], *_: Any) -> None:
    if issubclass(category, PosleakWarning):
        err.print("[bold yellow]warning[/bold yellow]", end=" ")
        err.print(str(message), markup=False, highlight=False, soft_wrap=True)


def load_subject(name: str, **options: Any) -> Subject:
    """Load with a line of status, since the first time fetches and converts."""
    from posleak.models import load

    with spoken_warnings(), err.status(f"loading {name}") as status:
        return load(name, progress=status.update, **options)


def version(value: bool) -> None:
    if value:
        out.print(f"posleak {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Where does a decoder-only language model's sense of absolute position come from?"""


@app.command(name="measure")
def measure_command(
    model: Model = DEFAULT_MODEL,
    inputs: Annotated[str, typer.Option(help="random, constant[:ID], text:PATH or text:stdlib.")] = "random",
    bos: Annotated[str, typer.Option(help="Position 0: auto, tokenizer, none, or a token.")] = "auto",
    length: Annotated[int, typer.Option(help="Tokens per prompt, position 0 included.")] = 512,
    prompts: Annotated[int, typer.Option(help="Prompts; the expectation and the intervals are over them.")] = 16,
    batch: Annotated[int, typer.Option(help="Prompts at once; 0 chooses about 4096 tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of tokens and of intervals.")] = 0,
    density: Annotated[int, typer.Option(help="Refines the plan of sampled rows.")] = 1,
    edit: Annotated[
        list[str] | None, typer.Option(help="What if: bos=zero, window=64, sink=cut, …; repeatable.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder. Default: runs/MODEL-FINGERPRINT.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again even if the folder has this run.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Measure absolute-position leakage and split it into mask, drift and sink.

    Example: `posleak measure smollm2-135m --length 512 --prompts 16`
    """
    from posleak.edits import parse_edits
    from posleak.inputs import parse
    from posleak.probe import default_plan
    from posleak.runs import MeasureSpec, default_folder, measure

    from .progress import prompt_progress
    from .tables import run_tables

    # What can be refused without the model is refused before it is loaded.
    edits = tuple(parsed.text for parsed in parse_edits(edit or ()))
    spec = MeasureSpec(inputs, bos, length, prompts, seed, batch, density, edits)
    default_plan(length, density)
    parse(inputs)
    subject = load_subject(
        model, device=device, dtype=dtype, device_map=device_map, revision=revision,
        trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
    )  # fmt: skip
    with spoken_warnings(), prompt_progress(err) as progress:
        run = measure(
            subject, inputs, out=folder or default_folder(subject, spec), fresh=fresh, progress=progress,
            bos=bos, length=length, prompts=prompts, seed=seed, batch=batch, density=density, edits=edits,
        )  # fmt: skip
    if as_json:
        emit(run.as_dict())
    else:
        for item in run_tables(run):
            out.print(item)


@app.command(name="doctor")
def doctor_command(
    model: Model = DEFAULT_MODEL,
    length: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 96, or past the model's windows.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts for the statistical laws.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Can this model be measured, and are the numbers right here? Exit status 1 if a check fails.

    Example: `posleak doctor smollm2-135m`
    """
    from posleak.probe import default_plan
    from posleak.studies import doctor

    from .tables import doctor_table

    if length is not None:
        default_plan(length)  # refuses a length that is too short before the model is loaded
    subject = load_subject(
        model, device=device, dtype=dtype, device_map=device_map, revision=revision,
        trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
    )  # fmt: skip
    with spoken_warnings(), err.status("checking") as status:
        diagnosis = doctor(subject, length=length, prompts=prompts, seed=seed, progress=status.update)
    if as_json:
        emit(diagnosis.as_dict())
    else:
        out.print(doctor_table(diagnosis))
    raise typer.Exit(0 if diagnosis.ok else 1)


@app.command(name="models")
def models_command(as_json: Json = False) -> None:
    """Built-in models: where their weights come from, and what is in the cache.

    Example: `posleak models`
    """
    from posleak.models import builtin

    from .tables import models_table

    if as_json:
        emit({"models": [asdict(entry) for entry in builtin.listing()]})
    else:
        out.print(models_table(builtin.listing()))
