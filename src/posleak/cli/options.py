"""Options that several commands share, and the registration of commands that run one model.

Defaults are in `posleak.defaults`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

import posleak
from posleak import defaults
from posleak.stopwatch import stage

from .app import app, emit, err, out, silence, spoken_warnings, working
from .progress import TimeProfile, prompt_progress

if TYPE_CHECKING:
    from posleak.models import Subject


def named(text: str) -> str:
    """Reject an empty name or path, which an unset shell variable would leave: it would mean the current folder."""
    if not text.strip():
        raise typer.BadParameter("it is empty; pass a name or omit the option. The current folder is `.`")
    return text


def named_path(text: str | Path) -> Path:
    """Return the path, rejecting an empty one."""
    return Path(named(str(text)))


def device_map(text: str) -> str | dict[str, Any]:
    """Return a device map: a name such as `auto`, or a JSON object from modules to devices."""
    if not text.lstrip().startswith("{"):
        return named(text)
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise typer.BadParameter(f"it is not JSON: {error}") from error


def path_option(*names: str, help: str) -> Any:
    """Return an option whose value is a path."""
    return typer.Option(*names, parser=named_path, metavar="<path>", help=help)


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

Edits = Annotated[
    list[str] | None,
    typer.Option("--edit", help="Intervention on the model, e.g. bos=zero or sink=cut (docs/edits.md); repeatable."),
]
Metrics = Annotated[
    str,
    typer.Option(help="Metrics of other papers, from the same forward passes: all, none, or names (docs/metrics.md)."),
]
Loss = Annotated[bool, typer.Option("--loss", help="Also compute the next-token loss at the sampled positions.")]

MaxMemory = Annotated[
    str | None,
    typer.Option(help="Memory limit of the process, including the model, e.g. 8GB. Batches are chosen to fit."),
]

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
STORAGE_OPTIONS: dict[str, Any] = {
    "out": Annotated[
        Path | None, path_option(help="Run folder. Default: a folder in runs/, named after the measurement.")
    ],
    "fresh": Annotated[bool, typer.Option("--fresh", help="Discard results in the folder and measure again.")],
}
"""Options of commands that store runs, by the names of the public function's parameters."""

Profile = Annotated[bool, typer.Option("--profile", help="Show time by stage and peak memory.")]

LOADING_OPTIONS: dict[str, Any] = {
    "device": Annotated[str | None, typer.Option(help="Device, e.g. cpu or cuda:0. Default: a GPU if there is one.")],
    "dtype": Annotated[
        str | None, typer.Option(help="float32 (default on a CPU), bfloat16, float16, float64 or auto.")
    ],
    "device_map": Annotated[
        Any,
        typer.Option(
            help="Passed to transformers: `auto` distributes a large model; or a JSON object.",
            parser=device_map,
            metavar="<text>",
        ),
    ],
    "adapter": Annotated[
        list[str] | None,
        typer.Option(help="Adapter of PEFT (LoRA and others) to apply: a folder or a Hub id; repeatable."),
    ],
    "base": Annotated[str | None, typer.Option(help="Base model if MODEL is an adapter. Default: as its config says.")],
    "tokenizer": Annotated[str | None, typer.Option(help="Folder or Hub id with the tokenizer. Default: the model's.")],
    "offload": Annotated[
        Path | None, path_option("--offload", help="Leave the weights on disk; FOLDER holds those that are converted.")
    ],
    "parallel": Annotated[
        str | None, typer.Option(help="Under torchrun: tensor (split the model) or data (split the prompts).")
    ],
    "revision": Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")],
    "trust_remote_code": Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code that comes with the model.")
    ],
    "allow_pickle": Annotated[bool, typer.Option("--allow-pickle", help="Allow weights stored as pickle files.")],
    "verify": Annotated[bool, typer.Option("--verify", help="Hash all model files again; ignore cached hashes.")],
}
"""Options of `posleak.load`, by the names of its parameters."""


