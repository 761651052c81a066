"""Tables of a trace: `posleak trace`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from posleak.analyses.trace.trace import SOURCES
from posleak.show.lines import prose
from posleak.show.terminal import cell, share_bar, table
from posleak.show.words import QUERIES

from .run import heading, metrics_table, remainder_line, shares_line

if TYPE_CHECKING:
    from posleak.analyses.trace.trace import Ladder, Trace

LEGEND = """\
earlier: masks of earlier layers, through the residual stream   here: this layer's own mask   origin: position 0
powers in nats², mean over heads, all queries, with 95% intervals over prompts; n.s.: total not significantly above 0
to origin: attention of late queries to the origin, ordinary → borrowed context"""


def trace_tables(trace: Trace) -> Iterator[RenderableType]:
    """Yield the heading, layers, the ladder if there is one, shares of the sources, metrics and the remainder."""
    yield heading(trace.ordinary)
    yield layers_table(trace)
    yield prose(LEGEND, style="dim", indent=2)
    if trace.ladder is not None:
        yield _ladder_table(trace.ladder)
        yield prose("total power left in the layers after the first if a context is lent up to layer K", style="dim")
    for queries, label in QUERIES.items():
        shares = trace.model[queries].share
        yield shares_line(label, {name: shares[name] for name in SOURCES}, trace.ordinary.prompts)
    if trace.ordinary.metrics is not None:
        yield metrics_table(trace.ordinary.metrics)
    yield remainder_line(trace.remainder, trace.ordinary)


def layers_table(trace: Trace) -> RenderableType:
    """Return one row per layer: powers and shares of the sources, attention to the origin in both passes."""
    decomposition, attention = trace.layers["all"], trace.attention
    layers = table(["layer", "total", *SOURCES, "shares", "to origin"], right=["layer"], gap=1)
    for layer, layer_name in enumerate(trace.ordinary.summary.layer_names):
        powers = [cell(decomposition.power[name][layer], name) for name in ("total", *SOURCES)]
        bar = share_bar({name: float(decomposition.share[name][layer].value) for name in SOURCES})
        to_origin = " → ".join(f"{attention[name].value[layer]:.2f}" for name in ("ordinary", "borrowed"))
        layers.add_row(layer_name, *powers, bar, to_origin)
    return layers


def _ladder_table(ladder: Ladder) -> RenderableType:
    rungs = table(["lent up to layer", "left"], right=["lent up to layer"])
    for row, upto in enumerate(ladder.upto):
        name = "none" if upto < 0 else f"{upto}, all" if row == len(ladder.upto) - 1 else str(upto)
        rungs.add_row(name, cell(ladder.mean[row]))
    return rungs
