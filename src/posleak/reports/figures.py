"""The page's figures as plotly dictionaries. Colours are names of CSS variables: the page resolves them, light or dark.

Absence is drawn: an open marker where an interval contains 0, a cross where a number is not defined, a triangle at the
edge where a value lies beyond it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from posleak.analyses.claims.finding import Kept
from posleak.analyses.origin.origin import Origin
from posleak.analyses.trace.trace import SOURCES, Ladder
from posleak.arrays import Array
from posleak.leakage import Estimate
from posleak.show.scale import power_range
from posleak.typed import plain

from .view import Pictures, Traced, View

Figure = dict[str, Any]

RUNS = tuple(f"var(--run-{k})" for k in range(6))
ALONE = "<extra></extra>"
"""Ends a hover text, so that plotly does not add the trace's name."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
RATIOS = {0.02: "−98%", 0.05: "−95%", 0.1: "−90%", 0.25: "−75%", 0.5: "−50%", 1: "no change", 2: "×2", 5: "×5",
          10: "×10", 25: "×25", 50: "×50", 100: "×100"}  # fmt: skip
SYMBOLS = {"residual": "diamond", "total": "square"}
"""In the forest plot; open for all queries, filled for early ones. Any other component is a circle."""


def run_figures(view: View) -> dict[str, Figure]:
    """Every figure of one run by name; figures that need what the folder does not have are left out."""
    found = {f"depth-{queries}": depth(view, queries) for queries in ("all", "early")}
    found |= {f"stabilisation-{queries}": stabilisation(view, queries) for queries in ("all", "early")}
    found["sink-attention"] = sink_attention(view)
    found["sink-profile"] = sink_profile(view)
    if view.trace is not None:
        found |= {f"both-{queries}": both(view, view.trace, queries) for queries in ("all", "early")}
        if view.trace.ladder is not None:
            found["ladder"] = ladder(view.trace.ladder, view)
    if view.origin is not None:
        found |= {"norm": norm(view.origin), "alike": alike(view.origin), "readers": readers(view.origin)}
    if view.pictures is not None:
        found["portrait"] = portrait(view.pictures)
        if view.pictures.cosine is not None:
            found["fingerprint"] = fingerprint(view.pictures)
    if view.edited:
        found["edits"] = forest(view)
    return found


def comparison_figures(views: Sequence[View]) -> dict[str, Figure]:
    """Figures about several runs."""
    trends = {f"overlay-{name}": overlay(views, name) for name in ("total", *every_part(views))}
    return {"balance-all": balance(views, "all"), "balance-early": balance(views, "early"), **trends}


def every_part(views: Sequence[View]) -> tuple[str, ...]:
    """Parts that any of the runs has, in order."""
    return tuple(dict.fromkeys(name for view in views for name in view.parts))


def depth(view: View, queries: str) -> Figure:
    """total, mask, drift and sink per layer, with bands."""
    powers, names = view.layers.numbers[queries].power, ("total", *view.parts)
    figure = go.Figure(_components(powers, names, view.places))
    figure.add_hline(y=0, line={"color": "var(--faint)", "width": 1})
    figure.update_layout(yaxis={"range": power_range(powers, names)})
    return finished(figure, "layer", "power, nats²")


def both(view: View, traced: Traced, queries: str) -> Figure:
    """Above where position comes from, below where it is read, over one axis of layers."""
    sources, parts = ("total", *SOURCES), ("total", *view.parts)
    from_, read = traced.layers[queries].power, view.layers.numbers[queries].power
    below = [trace.update(yaxis="y2", legend="legend2") for trace in _components(read, parts, view.places)]
    figure = go.Figure([*_components(from_, sources, view.places), *below])
    for axis in ("y", "y2"):
        figure.add_hline(y=0, yref=axis, line={"color": "var(--faint)", "width": 1})
    legend = {"orientation": "h", "x": 0, "yanchor": "bottom"}
    figure.update_layout(
        xaxis={"anchor": "y2"}, yaxis={"domain": [0.57, 1], "range": power_range(from_, sources)},
        yaxis2={"domain": [0, 0.43], "range": power_range(read, parts), "title": {"text": "where read, nats²"}},
        legend=legend | {"y": 1.01}, legend2=legend | {"y": 0.44},
    )  # fmt: skip
    return finished(figure, "layer", "where from, nats²")


