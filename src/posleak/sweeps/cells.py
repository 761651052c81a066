"""A cell: one measurement of a sweep, described before any model is loaded.

A finished cell also records what the model's files contained. If they have changed since, the cell counts as open again
(posleak.sweeps.state).
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from posleak.axes import MIN_LENGTH
from posleak.errors import InputError, did_you_mean
from posleak.inputs.corpus import STDLIB
from posleak.runs.software import COMPUTED_WITH, measurement_hash, slug, versions
from posleak.runs.spec import MeasureSpec
from posleak.typed import from_json, plain

MEASURE, TRACE = "measure", "trace"
KINDS = (MEASURE, TRACE)
TEXT = "text:"


@dataclass(frozen=True)
class Resources:
    """Resources of a worker that runs the cell; None leaves the choice to the engine. `memory` is in bytes."""

    cpus: float | None = None
    gpus: float = 0
    memory: int | None = None


@dataclass(frozen=True)
class Cell:
    """One measurement of one model.

    model       what `load` takes;  dtype, device, device_map: how it is loaded, None: as `load` chooses
    spec        the measurement;  kind: `measure`, or `trace`, which takes no edits
    title       display name of the model
    series      the training run that the model is a checkpoint of;  step: the number of training steps
    resources   of the worker
    """

    model: str
    spec: MeasureSpec = field(default_factory=MeasureSpec)
    kind: str = MEASURE
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    title: str | None = None
    series: str | None = None
    step: int | None = None
    resources: Resources = Resources()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("no such kind of run", where="kind", got=self.kind, remedy=did_you_mean(self.kind, KINDS))
        if self.kind == TRACE and self.spec.edits:
            raise InputError(
                "a trace takes no edits: it is itself an intervention", where=self.label,
                got=", ".join(self.spec.edit_texts), remedy="put cells with edits into a grid with kind: measure",
            )  # fmt: skip

    @property
    def loading(self) -> dict[str, str | None]:
        """The arguments of `load`."""
        return {"dtype": self.dtype, "device": self.device, "device_map": self.device_map}

    @property
    def group(self) -> tuple[str | None, ...]:
        """Identifies the model in memory: consecutive cells of one group load it once."""
        return self.model, self.dtype, self.device, self.device_map

    @cached_property
    def id(self) -> str:
        """The hash that identifies the measurement before its model is loaded: `measurement_hash` of the same
        serialised spec as in the digest of a run (`posleak.runs.record.digest`), with what is known so far.

        It covers the model's name and how it is loaded, the software and, for texts, their content. The digest has
        the model's weights and the tokens instead, which are only known after loading. Display names and resources
        are not part of it.
        """
        request = {"metrics": [], **self.spec.identifying, "model": self.model, "kind": self.kind, **self.loading}
        installed = versions()
        inputs = self.spec.inputs
        text = text_hash(inputs.removeprefix(TEXT)) if inputs.startswith(TEXT) else None
        return measurement_hash(request, {name: installed[name] for name in COMPUTED_WITH}, text)

    @property
    def folder(self) -> str:
        """The name of the cell's folder in a sweep."""
        return f"{slug(self._base, 60)}-{self.id[:12]}"

    @property
    def name(self) -> str:
        """The display name of the model."""
        return self.title or self._base

    @property
    def _base(self) -> str:
        """The last part of an absolute path; any other name unchanged."""
        return Path(self.model).name if Path(self.model).is_absolute() else self.model

    @property
    def label(self) -> str:
        """A description without length and seed: `smollm2-135m · window=64 · bos none`."""
        spec = self.spec
        extra = [*spec.edit_texts, *([spec.inputs] if spec.inputs != "random" else [])]
        extra += [f"bos {spec.bos}"] if spec.bos != "auto" else []
        return " · ".join([self.name, *extra])

    @property
    def details(self) -> str:
        """A description with every field that a grid varies."""
        size = [f"{self.spec.length} tokens", f"seed {self.spec.seed}"]
        return ", ".join([self.kind, self.label, *size, *([] if self.dtype is None else [self.dtype])])

    @property
    def work(self) -> int:
        """Tokens that go through the model, for estimates of time."""
        tokens = self.spec.prompts * max(self.spec.length, MIN_LENGTH)
        return 3 * tokens if self.kind == TRACE else tokens

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON, with those of the spec on the same level."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "spec"}
        return {**own, "resources": asdict(self.resources), **plain(self.spec)}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Read what `as_dict` writes."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_with_spec, handler(source))


def _with_spec(value: Any) -> Any:
    """Move the fields of the spec into one."""
    if not isinstance(value, dict):
        return value
    names = [each.name for each in fields(Cell)]
    spec = {name: entry for name, entry in value.items() if name not in names}
    return {name: value[name] for name in names if name in value} | {"spec": from_json(MeasureSpec, json.dumps(spec))}


@lru_cache(maxsize=64)
def text_hash(path: str) -> str:
    """Return a hash of a text; the standard library's documentation is identified by the version of Python."""
    if path == STDLIB:
        return f"Python {platform.python_version()}"
    from posleak.inputs.corpus import read_corpus

    return read_corpus(path).sha256
