"""A cell: one run as it is asked for, before any model is loaded. Its id is a hash of all that decides its numbers and
can be known beforehand: what is asked of which model, on which text, with which software.

What the model's files hold is not part of the id, for it would have to be read: a finished cell remembers it, and is
not finished any more when the files have changed (posleak.sweeps.state).
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path

from posleak.axes import MIN_LENGTH
from posleak.edits import parse_edits
from posleak.errors import InputError, did_you_mean
from posleak.inputs.corpus import STDLIB
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.software import COMPUTED_WITH, DEFINITIONS_VERSION, slug, versions
from posleak.runs.spec import LENGTH, PROMPTS, MeasureSpec
from posleak.typed import plain

MEASURE, TRACE = "measure", "trace"
KINDS = (MEASURE, TRACE)
TEXT = "text:"

GROUPED = ("model", "dtype", "device", "device_map")
"""What decides which model is in memory: cells that agree in these follow one another without loading it again."""


@dataclass(frozen=True)
class Resources:
    """What a worker is given while it has the model in memory; None: as the engine decides. `memory` in bytes."""

    cpus: float | None = None
    gpus: float = 0
    memory: int | None = None


@dataclass(frozen=True)
class Cell:
    """One run. `dtype` None: as `load` chooses. The fields after `loss` say where it computes and how it is shown;
    of them, device and device map decide its numbers.

    title   what people call the model;  series, step: whose checkpoint it is, and after how many steps
    """

    model: str
    edits: tuple[str, ...] = ()
    length: int = LENGTH
    prompts: int = PROMPTS
    seed: int = 0
    inputs: str = "random"
    bos: str | int = "auto"
    dtype: str | None = None
    kind: str = MEASURE
    origin: int = DEFAULT_ORIGIN
    density: int = 1
    batch: int = 0
    metrics: tuple[str, ...] = ()
    loss: bool = False
    device: str | None = None
    device_map: str | None = None
    title: str | None = None
    series: str | None = None
    step: int | None = None
    resources: Resources = Resources()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("no such kind of run", where="kind", got=self.kind, remedy=did_you_mean(self.kind, KINDS))
        if self.kind == TRACE and self.edits:
            raise InputError(
                "a trace takes no edits: it is itself an intervention", where=self.label, got=", ".join(self.edits),
                remedy="use kind: measure for cells with edits, in a grid of their own",
            )  # fmt: skip

    @cached_property
    def spec(self) -> MeasureSpec:
        """The measurement; refused here if it cannot be made with any model."""
        return MeasureSpec(
            self.inputs, self.bos, self.length, self.prompts, self.seed, self.batch, self.density, self.origin,
            parse_edits(self.edits), self.metrics, self.loss,
        )  # fmt: skip

    @property
    def group(self) -> tuple[str | None, ...]:
        return tuple(getattr(self, name) for name in GROUPED)

    @property
    def name(self) -> str:
        """What people call the model."""
        return self.title or self._base

    @property
    def label(self) -> str:
        """What tells it from other cells, apart from length and seed."""
        extra = [*self.edits, *([self.inputs] if self.inputs != "random" else [])]
        extra += [f"bos {self.bos}"] if self.bos != "auto" else []
        return " · ".join([self.name, *extra])

    @property
    def details(self) -> str:
        """The label with everything that a grid varies."""
        dtype = [] if self.dtype is None else [self.dtype]
        return ", ".join([self.kind, self.label, f"{self.length} tokens", f"seed {self.seed}", *dtype])

    @cached_property
    def id(self) -> str:
        """A sha256 over everything that decides the numbers and is known before the model is loaded."""
        asked = {field.name: getattr(self, field.name) for field in fields(self)}
        for shown in ("title", "series", "step", "resources", *([] if self.loss else ["loss"])):
            del asked[shown]  # cells without loss keep the id that they had before there was any
        used = versions()
        with_what = {name: used[name] for name in COMPUTED_WITH}
        text = text_hash(self.inputs.removeprefix(TEXT)) if self.inputs.startswith(TEXT) else None
        known = json.dumps(plain([DEFINITIONS_VERSION, asked, with_what, text]), sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def folder(self) -> str:
        """The name of its folder: the same cell finds the same folder."""
        return f"{slug(self._base, 60)}-{self.id[:12]}"

    @property
    def _base(self) -> str:
        """The last part of a path, or the name as it is. In a manifest, paths are whole ones."""
        return Path(self.model).name if Path(self.model).is_absolute() else self.model

    @property
    def work(self) -> int:
        """Tokens that go through the model, for guessing how long it takes."""
        tokens = self.prompts * max(self.length, MIN_LENGTH)
        return 3 * tokens if self.kind == TRACE else tokens


@lru_cache(maxsize=64)
def text_hash(path: str) -> str:
    """What a text says, as a hash; that of the standard library depends on the Python alone."""
    if path == STDLIB:
        return f"Python {platform.python_version()}"
    from posleak.inputs.corpus import read_corpus

    return read_corpus(path).sha256
