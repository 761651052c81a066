"""Pieces of what a manifest says, each checked: keys that are known, lists, texts, numbers; and errors that name the
place. Whatever stands in the file, an error shows a short piece of it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from posleak.errors import InputError, did_you_mean
from posleak.runs.spec import parse_bytes
from posleak.text import visible

from .cells import Resources

MOST = 100_000
"""Values of a list, and cells of a sweep, that can be meant."""

RESOURCES = ("cpus", "gpus", "memory")
TEXT, WHOLE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
MOST_DIGITS = 40
"""Characters of a whole number that can be meant."""


def mapping(said: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
    """A mapping that has no other keys than these."""
    if not isinstance(said, Mapping):
        raise wrong(where, "this must have keys", said, f"some of {', '.join(keys)}")
    for key in said:
        if key not in keys:
            raise wrong(where, "there is no such key", key, remedy=did_you_mean(str(key)[:100], keys))
    return dict(said)


def listed(said: Any, where: str) -> list[Any]:
    """A list, or one value as a list of one."""
    found = said if isinstance(said, list) else [said]
    if len(found) > MOST:
        raise wrong(where, "the list is too long", f"{len(found):,} values", f"at most {MOST:,}")
    return found


def text(said: Any, where: str) -> str:
    if isinstance(said, str) and said.strip():
        return said
    spelled = ": YAML reads on, off, yes and no as true and false; put it in quotes" if isinstance(said, bool) else ""
    raise wrong(where, f"not a text{spelled}", said)


def whole(said: Any, where: str) -> int:
    if isinstance(said, bool) or not isinstance(said, int):
        raise wrong(where, "not a whole number", said)
    return said


def resources(said: Any, where: str) -> Resources:
    given = mapping(said, RESOURCES, where)
    for key in ("cpus", "gpus"):
        value = given.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < 1e6):
            raise wrong(f"{where}, {key}", "not a number of processors", value)
    memory = given.get("memory")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int | str)):
        raise wrong(f"{where}, memory", "not an amount of memory", memory, "a number with a unit, like 8GB")
    return Resources(given.get("cpus"), given.get("gpus") or 0, parse_bytes(memory))


def wrong(
    where: str, what: str, got: Any = None, expected: str | None = None, remedy: str | None = None
) -> InputError:  # fmt: skip
    shown = got if isinstance(got, str) or got is None else reprlib.repr(got)
    short = None if shown is None else visible(shown)[:300]
    return InputError(what, where=where, got=short, expected=expected, remedy=remedy)


def loader() -> Any:
    """YAML's safe loader, which also refuses a key that stands twice: the first would be dropped without a word.

    It refuses numbers of too many digits, too, since Python cannot write them down.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set[str]()
            for key in (key for key, _ in node.value if key.tag == TEXT):
                if key.value in seen:
                    said = f"the key {key.value!r} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            if len(node.value) > MOST_DIGITS:
                said = f"a number of {len(node.value):,} characters, where {MOST_DIGITS} are enough"
                raise yaml.constructor.ConstructorError(None, None, said, node.start_mark)
            return super().construct_yaml_int(node)

    Loader.add_constructor(WHOLE, Loader.construct_yaml_int)
    return Loader
