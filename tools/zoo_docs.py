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
from tools.markdown import replace_part, table as markdown_table
from zoo.entropy import entropies
from zoo.measuring import QUANTITIES, Quantity
from zoo.recipe import RECIPES
from zoo.table import TABLE, ZOO, TrainingCurve, VariantComparison, ZooTable
from zoo.terminal import GROUPS
from zoo.variants import STANDARD, VARIANTS
from zoo.verdicts import JudgedClaim, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = "images"
DRAWN = ("total", "residual", "earlier", "attention", "readers", "pull", "mask", "here")
"""Quantities that are drawn over training."""


def variants() -> str:
    """Return the table of variants."""
    rows = [(f"`{each.name}`", each.about, each.kind) for each in VARIANTS.values()]
    return "\n".join(markdown_table(("variant", "setting", "architecture"), rows))


def trainings(tables: Sequence[ZooTable]) -> str:
    """Return the table of trainings: size, initial and final loss, its bounds, time."""
    header = ("data", "variant", "seed", "parameters", "steps", "initial held-out loss", "final held-out loss",
              "unigram entropy", "lowest possible loss", "minutes")  # fmt: skip
    rows = []
    for each in (training for table in tables for training in table.trainings):
        lowest = entropies().lowest_loss(each.recipe.context, bos=VARIANTS[each.variant].bos)
        bound = f"{lowest:.3f}" if each.data.data == "backcopy" else ""
        losses = (f"{loss:.3f}" for loss in (each.held_out[0].loss, each.final_loss, each.data.unigram_nats))
        size = (f"{each.parameters:,}", f"{each.recipe.steps:,}")
        model = (each.data.data, f"`{each.variant}`", str(each.seed))
        rows.append((*model, *size, *losses, bound, f"{each.seconds / 60:.1f}"))
    return "\n".join(markdown_table(header, rows))


def balance(table: ZooTable) -> str:
    """Return means over seeds with intervals over models, for every source of prompts; bold if a variant differs."""
    kinds = dict.fromkeys(each.inputs for each in table.comparisons)
    return "\n\n".join(block for inputs in kinds for block in _tables(table, inputs))


def _tables(table: ZooTable, inputs: str) -> Iterator[str]:
    """Yield a table for each group of quantities, or the reasons why none of them is compared."""
    for title, names in GROUPS:
        compared = [each for name in names if (each := table.comparison(name, inputs)) is not None]
        if not compared:
            yield f"{title.capitalize()}, on {inputs}, {table.why_not(names)}."
            continue
        shown = [QUANTITIES[each.quantity] for each in compared]
        header = (f"{title}, on {inputs}", *(_with_unit(each, _unit(each)) for each in shown))
        rows = [
            (f"`{variant}`", *(_cell(each, variant) for each in compared))
            for variant in dict.fromkeys(name for each in compared for name in each.variants)
        ]
        yield "\n".join(markdown_table(header, rows))


def _unit(quantity: Quantity) -> str:
    return "%" if quantity.is_share else quantity.shown_unit


def _with_unit(quantity: Quantity, unit: str) -> str:
    return f"{quantity.title}, {unit}" if unit else quantity.title


def _cell(comparison: VariantComparison, variant: str) -> str:
    """Return mean and interval; bold if the variant differs from standard RoPE."""
    mean = comparison.mean(variant)
    if mean is None:
        return numbers.NAN
    unit = "share" if QUANTITIES[comparison.quantity].is_share else ""
    value, interval = numbers.shown(mean.value, unit), numbers.interval(mean, unit)
    return f"**{value}** {interval}" if comparison.differs(variant) else f"{value} {interval}"


def quantities() -> str:
    """Return the table of quantities."""
    rows = [(each.title, each.about, _unit(each)) for each in QUANTITIES.values()]
    return "\n".join(markdown_table(("quantity", "description", "unit"), rows))


