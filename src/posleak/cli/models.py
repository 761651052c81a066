"""`posleak models`."""

from __future__ import annotations

from dataclasses import asdict

from .app import app, emit, out
from .options import Json


@app.command(name="models")
def models_command(as_json: Json = False) -> None:
    """List the built-in models, the source of their weights, and whether they are in the cache.

    Example: `posleak models`
    """
    from posleak.models import builtin
    from posleak.reports.terminal.models import models_tables

    models = list(builtin.list_models())
    if as_json:
        emit({"models": [asdict(model) for model in models]})
        return
    for table in models_tables(models):
        out.print(table)
