"""A cell: one measurement of a sweep, described before any model is loaded, and the memory and time that it may take.

A finished cell also records what the model's files contained. If they have changed since, the cell counts as open again
(posleak.sweeps.state).

Memory is estimated from the weights, by the headers of their files, the libraries, and the tensors of a batch. Time is
that of finished cells of the same model, per token; without any, the model's arithmetic at the speed of this machine's
matrix products.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.defaults import DONORS, TOKENS_AT_ONCE
from posleak.edits.context import Branches
from posleak.errors import InputError, PosleakError, did_you_mean
from posleak.files import read_regular
from posleak.inputs.corpus import STDLIB
from posleak.models import builtin, pretrained
from posleak.models.adapters import Adapter, is_adapter
from posleak.models.memory import LIBRARY_BYTES
from posleak.models.sources import snapshot_folder, split_revision
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.memory import ROW_COPIES, ModelSizes, fit_bytes
from posleak.runs.software import COMPUTED_WITH, measurement_hash, slug, versions
from posleak.runs.spec import MeasureSpec
from posleak.typed import from_json

from .storage import CELLS_FOLDER

if TYPE_CHECKING:
    from .state import Finished

MEASURE, TRACE = "measure", "trace"
KINDS = (MEASURE, TRACE)
PLAIN, LONG = DONORS

TEXT = "text:"

RATE = 0.3
"""Speed of a measured forward pass relative to that of a large matrix product."""

CELL_SECONDS, LOADING_SECONDS = 0.5, 5.0
"""Time that does not depend on the number of tokens: per cell, and for the first cell of a model."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
    spec        the measurement;  kind: `measure` or `trace`
    donor       of a trace: `plain`, or `long`
    title       display name of the model
    series      the training run that the model is a checkpoint of;  step: the number of training steps
    resources   of the worker
    """

    model: str
    spec: MeasureSpec = field(default_factory=MeasureSpec)
    kind: str = MEASURE
    donor: str = PLAIN
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    title: str | None = None
    series: str | None = None
    step: int | None = None
    resources: Resources = Resources()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("unknown kind of run", where="kind", got=self.kind, remedy=did_you_mean(self.kind, KINDS))
        _ = self.longest  # an InputError if the edits of a trace cannot be combined with a donor
        if self.donor not in DONORS:
            remedy = did_you_mean(self.donor, DONORS)
            raise InputError("unknown donor", where="donor", got=self.donor, remedy=remedy)
        if self.donor != PLAIN and self.kind != TRACE:
            raise InputError("only a trace has a donor", where="donor", got=self.donor, remedy="use kind: trace")

    @property
    def loading(self) -> dict[str, str | None]:
        """The arguments of `load`."""
        return {"dtype": self.dtype, "device": self.device, "device_map": self.device_map}

    @property
    def group(self) -> tuple[str | None, ...]:
        """Identifies the model in memory: consecutive cells of one group load it once."""
        return self.model, *self.loading.values()

    @cached_property
    def id(self) -> str:
        """The hash that identifies the measurement before its model is loaded: `measurement_hash` of the same
        serialised spec as in the digest of a run (`posleak.runs.record.digest`), with what is known so far.

        It covers the model's name and how it is loaded, the software and, for texts, their content. The digest has
        the model's weights and the tokens instead, which are only known after loading. Display names and resources
        are not part of it.
        """
        request = {"metrics": [], **self.spec.identifying, "model": self.model, "kind": self.kind, **self.loading}
        request |= {} if self.donor == PLAIN else {"donor": self.donor}
        installed = versions()
        inputs = self.spec.inputs
        text = text_hash(inputs.removeprefix(TEXT)) if inputs.startswith(TEXT) else None
        return measurement_hash(request, {name: installed[name] for name in COMPUTED_WITH}, text)

    def with_id(self, cell_id: str) -> Cell:
        """Return the cell under an id that another process computed."""
        cell = replace(self)
        vars(cell)["id"] = cell_id
        return cell

    @property
    def folder(self) -> str:
        """The name of the cell's folder in a sweep."""
        return f"{slug(self._base, 60)}-{self.id[:12]}"

    @property
    def path(self) -> str:
        """The cell's folder, relative to the root of the storage."""
        return f"{CELLS_FOLDER}/{self.folder}"

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
        extra += [f"origin {spec.origin}"] if spec.origin != DEFAULT_ORIGIN else []
        extra += [f"{self.donor} donor"] if self.donor != PLAIN else []
        return " · ".join([self.name, *extra])

    @property
    def details(self) -> str:
        """A description with every field that a grid varies."""
        size = [f"{self.spec.length} tokens", f"seed {self.spec.seed}"]
        return ", ".join([self.kind, self.label, *size, *([] if self.dtype is None else [self.dtype])])

    @property
    def longest(self) -> MeasureSpec:
        """The measurement of the longest sequences: of a trace, that of its branches."""
        if self.kind == MEASURE:
            return self.spec
        return replace(self.spec, edits=(*self.spec.edits, Branches(long=self.donor == LONG)), metrics=(), loss=False)

    @property
    def work(self) -> int:
        """Tokens that go through the model, for estimates of time."""
        plain = self.spec.length if self.kind == TRACE else 0
        return self.spec.prompts * (plain + self.longest.tokens_read)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with those of the spec on the same level."""
        own = self.__getstate__()
        spec: MeasureSpec = own.pop("spec")
        return {**own, **spec.as_dict()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for pickle, without the cached id: a worker computes it with its own software."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Read what `as_dict` writes."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_with_spec, handler(source))


def split_fields(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values by name into the fields of a cell and those of its spec."""
    names = {each.name for each in fields(Cell)}
    own = {name: value for name, value in values.items() if name in names}
    return own, {name: value for name, value in values.items() if name not in names}


