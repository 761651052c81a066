"""Tables of tested claims and of tried settings: `posleak claims` and `posleak advise`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from posleak.analyses.advise.effects import ADVICE_FILE, CHANGED, PLOT_FILE
from posleak.analyses.claims.catalogue import ENOUGH
from posleak.axes import EARLY, SCALING
from posleak.papers import by_paper
from posleak.runs.loss import LOSS_SPANS, LOSS_UNIT
from posleak.show.lines import prose
from posleak.show.numbers import effect, estimate
from posleak.show.terminal import cell, table
from posleak.show.words import MARKS

from .run import heading

if TYPE_CHECKING:
    from posleak.analyses.advise.effects import Advice
    from posleak.analyses.claims.catalogue import ClaimResult
    from posleak.analyses.claims.examination import ClaimsRun

VERDICT_STYLES = {"supported": "green", "contradicted": "red", "inconclusive": "yellow", "not applicable": "dim"}
CLAIM_WIDTHS = {"claim": 40, "effect, with its 95% interval": 35}


def claims_tables(claims: ClaimsRun) -> Iterator[RenderableType]:
    """Yield one row per claim: verdict, title and effect; grouped by paper if there are several papers."""
    groups = by_paper(claims.results)
    yield heading(claims.run)
    for name, results in groups.items():
        if len(groups) > 1:
            yield prose(name, style="bold")
        rows = table(["", *CLAIM_WIDTHS], wrap=CLAIM_WIDTHS, most=CLAIM_WIDTHS)
        for result in results:
            mark = Text(MARKS[result.verdict.value], style=VERDICT_STYLES[result.verdict.value])
            rows.add_row(mark, Text(f"{result.number:2}. {result.title}"), _effect(result))
        yield rows
    yield prose("  ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()), style="dim")
    if later := sum(result.decided is not None for result in claims.results):
        yield prose(
            f"the rule for verdicts was fixed before any test; {later} of {len(claims.results)} claims include choices "
            "made after data had been seen (`decided` in the JSON)", style="dim",
        )  # fmt: skip
    yield prose(f"full text and method of every claim: claims.json in {claims.run.path}", style="dim")


def _effect(result: ClaimResult) -> Text:
    """Return `39% (22% … 50%) removed, n=16`, and the verdict of the other norm if it differs, or why there is none."""
    if math.isnan(result.effect):
        return Text(str(result.reason or "could not be estimated").splitlines()[0], style="dim")
    value, rest = effect(result.estimate, result.unit)
    needs = f", a verdict needs {ENOUGH}" if result.too_few else ""
    even = f"; {result.disagreement}" if result.disagreement else ""
    return Text(value, style="bold").append(f" {rest}, n={result.n}{needs}{even}", style="dim not bold")


def advice_tables(advice: Advice) -> Iterator[RenderableType]:
    """Yield the change of leakage and of loss under every setting, then the conclusions."""
    run = advice.baseline
    yield prose(run.name, style="bold")
    yield prose(" · ".join([*run.record.model_facts, *run.record.facts]), style="dim")
    yield from _leakage(advice)
    yield from _loss(advice)
    yield prose(f"95% jackknife intervals over n = {run.prompts} prompts, paired with the baseline", style="dim")
    for sentence in advice.sentences:
        yield prose(sentence)
    for name, reason in advice.left_out.items():
        yield prose(f"not measured: {name}: {reason}", style="dim")
    yield prose(
        "these conclusions use simultaneous 95% intervals over all settings (Bonferroni), which are wider than the "
        "intervals in the tables", style="dim",
    )  # fmt: skip
    if run.path is not None:
        yield prose(f"runs, {ADVICE_FILE} and {PLOT_FILE} in {run.path}", style="dim")


def _leakage(advice: Advice) -> Iterator[RenderableType]:
    run = advice.baseline
    scaled = any(("all", SCALING) in tried.leakage for tried in advice.effects)
    parts = [part for part in CHANGED if part != SCALING or scaled]
    rows = table(("setting", *parts), wrap=["setting"], title="leakage")
    for tried in advice.effects:
        changes = (tried.leakage.get(("all", part)) for part in parts)
        rows.add_row(tried.setting.name, *("" if change is None else cell(change) for change in changes))
    yield rows
    power = run.summary.model["all"].power
    before = ", ".join(f"{part} {estimate(power[part])}" for part in parts if part != SCALING)
    yield prose(
        "change of the power in nats², all queries, weighted by the attention of the baseline; "
        f"baseline: {before} nats²." + (" scaling: leakage caused by the factor on queries itself" if scaled else ""),
        style="dim",
    )


def _loss(advice: Advice) -> Iterator[RenderableType]:
    losses = advice.baseline.loss
    assert losses is not None
    where = [name for name in LOSS_SPANS if name in losses.numbers]
    rows = table(("setting", *where), wrap=["setting"], title="loss")
    for tried in advice.effects:
        rows.add_row(tried.setting.name, *(cell(tried.loss[name]) for name in where))
    yield rows
    before = ", ".join(f"{name} {estimate(loss)}" for name, loss in losses.numbers.items())
    yield prose(
        f"change in {LOSS_UNIT}, at {losses.positions} positions of each prompt; first: before position {EARLY}, end: "
        f"the last quarter; baseline: {before} {LOSS_UNIT}", style="dim",
    )  # fmt: skip
