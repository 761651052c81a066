"""Commands that have moved: for one version they name the new place and exit with status 2."""

from __future__ import annotations

from posleak.errors import InputError

from .app import app

MOVED = {
    "bench": "run `python -m benchmarks MODEL` in a checkout of the repository; it has the same options and JSON",
    "study": "run `posleak sweep NAME`, which has the same named comparisons and options",
    "zoo": "run `python -m zoo train`, `measure` or `list` in a checkout of the repository; `posleak models` lists the "
    "trained models that ship with posleak",
}


def _register(name: str, remedy: str) -> None:
    @app.command(name=name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def moved() -> None:
        raise InputError("this command has moved", where=f"posleak {name}", remedy=remedy)


for _name, _remedy in MOVED.items():
    _register(_name, _remedy)