def claim_verdicts(tables: Sequence[ZooTable]) -> str:
    """Return the table of claims with the verdicts on each kind of data."""
    rows = []
    for judged in zip(*(verdicts(table) for table in tables)):
        claim = judged[0].claim
        comparison = f"{QUANTITIES[claim.quantity].title} of `{claim.variant}` with `{STANDARD}`"
        rows.append((claim.sentence, comparison, *map(_verdict, judged)))
    return "\n".join(markdown_table(("claim", "compares", *(table.data for table in tables)), rows))


def _verdict(judged: JudgedClaim) -> str:
    """Return the verdict with its effect, or with the reason why there is none."""
    finding = judged.finding
    effect = " ".join(numbers.effect(finding.estimate, finding.unit))
    return f"**{judged.verdict.value}**, " + (finding.reason or f"{effect}, n = {finding.n} models")


def sources(tables: Sequence[ZooTable]) -> str:
    """Return the sources of the text."""
    parts = [part for table in tables for part in table.trainings[0].data.parts]
    rows = [(part.name, part.version, f"{part.characters:,}") for part in parts]
    text = next((table.trainings[0].data for table in tables if table.data == "text"), None)
    note = "" if text is None else f"\n\nsha256 of the tokens: `{text.sha256}`; {text.tokens:,} training tokens."
    return "\n".join(markdown_table(("source", "version", "characters"), rows)) + note


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
    for own, name in zip(axes[1:], DRAWN):
        _lines(own, [curve for curve in table.curves if curve.quantity == name], colours)
        own.set(title=as_text(_with_unit(QUANTITIES[name], QUANTITIES[name].shown_unit)))
        if QUANTITIES[name].is_power:
            own.set_yscale("symlog", linthresh=0.1)
    for own in axes[6:]:
        own.set(xlabel="steps")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)


def _losses(table: ZooTable) -> Iterator[TrainingCurve]:
    """Yield the held-out loss of each variant over training."""
    for name in VARIANTS:
        own = [each for each in table.trainings if each.variant == name]
        if own:
            steps = tuple(point.step for point in own[0].held_out)
            values = tuple(zip(*([point.loss for point in each.held_out] for each in own)))
            yield TrainingCurve(name, "loss", steps, tuple(each.seed for each in own), values)


def _lines(axes: Axes, curves: Sequence[TrainingCurve], colours: dict[str, tuple[float, ...]]) -> None:
    """Draw curves: the mean over seeds as a line, each seed as dots."""
    for curve in curves:
        values = np.array(curve.values)
        axes.plot(curve.steps, values.mean(1), color=colours[curve.variant], label=curve.variant)
        for seed in range(values.shape[1]):
            axes.plot(curve.steps, values[:, seed], ".", color=colours[curve.variant], markersize=2.5, alpha=0.6)
    axes.set_xscale("symlog", linthresh=16)


def update_page(page: Path, root: Path | None) -> None:
    """Write the generated parts of the page and its figures; with `root`, from the results there."""
    stored = page.parent / page.stem
    if root is not None:
        for data in RECIPES:
            ZOO.write(stored / f"{data}.json", ZOO.read(root / data / TABLE))
    tables = [ZOO.read(stored / f"{data}.json") for data in RECIPES]
    text = page.read_text(encoding="utf-8")
    for name, part in parts(tables).items():
        text = replace_part(text, name, part)
    write_atomically(page, lambda path: path.write_text(text, encoding="utf-8"))
    for table in tables:
        path = page.parent / IMAGES / f"zoo-{table.data}.png"
        write_atomically(path, partial(write, picture(table), "png"))


def parts(tables: Sequence[ZooTable]) -> dict[str, str]:
    """Return the generated parts, by name of the marker."""
    general = {"variants": variants(), "quantities": quantities(), "trainings": trainings(tables),
               "verdicts": claim_verdicts(tables), "sources": sources(tables)}  # fmt: skip
    return general | {table.data: balance(table) for table in tables}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate parts of docs/zoo.md.")
    parser.add_argument("page", type=Path)
    parser.add_argument("root", type=Path, nargs="?", help="folder of the zoo with the tables")
    options = parser.parse_args(arguments)
    update_page(options.page, options.root)


if __name__ == "__main__":
    main()
