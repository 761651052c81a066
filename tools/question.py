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

from posleak.analyses.trace.trace import CAUSES, Trace, trace as trace_of
from posleak.arrays import Array
from posleak.axes import LEFT, PARTS, PROMPT
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.power import products
from posleak.reports.terminal.run import trace_tables
from posleak.runs.run import Run, split
from posleak.show.colours import LIGHT, LINE
from posleak.show.lines import PlainConsole
from posleak.show.numbers import interval, number, percent
from posleak.show.plots import Picture, band, drawn, powers
from posleak.show.words import QUERIES

from .gallery import NUMBERS, read_estimate
from .markdown import replace_part

PAGE, START, IMAGES, MODEL = "pictures.md", "start.md", "images", "smollm2-135m"
SIZE = 6.75, 2.6
"""Width and height of a figure in inches."""

START_COLUMNS, README_COLUMNS = 86, 110
"""Widths of the terminal outputs in docs/start.md and README.md."""

MASK_TOKENS = 10
"""Number of tokens in the drawings of masks."""


def figures(trace: Trace) -> dict[str, Picture]:
    """Return every figure of the page, by name."""
    run, x = trace.ordinary, np.asarray(trace.ordinary.summary.layer_ids)
    parts, sources = run.summary.layers["all"].power, trace.layers["all"].power
    draw: dict[str, Callable[[Figure], None]] = {
        "leakage": lambda figure: _draw_leakage(figure.subplots(), run),
        "mask": lambda figure: _draw_mask(figure, _causal_mask(), "an ordinary pass"),
        "read": lambda figure: _draw_powers(figure.subplots(), parts, PARTS, x),
        "lent": lambda figure: _draw_mask(figure, borrowed_mask(), "branch B: keys of another document"),
        "sources": lambda figure: _draw_powers(figure.subplots(), sources, (*trace.sources, LEFT), x),
        "first": lambda figure: _draw_attention(figure.subplots(), run.summary.layer_sink_attention, x),
    }
    title = f"{run.name}, n = {run.prompts} prompts of {run.record.spec.length} tokens"
    return {name: Picture(drawn(make, SIZE), title) for name, make in draw.items()}


def _draw_leakage(axes: Axes, run: Run) -> None:
    """Draw the power by position of the query, over heads and offsets, in the first layer and in a late one."""
    total = split(run, prompts=True).sel(component="total")
    layers, jackknife = total["layer"].values, Jackknife(run.prompts)
    for place, layer in enumerate(layers[[0, 2 * len(layers) // 3]]):
        values = total.sel(layer=layer).transpose(PROMPT, "query", "head", "offset").values
        flat = values.reshape(*values.shape[:2], -1)
        by_query = jackknife.inner(products(flat, flat)).estimate
        band(axes, by_query, LIGHT[f"run-{place}"], total["query"].values, f"layer {layer}")
    axes.axhline(0, color=LINE, linewidth=0.5)
    axes.set(xlabel="position of the query", ylabel="difference from late\nqueries, nats²")
    axes.legend()


def _draw_powers(axes: Axes, estimates: Mapping[str, Estimate], names: Sequence[str], x: Array) -> None:
    powers(axes, estimates, ("total", *names), x)
    axes.set(xlabel="layer", ylabel="power, nats²")


def _draw_attention(axes: Axes, attention: Estimate, x: Array) -> None:
    band(axes, attention, LIGHT["sink"], x)
    axes.set(xlabel="layer", ylabel="attention of late\nqueries to position 0", ylim=(0, 1))


def _causal_mask() -> Array:
    return np.tril(np.ones((MASK_TOKENS, MASK_TOKENS)))


def borrowed_mask() -> Array:
    """Return visible keys of another document (2) and of the prompt (1): all queries but the first see equally many."""
    own, query, key = _causal_mask(), np.arange(MASK_TOKENS)[:, None], np.arange(MASK_TOKENS)
    return np.hstack([2.0 * ((key > query) & (query > 0)), own])


def _draw_mask(figure: Figure, visible: Array, title: str) -> None:
    """Draw the visible keys of each query as squares, and their number."""
    left, right = figure.subplots(1, 2, width_ratios=[visible.shape[1] / MASK_TOKENS, 1], sharey=True)
    for value, colour in ((1, LIGHT["here"]), (2, LIGHT["earlier"])):
        rows, columns = np.nonzero(visible == value)
        left.scatter(columns, rows, marker="s", s=36, color=colour, linewidth=0)
    left.set(xlabel="key", ylabel="query", title=title, xticks=[], ylim=(MASK_TOKENS - 0.5, -0.5))
    counts = [(visible == value).sum(1) for value in (1, 2)]
    right.barh(np.arange(MASK_TOKENS), counts[0], color=LIGHT["here"], height=0.7)
    right.barh(np.arange(MASK_TOKENS), counts[1], left=counts[0], color=LIGHT["earlier"], height=0.7)
    right.set(xlabel="number of visible keys")


def sentences(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the sentences with numbers, by name of the marker."""
    shares = {name: read_estimate(share) for name, share in stored["shares"].items()}
    total = read_estimate(stored["leakage"])
    n = f"n = {total.n} prompts, 95% intervals"

    def list_shares(*names: str) -> str:
        listed = (f"{name} **{percent(shares[name].value)}** {interval(shares[name], 'share')}" for name in names)
        text = f"{', '.join(listed)} of the leakage ({n})."
        return text[0].upper() + text[1:]

    return {
        "leakage": f"In {MODEL} the power of that difference is **{number(total.value)}** {interval(total)} nats², "
        f"mean over all heads of all layers ({n}).",
        "read": list_shares(*PARTS),
        "sources": list_shares(*CAUSES[1:], LEFT),
    }


def page(text: str, stored: Mapping[str, Any]) -> str:
    """Return the page with the sentences replaced. `stored`: numbers of the model in docs/gallery/numbers.json."""
    for name, sentence in sentences(stored).items():
        text = replace_part(text, name, sentence)
    return text


def output(trace: Trace, columns: int = START_COLUMNS) -> str:
    """Return the output of `posleak trace` without its table: the heading and the shares."""
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=columns)
    for item in trace_tables(trace):
        console.print(item)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    header, answer, end = (
        next(place for place, line in enumerate(lines) if line.startswith(start))
        for start in ("layer", tuple(QUERIES.values()), "remainder")
    )
    return "\n".join(["```", *lines[:header], "…", *lines[answer:end], "```"])


def first() -> Trace:
    """Measure what docs/start.md shows."""
    return trace_of("zoo-backcopy-nope", length=128, prompts=16)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the figures of docs/pictures.md.")
    parser.add_argument("trace", type=Path, help="folder of a trace")
    parser.add_argument("docs", type=Path)
    options = parser.parse_args(arguments)
    trace = Trace.load(options.trace)
    if trace is None:
        raise SystemExit(f"{options.trace} has no trace: run `make gallery`")
    for name, picture in figures(trace).items():
        picture.save(options.docs / IMAGES / f"question-{name}.png")
    stored = json.loads((options.docs / "gallery" / NUMBERS).read_text(encoding="utf-8"))[MODEL][MODEL]
    pictures = options.docs / PAGE
    pictures.write_text(page(pictures.read_text(encoding="utf-8"), stored), encoding="utf-8")
    for path, name, text in (
        (options.docs / START, "first", output(first())),
        (options.docs.parent / "README.md", "trace", output(trace, README_COLUMNS)),
    ):
        path.write_text(replace_part(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
