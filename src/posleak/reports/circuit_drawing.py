"""The circuit as a drawing: geometry and texts of an SVG that the template writes, without a script.

Layers go upwards. Left, a grid of heads with the writers; in the middle, the direction as a line through depth; right,
the grid again with the readers. The stream at depth d lies between layer d − 1, which writes it, and layer d, which
reads it, so that an edge joins the line at the layer of its writer and leaves it at that of its reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from posleak.analyses.circuit.carrier import Carrier
from posleak.analyses.circuit.circuit import Circuit
from posleak.analyses.circuit.writing import Edge, Head, Reader, Writer
from posleak.show.numbers import estimate, excludes_zero, percent

from .view import RunView

MARGIN, GAP, TOP, BOTTOM = 28.0, 44.0, 40.0, 24.0
"""Widths of the axis labels and between a grid and the line, and heights above and below the grids, in pixels."""

GRID_WIDTH, GRID_HEIGHT = 104.0, 390.0
"""Size of a grid in pixels, unless its cells would be smaller than LEAST or larger than MOST."""

LEAST, MOST = (5.0, 9.0), (26.0, 30.0)
"""Smallest and largest width and height of a cell."""

LABEL_HEIGHT = 12.0
"""Least distance between two labels of layers."""


@dataclass(frozen=True)
class Node:
    """A writer, the direction at one depth, or a reader.

    index  in the list of its kind;  size: radius of a head, thickness of the line;  height: of the line
    marks  CSS classes;  name, text: label and numbers
    """

    kind: str
    index: int
    x: float
    y: float
    size: float
    name: str
    text: str
    marks: str = ""
    height: float = 0.0
    opacity: float = 1.0

    @property
    def label(self) -> str:
        return f"{self.name}: {self.text}"

    @property
    def diamond(self) -> str:
        """The path of a reader."""
        r = f"{self.size:.2f}"
        return f"M0 -{r}L{r} 0L0 {r}L-{r} 0Z"


@dataclass(frozen=True)
class Link:
    """An edge from a writer along the line to a reader; faint: its interval contains 0, or its share is not defined."""

    writer: int
    reader: int
    path: str
    width: float
    opacity: float
    marks: str
    name: str
    text: str


@dataclass(frozen=True)
class Label:
    """A text of an axis."""

    x: float
    y: float
    text: str
    marks: str = ""


@dataclass(frozen=True)
class Drawing:
    """Everything that the SVG of a circuit has.

    heads        centres of all heads, in both grids
    line         x of the line, and its ends from the bottom to the top;  measured: whether its shares are known
    """

    width: float
    height: float
    cell: float
    heads: tuple[tuple[float, float], ...]
    line: tuple[float, float, float]
    measured: bool
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class Grid:
    """Places of layers and heads. places: of the attention calls on the axis of layers;  layers: of the model"""

    places: tuple[float, ...]
    heads: int
    layers: int

    @property
    def cell(self) -> float:
        return min(max(GRID_WIDTH / self.heads, LEAST[0]), MOST[0])

    @property
    def row(self) -> float:
        return min(max(GRID_HEIGHT / self.layers, LEAST[1]), MOST[1])

    @property
    def line(self) -> float:
        return MARGIN + self.heads * self.cell + GAP

    @property
    def width(self) -> float:
        return 2 * self.line

    @property
    def height(self) -> float:
        return TOP + self.layers * self.row + BOTTOM

    def x(self, head: int, right: bool) -> float:
        start = self.line + GAP if right else MARGIN
        return start + (head + 0.5) * self.cell

    def y(self, place: float) -> float:
        """Return the height of a layer; layer 0 is at the bottom."""
        return TOP + (self.layers - place - 0.5) * self.row

    def between(self, depth: int) -> tuple[float, float]:
        """Return the lower and the upper end of the stream at a depth."""
        low, high = self.y(depth - 1), self.y(depth)
        return (low if depth else self.y(-0.7)), (high if depth < self.layers else self.y(self.layers - 0.3))

    def path(self, writer: tuple[float, float], reader: tuple[float, float]) -> str:
        """Return the path from a writer along the line to a reader, with round corners."""
        (x, y), (to_x, to_y), at = writer, reader, self.line
        bend = max(min(12.0, (y - to_y) / 2), 0.0)
        return (
            f"M{x:.1f} {y:.1f}H{at - bend:.1f}Q{at:.1f} {y:.1f} {at:.1f} {y - bend:.1f}V{to_y + bend:.1f}"
            f"Q{at:.1f} {to_y:.1f} {at + bend:.1f} {to_y:.1f}H{to_x:.1f}"
        )


def draw_circuit(view: RunView) -> Drawing | None:
    """Return the drawing of a run's circuit; None if there is no circuit or no writer."""
    circuit = view.circuit
    if circuit is None or not circuit.writing.writers:
        return None
    places, names = tuple(view.summary.places.tolist()), view.summary.layer_names
    depths = 0 if circuit.carrier is None else circuit.carrier.last
    grid = Grid(places, view.existing.shape[1], max(depths, math.floor(max(places)) + 1))
    writing = circuit.writing
    writers = [_writer(head, k, grid, names) for k, head in enumerate(writing.writers)]
    most = max([float(reader.earlier.value) for reader in writing.readers], default=0.0)
    readers = [_reader(head, k, grid, names, most) for k, head in enumerate(writing.readers)]
    depth_nodes = [] if circuit.carrier is None else list(_depths(circuit.carrier, grid))
    heads = [
        (grid.x(int(head), right), grid.y(places[call]))
        for right in (False, True)
        for call, head in np.argwhere(view.existing)
    ]
    links = [_link(edge, writers[edge.writer], readers[edge.reader], grid) for edge in writing.edges]
    return Drawing(
        grid.width, grid.height, grid.cell, tuple(heads), (grid.line, grid.between(0)[0], grid.between(grid.layers)[1]),
        circuit.carrier is not None, (*writers, *depth_nodes, *readers),
        tuple(sorted(links, key=lambda link: (link.marks != "faint", link.width))),
        (*_layers(circuit, grid, names), *_heads(grid)),
    )  # fmt: skip


