"""Results as tables for people. Every number carries its interval; absence has a mark of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from posleak.axes import PARTS, SCALING

if TYPE_CHECKING:
    from posleak.leakage import Estimate, Summary
    from posleak.leakage.summary import Numbers
    from posleak.runs import Run
    from posleak.studies import Diagnosis

# Okabe and Ito's colours: told apart by all eyes; and glyphs, for no colour at all.
COLOURS = {"mask": "#0072b2", "drift": "#e69f00", "sink": "#009e73", SCALING: "#cc79a7"}
GLYPHS = {"mask": "█", "drift": "▒", "sink": "·", SCALING: "╱"}
BAR = 8
LEGEND = """\
powers in nats², mean over heads, all queries, with 95% bootstrap intervals over prompts
shares of the total: █ mask ▒ drift · sink ╱ scaling, − cancels some; n.s.: total not clearly above 0
at 0: attention to position 0, mean over reference queries"""


def run_tables(run: Run) -> Iterator[RenderableType]:
    """The summary of a measurement: what was measured, layers, and the two lines that most people want."""
    summary = run.summary
    yield Group(*_heading(run))
    yield layers_table(summary)
    yield Text(LEGEND, style="dim")
    for queries, label in (("early", "early queries (i < 32)"), ("all", "all queries")):
        yield Text.from_markup(f"{label:<24} {_shares(summary, queries)}")
    yield Text.from_markup(f"[dim]remainder {run.data.attrs['remainder']:.1e} nats · run[/dim] {escape(str(run.path))}")


def _heading(run: Run) -> Iterator[Text]:
    spec, inputs, identity = run.record["spec"], run.record["inputs"], run.record["identity"]
    yield Text(f"{identity['name']}", style="bold")
    size = f"{identity['layers']} layers × {identity['heads']} heads"
    facts = (identity["architecture"], size, identity["dtype"], identity["quantisation"])
    yield Text(" · ".join(fact for fact in facts if fact), style="dim")
    prompts = f"{spec['prompts']} prompts of {spec['length']} tokens"
    facts = (spec["inputs"], prompts, f"seed {spec['seed']}", inputs["first_token"], *spec["edits"])
    yield Text(" · ".join(facts), style="dim")


def layers_table(summary: Summary) -> Table:
    """One line a layer, in 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("layer", justify="right")
    numbers = summary.layers["all"]
    shown = parts_of(numbers)
    for name in ("total", *shown):
        table.add_column(name, no_wrap=True)
    table.add_column("shares", no_wrap=True)
    table.add_column("at 0", justify="right")
    for layer in range(len(numbers.power["total"].value)):
        cells = [number(numbers.power[name][layer], COLOURS.get(name, "")) for name in ("total", *shown)]
        bar = share_bar({name: float(numbers.share[name][layer].value) for name in shown})
        table.add_row(str(layer), *cells, bar, f"{summary.layer_sink_attention[layer].value:.2f}")
    return table


def parts_of(numbers: Numbers) -> tuple[str, ...]:
    """Mask, drift and sink; and scaling in models that scale their queries by position."""
    return (*PARTS, SCALING) if SCALING in numbers.share else PARTS


def number(estimate: Estimate, style: str = "") -> Text:
    """Value, and its interval; a dash where there is none."""
    if math.isnan(estimate.value):
        return Text("–", style="dim")
    text = Text(short(estimate.value).rjust(4), style=style)
    if not math.isnan(estimate.low):
        text.append(f" {short(estimate.low)}–{short(estimate.high)}", style="dim")
    return text


def percent(estimate: Estimate) -> Text:
    """A share and its interval, in percent; a dash where there is none."""
    if math.isnan(estimate.value):
        return Text("–", style="dim")
    text = Text(f"{float(estimate.value):.0%}")
    if not math.isnan(estimate.low):
        text.append(f" {float(estimate.low):.0%}…{float(estimate.high):.0%}", style="dim")
    return text


def short(value: Any) -> str:
    """Made for columns: two decimals without the leading zero, or a digit and an exponent for what that would hide."""
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        return f"{value:.0e}".replace("e-0", "e-").replace("-", "−")
    return f"{value:.2f}".replace("0.", ".", 1).replace("-", "−") if abs(value) < 1 else f"{value:.2f}"


