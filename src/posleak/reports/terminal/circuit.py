"""Tables of `posleak circuit`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from posleak.analyses.circuit.writing import DRAWS
from posleak.show.lines import prose
from posleak.show.numbers import NAN, interval, percent, shown
from posleak.show.terminal import TableCell, table

from .run import heading

if TYPE_CHECKING:
    from posleak.analyses.circuit.carrier import Carrier
    from posleak.analyses.circuit.circuit import Circuit
    from posleak.analyses.circuit.erasure import Erased
    from posleak.analyses.circuit.writing import Writing
    from posleak.leakage import Estimate

LEGEND = """\
removed: share of the leakage from earlier layers that disappears if only the first k heads of the ranking also attend \
to keys of another document, so that they see equally many keys at every position; weighted by attention, with 95% \
intervals over prompts
random: mean over {draws} random sets of k heads of the same layers; others: all heads except the first k
writer, reader: layer.head; alone: share removed by this head alone; earlier: power in nats² of the source \
`earlier` in this head"""

CARRIER_LEGEND = """\
positional share: share of the variance over positions that all prompts have in common; one direction carries: share \
of this positional variance along the leading direction; directions: how many carry 90% of it"""

ERASURE_LEGEND = """\
removed: share of the leakage from earlier layers that the edit removes; change of the loss: of the next-token loss on \
text, in nats per token; random directions: the same numbers of the control, as many random directions at the same \
depths"""

DEPTHS = 8
"""Most depths that the table of the carrier shows."""


def circuit_tables(circuit: Circuit) -> Iterator[RenderableType]:
    """Yield the heading, the sentences, and tables of writers, of sets, of the carrier, of erasures and of readers."""
    yield heading(circuit.trace.ordinary)
    for sentence in circuit.sentences:
        yield prose(sentence, style="bold", indent=2)
    yield from _writing_tables(circuit.writing)
    if circuit.carrier is not None:
        yield prose("the direction that carries position", style="bold")
        yield _carrier_table(circuit.carrier)
        yield prose(CARRIER_LEGEND, style="dim", indent=2)
        yield prose("erasing directions of the residual stream", style="bold")
        yield _erasure_table(circuit.erasure)
        yield prose(ERASURE_LEGEND, style="dim", indent=2)
    path = circuit.trace.ordinary.path
    yield prose(f"remainder of the trace {circuit.trace.remainder:.1e} nats · run {path}", style="dim", indent=2)


def _writing_tables(writing: Writing) -> Iterator[RenderableType]:
    yield prose("writers, readers, and sets of heads", style="bold")
    heads = table(["writer", "alone", "reader", "earlier"])
    for writer, reader in zip_longest(writing.writers, writing.readers):
        heads.add_row(
            "" if writer is None else writer.name, _cell(None if writer is None else writer.alone, "share"),
            "" if reader is None else reader.name, _cell(None if reader is None else reader.earlier),
        )  # fmt: skip
    yield heads
    sets = table(["k", "removed", "random", "others"], right=["k"])
    for row in writing.removed:
        effect = row.leading
        sets.add_row(
            str(row.k), _cell(effect.removed, "share"), _cell(effect.random, "share"), _cell(effect.others, "share")
        )
    yield sets
    ranked = writing.attribution
    overlap = ", ".join(f"{percent(share)} of the first {k}" for k, share in ranked.overlap.items() if k in (3, 8))
    yield prose(
        f"ranked by {ranked.method} on {ranked.prompts} other prompts: the attributions sum to {ranked.sum:.3g} nats², "
        f"the exact difference is {ranked.truth:.3g}; the ranking on the evaluation prompts shares "
        f"{overlap or 'no heads'}",
        style="dim", indent=2,
    )  # fmt: skip
    yield prose(LEGEND.format(draws=DRAWS), style="dim", indent=2)


def _carrier_table(carrier: Carrier) -> RenderableType:
    """Return one row for some depths, evenly spaced."""
    names = ["depth", "positional share", "one direction carries", "directions", "cosine to position 0"]
    rows = table(names, right=["depth", "directions"])
    for depth in sorted({round(k * carrier.last / (DEPTHS - 1)) for k in range(DEPTHS)}):
        count, most = carrier.dimensions[depth], carrier.spectrum.value.shape[1]
        undefined = NAN if np.isnan(carrier.leading.value[depth]) else f"> {most}"
        rows.add_row(
            str(depth), _cell(carrier.share[depth], "share"), _cell(carrier.leading[depth], "share"),
            undefined if count is None else str(count), f"{carrier.with_origin[depth]:.2f}".replace("-", "−"),
        )  # fmt: skip
    return rows


def _erasure_table(erasure: tuple[Erased, ...]) -> RenderableType:
    rows = table(["edit", "removed", "random directions", "change of the loss", "random directions"])
    for row in erasure:
        if row.random is not None:
            rows.add_row(
                row.edit, _cell(row.earlier_removed, "share"), _cell(row.random, "share"), _cell(row.loss_change),
                _cell(row.random_loss),
            )  # fmt: skip
    return rows


def _cell(value: Estimate | None, unit: str = "") -> TableCell:
    if value is None:
        return TableCell(Text(""))
    return TableCell(Text(shown(value.value, unit)), interval(value, unit))
