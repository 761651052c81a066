"""Tables of the zoo: variants compared with standard RoPE, and verdicts on claims about architectures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from posleak.show.lines import prose
from posleak.show.numbers import effect as said
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


def zoo_tables(found: ZooTable) -> Iterator[RenderableType]:
    """Yield the quantities of each variant on its training data, and the verdicts."""
    from zoo.measuring import QUANTITIES

    if not found.comparisons:
        yield prose(f"{found.data}: no quantity of rope can be compared with another variant")
        return
    first = found.comparisons[0]
    facts = f"{len(found.trainings)} models, {len(first.seeds)} seeds, measured on {first.inputs}"
    yield prose(f"{found.data}: {facts}", style="bold")
    for title, names in GROUPS:
        compared = [each for name in names if (each := found.comparison(name)) is not None]
        if not compared:
            yield prose(f"{title}, {found.why_not(names)}")
            continue
        yield _group(title, compared)
        about = [f"{QUANTITIES[each.quantity].title}: {QUANTITIES[each.quantity].about}" for each in compared]
        yield prose("; ".join(about), style="dim")
    yield prose(
        "means over seeds (geometric for powers), with 95% intervals over models; *: the interval of the difference "
        "from rope excludes 0, or the ratio of powers excludes 1. One in twenty quantities without a difference is "
        "expected to have a *", style="dim",
    )  # fmt: skip
    yield _verdicts(found)


def _group(title: str, compared: list[VariantComparison]) -> FittedTable:
    from zoo.measuring import QUANTITIES

    made = table((title, *(QUANTITIES[each.quantity].title for each in compared)))
    for variant in dict.fromkeys(name for each in compared for name in each.variants):
        made.add_row(variant, *(_cell(each, variant) for each in compared))
    return made


def _cell(found: VariantComparison, variant: str) -> TableCell:
    from zoo.measuring import QUANTITIES

    mean = found.mean(variant)
    if mean is None:
        return TableCell(Text("–", style="dim"))
    shown = share(mean) if QUANTITIES[found.quantity].is_share else cell(mean)
    return TableCell(Text.assemble(shown.text, "*" if found.differs(variant) else ""), shown.interval)


def _verdicts(found: ZooTable) -> FittedTable:
    from zoo.verdicts import verdicts

    made = table(("", "what matched models say", "effect, with its 95% interval"), wrap=["what matched models say"])
    for each in verdicts(found):
        finding = each.finding
        if finding.reason is not None:
            made.add_row(MARKS[each.verdict.value], each.sentence.title, finding.reason)
            continue
        number, rest = said(finding.estimate, finding.unit)
        made.add_row(MARKS[each.verdict.value], each.sentence.title, f"{number} {rest}, n={finding.n} models")
    return made
