"""The keys of a manifest as pydantic models, the loader of its YAML, and errors that name the key.

A list is an axis of the grid, and a single value is a list of one. Unknown keys are rejected.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, StrictInt, ValidationError
from pydantic_core import PydanticCustomError
from yaml.constructor import ConstructorError

from posleak.errors import InputError, PosleakError, did_you_mean
from posleak.inputs.corpus import STDLIB
from posleak.metrics import parse_metrics
from posleak.models.builtin import known_names
from posleak.models.sources import split_revision
from posleak.runs.spec import parse_bytes
from posleak.text import visible

from .cells import KINDS, TEXT

MOST = 100_000
"""The largest number of values in a list, and of cells in a sweep."""

MOST_EDITS, MOST_DIGITS = 100, 40

T = TypeVar("T")
KeysT = TypeVar("KeysT", bound="Keys")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def absolute_path(name: str) -> str:
    """Return the absolute path if the text is that of a file, because workers start in other folders; else the text."""
    try:
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name
    except (OSError, ValueError, RuntimeError):
        return name


def absolute_model(name: str) -> str:
    """Return the model's name with an absolute path, unless it is a name that posleak knows."""
    if name in known_names():
        return name
    before, revision = split_revision(name)
    path = absolute_path(before)
    return name if path == before else f"{path}@{revision}" if revision else path


def _inputs(name: str) -> str:
    path = name.removeprefix(TEXT)
    return name if not name.startswith(TEXT) or path == STDLIB else TEXT + absolute_path(path)


def _parsed(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that reports posleak's own errors at the key."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except PosleakError as error:
            context = {"what": error.what, "expected": error.expected, "remedy": error.remedy}
            raise PydanticCustomError("posleak", "{what}", context) from None

    return BeforeValidator(validate)


Text = Annotated[str, Field(strict=True, pattern=r"\S")]
Listed = Annotated[list[T], BeforeValidator(_listed), Field(max_length=MOST)]
Axis = Annotated[list[T], BeforeValidator(_listed), Field(min_length=1, max_length=MOST)]
_NO_EDITS = BeforeValidator(lambda value: [] if value in (None, "none") else _listed(value))
Edits = Annotated[tuple[Text, ...], _NO_EDITS, Field(max_length=MOST_EDITS)]
Processors = Annotated[float, Field(strict=True, ge=0, lt=10**6)]


class Keys(BaseModel):
    """A mapping of a manifest."""

    model_config = {"extra": "forbid", "frozen": True}


class ResourceKeys(Keys):
    """The resources of a worker."""

    cpus: Processors | None = None
    gpus: Processors | None = None
    memory: Annotated[int | None, _parsed(parse_bytes)] = None


class ModelKeys(Keys):
    """An entry under `models`: a model, revisions of it, or a folder of checkpoints."""

    model: Annotated[Text, AfterValidator(absolute_model)] | None = None
    revisions: Listed[Text] | None = None
    checkpoints: Text | None = None
    steps: Listed[StrictInt] | None = None
    title: Text | None = None
    dtype: Text | None = None
    device: Text | None = None
    device_map: Text | None = None
    resources: ResourceKeys = ResourceKeys()


Entry = Annotated[ModelKeys, BeforeValidator(lambda value: {"model": value} if isinstance(value, str) else value)]


class GridKeys(Keys):
    """A grid: every combination of the values of its axes, for every model."""

    models: Listed[Entry] | None = None
    edits: Axis[Edits] = []
    length: Axis[StrictInt] = []
    prompts: Axis[StrictInt] = []
    seed: Axis[StrictInt] = []
    inputs: Axis[Annotated[Text, AfterValidator(_inputs)]] = []
    bos: Axis[Text | StrictInt] = []
    dtype: Axis[Text | None] = []
    origin: Axis[StrictInt] = []
    density: Axis[StrictInt] = []
    donor: Axis[Text] = []
    kind: Literal["measure", "trace"] = "measure"
    batch: StrictInt = 0
    metrics: Annotated[tuple[str, ...], _parsed(parse_metrics)] = ()
    loss: StrictBool = False
    device: Text | None = None
    device_map: Text | None = None
    resources: ResourceKeys = ResourceKeys()


class ManifestKeys(GridKeys):
    """The whole file; its keys of a grid hold for every grid that does not have them."""

    name: Text | None = None
    out: Text | None = None
    question: Text | None = None
    grids: Listed[Any] = [{}]


NESTED: dict[Any, type[Keys]] = {"models": ModelKeys, "resources": ResourceKeys}
KEYS = {*ManifestKeys.model_fields, *ModelKeys.model_fields, *ResourceKeys.model_fields}
WORDS = {
    "extra_forbidden": "unknown key",
    "model_type": "not a mapping of keys to values",
    "string_type": "not a text",
    "int_type": "not an integer",
    "too_short": "the list is empty",
}
"""Messages, by pydantic's type of error."""


def validated(kind: type[KeysT], value: Any, where: str) -> KeysT:
    """Return the value as keys of this kind; raise an InputError that names the first invalid key."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    error_type, got, context = first["type"], first["input"], first.get("ctx", {})
    keys = [key for key in first["loc"] if isinstance(key, int) or key in KEYS]  # without the branches of a union
    what = context.get("what") or WORDS.get(error_type, "not a valid value")
    expected = context.get("expected") or (None if "what" in context else first["msg"].removeprefix("Input should be "))
    remedy = context.get("remedy")
    if error_type in ("extra_forbidden", "model_type"):
        known = next((NESTED[key] for key in reversed(keys) if key in NESTED), kind).model_fields
        expected = f"some of {', '.join(known)}"
    if error_type == "extra_forbidden":
        got = first["loc"][-1]
        remedy = did_you_mean(str(got)[:100], known)
    elif error_type == "literal_error":
        remedy = did_you_mean(str(got)[:100], KINDS)
    elif error_type == "string_type" and isinstance(got, bool):
        remedy = "YAML reads on, off, yes and no as true and false: put it in quotes"
    place = ", ".join([where, *(str(key + 1) if isinstance(key, int) else str(key) for key in keys)])
    shown = visible(got if isinstance(got, str) else reprlib.repr(got))[:300]
    raise InputError(what, where=place, got=shown, expected=expected, remedy=remedy)


class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """YAML's safe loader, which also rejects duplicate keys and integers of too many digits."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set[str]()
        for key in (key for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"):
            if key.value in seen:
                raise ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        if len(node.value) > MOST_DIGITS:
            what = f"an integer of {len(node.value):,} characters; at most {MOST_DIGITS}"
            raise ConstructorError(None, None, what, node.start_mark)
        return super().construct_yaml_int(node)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
