"""What is asked for: one measurement as a frozen value that has checked itself, before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from posleak.edits import NamedEdit, Site, parse_edits, require_measurable
from posleak.errors import InputError
from posleak.inputs import parse
from posleak.inputs.prompts import UNLENT
from posleak.probe import Plan, default_plan
from posleak.probe.plan import ORIGIN

LENGTH, PROMPTS = 512, 16
GIVEN = "given"
"""In the place of `inputs`: the prompts were handed over as ids."""

TOKENS_AT_ONCE = 4096
"""Enough to keep a machine busy; the same on every machine, since the batch size affects the last bits."""


@dataclass(frozen=True)
class MeasureSpec:
    """One measurement. `batch` prompts go through the model at once (0: chosen); `density` refines the plan of rows;
    the first `origin` tokens are the origin."""

    inputs: str = "random"
    bos: str | int = "auto"
    length: int = LENGTH
    prompts: int = PROMPTS
    seed: int = 0
    batch: int = 0
    density: int = 1
    origin: int = ORIGIN
    edits: tuple[str, ...] = ()

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("seed", 0), ("batch", 0), ("density", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is too small", got=getattr(self, name), expected=f"at least {least}")
        if self.inputs != GIVEN:
            parse(self.inputs)
        require_measurable(self.parsed_edits)
        object.__setattr__(self, "edits", tuple(edit.text for edit in self.parsed_edits))
        _ = self.plan  # refuses a length that is too short

    @cached_property
    def plan(self) -> Plan:
        """Which rows are looked at."""
        return default_plan(self.length, self.density, self.origin)

    @cached_property
    def parsed_edits(self) -> tuple[NamedEdit, ...]:
        """In the order in which they are applied."""
        return parse_edits(self.edits)

    @property
    def borrowed(self) -> int:
        """How many tokens of another document stand before each prompt."""
        return self.length + UNLENT if any(edit.site is Site.CONTEXT for edit in self.parsed_edits) else 0

    def resolved(self) -> MeasureSpec:
        """With every default filled in."""
        batch = self.batch or max(1, TOKENS_AT_ONCE // self.length)
        return replace(self, batch=min(batch, self.prompts))

    def batches(self) -> list[range]:
        """Prompts 0 … prompts − 1 in consecutive batches."""
        return batches(self.prompts, self.batch)


def batches(prompts: int, batch: int) -> list[range]:
    return [range(first, min(first + batch, prompts)) for first in range(0, prompts, batch)]