def _components(powers: dict[str, Estimate], names: Iterable[str], x: Array) -> list[go.Scatter]:
    return [trace for name in names for trace in banded(powers[name], name, f"var(--{name})", x=x)]


def sink_profile(view: View) -> Figure:
    """Attention of late queries to the first positions; a dotted line ends the origin, a bar the sink of each layer."""
    profile, y = view.profile, view.places
    layers, positions = profile.attention.value.shape
    rows = [f"layer {name}" for name in view.names]
    figure = go.Figure(_map(profile.attention, rows, "position", "sink", "attention").update(y=y.tolist()))
    wide = [layer for layer in range(layers) if 0 < profile.width[layer] <= positions]
    ends = [float(profile.width[layer]) - 0.5 for layer in wide]
    texts = [f"{rows[k]}: sink of {profile.width[k]}" for k in wide]
    figure.add_trace(_edges(ends, y[wide].tolist(), texts, "end of the sink"))
    figure.add_vline(x=profile.origin - 0.5, line={"color": "var(--ink)", "width": 1.5, "dash": "dot"})
    figure.update_layout(yaxis={"range": [y[-1] + 0.5, y[0] - 0.5], "showgrid": False}, showlegend=False)
    figure.update_layout(xaxis={"showgrid": False, "dtick": 1 if positions <= 16 else 4})
    return finished(figure, "position", "layer")


def ladder(found: Ladder, view: View) -> Figure:
    """Power that is left in each layer when a context is lent up to layer K; a bar stands after layer K."""
    rows = len(found.upto)
    names = [f"lent to {name}" for name in lent_to(found)]
    figure = go.Figure(_map(found.left, names, "layer", "earlier", "nats²").update(x=view.places.tolist()))
    after = [int(np.searchsorted(view.record.calibration.numbers, k, side="right")) for k in found.upto[1:-1]]
    ends = [float(view.places[k - 1 : k + 1].mean()) for k in after]
    between = list(range(1, rows - 1))
    figure.add_trace(_edges(ends, between, [f"lent up to layer {k}" for k in found.upto[1:-1]], "last layer lent to"))
    figure.update_layout(
        xaxis={"showgrid": False}, showlegend=False,
        yaxis={"range": [rows - 0.5, -0.5], "showgrid": False, "tickvals": list(range(rows)),
               "ticktext": lent_to(found)},
    )  # fmt: skip
    return finished(figure, "layer", "context lent to")


def lent_to(found: Ladder) -> list[str]:
    """Names of the rows of a ladder."""
    last = len(found.upto) - 1
    names = ["none" if k < 0 else "0" if k == 0 else f"0–{k}" for k in found.upto]
    return ["all" if row == last else name for row, name in enumerate(names)]


def _map(estimate: Estimate, rows: list[str], column: str, colour: str, unit: str) -> go.Heatmap:
    """Values [row, column] in one colour, on a root scale from 0; a negative value is a zero with noise."""
    value, low, high = estimate.value, estimate.low, estimate.high
    top = float(np.nanmax([*value.flat, 1e-12]))
    ticks = [0.0, *[tick for k in range(-12, 6) for m in (1, 3) if (tick := m * 10.0**k) <= top][-5:]]
    hover = "%{customdata[0]:.3g} (%{customdata[1]:.3g} … %{customdata[2]:.3g})"
    return go.Heatmap(
        z=np.sqrt(np.maximum(value, 0)).tolist(), zmin=0, zmax=math.sqrt(top), xgap=1, ygap=1,
        colorscale=[[0, "var(--wash)"], [1, f"var(--{colour})"]], text=[[name] * value.shape[1] for name in rows],
        colorbar={"thickness": 10, "title": {"text": unit}, "tickvals": np.sqrt(ticks).tolist(),
                  "ticktext": [f"{tick:g}" for tick in ticks]},
        customdata=np.stack([value, low, high], axis=-1).tolist(),
        hovertemplate=f"%{{text}}, {column} %{{x}}: {hover}{ALONE}",
    )  # fmt: skip


def _edges(x: list[float], y: Sequence[float], texts: list[str], name: str) -> go.Scatter:
    """A short upright line at x in each row y."""
    return go.Scatter(
        x=[end for at in x for end in (at, at, None)], y=[end for at in y for end in (at - 0.5, at + 0.5, None)],
        mode="lines", line={"color": "var(--ink)", "width": 3}, name=name, text=[t for t in texts for _ in range(3)],
        hovertemplate=f"%{{text}}{ALONE}",
    )  # fmt: skip


