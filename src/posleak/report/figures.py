"""The page's figures as plotly dictionaries. Colours are names of CSS variables: the page resolves them, light or dark.

Absence is drawn: an open marker where an interval contains 0, a cross where a number is not defined, a triangle at the
edge where a value lies beyond it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from .view import View

Figure = dict[str, Any]
Numbers = Sequence[float | None]

RUNS = tuple(f"var(--run-{k})" for k in range(6))
ALONE = "<extra></extra>"
"""Ends a hover text: without the trace's name beside it."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
RATIOS = {0.02: "−98%", 0.05: "−95%", 0.1: "−90%", 0.25: "−75%", 0.5: "−50%", 1: "no change", 2: "×2", 5: "×5",
          10: "×10", 25: "×25", 50: "×50", 100: "×100"}  # fmt: skip
EDITED = {
    "residual, early": ("var(--residual)", "diamond"), "residual": ("var(--residual)", "diamond-open"),
    "mask, early": ("var(--mask)", "circle"), "mask": ("var(--mask)", "circle-open"),
    "drift, early": ("var(--drift)", "circle"), "drift": ("var(--drift)", "circle-open"),
    "total, early": ("var(--total)", "square"), "total": ("var(--total)", "square-open"),
}  # fmt: skip


def run_figures(view: View) -> dict[str, Figure]:
    """Every figure of one run by name; figures that need what the folder does not have are left out."""
    found = {f"depth-{queries}": depth(view, queries) for queries in ("all", "early")}
    found |= {f"stabilisation-{queries}": stabilisation(view, queries) for queries in ("all", "early")}
    found["sink-attention"] = sink_attention(view)
    if view.origin is not None:
        found |= {"norm": norm(view.origin), "alike": alike(view.origin), "readers": readers(view.origin)}
        if view.origin["picture"] is not None:
            found["portrait"] = portrait(view.origin)
        if view.origin["cosine"] is not None:
            found["fingerprint"] = fingerprint(view.origin)
    if view.edits:
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
    powers = view.layers[queries]["power"]
    figure = go.Figure(
        [trace for name in ("total", *view.parts) for trace in banded(powers[name], name, f"var(--{name})")]
    )
    figure.add_hline(y=0, line={"color": "var(--faint)", "width": 1})
    return finished(figure, "layer", "power, nats²")


