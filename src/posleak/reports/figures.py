"""Figures of the page as plotly dictionaries. Colours are names of CSS variables, which the page resolves.

Missing values are visible: an open marker where the interval contains the value of no effect, a cross where a value is
not defined, a triangle at the edge of an axis where a value lies outside it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from posleak.analyses.claims.catalogue import Kept
from posleak.analyses.origin.origin import Origin
from posleak.analyses.trace.trace import Ladder, Trace
from posleak.arrays import Array
from posleak.axes import LEFT, PARTS, SCALING
from posleak.leakage import Estimate
from posleak.show.colours import power_range
from posleak.typed import plain

from .compare import Comparison
from .view import RunView

Figure = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
NO_TRACE_NAME = "<extra></extra>"
"""Ends a hover text, so that plotly does not add the trace's name."""

INTERVAL_HOVER = "%{customdata[0]:.3g} (%{customdata[1]:.3g} … %{customdata[2]:.3g})"
RATIO_TICKS = {
    0.02: "−98%", 0.05: "−95%", 0.1: "−90%", 0.25: "−75%", 0.5: "−50%", 1: "no change", 2: "×2", 5: "×5", 10: "×10",
    25: "×25", 50: "×50", 100: "×100",
}  # fmt: skip
LEAST_RATIO = 0.02
SYMBOLS = {"residual": "diamond", "total": "square"}
"""Markers of the forest plot, open for all queries and filled for early ones; other components are circles."""


def run_figures(view: RunView) -> dict[str, Figure]:
    """Return the figures of one run by name; those without data are left out."""
    figures = {"sink-attention": sink_attention(view), "sink-profile": sink_profile(view)}
    for queries in ("all", "early"):
        figures[f"stabilisation-{queries}"] = stabilisation(view, queries)
        if view.trace is None:
            figures[f"depth-{queries}"] = depth(view, queries)
        else:
            figures[f"both-{queries}"] = both(view, view.trace, queries)
    if view.trace is not None and view.trace.ladder is not None:
        figures["ladder"] = ladder(view.trace.ladder, view)
    if view.origin is not None:
        origin = view.origin.record
        figures |= {"norm": norm(origin), "alike": alike(origin), "readers": readers(origin)}
        figures["portrait"] = portrait(view.first_tokens)
        if view.readers:
            figures["fingerprint"] = fingerprint(view.first_tokens[: view.origin.arrays.sizes["token_a"]])
    if view.edited:
        figures["edits"] = forest(view)
    return figures


def comparison_figures(views: Sequence[RunView], compared: Comparison) -> dict[str, Figure]:
    """Return the figures that compare several runs."""
    trends = {f"overlay-{name}": overlay(views, name) for name in ("total", *every_part(views))}
    return {"balance-all": balance(compared), **trends}


def every_part(views: Sequence[RunView]) -> tuple[str, ...]:
    """Return the parts that at least one run has, in order."""
    return tuple(dict.fromkeys(name for view in views for name in view.parts))


def depth(view: RunView, queries: str) -> Figure:
    """Draw total, mask, drift and sink by layer, with intervals."""
    powers, names = view.summary.layers[queries].power, ("total", *view.parts)
    figure = go.Figure(_components(powers, names, view.summary.places))
    figure.add_hline(y=0, line={"color": "var(--faint)", "width": 1})
    return finished(figure, "layer", "power, nats²", yaxis={"range": power_range(powers, names)})


def both(view: RunView, trace: Trace, queries: str) -> Figure:
    """Draw the sources above the parts, over one axis of layers."""
    sources, parts = ("total", *view.by_source), ("total", *view.parts)
    by_source, by_part = trace.layers[queries].power, view.summary.layers[queries].power
    below = [line.update(yaxis="y2", legend="legend2") for line in _components(by_part, parts, view.summary.places)]
    figure = go.Figure([*_components(by_source, sources, view.summary.places), *below])
    for axis in ("y", "y2"):
        figure.add_hline(y=0, yref=axis, line={"color": "var(--faint)", "width": 1})
    legend = {"orientation": "h", "x": 0, "yanchor": "bottom"}
    return finished(
        figure, "layer", "by source, nats²", xaxis={"anchor": "y2"},
        yaxis={"domain": [0.57, 1], "range": power_range(by_source, sources)},
        yaxis2={"domain": [0, 0.43], "range": power_range(by_part, parts), "title": {"text": "by part, nats²"}},
        legend=legend | {"y": 1.01}, legend2=legend | {"y": 0.44},
    )  # fmt: skip


