"""Table of claims: `posleak claims`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from posleak.analyses.claims.finding import ENOUGH
from posleak.papers import by_paper
from posleak.show.lines import prose
from posleak.show.numbers import effect
from posleak.show.terminal import table
from posleak.show.words import MARKS

from .run import heading

if TYPE_CHECKING:
    from posleak.analyses.claims.catalogue import ClaimResult
    from posleak.analyses.claims.examination import ClaimsRun

VERDICT_STYLES = {"supported": "green", "contradicted": "red", "inconclusive": "yellow", "not applicable": "dim"}


def claims_tables(claims: ClaimsRun) -> Iterator[RenderableType]:
    """Yield one row per claim: verdict, title and effect; grouped by paper if there are several papers."""
    groups = by_paper(claims.results)
    yield heading(claims.run)
    for name, results in groups.items():
        if len(groups) > 1:
            yield prose(name, style="bold")
        yield _rows(results)
    yield prose("  ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()), style="dim")
    yield prose(f"full text and test of every claim: claims.json in {claims.run.path}", style="dim")


def _rows(results: Iterable[ClaimResult]) -> RenderableType:
    widths = {"claim": 40, "effect, with its 95% interval": 35}
    rows = table(["", *widths], wrap=widths, most=widths)
    for result in results:
        mark = Text(MARKS[result.verdict.value], style=VERDICT_STYLES[result.verdict.value])
        rows.add_row(mark, Text(f"{result.number:2}. {result.title}"), _effect(result))
    return rows


def _effect(result: ClaimResult) -> Text:
    """Return `39% (22% … 50%) removed, n=16`, or the reason why there is no effect."""
    if math.isnan(result.effect):
        return Text(str(result.reason or "could not be estimated").splitlines()[0], style="dim")
    value, rest = effect(result.estimate, result.unit)
    needs = f", a verdict needs {ENOUGH}" if result.too_few else ""
    return Text(value, style="bold").append(f" {rest}, n={result.n}{needs}", style="dim not bold")
