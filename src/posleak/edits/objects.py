"""Edits that a user passes as objects, and what the record of a run holds of them.

The record names the class by its import path and holds the fields of the object, so that the same call resumes the run
or loads it. Reading a record imports nothing: `StoredEdit.load` does, if it is called. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from posleak.errors import InputError
from posleak.probe.edit import Edit
from posleak.text import visible
from posleak.typed import from_json

from .base import NamedEdit, Site

if TYPE_CHECKING:
    from posleak.probe import Probe

FORWARDED = (
    "placing", "causal", "needs_causal", "weights_dtype", "prompts", "reads", "arrange", "positions", "edit",
    "temperature", "changed_heads", "placed",
)  # fmt: skip
"""Attributes that an `UnnamedEdit` takes from the edit that it wraps."""


@dataclass(frozen=True)
class StoredEdit(NamedEdit):
    """What a record holds of an edit that was passed as an object; `load` makes the edit again.

    path     `module:class`;  fields: values of the dataclass's fields;  shown: text of the edit
    sha256   of the source of the class and its bases, so that another version of the class is not taken for this one
    """

    path: str
    fields: dict[str, Any]
    sha256: str
    shown: str

    site: ClassVar[Site] = Site.OWN

    @classmethod
    def of(cls, edit: Edit) -> StoredEdit | None:
        """Return what a record can hold of an edit; None if its class has no import path, or its state is not JSON."""
        kind = type(edit)
        path = f"{kind.__module__}:{kind.__qualname__}"
        state = set(vars(edit)).union(*(getattr(base, "__slots__", ()) for base in kind.__mro__))
        own: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(edit) if dataclasses.is_dataclass(edit) else ()
        fields = {each.name: getattr(edit, each.name) for each in own if each.init}
        if kind.__module__ == "__main__" or _imported(path) is not kind or not state <= set(fields):
            return None
        try:
            source = _source_sha256(kind)
        except (OSError, TypeError):  # a class without a source file
            return None
        return cls(path, json.loads(json.dumps(fields)), source, describe(edit)) if _is_json(fields) else None

    @classmethod
    def read(cls, stored: dict[str, Any]) -> StoredEdit:
        """Return the edit from its JSON form; raise a ValueError if that is malformed."""
        expected = {"class": str, "fields": dict, "sha256": str, "text": str}
        if {name: type(value) for name, value in stored.items()} != expected:
            raise ValueError(f"an edit has the fields {', '.join(expected)}")
        return cls(stored["class"], stored["fields"], stored["sha256"], stored["text"])

    @property
    def text(self) -> str:
        return self.shown

    @property
    def stored(self) -> dict[str, Any]:
        return {"class": self.path, "fields": self.fields, "sha256": self.sha256, "text": self.shown}

    def load(self) -> Edit:
        """Import the class and return the edit. This runs the code of the module: load only what you trust."""
        module, _, name = self.path.partition(":")
        try:
            importlib.import_module(module)
        except Exception as error:  # foreign code may raise anything
            raise self._refused(f"{type(error).__name__}: {error}", "add its folder to PYTHONPATH") from error
        kind = _imported(self.path)
        if not (isinstance(kind, type) and issubclass(kind, Edit)):
            raise self._refused(f"{module} has no class {name} derived from posleak.probe.Edit", "restore the class")
        if _source_sha256(kind) != self.sha256:
            raise self._refused("the class has changed since the run", "restore it, or measure again")
        try:
            return from_json(kind, json.dumps(self.fields)) if dataclasses.is_dataclass(kind) else kind()
        except (TypeError, ValueError) as error:
            raise self._refused(str(error), "restore the class") from error

    def _refused(self, got: str, remedy: str) -> InputError:
        return InputError("the edit of a stored run cannot be loaded", where=self.path, got=got, remedy=remedy)

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        raise InputError(
            "the edit of a stored run must be loaded before it can act", where=self.text, got=self.path,
            remedy="pass edit.load(), which imports its class",
        )  # fmt: skip
        yield


@dataclass(frozen=True, eq=False)
class UnnamedEdit(NamedEdit):
    """An `Edit` that has no text. It is shown by its repr and acts after all edits that have a text.

    No two are equal, because the text does not determine what such an edit does.
    """

    inner: Edit

    site: ClassVar[Site] = Site.OWN

    def __post_init__(self) -> None:
        for name in FORWARDED:
            if hasattr(self.inner, name):
                object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def text(self) -> str:
        return describe(self.inner)

    @cached_property
    def stored(self) -> str | dict[str, Any]:  # computed once: the object may change
        edit = StoredEdit.of(self.inner)
        return self.text if edit is None else edit.stored

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        if type(self.inner).installed is not Edit.installed:
            probe.effect_of(self).note("what it installs")
        with self.inner.installed(probe):
            yield


def describe(edit: Edit) -> str:
    """Return the repr of an edit, or the name of its class if the class defines no repr."""
    if type(edit).__repr__ is object.__repr__:
        return type(edit).__name__
    return visible(" ".join(repr(edit).split()))[:80]


def _imported(path: str) -> Any:
    """Return what `module:name` is in the modules that are imported already; None if it is absent."""
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _source_sha256(kind: type) -> str:
    """Return the hash of the source of a class and its bases, without those of posleak."""
    own = (base for base in kind.__mro__ if base is not object and base.__module__.split(".")[0] != "posleak")
    return hashlib.sha256("".join(map(inspect.getsource, own)).encode()).hexdigest()


def _is_json(value: Any) -> bool:
    """Return whether JSON can hold a value without loss; tuples are read back as the field's type says."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