@dataclass(frozen=True)
class ModelRequest:
    """The model named on the command line, and the options that commands on one model share.

    loading     arguments of `posleak.load`
    storage     arguments out, root and fresh of a function that stores runs; empty for other functions
    """

    name: str
    loading: dict[str, Any]
    storage: dict[str, Any]
    max_memory: str | None
    profile: TimeProfile
    as_json: bool

    def load(self) -> Subject:
        """Load the model, showing a status line: the first load may download it."""
        with stage("load"), spoken_warnings(), working(f"loading {self.name}") as status:
            from posleak.models import load

            subject = load(self.name, progress=status, max_memory=self.max_memory, **self.loading)
        if not subject.ranks.writes:
            silence()
        return subject

    def compute(self, function: str, more: Mapping[str, Any] | None = None, **spec: Any) -> Any:
        """Load the model, and return the result of a public function on it.

        function    its name: looking it up imports torch, and an invalid measurement is rejected before that
        more        arguments of the function that are not fields of MeasureSpec
        spec        arguments that are fields of MeasureSpec; None means the default
        """
        arguments = {**spec, **(more or {}), **self.storage, "max_memory": self.max_memory}
        counted = function == "measure"  # its progress is a number of prompts; that of the others is a status line
        with self.profile:
            require_valid(self.max_memory, **spec)
            subject, shown = self.load(), prompt_progress(err) if counted else working(function)
            with self.profile.measuring(subject), spoken_warnings(), shown as callback:
                arguments["on_progress" if counted else "progress"] = callback
                return getattr(posleak, function)(subject, **arguments)

    def present(self, result: Any, tables: Callable[[Any], Iterable[Any]], planned: int | None = None) -> None:
        """Print a result and the profile of the command, if it was requested, as JSON or as tables.

        planned     bytes of the memory plan, for the profile
        """
        profile = self.profile.as_dict(planned)
        if self.as_json:
            emit(result.as_dict() | ({} if profile is None else {"profile": profile}))
            return
        for item in tables(result):
            out.print(item)
        if profile is not None:
            from posleak.reports.terminal.run import profile_table

            out.print(profile_table(profile))


def require_valid(max_memory: str | None, **spec: Any) -> None:
    """Reject an invalid measurement before the model is loaded and before torch is imported."""
    from posleak.inputs import require_source
    from posleak.runs.spec import MeasureSpec, parse_bytes

    measurement = MeasureSpec(**{name: value for name, value in spec.items() if value is not None})
    measurement.require_effect()
    require_source(measurement.inputs)
    parse_bytes(max_memory)


def model_command(
    name: str, commands: typer.Typer = app, *, stored: bool = False, profiled: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose parameter `model` is a ModelRequest, made of the argument MODEL and the shared options.

    stored      the command stores runs: add --out and --fresh
    profiled    add --profile
    """
    shared = {**(STORAGE_OPTIONS if stored else {}), "max_memory": MaxMemory}
    shared |= {**({"profile": Profile} if profiled else {}), **LOADING_OPTIONS, "as_json": Json}

    def register(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(model: str, **options: Any) -> None:
            values = {key: options.pop(key) for key in shared}
            storage = {key: values[key] for key in STORAGE_OPTIONS} | {"root": defaults.RUNS} if stored else {}
            loading = {key: values[key] for key in LOADING_OPTIONS if values[key] not in (None, False, [])}
            profile = TimeProfile(values.get("profile", False))
            request = ModelRequest(model, loading, storage, values["max_memory"], profile, values["as_json"])
            command(model=request, **options)

        run.__signature__ = signature = _signature(command, shared)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        commands.command(name=name)(run)
        return command

    return register


def _signature(command: Callable[..., None], shared: dict[str, Any]) -> inspect.Signature:
    """Return the signature for typer: MODEL, the command's own options, then the shared ones."""
    hints = get_type_hints(command, include_extras=True)
    options = {p.name: (hints[p.name], p.default) for p in inspect.signature(command).parameters.values()}
    options["model"] = (MODEL_ARGUMENT, defaults.MODEL)
    options |= {key: (kind, False if get_args(kind)[0] is bool else None) for key, kind in shared.items()}
    named_only = inspect.Parameter.KEYWORD_ONLY
    parameters = (inspect.Parameter(key, named_only, annotation=a, default=d) for key, (a, d) in options.items())
    return inspect.Signature(list(parameters))
