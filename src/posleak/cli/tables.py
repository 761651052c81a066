"""Results as tables for people. Every number has its interval; a dash stands for a number that is not defined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from posleak.papers import by_paper
from posleak.show.colours import LIGHT
from posleak.show.lines import Prose, prose
from posleak.show.numbers import NAN, effect, estimate, percent, short
from posleak.show.terminal import cell, parts_of, share_bar, table
from posleak.show.words import MARKS, QUERIES

if TYPE_CHECKING:
    from posleak.analyses.claims.catalogue import ClaimResult
    from posleak.analyses.claims.examination import ClaimsRun
    from posleak.analyses.doctor.check import Check
    from posleak.analyses.doctor.doctor import Diagnosis
    from posleak.leakage import Estimate, Summary
    from posleak.metrics import Metrics
    from posleak.models import ModelListing
    from posleak.runs.loss import Losses
    from posleak.runs.run import Run

LEGEND = """\
powers in nats², mean over heads, all queries, with 95% jackknife intervals over prompts
shares of the total: █ mask ▒ drift · sink ╱ scaling, − cancels some; n.s.: total not clearly above 0
at 0: attention to position 0, mean over reference queries"""

WIDTHS = {"no sink": (0, 0), "1": (1, 1), "2": (2, 2), "3–4": (3, 4), "5 or more": (5, 10**9)}

VERDICTS = {"sound": "green", "by design": "yellow", "wrong": "red"}
DOCTOR_MARKS = {
    "✓": "holds", "!": "broken by the model on purpose, and the numbers are right", "✗": "failed",
    "·": "measured, not judged",
}  # fmt: skip

STYLES = {"supported": "green", "contradicted": "red", "inconclusive": "yellow", "not applicable": "dim"}


def heading(run: Run) -> Group:
    """The model, and what was measured on it."""
    return Group(
        prose(run.name, style="bold"),
        prose(" · ".join(run.record.model_facts), style="dim"),
        prose(" · ".join(run.record.facts), style="dim"),
    )


def run_tables(run: Run) -> Iterator[RenderableType]:
    """The summary of a measurement: what was measured, layers, and the two lines that most people want."""
    summary = run.summary
    yield heading(run)
    yield layers_table(summary)
    yield prose(LEGEND, style="dim", indent=2)
    yield sink_line(summary, run.record.plan.origin)
    for queries, label in QUERIES.items():
        yield labelled(label, _shares(summary, queries))
    yield _stabilisation(summary)
    if run.loss is not None:
        yield labelled("next-token loss", _losses(run.loss))
    if run.metrics is not None:
        yield metrics_table(run.metrics)
    yield remainder_line(run.remainder, run)


def _losses(found: Losses) -> Text:
    """By part of the prompt: `first 3.12 (2.98 … 3.26)`."""
    from posleak.runs.loss import LOSS_UNIT

    parts = [f"{name} {estimate(each)}" for name, each in found.numbers.items()]
    n = found.numbers["all"].n
    return Text("  ".join(parts)).append(
        f"  {LOSS_UNIT}, {found.positions} positions of each prompt, n={n}", style="dim"
    )


def metrics_table(found: Metrics) -> Group:
    """What others measure: one line per metric."""
    widths = {"metric": 44, "value, with its 95% interval": 34}
    made = table(list(widths), wrap=widths, most=widths)
    for row in found.rows:
        at = "" if row.at is None else f", depth {row.at}"
        value = Text(estimate(row.value, row.metric.unit)).append(f", n={row.value.n}{at}", style="dim")
        made.add_row(Text(row.metric.title), value)
    lines = [] if found.frame is None else [f"reference frame: {found.frame.words}"]
    return Group(
        prose("measurements of others, on the same passes", style="bold"),
        made,
        *(prose(line, indent=2) for line in lines),
        prose("definitions, sources and blind spots: docs/metrics.md", style="dim", indent=2),
    )


def labelled(label: str, text: Text) -> Prose:
    """A line that begins with what it is about."""
    return Prose(Text(f"{label:<24} ").append_text(text), indent=2)


def remainder_line(remainder: float, run: Run) -> Prose:
    """How exact the split is, and where the run is kept."""
    line = Text(f"remainder {remainder:.1e} nats · run", style="dim").append(f" {run.path}", style="not dim")
    return Prose(line, indent=2)


def layers_table(summary: Summary) -> RenderableType:
    """One line per layer, in 80 columns."""
    numbers = summary.layers["all"]
    shown = parts_of(numbers)
    made = table(["layer", "total", *shown, "shares", "at 0"], right=["layer", "at 0"], gap=1)
    for layer, name in enumerate(summary.layer_names):
        cells = [cell(numbers.power[part][layer], part) for part in ("total", *shown)]
        bar = share_bar({part: float(numbers.share[part][layer].value) for part in shown})
        made.add_row(name, *cells, bar, f"{summary.layer_sink_attention[layer].value:.2f}")
    return made


def sink_line(summary: Summary, origin: int) -> Prose:
    """Attention to the first positions, and how wide the sinks of heads are."""
    import numpy as np

    there = np.isfinite(summary.profile.value[..., 0])
    means = [short(float(summary.profile.value[..., at][there].mean())) for at in range(6)]
    widths = summary.width[there]
    counts = {name: int(((widths >= low) & (widths <= high)).sum()) for name, (low, high) in WIDTHS.items()}
    sizes = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    line = Text("attention to positions 0 … 5:  ").append(" ".join(means), style=LIGHT["sink"])
    line.append(f"\nheads by the width of their sink, in tokens: {sizes}; the origin has {origin}", style="dim")
    return Prose(line, indent=2)


def _shares(summary: Summary, queries: str) -> Text:
    numbers = summary.model[queries]
    parts = [named_share(name, numbers.share[name]) for name in parts_of(numbers)]
    return Text("  ").join([*parts, Text(f"n={summary.prompts}", style="dim")])


def named_share(name: str, share: Estimate) -> Text:
    """`mask 31% (20%…41%)`"""
    text = Text.assemble((name, LIGHT[name]), f" {percent(share.value)}")
    if math.isnan(share.value) or math.isnan(share.low):
        return text
    return text.append(f" ({percent(share.low)}…{percent(share.high)})", style="dim")


def _stabilisation(summary: Summary) -> Prose:
    """What the mask would leak without sinks, over what it leaks."""
    text = Text()
    for queries in QUERIES:
        text.append(f"{queries} ").append_text(times(summary.model[queries].stabilisation)).append("  ")
    return labelled("stabilisation", text.append(f"n={summary.prompts}", style="dim"))


def times(found: Estimate) -> Text:
    """`×4.4 (3.5…5.7)`"""
    if math.isnan(found.value):
        return Text(NAN)
    text = Text(f"×{found.value:.1f}")
    return text if math.isnan(found.low) else text.append(f" ({found.low:.1f}…{found.high:.1f})", style="dim")


def claims_table(found: ClaimsRun) -> Group:
    """One line per claim: verdict, title, and the effect; in 80 columns. By paper, where there are several."""
    groups = by_paper(found.results)
    papers = [part for name, some in groups.items() for part in (prose(name, style="bold"), _claims(some))]
    return Group(
        heading(found.run),
        *(papers if len(groups) > 1 else [_claims(found.results)]),
        prose("  ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()), style="dim"),
        prose(f"each claim in full, and how it was tested: claims.json in {found.run.path}", style="dim"),
    )


def _claims(results: Iterable[ClaimResult]) -> RenderableType:
    widths = {"claim": 40, "effect, with its 95% interval": 35}
    made = table(["", *widths], wrap=widths, most=widths)
    for result in results:
        mark = Text(MARKS[result.verdict.value], style=STYLES[result.verdict.value])
        made.add_row(mark, Text(f"{result.number:2}. {result.title}"), _effect(result))
    return made


def _effect(result: ClaimResult) -> Text:
    """`39% (22% … 50%) removed, n=16`, or why there is none."""
    if math.isnan(result.effect):
        return Text(str(result.reason or "could not be estimated").splitlines()[0], style="dim")
    from posleak.analyses.claims.finding import ENOUGH

    value, rest = effect(result.estimate, result.unit)
    needs = f", a verdict needs {ENOUGH}" if result.too_few else ""
    return Text(value, style="bold").append(f" {rest}, n={result.n}{needs}", style="dim not bold")


def doctor_table(diagnosis: Diagnosis) -> Group:
    made = table(("", "check", "value", "bound", "unit", "why"), right=("value", "bound"), wrap=("unit", "why"))
    for check in diagnosis.checks:
        bound = NAN if check.bound is None else f"{check.bound:.1e}" if check.bound else "0"
        value = NAN if math.isnan(check.value) else f"{check.value:.1e}" if check.value else "0"
        made.add_row(_mark(check), check.id, value, bound, check.unit, check.why)
    marks = {check.mark for check in diagnosis.checks}
    verdict = (diagnosis.sentence, VERDICTS[diagnosis.verdict.value])
    prompts = f"({diagnosis.prompts} prompts of {diagnosis.length} tokens; positions: {diagnosis.positions})"
    return Group(
        Prose(Text.assemble((diagnosis.model, "bold"), ": ", verdict, " ", (prompts, "dim"))),
        made,
        *(prose(f"note: {note}", style="yellow") for note in diagnosis.notes),
        prose("  ".join(f"{mark} {means}" for mark, means in DOCTOR_MARKS.items() if mark in marks), style="dim"),
    )


def _mark(check: Check) -> Text:
    return Text(check.mark, style="dim" if check.bound is None else VERDICTS[check.verdict.value])


def models_table(entries: Iterable[ModelListing]) -> Group:
    """Models that are fetched once, with what that takes; then those that come with posleak."""
    known = list(entries)
    names = ("name", "stands for", "from", "download", "licence", "cached")
    fetched = table(names, wrap=names[1:])
    for entry in known:
        if entry.packages:
            fetched.add_row(entry.name, entry.stands_for, _wheels(entry.packages), f"{entry.size_mb} MB",
                            entry.licence, "yes" if entry.cached else "no")  # fmt: skip
    shipped = table(("comes with posleak", "stands for"), wrap=["stands for"])
    for entry in known:
        if not entry.packages:
            shipped.add_row(entry.name, entry.stands_for)
    return Group(fetched, shipped)


def _wheels(packages: tuple[str, ...]) -> str:
    return packages[0] if len(packages) == 1 else f"{packages[0]} and {len(packages) - 1} more"


def profile_table(spent: dict[str, Any]) -> Group:
    """Seconds by stage, the share of the model's own forward pass, and memory against its plan."""
    made = table(("stage", "seconds", "of all", "times"), right=("seconds", "of all", "times"))
    for row in spent["stages"]:
        made.add_row(row["stage"], f"{row['seconds']:.2f}", f"{row['share']:.1%}", str(row["entries"]))
    made.add_row("all", f"{spent['seconds']:.2f}", "100%", "1")
    memory, share = spent["memory"], spent["forward_share"]
    lines = [
        "nothing was measured: the folder had this run (--fresh measures again)" if not share
        else f"the model's own forward pass: {share:.0%} of the {spent['measuring_seconds']:.1f} s of measuring, "
        f"{spent['forward_share_of_command']:.0%} of the whole command",
        f"memory above the loaded model: at most {memory['peak_mb']:.0f} MB"
        + ("" if memory["planned_mb"] is None else f", planned {memory['planned_mb']:.0f} MB"),
    ]  # fmt: skip
    return Group(made, *(prose(line, style="dim") for line in lines))
