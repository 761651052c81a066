"""A trace as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from posleak.show.lines import prose
from posleak.show.terminal import cell, share_bar, table
from posleak.show.words import QUERIES

from .tables import heading, labelled, metrics_table, named_share, remainder_line

if TYPE_CHECKING:
    from posleak.analyses.trace.trace import Ladder, Trace

NAMES = ("earlier", "here", "origin")
LEGEND = """\
earlier: masks of earlier layers, carried by the residual stream   here: this layer's own mask   origin: position 0
powers in nats², mean over heads, all queries, with 95% intervals over prompts; n.s.: total not clearly above 0
to origin: attention of late queries to the first tokens, ordinary → borrowed context"""


def trace_tables(found: Trace) -> Iterator[RenderableType]:
    """What was measured, layers, the ladder if there is one, and the answer last."""
    yield heading(found.ordinary)
    yield layers_table(found)
    yield prose(LEGEND, style="dim", indent=2)
    if found.ladder is not None:
        yield ladder_table(found.ladder)
        yield prose("total power left in the layers after the first if a context is lent up to layer K", style="dim")
    for queries, label in QUERIES.items():
        shares = found.model[queries].share
        parts = [named_share(name, shares[name]) for name in NAMES]
        count = Text(f"n={found.ordinary.prompts}", style="dim")
        yield labelled(label, Text("  ").join([*parts, count]))
    if found.ordinary.metrics is not None:
        yield metrics_table(found.ordinary.metrics)
    yield remainder_line(found.remainder, found.ordinary)


def layers_table(found: Trace) -> RenderableType:
    """One line per layer."""
    numbers, attention = found.layers["all"], found.attention
    made = table(["layer", "total", *NAMES, "shares", "to origin"], right=["layer"], gap=1)
    for layer, called in enumerate(found.ordinary.summary.layer_names):
        cells = [cell(numbers.power[name][layer], name) for name in ("total", *NAMES)]
        bar = share_bar({name: float(numbers.share[name][layer].value) for name in NAMES})
        to_origin = " → ".join(f"{attention[name].value[layer]:.2f}" for name in ("ordinary", "borrowed"))
        made.add_row(called, *cells, bar, to_origin)
    return made


def ladder_table(ladder: Ladder) -> RenderableType:
    made = table(["lent up to layer", "left"], right=["lent up to layer"])
    for row, upto in enumerate(ladder.upto):
        name = "none" if upto < 0 else f"{upto}, all" if row == len(ladder.upto) - 1 else str(upto)
        made.add_row(name, cell(ladder.mean[row]))
    return made
