"""Base classes of edits, and the registry of the kinds of edits that `--edit` takes.

`register` adds a kind of your own (docs/extending.md). docs/edits.md is generated from the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from posleak.inputs import Prompts
from posleak.plugins import reject_builtin_name
from posleak.probe.edit import Edit

from .scope import EVERYWHERE, Scope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posleak.models import Subject
    from posleak.probe import Calibration, Call


class Site(Enum):
    """Where an edit acts, in the order in which the edits of a run are applied."""

    DTYPE = "dtype"
    CONTEXT = "context before the prompt"
    EMBEDDING = "embedding at position 0"
    STREAM = "residual stream"
    POSITIONS = "positions"
    ROTATION = "rotation"
    LOGITS = "logits"
    VISIBILITY = "visibility"
    ORIGIN = "read of position 0"
    HEADS = "output of heads"
    OWN = "custom edit object"


class NamedEdit(Edit):
    """An edit with a text, which `--edit` accepts and which results store.

    causal         queries do not see later keys under it; otherwise leakage at equal offsets is not defined
    needs_causal   it is defined only where queries do not see later keys
    is_control     its text specifies no change, such as `shift=0`. Any other edit without effect is an error
    weights_dtype  dtype of the copy of the weights that it makes; None: it makes no copy
    """

    site: ClassVar[Site]
    causal: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = False
    weights_dtype: ClassVar[torch.dtype | None] = None

    @property
    def text(self) -> str:
        raise AssertionError(f"{type(self).__name__} must define text")

    @property
    def stored(self) -> str | dict[str, Any]:
        """What records hold of the edit: its text; of an object that has no text, its class and fields."""
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the schema that reads an edit from JSON."""
        from pydantic_core import core_schema

        from .parse import read_edit

        forms = core_schema.union_schema([core_schema.str_schema(), core_schema.dict_schema()])
        return core_schema.no_info_after_validator_function(read_edit, forms)

    def require_within(self, calibration: Calibration) -> None:
        """Raise an InputError if the model does not have the layers and heads that the edit names."""

    def require_length(self, length: int) -> None:
        """Raise a NoEffectError if prompts are too short for the edit to change anything."""

    def fit_bytes(self, depths: int, width: int, length: int) -> int:
        """Return the memory that `prepared` needs for its fit on prompts of this length, in bytes."""
        return 0

    def prepared(self, subject: Subject, base: Prompts, origin: int, cache: dict[Any, Any]) -> NamedEdit:
        """Return a copy of the edit that is fitted to the model, or the edit itself if it needs no fit.

        base     prompts of the run, without edits;  origin: number of leading tokens treated as the origin
        cache    fits of earlier runs of this model; the method may add to it
        """
        return self

    @property
    def is_control(self) -> bool:
        return False


@dataclass(frozen=True)
class ScopedEdit(NamedEdit):
    """An edit of attention calls at chosen layers and heads; `name` is its text without the scope."""

    scope: Scope = EVERYWHERE

    name: ClassVar[str]

    @property
    def text(self) -> str:
        return self.name + self.scope.text

    def require_within(self, calibration: Calibration) -> None:
        self.scope.require(calibration.numbers, calibration.heads, f"--edit {self.text}")

    def edit(self, call: Call) -> Call:
        heads = self.scope.heads(call)
        return self.at(call, heads) if bool(heads.any()) else call

    def at(self, call: Call, heads: Tensor) -> Call:
        """Return the call changed at the heads with heads [H] true; at least one is."""
        raise AssertionError(f"{type(self).__name__} must define at")


@dataclass(frozen=True)
class EditKind:
    """A kind of edit, which `--edit NAME=…` accepts.

    form      its syntax;  example: a valid text
    changes   what it changes and what it leaves unchanged;  refuses: what it cannot be combined with
    make      (text after the =, scope) -> the edit; raises a KeyError or ValueError if the text is malformed
    scoped    whether it takes layers and heads, as in sink=cut@3.1
    """

    name: str
    form: str
    changes: str
    refuses: str
    example: str
    make: Callable[[str, Scope], NamedEdit]
    scoped: bool = False


KINDS: dict[str, EditKind] = {}
"""All kinds of edits, by name."""


def register(kind: EditKind) -> None:
    """Add a kind of edit to those that `--edit` takes; raise an InputError if posleak has one of this name."""
    reject_builtin_name("edit", kind.name, KINDS.get(kind.name), kind)
    KINDS[kind.name] = kind
