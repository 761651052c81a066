"""Training of many models, one after the other, and the list of what has been trained.

    ROOT/DATA/VARIANT-SEED          a model trained for the steps of its recipe
    ROOT/DATA/VARIANT-SEED-STEPS    a model trained for another number of steps

A model that another process is training is skipped, so that two processes share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posleak.errors import BusyError, InputError
from posleak.inputs.bodies import check_seed

from .recipe import RECIPES, Recipe, recipe_named
from .tokens import tokens_for
from .training import RECORD, OnTrainingProgress, Training, read_training, train, training_name
from .variants import VARIANTS, Variant, variant_named

SEEDS = (0, 1)
"""Seeds of the full zoo."""


@dataclass(frozen=True)
class Job:
    """One model to train."""

    variant: Variant
    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        """Name of the training."""
        return training_name(self.variant.name, self.seed, self.recipe)

    def folder(self, root: Path) -> Path:
        return root / self.recipe.data / self.name


def plan_jobs(
    variants: Sequence[str] = (),
    data: Iterable[str] = ("text",),
    seeds: Sequence[int] = (0,),
    steps: int | None = None,
) -> list[Job]:
    """Return the models to train, all seeds of a variant together; every variant if none is named."""
    if steps is not None and steps < 1:
        raise InputError("training needs at least one step", where="--steps", got=steps, expected="1 or more")
    recipes = [recipe_named(each) for each in data]
    chosen = [variant_named(name) for name in dict.fromkeys(variants)] or list(VARIANTS.values())
    return [
        Job(variant, recipe if steps is None else replace(recipe, steps=steps), seed)
        for recipe in recipes
        for variant in chosen
        for seed in dict.fromkeys(map(check_seed, seeds))
    ]


def train_all(
    jobs: Sequence[Job],
    root: Path,
    *,
    text: str | None = None,
    threads: int | None = None,
    on_progress: OnTrainingProgress = lambda progress: None,
    on_finished: Callable[[Job, Training | None], None] = lambda job, record: None,
) -> list[Training]:
    """Train the models that are not trained yet and return the records.

    `on_finished` is called after each job, with None instead of a record if another process is training the model.
    """
    records = list[Training]()
    for job in jobs:
        tokens = tokens_for(job.recipe, text)
        folder = job.folder(root)
        try:
            record = train(job.variant, job.recipe, job.seed, tokens, folder, on_progress=on_progress, threads=threads)
        except BusyError:
            on_finished(job, None)
            continue
        records.append(record)
        on_finished(job, record)
    return records


def trained(root: Path, data: str | None = None) -> Iterator[tuple[Path, Training]]:
    """Yield every training below `root`, finished or not, in the order of the variants."""
    rank = {name: place for place, name in enumerate(VARIANTS)}
    for kind in RECIPES if data is None else [data]:
        folders = [path.parent for path in sorted((root / kind).glob(f"*/{RECORD}"))]
        records = [(folder, record) for folder in folders if (record := read_training(folder)) is not None]
        yield from sorted(
            records,
            key=lambda pair: (rank.get(pair[1].variant, len(rank)), pair[1].seed, pair[1].recipe.steps),
        )
