"""Tables of runs: `posleak measure`, `posleak trace` and the option `--profile`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from posleak.runs.loss import LOSS_UNIT
from posleak.show.colours import GLYPHS, LIGHT
from posleak.show.lines import Prose, prose
from posleak.show.numbers import NAN, estimate, percent, short
from posleak.show.terminal import cell, parts_of, share_bar, table
from posleak.show.words import QUERIES, SOURCES, evenly

if TYPE_CHECKING:
    from posleak.analyses.trace.trace import Trace
    from posleak.leakage import Summary
    from posleak.leakage.summary import Decomposition
    from posleak.metrics import Metrics
    from posleak.runs.run import Run
    from posleak.show.estimates import HasInterval

NORM = "powers weighted by the attention of late queries; evenly weighted ones: --json"

LEGEND = f"""\
powers in nats², mean over heads, all queries, with 95% jackknife intervals over prompts
{NORM}
shares of the total: █ mask ▒ drift · sink ╱ scaling, − negative; n.s.: total not significantly above 0
at 0: attention to position 0, mean over reference queries"""

TRACE_LEGEND = f"""\
powers in nats², mean over heads, all queries, with 95% intervals over prompts; n.s.: total not significantly above 0
{NORM}
to origin: attention of late queries to the first tokens, in the prompt alone → with borrowed context"""

SINK_WIDTHS = {"no sink": (0, 0), "1": (1, 1), "2": (2, 2), "3–4": (3, 4), "5 or more": (5, 10**9)}
"""Smallest and largest width of each group of heads."""


def run_tables(run: Run) -> Iterator[RenderableType]:
    """Yield the summary of a measurement: heading, layers, sinks, shares, stabilisation, loss, metrics, remainder."""
    summary = run.summary
    yield heading(run)
    yield layers_table(summary)
    yield prose(LEGEND, style="dim", indent=2)
    yield _sink_lines(summary, run.record.plan.origin)
    yield from shares_lines(summary.model, parts_of(summary.model["all"]), summary.prompts)
    yield _stabilisation(summary)
    if run.loss is not None:
        parts = "  ".join(f"{name} {estimate(loss)}" for name, loss in run.loss.numbers.items())
        n = run.loss.numbers["all"].n
        where = Text(f"  {LOSS_UNIT}, {run.loss.positions} positions of each prompt, n={n}", style="dim")
        yield _labelled("next-token loss", Text(parts).append_text(where))
    if run.metrics is not None:
        yield metrics_table(run.metrics)
    yield remainder_line(run.remainder, run)


def heading(run: Run) -> Group:
    """Return the name of the model, its properties and those of the measurement."""
    return Group(
        prose(run.name, style="bold"),
        prose(" · ".join(run.record.model_facts), style="dim"),
        prose(" · ".join(run.record.facts), style="dim"),
    )


def layers_table(summary: Summary) -> RenderableType:
    """Return one row per layer: powers, shares, attention to position 0."""
    decomposition = summary.layers["all"]
    parts = parts_of(decomposition)
    layers = table(["layer", "total", *parts, "shares", "at 0"], right=["layer", "at 0"], gap=1)
    for layer, name in enumerate(summary.layer_names):
        powers = [cell(decomposition.power[part][layer], part) for part in ("total", *parts)]
        bar = share_bar({part: float(decomposition.share[part][layer].value) for part in parts})
        layers.add_row(name, *powers, bar, f"{summary.layer_sink_attention[layer].value:.2f}")
    return layers


def metrics_table(metrics: Metrics) -> Group:
    """Return one row per metric of other papers."""
    widths = {"metric": 44, "value, with its 95% interval": 34}
    rows = table(list(widths), wrap=widths, most=widths)
    for row in metrics.rows:
        depth = "" if row.at is None else f", depth {row.at}"
        value = Text(estimate(row.value, row.metric.unit)).append(f", n={row.value.n}{depth}", style="dim")
        rows.add_row(Text(row.metric.title), value)
    frame = [] if metrics.frame is None else [prose(f"reference frame: {metrics.frame.words}", indent=2)]
    return Group(
        prose("metrics of other papers, from the same forward passes", style="bold"),
        rows,
        *frame,
        prose("definitions, sources and limitations: docs/metrics.md", style="dim", indent=2),
    )


def shares_lines(model: Mapping[str, Decomposition], names: Collection[str], prompts: int) -> Iterator[Prose]:
    """Yield the shares of early and of all queries, then evenly weighted ones that lead to another conclusion."""
    shown = {label: model[queries] for queries, label in QUERIES.items()}
    even = {f"evenly weighted, {queries}": evenly(model[queries], names) for queries in QUERIES}
    for label, numbers in (shown | even).items():
        if numbers is not None:
            yield shares_line(label, {name: numbers.share[name] for name in names}, prompts)


def shares_line(label: str, shares: Mapping[str, HasInterval], prompts: int) -> Prose:
    """Return `label   mask 31% (20%…41%)  drift …  n=16`."""
    parts = []
    for name, share in shares.items():
        text = Text.assemble((name, LIGHT[name]), f" {percent(share.value)}")
        if not (math.isnan(share.value) or math.isnan(share.low)):
            text.append(f" ({percent(share.low)}…{percent(share.high)})", style="dim")
        parts.append(text)
    return _labelled(label, Text("  ").join([*parts, Text(f"n={prompts}", style="dim")]))


def remainder_line(remainder: float, run: Run) -> Prose:
    """Return the remainder of the decomposition and the path of the run."""
    line = Text(f"remainder {remainder:.1e} nats · run", style="dim").append(f" {run.path}", style="not dim")
    return Prose(line, indent=2)


def _labelled(label: str, text: Text) -> Prose:
    return Prose(Text(f"{label:<24} ").append_text(text), indent=2)


def _sink_lines(summary: Summary, origin: int) -> Prose:
    """Return the mean attention to the first positions, and the number of heads by the width of their sink."""
    measured = np.isfinite(summary.profile.value[..., 0])
    means = [short(float(summary.profile.value[..., at][measured].mean())) for at in range(6)]
    widths = summary.width[measured]
    counts = {name: int(((widths >= low) & (widths <= high)).sum()) for name, (low, high) in SINK_WIDTHS.items()}
    sizes = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    line = Text("attention to positions 0 … 5:  ").append(" ".join(means), style=LIGHT["sink"])
    line.append(f"\nheads by the width of their sink, in tokens: {sizes}; the origin has {origin}", style="dim")
    return Prose(line, indent=2)


def _stabilisation(summary: Summary) -> Prose:
    """Return the mask power without sinks divided by the mask power: `early ×4.4 (3.5…5.7)  all …`."""
    text = Text()
    for queries in QUERIES:
        ratio = summary.model[queries].stabilisation
        text.append(f"{queries} " + (NAN if math.isnan(ratio.value) else f"×{ratio.value:.1f}"))
        if not (math.isnan(ratio.value) or math.isnan(ratio.low)):
            text.append(f" ({ratio.low:.1f}…{ratio.high:.1f})", style="dim")
        text.append("  ")
    return _labelled("stabilisation", text.append(f"n={summary.prompts}", style="dim"))


def trace_tables(trace: Trace) -> Iterator[RenderableType]:
    """Yield the heading, layers, the ladder if there is one, shares of the sources, checks, metrics and remainder."""
    yield heading(trace.ordinary)
    yield trace_layers(trace)
    sources = "   ".join(f"{GLYPHS[name]} {name}: {SOURCES[name]}" for name in trace.sources)
    yield prose(f"{sources}   − negative", style="dim", indent=2)
    yield prose(TRACE_LEGEND, style="dim", indent=2)
    if trace.ladder is not None:
        rungs = table(["borrowed up to layer", "power"], right=["borrowed up to layer"])
        for row, upto in enumerate(trace.ladder.upto):
            name = "none" if upto < 0 else f"{upto}, all" if row == len(trace.ladder.upto) - 1 else str(upto)
            rungs.add_row(name, cell(trace.ladder.mean[row]))
        yield rungs
        yield prose("total power in layers after the first, with the context borrowed up to layer K", style="dim")
    yield from shares_lines(trace.model, trace.sources, trace.ordinary.prompts)
    for check in trace.checks:
        yield prose(check, indent=2)
    if trace.ordinary.metrics is not None:
        yield metrics_table(trace.ordinary.metrics)
    yield remainder_line(trace.remainder, trace.ordinary)


def trace_layers(trace: Trace) -> RenderableType:
    """Return one row per layer: powers and shares of the sources, attention to the origin in both passes."""
    decomposition, attention, sources = trace.layers["all"], trace.attention, trace.sources
    layers = table(["layer", "total", *sources, "shares", "to origin"], right=["layer"], gap=1)
    for layer, layer_name in enumerate(trace.ordinary.summary.layer_names):
        powers = [cell(decomposition.power[name][layer], name) for name in ("total", *sources)]
        bar = share_bar({name: float(decomposition.share[name][layer].value) for name in sources})
        to_origin = " → ".join(f"{attention[name].value[layer]:.2f}" for name in ("ordinary", "borrowed"))
        layers.add_row(layer_name, *powers, bar, to_origin)
    return layers


def profile_table(profile: dict[str, Any]) -> Group:
    """Return seconds by stage, the share of the model's own forward pass, and memory compared with its plan."""
    stages = table(("stage", "seconds", "share", "times"), right=("seconds", "share", "times"))
    for row in profile["stages"]:
        stages.add_row(row["stage"], f"{row['seconds']:.2f}", f"{row['share']:.1%}", str(row["entries"]))
    stages.add_row("all", f"{profile['seconds']:.2f}", "100%", "1")
    memory, share = profile["memory"], profile["forward_share"]
    lines = [
        "nothing was measured: the folder already contains this run (--fresh measures again)" if not share
        else f"the model's own forward pass: {share:.0%} of the {profile['measuring_seconds']:.1f} s of measuring, "
        f"{profile['forward_share_of_command']:.0%} of the whole command",
        f"peak memory above the loaded model: {memory['peak_mb']:.0f} MB"
        + ("" if memory["planned_mb"] is None else f", planned {memory['planned_mb']:.0f} MB"),
    ]  # fmt: skip
    return Group(stages, *(prose(line, style="dim") for line in lines))
