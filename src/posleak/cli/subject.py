"""Commands about one model: which model it is, and how it is loaded, are options that all of them share.

A command is written as a function of `load`, which it calls after all checks that need no model; `model_command` adds
MODEL in front of the command's own options and the loading options behind them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from posleak.stopwatch import stage

from .app import app, spoken_warnings, working
from .options import named

if TYPE_CHECKING:
    from posleak.models import Subject

DEFAULT_MODEL = "smollm2-135m"

Load = Callable[[], Any]
"""Gives the Subject that the user named."""

MODEL = Annotated[
    str,
    typer.Argument(
        parser=named, metavar="MODEL", help="A built-in name (`posleak models`), a hub id, a folder, or a .gguf file."
    ),
]
LOADING: dict[str, tuple[Any, Any]] = {
    "device": (str | None, typer.Option(help="Device, e.g. cpu or cuda:0. Default: a GPU where there is one.")),
    "dtype": (str | None, typer.Option(help="float32 (default on a CPU), bfloat16, float16, float64 or auto.")),
    "device_map": (str | None, typer.Option(help="Passed on to transformers; `auto` spreads a large model.")),
    "revision": (str | None, typer.Option(help="Branch, tag or commit of a hub id.")),
    "trust_remote_code": (bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")),
    "allow_pickle": (bool, typer.Option("--allow-pickle", help="Read weights that are stored as pickles.")),
    "verify": (
        bool,
        typer.Option("--verify", help="Hash every file of the model again, instead of trusting remembered hashes."),
    ),
}
"""The options of `posleak.models.load`, by their names there."""


def model_command(name: str, commands: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command; its parameter `load` is made from MODEL and the loading options."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(model: str, **given: Any) -> None:
            loading = {key: given.pop(key) for key in LOADING}
            asked = {key: value for key, value in loading.items() if value not in (None, False)}
            command(load=partial(load_subject, model, **asked), **given)

        run.__signature__ = _signature(command)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in _signature(command).parameters.values()}
        commands.command(name=name)(run)
        return command

    return register


def _signature(command: Callable[..., None]) -> inspect.Signature:
    """MODEL, the command's own options, the loading options, and `--json` last."""
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "load"]
    first, last = [_option("model", DEFAULT_MODEL, MODEL)], [p for p in own if p.name == "as_json"]
    loading = [
        _option(key, False if kind is bool else None, Annotated[kind, of]) for key, (kind, of) in LOADING.items()
    ]
    return inspect.Signature([*first, *(p for p in own if p not in last), *loading, *last])


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def load_subject(name: str, **options: Any) -> Subject:
    """Load with a line of status, since the first load fetches and converts the model."""
    with stage("load"), spoken_warnings(), working(f"loading {name}") as update:
        from posleak.models import load

        return load(name, progress=update, **options)