def stabilisation(view: View, queries: str) -> Figure:
    """How many times the sink damps the mask, by layer, on a log axis: 1 is no effect."""
    found, x = view.layers.numbers[queries].stabilisation, view.places
    figure = go.Figure([*banded(found, "stabilisation", "var(--sink)", no_effect=1.0, x=x), *undefined(found.value, x)])
    figure.add_hline(y=1, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    figure.update_layout(showlegend=False)
    return finished(figure, "layer", "times damped", log_y=True)


def sink_attention(view: View) -> Figure:
    attention = view.layers.sink_attention
    figure = go.Figure([*banded(attention, "attention to position 0", "var(--sink)", x=view.places)])
    figure.update_layout(showlegend=False, yaxis={"range": [0, 1]})
    return finished(figure, "layer", "attention to position 0")


def norm(origin: Origin) -> Figure:
    """‖x_0‖ of the reference token, of many first tokens, and of ordinary positions."""
    path, many = origin.trajectory, origin.portrait
    low, middle, high = many.norm
    spread = Estimate(middle, low, high, many.n)
    figure = go.Figure([*banded(spread, f"{many.n} first tokens, 5–95%", "var(--mask)", marks=False)])
    figure.add_trace(line(path.norm, escaped(origin.reference.name), "var(--sink)", width=3))
    figure.add_trace(line(path.body.median_norm, "ordinary positions, median", "var(--muted)", dash="dot"))
    return finished(figure, "depth (0: embedding)", "norm of the state", log_y=True)


def alike(origin: Origin) -> Figure:
    """Do the layers turn all first tokens into one direction?"""
    to = f"first tokens to {origin.reference.name}"
    figure = go.Figure(
        [
            *banded(origin.portrait.to_reference, escaped(to), "var(--sink)", marks=False),
            *banded(origin.portrait.among, "among first tokens", "var(--mask)", marks=False),
            line(origin.trajectory.body.alike, "among ordinary positions", "var(--muted)", dash="dot"),
        ]
    )
    figure.update_layout(yaxis={"range": [-0.05, 1.05]})
    return finished(figure, "depth (0: embedding)", "mean cosine")


def readers(origin: Origin) -> Figure:
    """Sink-reading heads of each attention call, with intervals over prompts."""
    calls = origin.reading.calls
    counts = [call.readers for call in calls]
    up = [abs(float(count.high - count.value)) for count in counts]
    down = [abs(float(count.low - count.value)) for count in counts]
    bars = go.Bar(
        x=[call.layer for call in calls], y=[float(count.value) for count in counts], marker={"color": "var(--sink)"},
        error_y={"array": up, "arrayminus": down, "color": "var(--ink)", "thickness": 1, "width": 2},
        hovertemplate="layer %{x}: %{y} heads<extra></extra>",
    )  # fmt: skip
    return finished(go.Figure(bars), "layer", "sink-reading heads")


def portrait(pictures: Pictures) -> Figure:
    """Directions of first tokens on their first two principal components; the page moves it through the depths."""
    names = [escaped(name) for name in pictures.tokens]
    dot = {"color": "var(--mask)", "size": 6, "opacity": 0.6}
    star = {"color": "var(--drift)", "size": 14, "symbol": "star", "line": {"color": "var(--ink)", "width": 1}}
    point = {"mode": "markers", "hovertemplate": "%{text}<extra></extra>", "x": [], "y": []}
    figure = go.Figure(
        [
            go.Scatter(**point, text=names[1:], name="first tokens", marker=dot),
            go.Scatter(**point, text=names[:1], name=names[0], marker=star),
        ]
    )  # fmt: skip
    return finished(figure, "first component", "second component")


def fingerprint(pictures: Pictures) -> Figure:
    """Cosines of W_O v_0 between first tokens; the scale diverges around 0, a real zero. The page sets z."""
    size = pictures.cosine_size
    names = [escaped(name if len(name) < 14 else name[:12] + "…") for name in pictures.tokens[:size]]
    scale = [[0, "var(--negative)"], [0.5, "var(--paper)"], [1, "var(--mask)"]]
    place = list(range(size))
    figure: Figure = {
        "data": [
            {"type": "heatmap", "z": [], "x": place, "y": place, "zmin": -1, "zmax": 1, "zmid": 0, "colorscale": scale,
             "xgap": 1, "ygap": 1, "colorbar": {"thickness": 10, "title": {"text": "cosine"}},
             "hovertemplate": "%{customdata}: %{z:.4f}<extra></extra>",
             "customdata": [[f"{a} · {b}" for b in names] for a in names]}
        ],
        "layout": {
            "xaxis": {"tickvals": place, "ticktext": names, "tickangle": -60, "showgrid": False},
            "yaxis": {"tickvals": place, "ticktext": names, "autorange": "reversed", "showgrid": False},
        },
    }  # fmt: skip
    return figure


def forest(view: View) -> Figure:
    """Power after / before for each edit, on a log axis around no change; paired intervals."""
    rows = forest_rows(view)
    ends = [float(x) for _, _, kept in rows for x in (kept.ratio.value, kept.ratio.low, kept.ratio.high) if x > 0]
    least, most = max(0.02, min([*ends, 0.5])), max([*ends, 2.0])
    figure = go.Figure()
    for name in dict.fromkeys(kept.name for _, _, kept in rows):
        chosen = [(y, kept) for y, _, kept in rows if kept.name == name]
        figure.add_trace(_forest_trace(name, [kept for _, kept in chosen], [y for y, _ in chosen], least))
    figure.add_vline(x=1, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    ticks = {x: text for x, text in RATIOS.items() if least / 1.5 <= x <= most * 1.5}
    labels = [escaped(result.edited.about) for result in view.edited if result.edited is not None]
    figure.update_layout(
        xaxis={"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values()),
               "range": [math.log10(least / 1.25), math.log10(most * 1.25)]},
        yaxis={"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.4, -0.6],
               "automargin": True},
    )  # fmt: skip
    return finished(figure, "power after / before the edit", "")


def forest_rows(view: View) -> list[tuple[float, int, Kept]]:
    """(height, number of the edit, ratio) of each ratio that is drawn; undefined ones are shown in the table only."""
    found = []
    for row, result in enumerate(view.edited):
        kept = [] if result.edited is None else [k for k in result.edited.kept if not math.isnan(k.ratio.value)]
        found += [(row + 0.19 * (rank - (len(kept) - 1) / 2), row, each) for rank, each in enumerate(kept)]
    return found


def _forest_trace(name: str, kept: Sequence[Kept], y: list[float], least: float) -> go.Scatter:
    """Values and lower ends at or below 0 lie beyond a log axis: drawn at its edge, a triangle for the value."""
    colour = f"var(--{kept[0].component})"
    symbol = SYMBOLS.get(kept[0].component, "circle") + ("" if kept[0].queries == "early" else "-open")
    value, low, high = (np.array([getattr(each.ratio, end) for each in kept]) for end in ("value", "low", "high"))
    x = np.maximum(value, least)
    return go.Scatter(
        x=x.tolist(), y=y, name=name, mode="markers", customdata=np.stack([value, low, high], axis=-1).tolist(),
        marker={"color": colour, "size": 9, "symbol": ["triangle-left" if v < least else symbol for v in value]},
        error_x={"array": np.nan_to_num(np.maximum(high - x, 0)).tolist(), "color": colour, "thickness": 1.5,
                 "arrayminus": np.nan_to_num(np.maximum(x - np.maximum(low, least / 2), 0)).tolist(), "width": 0},
        hovertemplate=f"{name}: ×%{{customdata[0]:.3g}} (%{{customdata[1]:.3g}} … %{{customdata[2]:.3g}}){ALONE}",
    )  # fmt: skip


def overlay(views: Sequence[View], name: str) -> Figure:
    """One component through the relative depth of several models."""
    figure = go.Figure()
    for k, view in enumerate(views):
        if name not in ("total", *view.parts):
            continue
        power = view.layers.numbers["all"].power[name]
        x = np.linspace(0, 1, len(power.value))
        for trace in banded(
            power, escaped(view.label), RUNS[k % 6], x=x, dash=DASHES[k % 6], band=f"var(--run-{k % 6}-band)"
        ):
            figure.add_trace(trace)
    figure.update_layout(title={"text": name})
    return finished(figure, "relative depth", "power, nats²")


def balance(views: Sequence[View], queries: str) -> Figure:
    """Shares of mask, drift and sink of each run, with intervals."""
    figure = go.Figure()
    for rank, name in enumerate(every_part(views)):
        there = [
            (k, share)
            for k, view in enumerate(views)
            if name in view.parts and not math.isnan((share := view.answer[queries][name]).value)
        ]
        up, down = ([_length(share, end) for _, share in there] for end in ("high", "low"))
        colour = f"var(--{name})"
        figure.add_trace(
            go.Scatter(
                x=[float(share.value) for _, share in there], y=[k + 0.2 * (rank - 1) for k, _ in there], name=name,
                mode="markers", marker={"color": colour, "size": 10}, hovertemplate=name + " %{x:.1%}<extra></extra>",
                error_x={"array": up, "arrayminus": down, "color": colour, "thickness": 2, "width": 0},
            )
        )  # fmt: skip
    labels = [escaped(v.label) + (" (n.s.)" if math.isnan(v.answer[queries]["mask"].value) else "") for v in views]
    figure.add_vline(x=0, line={"color": "var(--muted)", "width": 1})
    figure.update_layout(
        xaxis={"tickformat": ".0%"},
        yaxis={"tickvals": list(range(len(views))), "ticktext": labels, "range": [len(views) - 0.5, -0.5]},
    )  # fmt: skip
    return finished(figure, "share of the total", "")


def _length(share: Estimate, end: str) -> float:
    return float(np.nan_to_num(abs(getattr(share, end) - share.value)))


def banded(
    estimate: Estimate, name: str, colour: str, *, x: Array | None = None, dash: str = "solid", band: str | None = None,
    marks: bool = True, no_effect: float = 0.0,
) -> Iterable[go.Scatter]:  # fmt: skip
    """A line and its band; markers are open where the interval contains `no_effect`."""
    value, low, high = estimate.value, estimate.low, estimate.high
    x = np.arange(len(value), dtype=float) if x is None else x
    there = np.isfinite(low) & np.isfinite(high)
    yield go.Scatter(
        x=[*x[there].tolist(), *x[there][::-1].tolist()], y=[*high[there].tolist(), *low[there][::-1].tolist()],
        fill="toself", fillcolor=band or colour.replace(")", "-band)"), line={"width": 0}, hoverinfo="skip",
        showlegend=False, legendgroup=name, mode="lines",
    )  # fmt: skip
    clear = (low > no_effect) | (high < no_effect)
    yield go.Scatter(
        x=x.tolist(), y=value.tolist(), name=name, legendgroup=name, mode="lines+markers" if marks else "lines",
        line={"color": colour, "width": 2, "dash": dash}, customdata=np.stack([low, high], axis=-1).tolist(),
        marker={"symbol": ["circle" if c else "circle-open" for c in clear], "size": 6, "color": colour},
        hovertemplate=f"{name} %{{x:.3~g}}: %{{y:.3g}} (%{{customdata[0]:.3g}} … %{{customdata[1]:.3g}}){ALONE}",
    )  # fmt: skip


def line(y: Array, name: str, colour: str, **style: Any) -> go.Scatter:
    return go.Scatter(
        x=list(range(len(y))), y=y.tolist(), name=name, mode="lines", line={"color": colour, **style},
        hovertemplate=f"{name} %{{x}}: %{{y:.3g}}<extra></extra>",
    )  # fmt: skip


def undefined(values: Array, x: Array) -> Iterable[go.Scatter]:
    """Crosses on the bottom line where a number is not defined."""
    missing = x[np.isnan(values)].tolist()
    if missing:
        yield go.Scatter(
            x=missing, y=[float(np.nanmin([*values, 1.0]))] * len(missing), name="not defined", mode="markers",
            marker={"symbol": "x-thin", "size": 8, "line": {"color": "var(--muted)", "width": 2}},
            hovertemplate="layer %{x}: not defined, its mask power is not clearly above 0<extra></extra>",
        )  # fmt: skip


def escaped(text: str) -> str:
    """Text for plotly, which would read tags in it: they are escaped."""
    return html.escape(text, quote=False).replace("\n", "⏎")


def finished(figure: go.Figure, x: str, y: str, log_y: bool = False) -> Figure:
    """As a dictionary, with titled axes and without plotly's template: the page has its own."""
    figure.update_layout(xaxis_title_text=x, yaxis_title_text=y)
    if log_y:
        figure.update_yaxes(type="log", dtick=1)
    found: Figure = plain(figure.to_plotly_json())
    found["layout"].pop("template", None)
    return found
