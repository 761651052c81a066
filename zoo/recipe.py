"""Recipes of the models: size, data and optimiser. There are two: text and backcopy.

Text models of this size have no sinks; backcopy models have. Attempts to get both are described in LOG.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posleak.errors import InputError, did_you_mean
from posleak.inputs.backcopy import CHAIN_TOKENS

from .corpus import ALPHABET


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a model except for the setting of the variant.

    data         text or backcopy;  tokens: number of ordinary tokens; BOS has the next id
    layers, width, heads, feedforward      of the model; heads have width / heads dimensions
    context      tokens per prompt, BOS included;  batch: prompts per step;  steps: of the optimiser
    rate         peak learning rate, after `warmup` steps, followed by a cosine decay to a tenth
    decay        weight decay of AdamW, on matrices only;  clip: maximum norm of the gradient
    """

    data: str
    tokens: int
    layers: int
    width: int
    heads: int
    feedforward: int
    context: int
    batch: int
    steps: int
    rate: float
    warmup: int = 100
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    @property
    def bos(self) -> int:
        return self.tokens

    @property
    def window(self) -> int:
        """Window size in variants with a window."""
        return self.context // 4

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: linear warm-up, then cosine decay to a tenth."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step / max(self.steps, 1), 1.0)))
        return self.rate * min(1.0, (step + 1) / self.warmup) * (0.1 + 0.9 * cosine)

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints: 0, 16, 32, 64 … and the last."""
        return (0, *(2**power for power in range(4, 40) if 2**power < self.steps), self.steps)


TEXT = Recipe(
    "text", len(ALPHABET), layers=6, width=128, heads=4, feedforward=344, context=256, batch=4, steps=1_500, rate=3e-3
)
BACKCOPY = Recipe(
    "backcopy", CHAIN_TOKENS, layers=2, width=64, heads=2, feedforward=176, context=128, batch=32, steps=500, rate=3e-2
)
RECIPES = {recipe.data: recipe for recipe in (TEXT, BACKCOPY)}


def recipe_named(data: str) -> Recipe:
    """Return the recipe for this kind of data."""
    if data not in RECIPES:
        raise InputError("unknown kind of data", where="zoo", got=data, remedy=did_you_mean(data, RECIPES))
    return RECIPES[data]
