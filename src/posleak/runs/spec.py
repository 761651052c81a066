"""The specification of one measurement, checked before a model is loaded and without importing torch.

`resolve_request` makes it from the arguments of a call.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from posleak.defaults import LENGTH, PROMPTS, TOKENS_AT_ONCE
from posleak.edits import NamedEdit, parse_edits, require_measurable
from posleak.edits.context import AfterDonor
from posleak.edits.positions import Shift
from posleak.errors import InputError
from posleak.inputs import GivenPrompts, Inputs, is_source_name, parse, read_given
from posleak.inputs.bodies import SEED_LIMIT
from posleak.metrics import parse_metrics
from posleak.models import AnyModel, Subject, subject_of
from posleak.models.memory import parse_bytes as parse_bytes
from posleak.probe import Plan, default_plan
from posleak.probe.plan import DEFAULT_ORIGIN, MAX_DENSITY
from posleak.typed import plain

GIVEN = "given"
"""Value of `inputs` for prompts that the user passed."""

MAX_COUNT = 10**6
"""Largest number of prompts, and of other counts."""


@dataclass(frozen=True)
class MeasureSpec:
    """Specification of one measurement.

    inputs    source of the prompts, or GIVEN;  bos: token at position 0
    length    tokens per prompt;  prompts: number of prompts;  seed: random seed for the prompts
    batch     prompts per forward pass; 0: about TOKENS_AT_ONCE tokens
    density   factor on the numbers of sampled rows;  origin: number of leading tokens treated as the origin
    edits     objects or texts; stored as objects in the order in which they are applied. In JSON they are texts, or
              the class and the fields of an object
    metrics   names of metrics of other papers;  loss: also compute the next-token loss at the sampled positions
    """

    inputs: str = "random"
    bos: str | int = "auto"
    length: int = LENGTH
    prompts: int = PROMPTS
    seed: int = 0
    batch: int = 0
    density: int = 1
    origin: int = DEFAULT_ORIGIN
    edits: tuple[NamedEdit, ...] = ()
    metrics: tuple[str, ...] = ()
    loss: bool = False

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name in ("length", "prompts", "seed", "batch", "density", "origin"):
            object.__setattr__(self, name, require_integer(name, getattr(self, name)))
        require_between("prompts", self.prompts, 1)
        require_between("batch", self.batch, 0)
        require_between("seed", self.seed, 0, SEED_LIMIT - 1)
        require_between("density", self.density, 1, MAX_DENSITY)
        if self.inputs != GIVEN:
            parse(self.inputs)
        object.__setattr__(self, "edits", parse_edits(self.edits))
        require_measurable(self.edits)
        object.__setattr__(self, "metrics", parse_metrics(self.metrics))
        if not isinstance(self.loss, bool):
            raise InputError("loss must be true or false", where="--loss", got=repr(self.loss), expected="a bool")
        for name in ("metrics", "loss"):
            if getattr(self, name) and self.borrowed:
                raise InputError(
                    f"{name} cannot be measured under a borrowed context, where prompts attend to another document",
                    where=f"--{name}", remedy="measure without the edit",
                )  # fmt: skip
        _ = self.plan  # raises if the length is too short or too long

    def require_effect(self) -> None:
        """Raise a NoEffectError if an edit changes nothing in prompts of this length, whatever the model."""
        for edit in self.edits:
            edit.require_length(self.length)

    @property
    def identifying(self) -> dict[str, Any]:
        """Return the fields as JSON, for the hashes of runs and of cells.

        Metrics and loss are left out where they are not measured: hashes from before they existed stay valid.
        """
        request: dict[str, Any] = plain(self)
        return {name: value for name, value in request.items() if value or name not in ("metrics", "loss")}

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of sampled rows."""
        return default_plan(self.length, self.density, self.origin)

    @property
    def edit_texts(self) -> tuple[str, ...]:
        """Return the text of each edit, as in `--edit` and in JSON."""
        return tuple(edit.text for edit in self.edits)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with edits as records hold them."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"edits": [edit.stored for edit in self.edits]}

    @property
    def borrowed(self) -> int:
        """Return the number of donor tokens before each prompt; 0 without a borrowed context."""
        return next((edit.donor_tokens(self.length) for edit in self.edits if isinstance(edit, AfterDonor)), 0)

    @property
    def sequences(self) -> tuple[int, int]:
        """Return the number of sequences that the model reads for each prompt, and their tokens."""
        read = (edit.sequences(self.length) for edit in self.edits if isinstance(edit, AfterDonor))
        return next(read, (1, self.length))

    @property
    def tokens_read(self) -> int:
        """Return the number of tokens that the model reads for each prompt."""
        return math.prod(self.sequences)

    @property
    def shifted(self) -> int:
        """Return the number of positions by which edits shift the prompts."""
        return sum(edit.by for edit in self.edits if isinstance(edit, Shift))

    def resolved(self) -> MeasureSpec:
        """Return the spec with every default filled in."""
        batch = self.batch or max(1, TOKENS_AT_ONCE // self.tokens_read)
        return replace(self, batch=min(batch, self.prompts))

    def batches(self) -> list[range]:
        """Return prompts 0 … prompts − 1 in consecutive batches."""
        return batches(self.prompts, self.batch)


def resolve_request(
    subject: AnyModel,
    inputs: Inputs,
    *,
    length: int | None,
    prompts: int | None,
    default_length: int = LENGTH,
    bos: str | int = "auto",
    max_memory: str | int | None = None,
    **more: Any,
) -> tuple[Subject, MeasureSpec, GivenPrompts | None]:
    """Resolve the arguments of `measure`, `trace`, `claims` or `advise`.

    Return the subject, the spec, and the prompts that the user passed, None if posleak makes them. What can be rejected
    without the model is rejected before it is loaded.

    default_length   length of the prompts that posleak makes, if `length` is None
    max_memory       memory limit of the process, for a model that is loaded here
    more             further fields of MeasureSpec
    """
    if isinstance(inputs, str) and is_source_name(inputs):
        tokens, count = default_length if length is None else length, PROMPTS if prompts is None else prompts
        spec = MeasureSpec(inputs, bos, tokens, count, **more)
        spec.require_effect()
        return subject_of(subject, max_memory), spec, None
    loaded = subject_of(subject, max_memory)
    given = read_given(loaded, inputs, length=length, prompts=prompts, bos=bos)
    count, tokens = given.table.shape
    return loaded, MeasureSpec(GIVEN, bos, tokens, count, **more), given


def require_integer(name: str, value: Any) -> int:
    """Return an integer, also of numpy, as an int; raise an InputError for other values."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be an integer", got=repr(value)) from None


def require_between(name: str, value: int, least: int, most: int = MAX_COUNT, *, why: str | None = None) -> None:
    """Raise an InputError for an out-of-range value; `why`: the reason for the lower bound."""
    if least <= value <= most:
        return
    small = value < least
    reason = f": {why}" if small and why is not None else ""
    raise InputError(
        f"{name} is too {'small' if small else 'large'}{reason}", got=f"{value:,}",
        expected=f"at least {least:,}" if small else f"at most {most:,}",
        remedy=f"use --{name} {least} or more" if small else f"use --{name} {most} or less",
    )  # fmt: skip


def batches(prompts: int, batch: int) -> list[range]:
    """Return consecutive ranges of at most `batch` prompts."""
    return [range(first, min(first + batch, prompts)) for first in range(0, prompts, batch)]
