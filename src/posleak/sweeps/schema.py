"""The keys of a manifest as pydantic models, the loader of its YAML, and errors that name the key.

A list is an axis of the grid, and a single value is a list of one. Unknown keys are rejected.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from posleak.errors import InputError, PosleakError, did_you_mean
from posleak.files import stays_in_folder
from posleak.inputs.corpus import STDLIB
from posleak.metrics.names import parse_metrics
from posleak.models.builtin import known_names
from posleak.models.sources import split_revision
from posleak.runs.spec import parse_bytes
from posleak.text import visible

from .cells import KINDS, MEASURE, TEXT, Resources

MOST = 100_000
"""The largest number of values in a list, and of cells in a sweep."""

MOST_EDITS, MOST_DIGITS, MOST_PROCESSORS = 100, 40, 10**6

T = TypeVar("T", bound=BaseModel)


def _invalid(what: str, expected: str | None = None, remedy: str | None = None, **got: Any) -> PydanticCustomError:
    """An error at the key that is being validated; `got` replaces the key's value in the message."""
    return PydanticCustomError("manifest", "{what}", {"what": what, "expected": expected, "remedy": remedy, **got})


# -- types of values ---------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    hint = ": YAML reads on, off, yes and no as true and false; put it in quotes" if isinstance(value, bool) else ""
    raise _invalid(f"not a text{hint}")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid("not a whole number")
    return value


