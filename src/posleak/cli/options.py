"""Options that several commands share, and the registration of commands that run one model.

Defaults are in `posleak.defaults`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from posleak import defaults
from posleak.stopwatch import stage

from .app import app, spoken_warnings, working

if TYPE_CHECKING:
    from posleak.models import Subject


def named(text: str) -> str:
    """Reject an empty name or path, which an unset shell variable would leave: it would mean the current folder."""
    if not text.strip():
        raise typer.BadParameter("it is empty; give a name or omit it. The current folder is `.`")
    return text


def named_path(text: str | Path) -> Path:
    """Return the path, rejecting an empty one."""
    return Path(named(str(text)))


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

Inputs = Annotated[
    str, typer.Option(help="Source of the prompts: random, constant[:ID], text:PATH, text:stdlib or backcopy.")
]
Bos = Annotated[
    str,
    typer.Option(
        help="Token at position 0: auto (BOS of the config, if any), tokenizer (what it prepends), none, or a token."
    ),
]
Length = Annotated[int, typer.Option(help="Tokens per prompt, including position 0.")]
Prompts = Annotated[int, typer.Option(help="Number of prompts. Estimates and intervals are computed over prompts.")]
Seed = Annotated[int, typer.Option(help="Random seed for the prompts.")]
OriginWidth = Annotated[int, typer.Option(help="Number of leading tokens treated as the origin.")]

Metrics = Annotated[
    str,
    typer.Option(help="Metrics of other papers, from the same forward passes: all, none, or names (docs/metrics.md)."),
]
Loss = Annotated[bool, typer.Option("--loss", help="Also compute the next-token loss at the sampled positions.")]

RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        parser=named_path,
        metavar="<path>",
        help="Run folder. Default: a folder in runs/, named after the measurement.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard results in the folder and measure again.")]
MaxMemory = Annotated[
    str | None,
    typer.Option(help="Memory limit of the process, including the model, e.g. 8GB. Batches are chosen to fit."),
]
Profiled = Annotated[bool, typer.Option("--profile", help="Show time by stage and peak memory.")]

Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders written by `measure`, `trace` or `claims`.", parser=named_path, metavar="RUN..."),
]

MODEL_ARGUMENT = Annotated[
    str,
    typer.Argument(
        parser=named,
        metavar="MODEL",
        help="A built-in model (`posleak models`), a Hugging Face Hub id, a folder, or a .gguf file.",
    ),
]
LOADING_OPTIONS: dict[str, tuple[Any, Any]] = {
    "device": (str | None, typer.Option(help="Device, e.g. cpu or cuda:0. Default: a GPU if there is one.")),
    "dtype": (str | None, typer.Option(help="float32 (default on a CPU), bfloat16, float16, float64 or auto.")),
    "device_map": (str | None, typer.Option(help="Passed to transformers; `auto` distributes a large model.")),
    "revision": (str | None, typer.Option(help="Branch, tag or commit of a Hub id.")),
    "trust_remote_code": (bool, typer.Option("--trust-remote-code", help="Allow code that comes with the model.")),
    "allow_pickle": (bool, typer.Option("--allow-pickle", help="Allow weights stored as pickle files.")),
    "verify": (bool, typer.Option("--verify", help="Hash all model files again; ignore cached hashes.")),
}
"""Options of `posleak.load`, by the names of its parameters."""


@dataclass(frozen=True)
class ModelRequest:
    """The model named on the command line, with the options for loading it."""

    name: str
    options: dict[str, Any]

    def load(self, *, max_memory: str | None = None, **spec: Any) -> Subject:
        """Check the measurement, then load the model, showing a status line: the first load may download it.

        max_memory  value of --max-memory
        spec        fields of the MeasureSpec; None means the default
        """
        require_valid(max_memory, **spec)
        with stage("load"), spoken_warnings(), working(f"loading {self.name}") as status:
            from posleak.models import load

            return load(self.name, progress=status, **self.options)


def require_valid(max_memory: str | None, **spec: Any) -> None:
    """Reject an invalid measurement before the model is loaded and before torch is imported."""
    from posleak.inputs import require_source
    from posleak.runs.spec import MeasureSpec, parse_bytes

    made = MeasureSpec(**{name: value for name, value in spec.items() if value is not None})
    made.require_effect()
    require_source(made.inputs)
    parse_bytes(max_memory)


def model_command(name: str, commands: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose parameter `model` is a ModelRequest, made of the argument MODEL and loading options."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(model: str, **options: Any) -> None:
            loading = {key: options.pop(key) for key in LOADING_OPTIONS}
            given = {key: value for key, value in loading.items() if value not in (None, False)}
            command(model=ModelRequest(model, given), **options)

        run.__signature__ = signature = _signature(command)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        commands.command(name=name)(run)
        return command

    return register


def _signature(command: Callable[..., None]) -> inspect.Signature:
    """Return the signature for typer: MODEL, the command's own options, the loading options, and `--json` last."""
    hints = get_type_hints(command, include_extras=True)
    options = {p.name: (hints[p.name], p.default) for p in inspect.signature(command).parameters.values()}
    options["model"], json = (MODEL_ARGUMENT, defaults.MODEL), options.pop("as_json", None)
    for key, (kind, option) in LOADING_OPTIONS.items():
        options[key] = (Annotated[kind, option], False if kind is bool else None)
    if json is not None:
        options["as_json"] = json
    named_only = inspect.Parameter.KEYWORD_ONLY
    made = (inspect.Parameter(name, named_only, annotation=a, default=d) for name, (a, d) in options.items())
    return inspect.Signature(list(made))
