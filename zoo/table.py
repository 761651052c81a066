"""The table of all variants, zoo.json: means over seeds, and differences from standard RoPE.

Powers are compared by ratio and averaged as geometric means, other quantities by difference. Intervals are over models
(layout.py). What cannot be compared is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posleak.errors import RunError
from posleak.files import Sealed
from posleak.leakage import Estimate
from posleak.typed import Number

from .jobs import trained
from .layout import Layout
from .measuring import PROMPTS, QUANTITIES, AllMeasured, Quantity, VariantMeasurement, inputs_of, read_measured
from .recipe import recipe_named
from .training import Training
from .variants import STANDARD, VARIANTS

TABLE = "zoo.json"


@dataclass(frozen=True)
class Trained:
    """A finished training with its results."""

    folder: Path
    record: Training
    measured: AllMeasured

    def final(self, inputs: str, prompts: int) -> VariantMeasurement | None:
        """Return the results of the last step; None if they are not measured."""
        return self.measured.of(self.record.recipe.steps, inputs, prompts)


@dataclass(frozen=True)
class VariantComparison:
    """One quantity on one source of prompts, compared over variants.

    variants   that can be compared, standard RoPE first;  left_out: reasons why others cannot
    seeds      shared by all variants;  models: estimate of each model over prompts [V][S]
    means      [V];  effects: [V] difference from standard RoPE, ratio for powers; both with intervals over models
    freedom    degrees of freedom of these intervals
    """

    quantity: str
    inputs: str
    variants: tuple[str, ...]
    left_out: dict[str, str]
    seeds: tuple[int, ...]
    models: tuple[tuple[Estimate, ...], ...]
    means: Estimate
    effects: Estimate
    freedom: int
    is_ratio: bool

    def mean(self, variant: str) -> Estimate | None:
        """Return the mean of a variant; None if it is left out."""
        return self.means[self.variants.index(variant)] if variant in self.variants else None

    def effect(self, variant: str) -> Estimate | None:
        """Return the difference of a variant from standard RoPE, or the ratio; None if it is left out."""
        return self.effects[self.variants.index(variant)] if variant in self.variants else None

    def differs(self, variant: str) -> bool:
        """Return whether the interval of the effect excludes no effect: difference 0, ratio 1."""
        effect, no_effect = self.effect(variant), 1.0 if self.is_ratio else 0.0
        return effect is not None and bool(effect.low > no_effect or effect.high < no_effect)


@dataclass(frozen=True)
class TrainingCurve:
    """A quantity of one variant over training, on its training data: values [step][seed], NaN if undefined."""

    variant: str
    quantity: str
    steps: tuple[int, ...]
    seeds: tuple[int, ...]
    values: tuple[tuple[Number, ...], ...]


@dataclass(frozen=True)
class ZooTable:
    """All comparisons on one kind of data, curves over training, and the records of the trainings.

    incomparable   quantities that are not defined for standard RoPE on its training data, with reasons
    """

    data: str
    trainings: tuple[Training, ...]
    comparisons: tuple[VariantComparison, ...]
    curves: tuple[TrainingCurve, ...]
    incomparable: dict[str, str]

    def comparison(self, quantity: str, inputs: str | None = None) -> VariantComparison | None:
        """Return the comparison of a quantity, on the training data unless `inputs` is given; None if there is none."""
        chosen = [each for each in self.comparisons if each.quantity == quantity and inputs in (None, each.inputs)]
        return chosen[0] if chosen else None

    def why_not(self, quantities: Sequence[str]) -> str:
        """Return the reasons why none of these quantities is compared on the training data."""
        titles: dict[str, list[str]] = {}
        for name in quantities:
            titles.setdefault(self.incomparable.get(name, "not measured"), []).append(QUANTITIES[name].title)
        return "not compared: " + "; ".join(f"{', '.join(same)} ({why})" for why, same in titles.items())


ZOO = Sealed("posleak zoo", 1, ZooTable, "start `python -m zoo measure` again")


def write_table(root: Path, table: ZooTable) -> Path:
    """Write a table to ROOT/DATA/zoo.json and return the path."""
    path = root / table.data / TABLE
    ZOO.write(path, table)
    return path


def finished(root: Path, data: str) -> list[Trained]:
    """Return every finished training by the recipe, on the same text as the first one."""
    recipe = recipe_named(data)
    records = [
        (folder, record) for folder, record in trained(root, data) if record.finished and record.recipe == recipe
    ]
    text = {record.data.sha256 for _, record in records[:1]}
    return [Trained(folder, record, read_measured(folder)) for folder, record in records if record.data.sha256 in text]


def zoo_table(root: Path, data: str, prompts: int | None = None) -> ZooTable:
    """Return the table of the results on `prompts` prompts."""
    models, prompts = finished(root, data), PROMPTS[data] if prompts is None else prompts
    if len({each.record.variant for each in models}) < 2 or STANDARD not in {each.record.variant for each in models}:
        raise RunError(
            "nothing to compare", where=str(root / data),
            got=", ".join(each.record.name for each in models) or "no training that finished all steps of the recipe",
            expected=f"{STANDARD} and another variant, trained by the recipe for {data}",
            remedy=f"train some: python -m zoo train {STANDARD} window --data {data} --seed 0 --seed 1",
        )  # fmt: skip
    kinds = inputs_of(models[0].record)
    comparisons = {
        (quantity.name, inputs): _comparison(models, quantity, inputs, prompts)
        for inputs in kinds
        for quantity in QUANTITIES.values()
    }
    curves = [_curve(models, name, quantity, prompts) for name in VARIANTS for quantity in QUANTITIES]
    return ZooTable(
        data,
        tuple(each.record for each in models),
        tuple(each for each in comparisons.values() if isinstance(each, VariantComparison)),
        tuple(each for each in curves if each is not None),
        {name: why for (name, inputs), why in comparisons.items() if inputs == kinds[0] and isinstance(why, str)},
    )


def _comparison(models: Sequence[Trained], quantity: Quantity, inputs: str, prompts: int) -> VariantComparison | str:
    """Return the comparison, or the reason why there is none."""
    estimates: dict[str, dict[int, Estimate]] = {}  # by variant and seed
    for each in models:
        final = each.final(inputs, prompts)
        if final is not None:
            by_seed = estimates.setdefault(each.record.variant, {})
            if quantity.name in final.numbers:
                by_seed[each.record.seed] = final.numbers[quantity.name]
    seeds = tuple(sorted({each.record.seed for each in models if each.record.variant == STANDARD}))
    left_out = {name: why for name, own in estimates.items() if (why := _obstacle(quantity, own, seeds)) is not None}
    variants = tuple(name for name in VARIANTS if name in estimates and name not in left_out)
    if STANDARD not in variants or len(variants) < 2:
        return f"{STANDARD}: {left_out[STANDARD]}" if STANDARD in left_out else f"nothing to compare {STANDARD} with"
    chosen = tuple(tuple(estimates[name][seed] for seed in seeds) for name in variants)
    values = np.array([[float(each.value) for each in row] for row in chosen])
    layout = Layout(np.log(values) if quantity.is_power else values)
    means, effects = layout.means, layout.differences
    if quantity.is_power:
        means, effects = _exponential(means), _exponential(effects)
    return VariantComparison(
        quantity.name, inputs, variants, left_out, seeds, chosen, means, effects, layout.freedom, quantity.is_power
    )


def _obstacle(quantity: Quantity, own: dict[int, Estimate], seeds: Sequence[int]) -> str | None:
    """Return the reason why a variant cannot be compared, None if it can."""
    if not own:
        return "not defined for this variant"
    values = [float(own[seed].value) for seed in seeds if seed in own]
    if len(values) < len(seeds):
        return "not measured with every seed"
    if not np.isfinite(values).all():
        return "not defined: the leakage of a model is not significantly different from zero"
    if quantity.is_power and min(values) <= 0:
        return "no ratio: not positive in every model"
    if not np.any(values) and not quantity.is_share:
        return "0 by construction"
    return None


def _exponential(logs: Estimate) -> Estimate:
    return Estimate(np.exp(logs.value), np.exp(logs.low), np.exp(logs.high), logs.n)


def _curve(models: Sequence[Trained], variant: str, quantity: str, prompts: int) -> TrainingCurve | None:
    """Return the values of a quantity over training; None if fewer than two checkpoints have it in every model."""
    own = [each for each in models if each.record.variant == variant]
    if not own:
        return None
    inputs, steps = inputs_of(own[0].record)[0], own[0].record.recipe.kept_steps
    rows = [[each.measured.of(step, inputs, prompts) for each in own] for step in steps]
    complete = [
        (step, tuple(float(each.numbers[quantity].value) for each in row if each is not None))
        for step, row in zip(steps, rows)
        if all(each is not None and quantity in each.numbers for each in row)
    ]
    if len(complete) < 2:
        return None
    measured_steps, values = zip(*complete)
    return TrainingCurve(variant, quantity, measured_steps, tuple(each.record.seed for each in own), values)