def _components(powers: Mapping[str, Estimate], names: Iterable[str], x: Array) -> list[go.Scatter]:
    dashes = {name: "dot" if name == LEFT else "solid" for name in names}
    return [
        line for name, dash in dashes.items() for line in banded(powers[name], name, f"var(--{name})", x=x, dash=dash)
    ]


def sink_profile(view: RunView) -> Figure:
    """Map the attention of late queries to the first positions; lines mark the origin and each layer's sink."""
    profile, y = view.profile, view.summary.places
    layers, positions = profile.attention.value.shape
    rows = [f"layer {name}" for name in view.summary.layer_names]
    figure = go.Figure(value_map(profile.attention, rows, "position", "sink", "attention").update(y=y.tolist()))
    wide = [layer for layer in range(layers) if 0 < profile.width[layer] <= positions]
    ends = [float(profile.width[layer]) - 0.5 for layer in wide]
    texts = [f"{rows[k]}: sink of {profile.width[k]}" for k in wide]
    figure.add_trace(_edges(ends, y[wide].tolist(), texts, "end of the sink"))
    figure.add_vline(x=profile.origin - 0.5, line={"color": "var(--ink)", "width": 1.5, "dash": "dot"})
    return finished(
        figure, "position", "layer", yaxis={"range": [y[-1] + 0.5, y[0] - 0.5], "showgrid": False}, showlegend=False,
        xaxis={"showgrid": False, "dtick": 1 if positions <= 16 else 4},
    )  # fmt: skip


def ladder(steps: Ladder, view: RunView) -> Figure:
    """Map the power left in each layer if the layers up to K have a borrowed context; a bar marks layer K."""
    rows, layers = len(steps.upto), lent_to(steps)
    names = [f"borrowed in {name}" for name in layers]
    figure = go.Figure(value_map(steps.left, names, "layer", "earlier", "nats²").update(x=view.summary.places.tolist()))
    after = [int(np.searchsorted(view.summary.layer_ids, k, side="right")) for k in steps.upto[1:-1]]
    ends = [float(view.summary.places[k - 1 : k + 1].mean()) for k in after]
    texts = [f"borrowed up to layer {k}" for k in steps.upto[1:-1]]
    figure.add_trace(_edges(ends, list(range(1, rows - 1)), texts, "last layer with a borrowed context"))
    return finished(
        figure, "layer", "layers with borrowed context", xaxis={"showgrid": False}, showlegend=False,
        yaxis={"range": [rows - 0.5, -0.5], "showgrid": False, "tickvals": list(range(rows)), "ticktext": layers},
    )  # fmt: skip


def lent_to(steps: Ladder) -> list[str]:
    """Return the names of a ladder's rows: the layers that have a borrowed context."""
    names = ["none" if k < 0 else "0" if k == 0 else f"0–{k}" for k in steps.upto]
    return [*names[:-1], "all"]


def value_map(estimate: Estimate, rows: list[str], column: str, colour: str, unit: str) -> go.Heatmap:
    """Map values [row, column] on a square-root scale from 0; negative estimates have the colour of 0."""
    value = estimate.value
    top = float(np.nanmax([*value.flat, 1e-12]))
    ticks = [0.0, *[tick for k in range(-12, 6) for m in (1, 3) if top / 40 <= (tick := m * 10.0**k) <= top]]
    return go.Heatmap(
        z=np.sqrt(np.maximum(value, 0)).tolist(), zmin=0, zmax=math.sqrt(top), xgap=1, ygap=1,
        colorscale=[[0, "var(--wash)"], [1, f"var(--{colour})"]], text=[[name] * value.shape[1] for name in rows],
        colorbar={"thickness": 10, "title": {"text": unit}, "tickvals": np.sqrt(ticks).tolist(),
                  "ticktext": [f"{tick:g}" for tick in ticks]},
        customdata=np.stack([value, estimate.low, estimate.high], axis=-1).tolist(),
        hovertemplate=f"%{{text}}, {column} %{{x}}: {INTERVAL_HOVER}{NO_TRACE_NAME}",
    )  # fmt: skip


def _edges(x: list[float], y: Sequence[float], texts: list[str], name: str) -> go.Scatter:
    """Draw a short vertical line at x in each row y."""
    return go.Scatter(
        x=[end for at in x for end in (at, at, None)], y=[end for at in y for end in (at - 0.5, at + 0.5, None)],
        mode="lines", line={"color": "var(--ink)", "width": 3}, name=name, text=[t for t in texts for _ in range(3)],
        hovertemplate=f"%{{text}}{NO_TRACE_NAME}",
    )  # fmt: skip


