"""How a model of the zoo is made: its size, what it reads, and how it is trained. Two recipes: text, and backcopy.

Text models of this size have no sinks; backcopy is there for those. What was tried to get both is in LOG.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posleak.errors import InputError, did_you_mean
from posleak.inputs.backcopy import CHAIN_TOKENS

from .corpus import ALPHABET


@dataclass(frozen=True)
class Recipe:
    """One way of making a model; everything but the knob that a variant turns.

    data         text or backcopy;  tokens: its ordinary ones, 0 … tokens − 1. BOS is the next
    layers, width, heads, feedforward      of the model; heads have width / heads dimensions
    context      tokens per prompt, BOS included;  batch: prompts per step;  steps: of the optimiser
    rate         the highest learning rate: reached after `warmup` steps, falling to a tenth along a cosine
    decay        weight decay of AdamW, on matrices alone;  clip: of the gradient's norm
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
        """Keys that a query sees in variants with a window."""
        return self.context // 4

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0: a linear warm-up, then a cosine down to a tenth."""
        fallen = 0.5 * (1 + math.cos(math.pi * min(step / max(self.steps, 1), 1.0)))
        return self.rate * min(1.0, (step + 1) / self.warmup) * (0.1 + 0.9 * fallen)

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """After how many steps a checkpoint is kept: 0, 16, 32, 64 … and at the end."""
        return (0, *(2**power for power in range(4, 40) if 2**power < self.steps), self.steps)


TEXT = Recipe(
    "text", len(ALPHABET), layers=6, width=128, heads=4, feedforward=344, context=256, batch=4, steps=1_500, rate=3e-3
)
BACKCOPY = Recipe(
    "backcopy", CHAIN_TOKENS, layers=2, width=64, heads=2, feedforward=176, context=128, batch=32, steps=500, rate=3e-2
)
RECIPES = {recipe.data: recipe for recipe in (TEXT, BACKCOPY)}


def recipe_named(data: str) -> Recipe:
    """The recipe for this kind of data."""
    if data not in RECIPES:
        raise InputError("no data of this name", where="zoo", got=data, remedy=did_you_mean(data, RECIPES))
    return RECIPES[data]