def _writer(head: Writer, k: int, grid: Grid, names: tuple[str, ...]) -> Node:
    alone, rank = head.alone, f"rank {k + 1}, {percent(head.attribution)} of the sum of attributions"
    text, marks, share = "the share removed by this head alone is not defined", "open", 0.0
    if not math.isnan(alone.value):
        share = float(alone.value)
        text = f"removed by this head alone: {estimate(alone, 'share')}, n = {alone.n} prompts"
        marks = "open" if not excludes_zero(alone) else "negative" if share < 0 else ""
    return Node(
        "writer", k, grid.x(head.head, False), grid.y(grid.places[head.call]), 2.8 + 5.7 * _root(abs(share)),
        f"Writer {_name(head, names)}", f"{text}; {rank}", marks, opacity=0.45 + 0.5 * min(abs(share), 1.0),
    )  # fmt: skip


def _reader(head: Reader, k: int, grid: Grid, names: tuple[str, ...], most: float) -> Node:
    power = head.earlier
    share = "" if math.isnan(head.share.value) else f", {estimate(head.share, 'share')} of its total"
    return Node(
        "reader", k, grid.x(head.head, True), grid.y(grid.places[head.call]),
        3.0 + 4.5 * _root(float(power.value) / most if most > 0 else 0.0), f"Reader {_name(head, names)}",
        f"reads a power of {estimate(power)} nats² from earlier layers{share}, n = {power.n} prompts",
        "" if excludes_zero(power) else "open",
    )  # fmt: skip


def _depths(carrier: Carrier, grid: Grid) -> Iterator[Node]:
    """Yield the direction at every depth; where no share is defined it has no thickness."""
    for depth in range(len(carrier.dimensions)):
        share, of_all = carrier.leading[depth], carrier.share[depth]
        low, high = grid.between(depth)
        defined, total = math.isfinite(share.value), f"which is {estimate(of_all, 'share')} of the variance"
        text = f"one direction carries {estimate(share, 'share')} of the positional variance, {total}"
        if not defined:
            text = f"not defined: the positional variance, {total}, is not significantly above 0"
        size = min(max(float(share.value), 0.0), 1.0) if defined else 0.0
        yield Node(
            "depth", depth, grid.line, (low + high) / 2, 2 + 11 * size, f"Direction at depth {depth}",
            f"{text}, n = {share.n} prompts", "" if defined else "absent", low - high, 0.2 + 0.55 * size,
        )  # fmt: skip


def _link(edge: Edge, writer: Node, reader: Node, grid: Grid) -> Link:
    share = float(edge.share.value)
    clear = math.isfinite(share) and excludes_zero(edge.removed)
    size = min(abs(share), 1.0) if clear else 0.0
    part = (
        ""
        if math.isnan(share)
        else f", {estimate(edge.share, 'share')} of what all heads together remove at this reader"
    )
    return Link(
        edge.writer, edge.reader, grid.path((writer.x, writer.y), (reader.x, reader.y)), 0.7 + 3.3 * size,
        0.35 + 0.55 * size if clear else 0.3, "faint" if not clear else "negative" if share < 0 else "",
        f"{writer.name.removeprefix('Writer ')} → {reader.name.removeprefix('Reader ')}",
        f"removed by this writer alone: {estimate(edge.removed)} nats²{part}, n = {edge.removed.n} prompts",
    )  # fmt: skip


def _layers(circuit: Circuit, grid: Grid, names: tuple[str, ...]) -> Iterator[Label]:
    """Yield names of layers: those of writers on the left, those of readers on the right, others as space allows."""
    for heads, x, side in (
        (circuit.writing.writers, MARGIN - 7, "left"),
        (circuit.writing.readers, grid.width - MARGIN + 7, "right"),
    ):
        shown, taken = [head.call for head in heads], list[float]()
        every = range(0, len(names), max(1, len(names) // 6))
        for call in [*dict.fromkeys(shown), *every]:
            y = grid.y(grid.places[call])
            if all(abs(y - other) >= LABEL_HEIGHT for other in taken):
                taken.append(y)
                yield Label(x, y, names[call], f"{side} {'strong' if call in shown else ''}")


def _heads(grid: Grid) -> Iterator[Label]:
    """Yield the first and the last head below both grids, and the titles above."""
    bottom = grid.y(-0.5) + 12
    for right, title in ((False, "writers"), (True, "readers")):
        for head in sorted({0, grid.heads - 1}):
            yield Label(grid.x(head, right), bottom, str(head))
        middle = (grid.x(0, right) + grid.x(grid.heads - 1, right)) / 2
        yield Label(middle, 12, title, "title")
        if grid.heads * grid.cell >= 60:
            yield Label(middle, bottom, "head")
    yield Label(grid.line, 12, "direction", "title")
    yield Label(0, TOP - 14, "layer", "right")


def _name(head: Head, names: tuple[str, ...]) -> str:
    return f"L{names[head.call]}.H{head.head}"


def _root(share: float) -> float:
    """Return the root of a share, limited to 0 … 1, so that areas are proportional to shares."""
    return math.sqrt(min(max(share, 0.0), 1.0))