def stabilisation(view: RunView, queries: str) -> Figure:
    """Draw the stabilisation factor by layer on a log axis; 1 is no effect."""
    factor, x = view.summary.layers[queries].stabilisation, view.summary.places
    lines = banded(factor, "stabilisation", "var(--sink)", no_effect=1.0, x=x)
    figure = go.Figure([*lines, *undefined(factor.value, x)])
    figure.add_hline(y=1, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    return finished(figure, "layer", "stabilisation factor", log_y=True, showlegend=False)


def sink_attention(view: RunView) -> Figure:
    """Draw the attention to position 0 by layer."""
    attention = view.summary.layer_sink_attention
    figure = go.Figure([*banded(attention, "attention to position 0", "var(--sink)", x=view.summary.places)])
    return finished(figure, "layer", "attention to position 0", showlegend=False, yaxis={"range": [0, 1]})


def norm(origin: Origin) -> Figure:
    """Draw ‖x_0‖ by depth for the reference token and for other first tokens, and the norm at ordinary positions."""
    path, portrait = origin.trajectory, origin.portrait
    low, middle, high = portrait.norm
    spread = Estimate(middle, low, high, portrait.n)
    figure = go.Figure([*banded(spread, f"{portrait.n} first tokens, 5–95%", "var(--mask)", marks=False)])
    figure.add_trace(line(path.norm, escaped(origin.reference.name), "var(--sink)", width=3))
    figure.add_trace(line(path.body.median_norm, "ordinary positions, median", "var(--muted)", dash="dot"))
    return finished(figure, "depth (0: embedding)", "norm of the state", log_y=True)


def alike(origin: Origin) -> Figure:
    """Draw the mean cosine of first tokens by depth: 1 if the layers map all of them to one direction."""
    to_reference = escaped(f"first tokens to {origin.reference.name}")
    lines = [
        *banded(origin.portrait.to_reference, to_reference, "var(--sink)", marks=False),
        *banded(origin.portrait.among, "among first tokens", "var(--mask)", marks=False),
        line(origin.trajectory.body.alike, "among ordinary positions", "var(--muted)", dash="dot"),
    ]
    return finished(go.Figure(lines), "depth (0: embedding)", "mean cosine", yaxis={"range": [-0.05, 1.05]})


def readers(origin: Origin) -> Figure:
    """Draw the number of sink-reading heads of each attention call, with intervals."""
    calls = origin.reading.calls
    bars = go.Bar(
        x=[call.layer for call in calls], y=[call.readers.value for call in calls], marker={"color": "var(--sink)"},
        error_y=error_bars([call.readers for call in calls], "var(--ink)", thickness=1, width=2),
        hovertemplate=f"layer %{{x}}: %{{y}} heads{NO_TRACE_NAME}",
    )  # fmt: skip
    return finished(go.Figure(bars), "layer", "sink-reading heads")


def portrait(tokens: Sequence[str]) -> Figure:
    """Draw first tokens on the two main components of their directions; the script sets the points of each depth."""
    names = [escaped(name) for name in tokens]
    dot = {"color": "var(--mask)", "size": 6, "opacity": 0.6}
    star = {"color": "var(--drift)", "size": 14, "symbol": "star", "line": {"color": "var(--ink)", "width": 1}}
    point = {"mode": "markers", "hovertemplate": f"%{{text}}{NO_TRACE_NAME}", "x": [], "y": []}
    others = go.Scatter(**point, text=names[1:], name="first tokens", marker=dot)
    reference = go.Scatter(**point, text=names[:1], name=names[0], marker=star)
    return finished(go.Figure([others, reference]), "first component", "second component")


def fingerprint(tokens: Sequence[str]) -> Figure:
    """Map the cosines of W_O v_0 between first tokens on a scale that diverges at 0; the script sets z."""
    names = [escaped(name if len(name) < 14 else name[:12] + "…") for name in tokens]
    scale = [[0, "var(--negative)"], [0.5, "var(--paper)"], [1, "var(--mask)"]]
    place = list(range(len(names)))
    return {
        "data": [
            {"type": "heatmap", "z": [], "x": place, "y": place, "zmin": -1, "zmax": 1, "zmid": 0, "colorscale": scale,
             "xgap": 1, "ygap": 1, "colorbar": {"thickness": 10, "title": {"text": "cosine"}},
             "hovertemplate": f"%{{customdata}}: %{{z:.4f}}{NO_TRACE_NAME}",
             "customdata": [[f"{a} · {b}" for b in names] for a in names]}
        ],
        "layout": {
            "xaxis": {"tickvals": place, "ticktext": names, "tickangle": -60, "showgrid": False},
            "yaxis": {"tickvals": place, "ticktext": names, "autorange": "reversed", "showgrid": False},
        },
    }  # fmt: skip


def forest(view: RunView) -> Figure:
    """Draw power after / before each edit with its paired interval, on a log axis."""
    rows = forest_rows(view)
    ends = [float(x) for _, kept in rows for x in (kept.ratio.value, kept.ratio.low, kept.ratio.high) if x > 0]
    least, most = max(LEAST_RATIO, min([*ends, 0.5])), max([*ends, 2.0])
    figure = go.Figure()
    for name in dict.fromkeys(kept.name for _, kept in rows):
        y, chosen = zip(*((y, kept) for y, kept in rows if kept.name == name), strict=True)
        figure.add_trace(_forest_trace(name, chosen, y, least))
    figure.add_vline(x=1, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    ticks = {x: text for x, text in RATIO_TICKS.items() if least / 1.5 <= x <= most * 1.5}
    labels = [escaped(edited.about) for _, edited in view.edited]
    return finished(
        figure, "power after / before the edit", "",
        xaxis={"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values()),
               "range": [math.log10(least / 1.25), math.log10(most * 1.25)]},
        yaxis={"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.4, -0.6],
               "automargin": True},
    )  # fmt: skip


def forest_rows(view: RunView) -> list[tuple[float, Kept]]:
    """Return (height, ratio) of every ratio that is drawn; undefined ratios are only in the table."""
    rows = list[tuple[float, Kept]]()
    for row, (_, edited) in enumerate(view.edited):
        defined = [kept for kept in edited.kept if not math.isnan(kept.ratio.value)]
        rows += [(row + 0.19 * (rank - (len(defined) - 1) / 2), kept) for rank, kept in enumerate(defined)]
    return rows


def _forest_trace(name: str, kept: Sequence[Kept], y: Sequence[float], least: float) -> go.Scatter:
    """Draw the ratios of one component; values below `least` are triangles at the edge of the log axis."""
    colour = f"var(--{kept[0].component})"
    symbol = SYMBOLS.get(kept[0].component, "circle") + ("" if kept[0].queries == "early" else "-open")
    value, low, high = (np.array([getattr(each.ratio, end) for each in kept]) for end in ("value", "low", "high"))
    x = np.maximum(value, least)
    return go.Scatter(
        x=x.tolist(), y=list(y), name=name, mode="markers", customdata=np.stack([value, low, high], axis=-1).tolist(),
        marker={"color": colour, "size": 9, "symbol": ["triangle-left" if v < least else symbol for v in value]},
        error_x={"array": np.nan_to_num(np.maximum(high - x, 0)).tolist(), "color": colour, "thickness": 1.5,
                 "arrayminus": np.nan_to_num(np.maximum(x - np.maximum(low, least / 2), 0)).tolist(), "width": 0},
        hovertemplate=f"{name}: ×{INTERVAL_HOVER}{NO_TRACE_NAME}",
    )  # fmt: skip


def overlay(views: Sequence[RunView], name: str) -> Figure:
    """Draw one component of several runs by relative depth."""
    figure = go.Figure()
    for k, view in enumerate(views):
        if name in ("total", *view.parts):
            power = view.summary.layers["all"].power[name]
            x, colour = np.linspace(0, 1, len(power.value)), f"var(--run-{k % 6})"
            figure.add_traces(list(banded(power, escaped(view.label), colour, x=x, dash=DASHES[k % 6])))
    return finished(figure, "relative depth", "power, nats²", title={"text": name})


def balance(compared: Comparison) -> Figure:
    """Draw the shares of the parts of each run, all queries, with intervals."""
    shares = [row.cells for row in compared.rows if row.queries == "all" and row.minus is None]
    figure, parts = go.Figure(), (*PARTS, SCALING) if SCALING in compared.units else PARTS
    for rank, name in enumerate(parts):
        defined = [(k, s[name]) for k, s in enumerate(shares) if name in s and not math.isnan(s[name].value)]
        figure.add_scatter(
            x=[share.value for _, share in defined], y=[k + 0.2 * (rank - 1) for k, _ in defined], name=name,
            mode="markers", marker={"color": f"var(--{name})", "size": 10, "symbol": "circle"},
            hovertemplate=f"{name} %{{x:.1%}}{NO_TRACE_NAME}",
            error_x=error_bars([share for _, share in defined], f"var(--{name})", thickness=2, width=0),
        )  # fmt: skip
    labels = [
        escaped(label) + (" (n.s.)" if math.isnan(share["mask"].value) else "")
        for label, share in zip(compared.labels, shares, strict=True)
    ]
    figure.add_vline(x=0, line={"color": "var(--muted)", "width": 1})
    return finished(
        figure, "share of the total", "", xaxis={"tickformat": ".0%"},
        yaxis={"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]},
    )  # fmt: skip


def error_bars(estimates: Iterable[Estimate], colour: str, **style: float) -> dict[str, Any]:
    """Return plotly's error bars of the intervals; a value without an interval has none."""
    ends = np.array([[abs(x.low - x.value), abs(x.high - x.value)] for x in estimates]).reshape(-1, 2)
    down, up = np.nan_to_num(ends).T.tolist()
    return {"array": up, "arrayminus": down, "color": colour, **style}


def banded(
    estimate: Estimate, name: str, colour: str, *, x: Array | None = None, dash: str = "solid", marks: bool = True,
    no_effect: float = 0.0,
) -> Iterator[go.Scatter]:  # fmt: skip
    """Yield the band of the intervals and the line; markers are open where the interval contains `no_effect`."""
    value, low, high = estimate.value, estimate.low, estimate.high
    x = np.arange(len(value), dtype=float) if x is None else x
    defined = np.isfinite(low) & np.isfinite(high)
    yield go.Scatter(
        x=[*x[defined], *x[defined][::-1]], y=[*high[defined], *low[defined][::-1]],
        fill="toself", fillcolor=colour.replace(")", "-band)"), line={"width": 0}, hoverinfo="skip",
        showlegend=False, legendgroup=name, mode="lines",
    )  # fmt: skip
    clear = (low > no_effect) | (high < no_effect)
    yield go.Scatter(
        x=x.tolist(), y=value.tolist(), name=name, legendgroup=name, mode="lines+markers" if marks else "lines",
        line={"color": colour, "width": 2, "dash": dash}, customdata=np.stack([low, high], axis=-1).tolist(),
        marker={"symbol": ["circle" if c else "circle-open" for c in clear], "size": 6, "color": colour},
        hovertemplate=f"{name} %{{x:.3~g}}: %{{y:.3g}} (%{{customdata[0]:.3g}} … %{{customdata[1]:.3g}})"
        + NO_TRACE_NAME,
    )  # fmt: skip


def line(y: Array, name: str, colour: str, **style: Any) -> go.Scatter:
    """Draw values by depth, without an interval."""
    return go.Scatter(
        x=list(range(len(y))), y=y.tolist(), name=name, mode="lines", line={"color": colour, **style},
        hovertemplate=f"{name} %{{x}}: %{{y:.3g}}{NO_TRACE_NAME}",
    )  # fmt: skip


def undefined(values: Array, x: Array) -> Iterator[go.Scatter]:
    """Yield crosses on the bottom line where a value is not defined."""
    missing = x[np.isnan(values)].tolist()
    if missing:
        yield go.Scatter(
            x=missing, y=[float(np.nanmin([*values, 1.0]))] * len(missing), name="not defined", mode="markers",
            marker={"symbol": "x-thin", "size": 8, "line": {"color": "var(--muted)", "width": 2}},
            hovertemplate="layer %{x}: not defined, its mask power is not significantly above 0" + NO_TRACE_NAME,
        )  # fmt: skip


def escaped(text: str) -> str:
    """Return text in which plotly finds no tags."""
    return html.escape(text, quote=False).replace("\n", "⏎")


def finished(figure: go.Figure, x: str, y: str, log_y: bool = False, **layout: Any) -> Figure:
    """Return a figure as a dictionary, with axis titles and without plotly's template."""
    figure.update_layout(**layout)
    figure.update_layout(xaxis_title_text=x, yaxis_title_text=y)
    if log_y:
        figure.update_yaxes(type="log", dtick=1)
    fields: Figure = plain(figure.to_plotly_json())
    fields["layout"].pop("template", None)
    return fields