def share_bar(shares: dict[str, float]) -> Text:
    """Positive shares as a bar; a component that cancels leakage has no length and a minus sign at the end."""
    if any(math.isnan(share) for share in shares.values()):
        return Text("n.s.".ljust(BAR), style="dim")
    positive = {name: max(share, 0.0) for name, share in shares.items()}
    whole = sum(positive.values()) or 1.0
    bar, drawn, edge = Text(), 0, 0.0
    for name, share in positive.items():
        edge += share / whole * BAR
        bar.append(GLYPHS[name] * (round(edge) - drawn), style=COLOURS[name])
        drawn = round(edge)
    for name, share in shares.items():
        if share < -0.05:
            bar.append("−", style=COLOURS[name])
    return bar


def _shares(summary: Summary, queries: str) -> str:
    numbers = summary.model[queries]
    parts = []
    for name in parts_of(numbers):
        share = numbers.share[name]
        interval = "" if math.isnan(share.low) else f" [dim]({share.low:.0%}…{share.high:.0%})[/dim]"
        text = "–" if math.isnan(share.value) else f"{share.value:.0%}"
        parts.append(f"[{COLOURS[name]}]{name}[/] {text}{interval}")
    stable = numbers.stabilisation
    parts.append("stabilisation " + ("–" if math.isnan(stable.value) else f"×{stable.value:.1f} "
                 f"[dim]({stable.low:.1f}…{stable.high:.1f})[/dim]"))  # fmt: skip
    return "  ".join([*parts, f"[dim]n={summary.prompts}[/dim]"])


def doctor_table(diagnosis: Diagnosis) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "check", "value", "bound", "unit", "why"):
        table.add_column(name, justify="right" if name in ("value", "bound") else "left")
    for check in diagnosis.checks:
        mark = "[green]✓[/]" if check.ok and check.bound is not None else "[dim]·[/]" if check.ok else "[red]✗[/]"
        bound = "–" if check.bound is None else f"{check.bound:.1e}" if check.bound else "0"
        value = f"{check.value:.1e}" if check.value else "0"
        table.add_row(mark, check.id, value, bound, check.unit, escape(check.why))
    verdict = "[green]can be measured here[/]" if diagnosis.ok else "[red]a check failed[/]"
    prompts = f"[dim]({diagnosis.prompts} prompts of {diagnosis.length} tokens)[/dim]"
    head = f"[bold]{escape(diagnosis.model)}[/bold]: {verdict} {prompts}"
    return Group(Text.from_markup(head), table)


def _wheels(packages: tuple[str, ...]) -> str:
    return packages[0] if len(packages) == 1 else f"{packages[0]} and {len(packages) - 1} more"


def models_table(entries: Iterable[Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "stands for", "from", "download", "licence", "cached"):
        table.add_column(name)
    for entry in entries:
        table.add_row(
            entry.name, entry.stands_for, escape(_wheels(entry.packages)), f"{entry.size_mb} MB", entry.licence,
            "yes" if entry.cached else "no",
        )  # fmt: skip
    return table


def profile_table(spent: dict[str, Any]) -> Group:
    """Seconds by stage, the share of the model's own forward pass, and memory against its plan."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stage", "seconds", "of all", "times"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for row in spent["stages"]:
        table.add_row(row["stage"], f"{row['seconds']:.2f}", f"{row['share']:.1%}", str(row["entries"]))
    table.add_row("all", f"{spent['seconds']:.2f}", "100%", "1")
    memory, share = spent["memory"], spent["forward_share"]
    lines = [
        "nothing was measured: the folder had this run (--fresh measures again)" if not share
        else f"the model's own forward pass: {share:.0%} of the {spent['measuring_seconds']:.1f} s of measuring, "
        f"{spent['forward_share_of_command']:.0%} of the whole command",
        f"memory above the loaded model: at most {memory['peak_mb']:.0f} MB"
        + ("" if memory["planned_mb"] is None else f", planned {memory['planned_mb']:.0f} MB"),
    ]  # fmt: skip
    return Group(table, *(Text(line, style="dim") for line in lines))
