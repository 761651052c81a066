"""Tables of the zoo: variants compared with standard RoPE, and verdicts on claims about architectures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from posleak.show.lines import prose
from posleak.show.numbers import effect
from posleak.show.terminal import FittedTable, TableCell, cell, share, table
from posleak.show.words import MARKS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zoo.table import VariantComparison, ZooTable

GROUPS = (
    ("where it comes from", ("total", "here", "earlier", "origin")),
    ("where it is read", ("mask", "drift", "sink", "residual", "slope")),
    ("position 0", ("attention", "readers", "pull")),
)
"""Quantities that are shown together."""


def zoo_tables(results: ZooTable) -> Iterator[RenderableType]:
    """Yield the quantities of each variant on its training data, and the verdicts."""
    from zoo.measuring import QUANTITIES

    if not results.comparisons:
        yield prose(f"{results.data}: no quantity of rope can be compared with another variant")
        return
    first = results.comparisons[0]
    facts = f"{len(results.trainings)} models, {len(first.seeds)} seeds, measured on {first.inputs}"
    yield prose(f"{results.data}: {facts}", style="bold")
    for title, names in GROUPS:
        compared = [each for name in names if (each := results.comparison(name)) is not None]
        if not compared:
            yield prose(f"{title}, {results.why_not(names)}")
            continue
        yield _group(title, compared)
        about = [f"{QUANTITIES[each.quantity].title}: {QUANTITIES[each.quantity].about}" for each in compared]
        yield prose("; ".join(about), style="dim")
    yield prose(
        "means over seeds (geometric for powers), with 95% intervals over models; *: the interval of the difference "
        "from rope excludes 0, or that of the ratio of powers excludes 1. Without any difference, one in twenty "
        "quantities is expected to have a *", style="dim",
    )  # fmt: skip
    yield _verdicts(results)


def _group(title: str, compared: list[VariantComparison]) -> FittedTable:
    from zoo.measuring import QUANTITIES

    rows = table((title, *(QUANTITIES[each.quantity].title for each in compared)))
    for variant in dict.fromkeys(name for each in compared for name in each.variants):
        rows.add_row(variant, *(_cell(each, variant) for each in compared))
    return rows


def _cell(comparison: VariantComparison, variant: str) -> TableCell:
    from zoo.measuring import QUANTITIES

    mean = comparison.mean(variant)
    if mean is None:
        return TableCell(Text("–", style="dim"))
    shown = share(mean) if QUANTITIES[comparison.quantity].is_share else cell(mean)
    return TableCell(Text.assemble(shown.text, "*" if comparison.differs(variant) else ""), shown.interval)


def _verdicts(results: ZooTable) -> FittedTable:
    from zoo.verdicts import verdicts

    rows = table(
        ("", "claim, tested on matched models", "effect, 95% interval"), wrap=["claim, tested on matched models"]
    )
    for each in verdicts(results):
        finding = each.finding
        shown = f"{' '.join(effect(finding.estimate, finding.unit))}, n={finding.n} models"
        rows.add_row(MARKS[each.verdict.value], each.claim.title, finding.reason or shown)
    return rows
