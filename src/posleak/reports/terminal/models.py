"""Table of the built-in models: `posleak models`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from posleak.show.terminal import table

if TYPE_CHECKING:
    from posleak.models import ModelListing


def models_tables(models: Iterable[ModelListing]) -> Iterator[RenderableType]:
    """Yield one table of the models that are downloaded on first use and one of those that ship with posleak."""
    names = ("name", "stands for", "from", "download", "licence", "cached")
    downloaded, shipped = table(names, wrap=names[1:]), table(("ships with posleak", "stands for"), wrap=["stands for"])
    for model in models:
        if model.packages:
            cached = "yes" if model.cached else "no"
            downloaded.add_row(
                model.name, model.stands_for, _wheels(model.packages), f"{model.size_mb} MB", model.licence, cached
            )
        else:
            shipped.add_row(model.name, model.stands_for)
    yield downloaded
    yield shipped


def _wheels(packages: tuple[str, ...]) -> str:
    return packages[0] if len(packages) == 1 else f"{packages[0]} and {len(packages) - 1} more"