def _with_spec(value: Any) -> Any:
    """Move the fields of the spec into one."""
    if not isinstance(value, dict):
        return value
    own, spec = split_fields(value)
    return own | {"spec": from_json(MeasureSpec, json.dumps(spec))}


@lru_cache(maxsize=64)
def text_hash(path: str) -> str:
    """Return a hash of a text; the standard library's documentation is identified by the version of Python."""
    if path == STDLIB:
        return f"Python {platform.python_version()}"
    from posleak.inputs.corpus import read_corpus

    return read_corpus(path).sha256


# -- estimates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guess:
    """Estimated bytes and seconds of a cell; None if unknown. `seen`: seconds are from finished cells of the model."""

    memory: int | None
    seconds: float | None
    seen: bool


def guesses(cells: Sequence[Cell], finished: Iterable[Finished]) -> dict[str, Guess]:
    """Return an estimate for every cell, by its id; the time is based on `finished` cells of the same model."""
    rates = dict[Any, list[float]]()
    for record in finished:
        rates.setdefault(record.cell.group, []).append(record.seconds.measuring / record.cell.work)
    speed = _speed() if any(cell.group not in rates for cell in cells) else 1.0
    first = {cell.group: cell.id for cell in reversed(cells)}
    guessed = dict[str, Guess]()
    for cell in cells:
        loading = LOADING_SECONDS if first[cell.group] == cell.id else 0.0
        seconds: float | None = None
        if seen := rates.get(cell.group):
            seconds = loading + cell.work * sum(seen) / len(seen)
        elif (shape := shape_of(cell.model)) is not None:
            seconds = loading + CELL_SECONDS + 2 * shape.parameters * cell.work / (RATE * speed)
        guessed[cell.id] = Guess(memory_of(cell), seconds, bool(seen))
    return guessed


def memory_of(cell: Cell) -> int | None:
    """Return the estimated bytes of a worker with this cell; None if the model's files are not on this machine."""
    shape = shape_of(cell.model)
    if shape is None:
        return None
    spec, item = cell.longest.resolved(), ITEM_BYTES.get(cell.dtype or "float32", 4)
    read = spec.tokens_read
    copies = ROW_COPIES if not spec.edits else 2 * ROW_COPIES
    fits = fit_bytes(spec, shape)
    tokens = max(spec.batch * read, TOKENS_AT_ONCE if fits else 0)
    rows = shape.sampled(spec.plan, spec.batch, read, item, copies)
    work = shape.forward(tokens, item) + fits + rows + shape.results(spec.plan, spec.prompts)
    return shape.parameters * item + LIBRARY_BYTES + work


@cache
def shape_of(model: str) -> ModelSizes | None:
    """Return the model's sizes from its files; None if they are not on this machine or cannot be read."""
    with suppress(PosleakError, OSError, ValueError, KeyError, TypeError):
        if (folder := _folder(model)) is None:
            return None
        config = json.loads(read_regular(folder / "config.json"))
        config = config.get("text_config") or config
        headers = pretrained.read_headers(folder, allow_pickle=True)
        width = int(config.get("hidden_size") or config.get("n_embd") or config["d_model"])
        inner = config.get("intermediate_size") or 4 * width
        return ModelSizes(
            headers.elements, int(config.get("num_hidden_layers") or config.get("n_layer") or 1), width,
            int(config.get("num_attention_heads") or config.get("n_head") or 1), width,
            int(max(inner) if isinstance(inner, list) else inner),
        )  # fmt: skip
    return None


def _folder(model: str) -> Path | None:
    """Return the folder of the model's files; None if they are not on this machine."""
    text, revision = split_revision(model)
    if text in builtin.BUILTIN_MODELS:
        return builtin.cached_folder(text)
    if text in builtin.shipped_names():
        return builtin.shipped_folder(text)
    path = Path(text).expanduser()
    if path.is_dir():
        folder = snapshot_folder(path, revision)
        return _folder(Adapter.read(folder, allow_pickle=True).base_of(None)) if is_adapter(folder) else folder
    if path.exists() or text.count("/") > 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    path_of_config = try_to_load_from_cache(text, "config.json", revision=revision)
    return Path(path_of_config).parent if isinstance(path_of_config, str) else None


@cache
def _speed() -> float:
    """Return the floating-point operations per second of this machine in a float32 matrix product."""
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    a @ a
    started, rounds = time.perf_counter(), 0
    while time.perf_counter() - started < 0.1:
        a @ a
        rounds += 1
    return 2 * 1024**3 * rounds / (time.perf_counter() - started)