def _list(value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if len(values) > MOST:
        raise _invalid("the list is too long", f"at most {MOST:,} values", got=f"{len(values):,} values")
    return values


def _axis(value: Any) -> list[Any]:
    if value == []:
        raise _invalid("the list is empty", remedy="leave the key out, or give it a value")
    return _list(value)


def _edits(value: Any) -> list[Any]:
    """The edits of one cell: `none`, one edit, or several that act together."""
    edits = [] if value is None or value == "none" else _list(value)
    if len(edits) > MOST_EDITS:
        raise _invalid("too many edits for one cell", f"at most {MOST_EDITS}", got=f"{len(edits)} edits")
    return edits


def _bos(value: Any) -> str | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _kind(value: Any) -> str:
    if (kind := _text(value)) not in KINDS:
        raise _invalid("no such kind of run", remedy=did_you_mean(kind, KINDS))
    return kind


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid("not true or false")
    return value


def _processors(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_PROCESSORS:
        raise _invalid("not a number of processors")
    return value


def _memory(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _invalid("not an amount of memory", "a number with a unit, like 8GB")
    try:
        return parse_bytes(value)
    except InputError as error:
        raise _invalid(error.what, str(error.expected)) from None


def _name(value: str) -> str:
    if not stays_in_folder(value):
        raise _invalid("the name leads out of the folder of results", remedy="use a plain name")
    return value


def absolute_path(name: str) -> str:
    """Return the absolute path if the text is one of a file, because workers start in other folders; else the text."""
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


Text = Annotated[str, BeforeValidator(_text)]
Whole = Annotated[int, BeforeValidator(_whole)]
Processors = Annotated[float, BeforeValidator(_processors)]
Edits = Annotated[tuple[Text, ...], BeforeValidator(_edits)]
Model = Annotated[Text, AfterValidator(absolute_model)]
Listed, Axis = BeforeValidator(_list), BeforeValidator(_axis)
Wholes = Annotated[list[Whole], Axis]


# -- keys --------------------------------------------------------------------------------------------------------------


class Keys(BaseModel):
    """A mapping of a manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        known = list(cls.model_fields)
        if not isinstance(value, Mapping):
            raise _invalid("this must have keys", f"some of {', '.join(known)}")
        for key in value:
            if key not in known:
                raise _invalid("there is no such key", remedy=did_you_mean(str(key)[:100], known), got=_short(key))
        return dict(value)

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values of those of these keys that the manifest has."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


class ResourceKeys(Keys):
    cpus: Processors | None = None
    gpus: Processors | None = None
    memory: Annotated[int, BeforeValidator(_memory)] | None = None

    def over(self, general: ResourceKeys | None = None) -> Resources:
        """Return the resources of a model; those that it does not name are the `general` ones of its grid."""
        both = {**(general or self).given(*RESOURCES), **self.given(*RESOURCES)}
        return Resources(both.get("cpus"), both.get("gpus") or 0, both.get("memory"))


RESOURCES = tuple(ResourceKeys.model_fields)


class ModelKeys(Keys):
    """An entry under `models`: a model, revisions of it, or a folder of checkpoints."""

    model: Model | None = None
    revisions: Annotated[list[Text], Listed] | None = None
    checkpoints: Text | None = None
    steps: Annotated[list[Whole], Listed] | None = None
    title: Text | None = None
    dtype: Text | None = None
    device: Text | None = None
    device_map: Text | None = None
    resources: ResourceKeys = ResourceKeys()

    @model_validator(mode="after")
    def _one_source(self) -> ModelKeys:
        if (self.model is None) == (self.checkpoints is None):
            raise _invalid("an entry needs either `model` or `checkpoints`")
        if self.revisions is not None and self.model is not None and "@" in self.model:
            raise _invalid("the model has a revision already", remedy="leave out that one, or `revisions`")
        return self


def _model(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


class GridKeys(Keys):
    """A grid: every combination of the values of its axes, for every model."""

    models: Annotated[list[Annotated[ModelKeys, BeforeValidator(_model)]], Listed] | None = None
    edits: Annotated[list[Edits], Axis] = [()]
    length: Wholes = []
    prompts: Wholes = []
    seed: Wholes = []
    inputs: Annotated[list[Annotated[Text, AfterValidator(_inputs)]], Axis] = []
    bos: Annotated[list[Annotated[str | int, BeforeValidator(_bos)]], Axis] = []
    dtype: Annotated[list[Text | None], Axis] = []
    origin: Wholes = []
    density: Wholes = []
    kind: Annotated[str, BeforeValidator(_kind)] = MEASURE
    batch: Whole = 0
    metrics: Annotated[tuple[str, ...], BeforeValidator(parse_metrics)] = ()
    loss: Annotated[bool, BeforeValidator(_yes_or_no)] = False
    device: Text | None = None
    device_map: Text | None = None
    resources: ResourceKeys = ResourceKeys()


class ManifestKeys(GridKeys):
    """The whole file; the keys of a grid hold for every one under `grids` that does not have them."""

    name: Annotated[Text, AfterValidator(_name)] | None = None
    out: Text | None = None
    question: Text | None = None
    grids: Annotated[list[Any], Listed] = [{}]


def validated(kind: type[T], value: Any, where: str) -> T:
    """Return the value as keys of this kind; the first thing that is wrong is an InputError that names its key."""
    try:
        return kind.model_validate(value)
    except PosleakError as error:
        raise error.at(where) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        facts: dict[str, Any] = {"what": first["msg"], **first.get("ctx", {})}
        place = ", ".join([where, *(str(step + 1) if isinstance(step, int) else step for step in first["loc"])])
        raise InputError(
            facts["what"], where=place, got=facts.get("got", _short(first["input"])), expected=facts.get("expected"),
            remedy=facts.get("remedy"),
        ) from error  # fmt: skip


def _short(value: Any) -> str:
    return visible(value if isinstance(value, str) else reprlib.repr(value))[:300]


# -- YAML --------------------------------------------------------------------------------------------------------------


def yaml_loader() -> Any:
    """Return YAML's safe loader, which also rejects duplicate keys and integers of too many digits."""
    import yaml

    def error(what: str, mark: Any) -> Exception:
        return yaml.constructor.ConstructorError(None, None, what, mark)

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set[str]()
            for key in (key for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"):
                if key.value in seen:
                    raise error(f"the key {key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            if len(node.value) > MOST_DIGITS:
                raise error(f"an integer of {len(node.value):,} characters; at most {MOST_DIGITS}", node.start_mark)
            return super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader
