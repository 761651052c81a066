"""Conversion between dataclasses and JSON.

`plain` makes everything that posleak writes as JSON. `from_json` reads it, checks every field against its type and
names the first that is wrong. JSON has no NaN: `plain` writes null, and fields of type `Number` (or `Array`, arrays.py)
read null as NaN.
"""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, cast

T = TypeVar("T")


class _NullIsNan:
    """Annotation that reads null as NaN."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(lambda x: math.nan if x is None else x, handler(source))


Number = Annotated[float, _NullIsNan]


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return the value of this type that a JSON text holds; raise a ValueError that names the first wrong field."""
    from pydantic import ValidationError

    try:
        value: T = _reader(cast(Any, kind)).validate_json(text, strict=True)
        return value
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from error


@cache
def _reader(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def plain(value: Any) -> Any:
    """Return a copy of numbers, strings, lists and dicts for JSON; objects are converted by `as_dict` or by field."""
    if hasattr(value, "as_dict"):
        return plain(value.as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy's arrays and scalars, recognised without importing numpy
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()  # a path need not be UTF-8
    return value
