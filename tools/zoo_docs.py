"""Generate parts of docs/zoo.md and its figures, from the tables of `python -m zoo measure`.

python -m tools.zoo_docs docs/zoo.md runs/zoo     # copies the tables to docs/zoo, then generates
python -m tools.zoo_docs docs/zoo.md              # generates from docs/zoo; a test compares
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posleak.files import write_atomically
from posleak.show import numbers
from posleak.show.plots import as_text, drawn, write
from tools.made import replaced, row
from zoo.entropy import entropies
from zoo.measuring import QUANTITIES
from zoo.recipe import RECIPES
from zoo.table import TABLE, ZOO, TrainingCurve, VariantComparison, ZooTable
from zoo.terminal import GROUPS
from zoo.variants import STANDARD, VARIANTS
from zoo.verdicts import verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = "images"
SHOWN = ("total", "residual", "earlier", "attention", "readers", "pull")
"""Quantities that are drawn over training."""


def variants() -> str:
    """Return the table of variants."""
    lines = [row("variant", "differs from standard RoPE in", "architecture"), "|---|---|---|"]
    return "\n".join([*lines, *(row(f"`{each.name}`", each.about, each.kind) for each in VARIANTS.values())])


def trainings(tables: Sequence[ZooTable]) -> str:
    """Return the table of trainings: size, loss before and after, time."""
    names = ("data", "variant", "seed", "parameters", "steps", "held-out loss: before", "after", "single tokens",
             "at best", "minutes")  # fmt: skip
    lines = [row(*names), "|" + "---|" * len(names)]
    for table in tables:
        for each in table.trainings:
            least = entropies().least(each.recipe.context, bos=VARIANTS[each.variant].bos)
            floor = f"{least:.3f}" if each.data.data == "backcopy" else ""
            losses = (f"{loss:.3f}" for loss in (each.held_out[0].loss, each.final_loss, each.data.unigram_nats))
            size = (f"{each.parameters:,}", f"{each.recipe.steps:,}")
            what = (each.data.data, f"`{each.variant}`", str(each.seed))
            lines.append(row(*what, *size, *losses, floor, f"{each.seconds / 60:.1f}"))
    return "\n".join(lines)


def balance(table: ZooTable) -> str:
    """Return means over seeds with intervals over models, for every source of prompts; bold if a variant differs."""
    kinds = dict.fromkeys(each.inputs for each in table.comparisons)
    return "\n\n".join(block for inputs in kinds for block in _tables(table, inputs))


def _tables(table: ZooTable, inputs: str) -> Iterator[str]:
    for title, names in GROUPS:
        compared = [each for name in names if (each := table.comparison(name, inputs)) is not None]
        if not compared:
            yield f"{title.capitalize()}, on {inputs}, {table.why_not(names)}."
            continue
        heads = [f"{QUANTITIES[each.quantity].title}, {_unit(each)}" for each in compared]
        lines = [row(f"{title}, on {inputs}", *heads), "|" + "---|" * (len(compared) + 1)]
        for variant in dict.fromkeys(name for each in compared for name in each.variants):
            lines.append(row(f"`{variant}`", *(_cell(each, variant) for each in compared)))
        yield "\n".join(lines)


def _unit(found: VariantComparison) -> str:
    unit = QUANTITIES[found.quantity].unit
    return {"share": "%", "1": "no unit"}.get(unit, unit)


def _cell(found: VariantComparison, variant: str) -> str:
    """Return mean and interval; bold if they differ from standard RoPE."""
    mean = found.mean(variant)
    if mean is None:
        return numbers.NAN
    unit = "share" if QUANTITIES[found.quantity].is_share else ""
    value, ends = numbers.shown(mean.value, unit), numbers.interval(mean, unit)
    return f"**{value}** {ends}" if found.differs(variant) else f"{value} {ends}"


def quantities() -> str:
    lines = [row("number", "is", "unit"), "|---|---|---|"]
    units = {"share": "%", "1": "none"}
    made = (row(each.title, each.about, units.get(each.unit, each.unit)) for each in QUANTITIES.values())
    return "\n".join([*lines, *made])


def judged(tables: Sequence[ZooTable]) -> str:
    """Return every claim with the verdicts on each kind of data."""
    lines = [row("sentence", "compares", *(table.data for table in tables)), "|---|---|" + "---|" * len(tables)]
    found = [verdicts(table) for table in tables]
    for same in zip(*found):
        sentence = same[0].sentence
        what = f"{QUANTITIES[sentence.quantity].title} of `{sentence.variant}` with `{STANDARD}`"
        cells = []
        for each in same:
            finding = each.finding
            effect = " ".join(numbers.effect(finding.estimate, finding.unit))
            cells.append(f"**{each.verdict.value}**, " + (finding.reason or f"{effect}, n = {finding.n} models"))
        lines.append(row(sentence.sentence, what, *cells))
    return "\n".join(lines)


def sources(tables: Sequence[ZooTable]) -> str:
    """Return the sources of the text."""
    lines = [row("source", "version", "characters"), "|---|---|---|"]
    for table in tables:
        for each in table.trainings[0].data.parts:
            lines.append(row(each.name, each.version, f"{each.characters:,}"))
    text = next((table.trainings[0].data for table in tables if table.data == "text"), None)
    note = "" if text is None else f"\n\nsha256 of the tokens: `{text.sha256}`; {text.tokens:,} are trained on."
    return "\n".join(lines) + note


# -- pictures -------------------------------------------------------------------------------------------------------


def picture(table: ZooTable) -> Figure:
    """Return the figure of held-out loss and quantities over training: means of seeds as lines, seeds as dots."""
    return drawn(partial(_draw, table=table), (9.0, 7.0))


def _draw(figure: Figure, table: ZooTable) -> None:
    import matplotlib

    colours = dict(zip(VARIANTS, matplotlib.colormaps["tab10"].colors))  # type: ignore[attr-defined]
    axes = figure.subplots(3, 3).ravel()
    _lines(axes[0], list(_losses(table)), colours)
    axes[0].set(title="held-out loss, nats per token")
    for own, name in zip(axes[1:], (*SHOWN, "mask", "here")):
        _lines(own, [curve for curve in table.curves if curve.quantity == name], colours)
        unit = "" if QUANTITIES[name].unit == "1" else f", {QUANTITIES[name].unit}"
        own.set(title=as_text(QUANTITIES[name].title + unit))
        if QUANTITIES[name].is_power:
            own.set_yscale("symlog", linthresh=0.1)
    for own in axes[6:]:
        own.set(xlabel="steps")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)


def _losses(table: ZooTable) -> Iterator[TrainingCurve]:
    for name in VARIANTS:
        own = [each for each in table.trainings if each.variant == name]
        if own:
            steps = tuple(point.step for point in own[0].held_out)
            values = tuple(zip(*([point.loss for point in each.held_out] for each in own)))
            yield TrainingCurve(name, "loss", steps, tuple(each.seed for each in own), values)


def _lines(axes: Axes, curves: Sequence[TrainingCurve], colours: dict[str, tuple[float, ...]]) -> None:
    for curve in curves:
        values = np.array(curve.values)
        axes.plot(curve.steps, values.mean(1), color=colours[curve.variant], label=curve.variant)
        for seed in range(values.shape[1]):
            axes.plot(curve.steps, values[:, seed], ".", color=colours[curve.variant], markersize=2.5, alpha=0.6)
    axes.set_xscale("symlog", linthresh=16)


def make(page: Path, root: Path | None) -> None:
    """Write the generated parts of the page and its figures; with `root`, from the results there."""
    kept = page.parent / page.stem
    if root is not None:
        for data in RECIPES:
            ZOO.write(kept / f"{data}.json", ZOO.read(root / data / TABLE))
    tables = [ZOO.read(kept / f"{data}.json") for data in RECIPES]
    text = page.read_text(encoding="utf-8")
    for name, made in parts(tables).items():
        text = replaced(text, name, made)
    write_atomically(page, lambda path: path.write_text(text, encoding="utf-8"))
    for table in tables:
        place = page.parent / IMAGES / f"zoo-{table.data}.png"
        write_atomically(place, partial(write, picture(table), "png"))


def parts(tables: Sequence[ZooTable]) -> dict[str, str]:
    """Return the generated parts, by name of the marker."""
    made = {"variants": variants(), "quantities": quantities(), "trainings": trainings(tables),
            "verdicts": judged(tables), "sources": sources(tables)}  # fmt: skip
    return made | {table.data: balance(table) for table in tables}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate parts of docs/zoo.md.")
    parser.add_argument("page", type=Path)
    parser.add_argument("root", type=Path, nargs="?", help="folder of the zoo with the tables")
    options = parser.parse_args(arguments)
    make(options.page, options.root)


if __name__ == "__main__":
    main()
