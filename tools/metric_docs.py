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
from tools.markdown import replace_part, table

IMAGES = "images"


def catalogue() -> str:
    """Return the table of all metrics, grouped by what they read."""
    return "\n".join(line for looks in Looks for line in _group(looks)).rstrip("\n")


def _group(looks: Looks) -> Iterator[str]:
    yield f"### Metrics computed from {looks.value}\n"
    header = ("metric", "`--metrics`", "definition", "unit", "does not see", "source", "reported for other models")
    yield from table(header, [_description(metric) for metric in CATALOGUE if metric.looks is looks])
    yield ""


def _description(metric: Metric) -> tuple[str, ...]:
    """Return the row of a metric."""
    return (
        f"{metric.title} (`{metric.id}`)", f"`{metric.meter}`", metric.definition, metric.unit, metric.blind,
        metric.source, metric.published,
    )  # fmt: skip


def results(runs: Sequence[RunView]) -> str:
    """Return the results of all runs, with intervals and n."""
    by_run = {run.label: {row.metric.id: row for row in _related(run).metrics.rows} for run in runs}
    rows = [
        (f"{metric.title}{_unit(metric)}", *(_value(each.get(metric.id)) for each in by_run.values()))
        for metric in CATALOGUE
        if any(metric.id in each for each in by_run.values())
    ]
    frames = [frame.words if (frame := _related(run).metrics.frame) is not None else numbers.NAN for run in runs]
    rows.append(("Reference frame, mean over layers", *frames))
    return "\n".join([*(f"- {_facts(run)}" for run in runs), "", *table(("metric", *by_run), rows)])


def _related(view: RunView) -> RelatedMetrics:
    if view.related is None:
        raise RunError("the run has no metrics", where=str(view.run.path), remedy="measure it with --metrics all")
    return view.related


def _facts(view: RunView) -> str:
    """Return one line about a run: prompts, inputs, seed."""
    spec = view.run.record.spec
    traced = "with a trace" if view.trace is not None else "without a trace"
    return (
        f"{view.label}: {view.run.prompts} prompts of {spec.length} tokens, {spec.inputs}, seed {spec.seed}, {traced}"
    )


def _unit(metric: Metric) -> str:
    return "" if metric.unit == "1" else f" ({metric.unit})"


def _value(result: MetricRow | None) -> str:
    """Return `0.525 (0.424 … 0.649), n = 16`, with the depth if one was selected."""
    if result is None:
        return numbers.NAN
    depth = "" if result.at is None else f", depth {result.at}"
    return f"{numbers.estimate(result.value, result.metric.unit)}, n = {result.value.n}{depth}"


def agreement(runs: Sequence[RunView]) -> str:
    """Return the figures of all runs."""
    return "\n\n".join(f"![{alternative_text(run)}]({IMAGES}/{picture_name(run)})" for run in runs)


def alternative_text(run: RunView) -> str:
    """Return the alternative text of the figure."""
    return f"{run.label}: rank correlation of each metric with the leakage and its parts, over heads and over layers"


def picture_name(run: RunView) -> str:
    """Return the file name of the figure."""
    return f"metrics-agreement-{slug(run.label)}.png"


def seen(runs: Sequence[RunView]) -> str:
    """Return a table: whether a metric can see the mask, and its strongest correlation in every run."""
    by_run = [
        {each.metric: each for over in _related(run).agreements.values() for each in alignments(over)} for run in runs
    ]
    rows = []
    for name in [metric.id for metric in CATALOGUE if any(metric.id in each for each in by_run)]:
        over = next(each[name].over for each in by_run if name in each)
        sees_mask = "yes" if can_see_mask(name) else "no"
        rows.append((BY_ID[name].title, over, sees_mask, *(_strongest(each.get(name)) for each in by_run)))
    return "\n".join(table(("metric", "over", "can see the mask", *(run.label for run in runs)), rows))


def _strongest(alignment: MetricAlignment | None) -> str:
    """Return `**the mask**, here: ρ = 0.73 (0.57 … 0.84)`."""
    if alignment is None:
        return numbers.NAN
    if (part := alignment.most) is None:
        return f"**{alignment.family.value}**"
    interval = f"({numbers.number(part.low)} … {numbers.number(part.high)})"
    return f"**{alignment.family.value}**, {part.name}: ρ = {numbers.number(part.rho)} {interval}"


def update_page(page: Path, folders: Sequence[Path]) -> None:
    """Write the generated parts of the page; those with results only if folders of runs are given."""
    text = replace_part(page.read_text(encoding="utf-8"), "catalogue", catalogue())
    if folders:
        runs, refused = gather(folders, unfinished=False)
        for each in refused:
            raise RunError("a run cannot be read", where=each.name, got=each.reason)
        for name, section in {"results": results, "agreement": agreement, "seen": seen}.items():
            text = replace_part(text, name, section(runs))
        for run in runs:
            figure = agreement_figure(_related(run).agreements, metric_figures.of_run(run), run.label)
            write_atomically(page.parent / IMAGES / picture_name(run), partial(write, figure, "png"))
    write_atomically(page, lambda path: path.write_text(text, encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate parts of docs/metrics.md.")
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    update_page(options.page, options.runs)


if __name__ == "__main__":
    main()
