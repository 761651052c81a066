"""Generate the figures and numbers of docs/pictures.md, and the outputs shown in README.md and docs/start.md.

python -m tools.question runs/gallery/smollm2-135m docs

The folder is a trace of the gallery. Sentences are made from docs/gallery/numbers.json, so that a test can check them
without a model.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posleak.analyses.trace.trace import SOURCES, Trace, trace as trace_of
from posleak.arrays import Array
from posleak.axes import PARTS, PROMPT
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.power import products
from posleak.reports.terminal.run import trace_tables
from posleak.runs.run import Run, split
from posleak.show.colours import LIGHT, LINE
from posleak.show.lines import PlainConsole
from posleak.show.numbers import interval, number, percent
from posleak.show.plots import Picture, band, drawn, powers
from posleak.show.words import QUERIES

from .gallery import NUMBERS, read
from .made import replaced

PAGE, START, IMAGES, MODEL = "pictures.md", "start.md", "images", "smollm2-135m"
WIDE, TALL = 6.75, 2.6
"""Size of a figure in inches."""

COLUMNS, WIDER = 86, 110
"""Columns of the terminals in docs/start.md and README.md."""

SMALL = 10
"""Tokens in the drawings of masks."""


def figures(trace: Trace) -> dict[str, Picture]:
    """Return every figure of the page, by name."""
    run, x = trace.ordinary, np.asarray(trace.ordinary.summary.layer_ids)
    read_in, comes_from = run.summary.layers["all"].power, trace.layers["all"].power
    draw: dict[str, Callable[[Figure], None]] = {
        "leakage": lambda figure: _leakage(figure.subplots(), run),
        "mask": lambda figure: _grids(figure, _plain(), "an ordinary pass"),
        "read": lambda figure: _by_layer(figure.subplots(), read_in, PARTS, x),
        "lent": lambda figure: _grids(figure, _lent(), "the second pass: lent keys of another document"),
        "sources": lambda figure: _by_layer(figure.subplots(), comes_from, SOURCES, x),
        "first": lambda figure: _attention(figure.subplots(), run.summary.layer_sink_attention, x),
    }
    title = f"{run.name}, n = {run.prompts} prompts of {run.record.spec.length} tokens"
    return {name: Picture(drawn(make, (WIDE, TALL)), title) for name, make in draw.items()}


def _leakage(axes: Axes, run: Run) -> None:
    """Draw the power by position of the query, over heads and offsets, in the first layer and in a late one."""
    found = split(run, prompts=True).sel(component="total")
    layers, jackknife = found["layer"].values, Jackknife(run.prompts)
    for place, layer in enumerate(layers[[0, 2 * len(layers) // 3]]):
        of = found.sel(layer=layer).transpose(PROMPT, "query", "head", "offset").values
        flat = of.reshape(*of.shape[:2], -1)
        powers = jackknife.inner(products(flat, flat)).estimate
        band(axes, powers, LIGHT[f"run-{place}"], found["query"].values, f"layer {layer}")
    axes.axhline(0, color=LINE, linewidth=0.5)
    axes.set(xlabel="position of the query", ylabel="difference from late\nqueries, nats²")
    axes.legend()


def _by_layer(axes: Axes, found: Mapping[str, Estimate], names: Sequence[str], x: Array) -> None:
    powers(axes, found, ("total", *names), x)
    axes.set(xlabel="layer", ylabel="power, nats²")


def _attention(axes: Axes, found: Estimate, x: Array) -> None:
    band(axes, found, LIGHT["sink"], x)
    axes.set(xlabel="layer", ylabel="attention of late\nqueries to position 0", ylim=(0, 1))


def _plain() -> Array:
    return np.tril(np.ones((SMALL, SMALL)))


def _lent() -> Array:
    """Return visible keys of another document (2) and of the prompt (1): all queries but the first see equally many."""
    own, query, key = _plain(), np.arange(SMALL)[:, None], np.arange(SMALL)
    return np.hstack([2.0 * ((key > query) & (query > 0)), own])


def _grids(figure: Figure, seen: Array, title: str) -> None:
    """Draw the visible keys of each query as squares, and their number."""
    left, right = figure.subplots(1, 2, width_ratios=[seen.shape[1] / SMALL, 1], sharey=True)
    for value, colour in ((1, LIGHT["here"]), (2, LIGHT["earlier"])):
        rows, columns = np.nonzero(seen == value)
        left.scatter(columns, rows, marker="s", s=36, color=colour, linewidth=0)
    left.set(xlabel="key", ylabel="query", title=title, xticks=[], ylim=(SMALL - 0.5, -0.5))
    counts = [(seen == value).sum(1) for value in (1, 2)]
    right.barh(np.arange(SMALL), counts[0], color=LIGHT["here"], height=0.7)
    right.barh(np.arange(SMALL), counts[1], left=counts[0], color=LIGHT["earlier"], height=0.7)
    right.set(xlabel="keys that it sees")


def sentences(kept: Mapping[str, Any]) -> dict[str, str]:
    """Return the sentences with numbers, by name of the marker."""
    shares = {name: read(found) for name, found in kept["shares"].items()}
    total = read(kept["leakage"])
    n = f"n = {total.n} prompts, 95% intervals"

    def of(*names: str) -> str:
        said = (
            f"{name} **{percent(each.value)}** {interval(each, 'share')}" for name in names for each in [shares[name]]
        )
        text = f"{', '.join(said)} of the leakage ({n})."
        return text[0].upper() + text[1:]

    return {
        "leakage": f"In {MODEL} the power of that difference is **{number(total.value)}** {interval(total)} nats², "
        f"mean over all heads of all layers ({n}).",
        "read": of(*PARTS),
        "sources": of(*SOURCES),
    }


def page(text: str, kept: Mapping[str, Any]) -> str:
    """Return the page with these numbers."""
    for name, said in sentences(kept).items():
        text = replaced(text, name, said)
    return text


def output(trace: Trace, columns: int = COLUMNS) -> str:
    """Return the output of `posleak trace` without its table: the heading and the shares."""
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=columns)
    for item in trace_tables(trace):
        console.print(item)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    table, answer, end = (
        next(place for place, line in enumerate(lines) if line.startswith(start))
        for start in ("layer", tuple(QUERIES.values()), "remainder")
    )
    return "\n".join(["```", *lines[:table], "…", *lines[answer:end], "```"])


def first() -> Trace:
    """Measure what docs/start.md shows."""
    return trace_of("zoo-text-rope", length=128, prompts=16)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the figures of docs/pictures.md.")
    parser.add_argument("trace", type=Path, help="a folder with a trace")
    parser.add_argument("docs", type=Path)
    options = parser.parse_args(arguments)
    trace = Trace.load(options.trace)
    if trace is None:
        raise SystemExit(f"{options.trace} has no trace: `make gallery` measures it")
    for name, picture in figures(trace).items():
        picture.save(options.docs / IMAGES / f"question-{name}.png")
    kept = json.loads((options.docs / "gallery" / NUMBERS).read_text(encoding="utf-8"))[MODEL][MODEL]
    pages, readme = options.docs / PAGE, options.docs.parent / "README.md"
    pages.write_text(page(pages.read_text(encoding="utf-8"), kept), encoding="utf-8")
    start = options.docs / START
    start.write_text(replaced(start.read_text(encoding="utf-8"), "first", output(first())), encoding="utf-8")
    readme.write_text(replaced(readme.read_text(encoding="utf-8"), "trace", output(trace, WIDER)), encoding="utf-8")


if __name__ == "__main__":
    main()
