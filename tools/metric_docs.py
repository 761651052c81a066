"""Generate parts of docs/metrics.md: the table of metrics from the catalogue, and results from runs.

python -m tools.metric_docs docs/metrics.md                     # the table of metrics
python -m tools.metric_docs docs/metrics.md RUN RUN RUN         # and results, agreement and pictures of runs

Runs must have been measured with `--metrics all`; if a folder has a trace, sources are compared, too. Figures go to the
folder `images` next to the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from posleak.errors import RunError
from posleak.files import write_atomically
from posleak.metrics.agreement import MetricAlignment, alignments, can_see_mask
from posleak.metrics.catalogue import BY_ID, CATALOGUE, Looks, Metric
from posleak.metrics.table import MetricRow
from posleak.reports import metric_figures
from posleak.reports.assets import agreement_figure
from posleak.reports.gather import gather
from posleak.reports.related import RelatedMetrics
from posleak.reports.view import RunView
from posleak.runs.software import slug
from posleak.show import numbers
from posleak.show.plots import write
from tools.made import replaced, row

IMAGES = "images"


def catalogue() -> str:
    """Return the table of all metrics, grouped by what they read."""
    return "\n".join(line for looks in Looks for line in _group(looks)).rstrip("\n")


def _group(looks: Looks) -> Iterator[str]:
    yield f"### Metrics that look at {looks.value}\n"
    yield "| metric | `--metrics` | definition | unit | does not see | source | reported of other models |"
    yield "|---|---|---|---|---|---|---|"
    for metric in CATALOGUE:
        if metric.looks is looks:
            yield row(
                f"{metric.title} (`{metric.id}`)", f"`{metric.meter}`", metric.definition, metric.unit, metric.blind,
                metric.source, metric.published,
            )  # fmt: skip
    yield ""


def results(found: Sequence[RunView]) -> str:
    """Return the results of all runs, with intervals and n."""
    rows = {shown.label: {each.metric.id: each for each in _related(shown).metrics.rows} for shown in found}
    lines = [f"- {_about(shown)}" for shown in found]
    lines += ["", row("metric", *rows), "|---|" + "---|" * len(rows)]
    for metric in CATALOGUE:
        if any(metric.id in each for each in rows.values()):
            lines.append(
                row(f"{metric.title}{_unit(metric)}", *(_value(each.get(metric.id)) for each in rows.values()))
            )
    frames = [frame.words if (frame := _related(shown).metrics.frame) is not None else numbers.NAN for shown in found]
    return "\n".join([*lines, row("Reference frame, mean over layers", *frames)])


def _related(shown: RunView) -> RelatedMetrics:
    if shown.related is None:
        raise RunError("the run has no metrics", where=str(shown.run.path), remedy="measure it with --metrics all")
    return shown.related


def _about(shown: RunView) -> str:
    spec = shown.run.record.spec
    traced = "with a trace" if shown.trace is not None else "without a trace"
    return (
        f"{shown.label}: {shown.run.prompts} prompts of {spec.length} tokens, {spec.inputs}, seed {spec.seed}, {traced}"
    )


def _unit(metric: Metric) -> str:
    return "" if metric.unit == "1" else f" ({metric.unit})"


def _value(found: MetricRow | None) -> str:
    """Return `0.525 (0.424 … 0.649), n = 16`, with the depth if one was selected."""
    if found is None:
        return numbers.NAN
    at = "" if found.at is None else f", depth {found.at}"
    return f"{numbers.estimate(found.value, found.metric.unit)}, n = {found.value.n}{at}"


def agreement(found: Sequence[RunView]) -> str:
    """Return the figures of all runs."""
    return "\n\n".join(f"![{alternative(shown)}]({IMAGES}/{picture_name(shown)})" for shown in found)


def alternative(shown: RunView) -> str:
    """Return the alternative text of the figure."""
    return f"{shown.label}: rank correlation of each metric with the leakage and its parts, over heads and over layers"


def picture_name(shown: RunView) -> str:
    return f"metrics-agreement-{slug(shown.label)}.png"


def seen(found: Sequence[RunView]) -> str:
    """Return a table: whether a metric can see the mask, and its strongest correlation in every run."""
    by_run = [
        {each.metric: each for over in _related(shown).agreements.values() for each in alignments(over)}
        for shown in found
    ]
    lines = [row("metric", "over", "can see the mask", *(shown.label for shown in found))]
    lines.append("|---|---|---|" + "---|" * len(found))
    for name in [metric.id for metric in CATALOGUE if any(metric.id in each for each in by_run)]:
        over = next(each[name].over for each in by_run if name in each)
        can = "yes" if can_see_mask(name) else "no"
        lines.append(row(BY_ID[name].title, over, can, *(_most(each.get(name)) for each in by_run)))
    return "\n".join(lines)


def _most(found: MetricAlignment | None) -> str:
    """Return `**the mask**, here: ρ = 0.73 (0.57 … 0.84)`."""
    if found is None:
        return numbers.NAN
    if (part := found.most) is None:
        return f"**{found.family.value}**"
    ends = f"({numbers.number(part.low)} … {numbers.number(part.high)})"
    return f"**{found.family.value}**, {part.name}: ρ = {numbers.number(part.rho)} {ends}"


def make(page: Path, runs: Sequence[Path]) -> None:
    """Write the generated parts of the page; those of runs only if runs are given."""
    text = replaced(page.read_text(encoding="utf-8"), "catalogue", catalogue())
    if runs:
        found, refused = gather(runs, unfinished=False)
        for each in refused:
            raise RunError("a run cannot be read", where=each.name, got=each.reason)
        for name, maker in {"results": results, "agreement": agreement, "seen": seen}.items():
            text = replaced(text, name, maker(found))
        for shown in found:
            figure = agreement_figure(_related(shown).agreements, metric_figures.of_run(shown), shown.label)
            write_atomically(page.parent / IMAGES / picture_name(shown), partial(write, figure, "png"))
    write_atomically(page, lambda path: path.write_text(text, encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate parts of docs/metrics.md.")
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    make(options.page, options.runs)


if __name__ == "__main__":
    main()