def stabilisation(view: View, queries: str) -> Figure:
    """How many times the sink damps the mask, by layer, on a log axis: 1 is no effect."""
    found = view.layers[queries]["stabilisation"]
    figure = go.Figure([*banded(found, "stabilisation", "var(--sink)", no_effect=1.0), *undefined(found["value"])])
    figure.add_hline(y=1, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    figure.update_layout(showlegend=False)
    return finished(figure, "layer", "times damped", log_y=True)


def sink_attention(view: View) -> Figure:
    figure = go.Figure([*banded(view.layers["sink_attention"], "attention to position 0", "var(--sink)")])
    figure.update_layout(showlegend=False, yaxis={"range": [0, 1]})
    return finished(figure, "layer", "attention to position 0")


def norm(origin: dict[str, Any]) -> Figure:
    """‖x_0‖ of the reference token, of many first tokens, and of ordinary positions."""
    path, portrait = origin["trajectory"], origin["portrait"]
    low, middle, high = portrait["norm"]
    many = {"value": middle, "low": low, "high": high}
    figure = go.Figure([*banded(many, f"{portrait['n']} first tokens, 5–95%", "var(--mask)", marks=False)])
    figure.add_trace(line(path["norm"], escaped(reference_name(origin)), "var(--sink)", width=3))
    figure.add_trace(line(path["body"]["median_norm"], "ordinary positions, median", "var(--muted)", dash="dot"))
    return finished(figure, "depth (0: embedding)", "norm of the state", log_y=True)


def alike(origin: dict[str, Any]) -> Figure:
    """Does the map pull all first tokens to one direction?"""
    portrait, path = origin["portrait"], origin["trajectory"]
    to = f"first tokens to {reference_name(origin)}"
    figure = go.Figure(
        [
            *banded(portrait["to_reference"], escaped(to), "var(--sink)", marks=False),
            *banded(portrait["among"], "among first tokens", "var(--mask)", marks=False),
            line(path["body"]["alike"], "among ordinary positions", "var(--muted)", dash="dot"),
        ]
    )
    figure.update_layout(yaxis={"range": [-0.05, 1.05]})
    return finished(figure, "depth (0: embedding)", "mean cosine")


def readers(origin: dict[str, Any]) -> Figure:
    """Sink-reading heads of each attention call, with intervals over prompts."""
    calls = origin["reading"]["calls"]
    counts = [call["readers"] for call in calls]
    up, down = ([abs(c[k] - c["value"]) for c in counts] for k in ("high", "low"))
    bars = go.Bar(
        x=[call["layer"] for call in calls], y=[c["value"] for c in counts], marker={"color": "var(--sink)"},
        error_y={"array": up, "arrayminus": down, "color": "var(--ink)", "thickness": 1, "width": 2},
        hovertemplate="layer %{x}: %{y} heads<extra></extra>",
    )  # fmt: skip
    return finished(go.Figure(bars), "layer", "sink-reading heads")


def portrait(origin: dict[str, Any]) -> Figure:
    """Directions of first tokens on their first two principal components; the page moves it through the depths."""
    names = [escaped(name) for name in origin["tokens_spelled"]]
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


def fingerprint(origin: dict[str, Any]) -> Figure:
    """Cosines of W_O v_0 between first tokens; the scale diverges around 0, a real zero. The page sets z."""
    size = origin["cosine_size"]
    names = [escaped(name if len(name) < 14 else name[:12] + "…") for name in origin["tokens_spelled"][:size]]
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
    edits = [{**edit, "ratios": defined(edit["ratios"])} for edit in view.edits]
    cells = [cell for edit in edits for cell in edit["ratios"].values()]
    positive = [x for cell in cells for x in (cell["value"], cell["low"], cell["high"]) if x is not None and x > 0]
    least, most = max(0.02, min([*positive, 0.5])), max([*positive, 2.0])
    figure = go.Figure()
    for name in dict.fromkeys(name for edit in edits for name in edit["ratios"]):
        rows = [(k, edit, edit["ratios"][name]) for k, edit in enumerate(edits) if name in edit["ratios"]]
        ranks = [list(edit["ratios"]).index(name) - (len(edit["ratios"]) - 1) / 2 for _, edit, _ in rows]
        y = [k + 0.19 * rank for (k, _, _), rank in zip(rows, ranks, strict=True)]
        figure.add_trace(_forest_trace(name, [cell for *_, cell in rows], y, least))
    figure.add_vline(x=1, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    ticks = {x: text for x, text in RATIOS.items() if least / 1.5 <= x <= most * 1.5}
    figure.update_layout(
        xaxis={"type": "log", "tickvals": list(ticks), "ticktext": list(ticks.values()),
               "range": [math.log10(least / 1.25), math.log10(most * 1.25)]},
        yaxis={"tickvals": list(range(len(edits))), "ticktext": [edit["about"] for edit in edits],
               "range": [len(edits) - 0.4, -0.6], "automargin": True},
    )  # fmt: skip
    return finished(figure, "power after / before the edit", "")


def defined(ratios: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What can be drawn; the table says of the others that they are not defined."""
    return {name: cell for name, cell in ratios.items() if cell["value"] is not None}


def _forest_trace(name: str, cells: list[dict[str, Any]], y: list[float], least: float) -> go.Scatter:
    """Values and lower ends at or below 0 lie beyond a log axis: drawn at its edge, a triangle for the value."""
    colour, symbol = EDITED.get(name, ("var(--muted)", "circle"))
    x = [max(cell["value"], least) for cell in cells]
    low = [0 if c["low"] is None else at - max(c["low"], least / 2) for c, at in zip(cells, x, strict=True)]
    high = [0 if c["high"] is None else c["high"] - at for c, at in zip(cells, x, strict=True)]
    numbers = [[c["value"], c["low"], c["high"]] for c in cells]
    symbols = ["triangle-left" if c["value"] < least else symbol for c in cells]
    return go.Scatter(
        x=x, y=y, name=name, mode="markers", customdata=numbers,
        marker={"color": colour, "size": 9, "symbol": symbols},
        error_x={"array": [max(h, 0) for h in high], "arrayminus": [max(v, 0) for v in low], "color": colour,
                 "thickness": 1.5, "width": 0},
        hovertemplate=f"{name}: ×%{{customdata[0]:.3g}} (%{{customdata[1]:.3g}} … %{{customdata[2]:.3g}}){ALONE}",
    )  # fmt: skip


def overlay(views: Sequence[View], name: str) -> Figure:
    """One component through the relative depth of several models."""
    figure = go.Figure()
    for k, view in enumerate(views):
        if name not in ("total", *view.parts):
            continue
        power = view.layers["all"]["power"][name]
        count = max(len(power["value"]) - 1, 1)
        x = [layer / count for layer in range(len(power["value"]))]
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
        cells = [(k, view.answer[queries][name]) for k, view in enumerate(views) if name in view.parts]
        there = [(k, cell) for k, cell in cells if cell["value"] is not None]
        spans = [[0 if c[end] is None else abs(c[end] - c["value"]) for _, c in there] for end in ("high", "low")]
        figure.add_trace(
            go.Scatter(
                x=[c["value"] for _, c in there],
                y=[k + 0.2 * (rank - 1) for k, _ in there],
                name=name,
                mode="markers",
                marker={"color": f"var(--{name})", "size": 10},
                hovertemplate=name + " %{x:.1%}<extra></extra>",
                error_x={
                    "array": spans[0],
                    "arrayminus": spans[1],
                    "color": f"var(--{name})",
                    "thickness": 2,
                    "width": 0,
                },
            )
        )
    labels = [
        escaped(view.label) + ("" if view.answer[queries]["mask"]["value"] is not None else " (n.s.)") for view in views
    ]
    figure.add_vline(x=0, line={"color": "var(--muted)", "width": 1})
    figure.update_layout(
        xaxis={"tickformat": ".0%"},
        yaxis={"tickvals": list(range(len(views))), "ticktext": labels, "range": [len(views) - 0.5, -0.5]},
    )  # fmt: skip
    return finished(figure, "share of the total", "")


def banded(
    estimate: dict[str, Any], name: str, colour: str, *, x: Numbers | None = None, dash: str = "solid",
    band: str | None = None, marks: bool = True, no_effect: float = 0.0,
) -> Iterable[go.Scatter]:  # fmt: skip
    """A line and its band; markers are open where the interval contains `no_effect`."""
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    x = list(range(len(value))) if x is None else list(x)
    there = [k for k in range(len(value)) if low[k] is not None and high[k] is not None]
    around = [*there, *reversed(there)]
    yield go.Scatter(
        x=[x[k] for k in around], y=[high[k] for k in there] + [low[k] for k in reversed(there)], fill="toself",
        fillcolor=band or colour.replace(")", "-band)"), line={"width": 0}, hoverinfo="skip", showlegend=False,
        legendgroup=name, mode="lines",
    )  # fmt: skip
    clear = [lo is not None and hi is not None and (lo > no_effect or hi < no_effect) for lo, hi in zip(low, high)]
    yield go.Scatter(
        x=x, y=value, name=name, legendgroup=name, mode="lines+markers" if marks else "lines",
        line={"color": colour, "width": 2, "dash": dash}, customdata=list(map(list, zip(low, high, strict=True))),
        marker={"symbol": ["circle" if c else "circle-open" for c in clear], "size": 6, "color": colour},
        hovertemplate=f"{name} %{{x:.3~g}}: %{{y:.3g}} (%{{customdata[0]:.3g}} … %{{customdata[1]:.3g}}){ALONE}",
    )  # fmt: skip


def line(y: Numbers, name: str, colour: str, **style: Any) -> go.Scatter:
    return go.Scatter(
        x=list(range(len(y))), y=list(y), name=name, mode="lines", line={"color": colour, **style},
        hovertemplate=f"{name} %{{x}}: %{{y:.3g}}<extra></extra>",
    )  # fmt: skip


def undefined(values: Numbers) -> Iterable[go.Scatter]:
    """Crosses on the bottom line where a number is not defined."""
    missing = [k for k, value in enumerate(values) if value is None]
    if missing:
        there = [value for value in values if value is not None]
        yield go.Scatter(
            x=missing, y=[min([*there, 1.0])] * len(missing), name="not defined", mode="markers",
            marker={"symbol": "x-thin", "size": 8, "line": {"color": "var(--muted)", "width": 2}},
            hovertemplate="layer %{x}: not defined, its mask power is not clearly above 0<extra></extra>",
        )  # fmt: skip


def reference_name(origin: dict[str, Any]) -> str:
    reference = origin["reference"]
    spelled = reference["spelled"] or f"token {reference['token']}"
    return f"BOS {spelled}" if reference["is_bos"] else spelled


def escaped(text: str) -> str:
    """Text for plotly, which reads tags: shown as it is."""
    return html.escape(text, quote=False).replace("\n", "⏎")


def finished(figure: go.Figure, x: str, y: str, log_y: bool = False) -> Figure:
    """As a dictionary, with titled axes and without plotly's template: the page has its own."""
    figure.update_layout(xaxis_title_text=x, yaxis_title_text=y)
    if log_y:
        figure.update_yaxes(type="log", dtick=1)
    plain: Figure = figure.to_plotly_json()
    plain["layout"].pop("template", None)
    return plain
