"""What every edit declares: where it acts, its short text, and what decides which edits it can be combined with.

`register` adds an edit of your own to those that `--edit` takes (docs/extending.md); docs/edits.md is made from the
registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from posleak.plugins import reject_builtin_name
from posleak.probe.edit import Edit

from .scope import EVERYWHERE, Scope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posleak.probe import Calibration, Call


class Site(Enum):
    """Where an edit acts; the order in which edits of one run are applied."""

    DTYPE = "dtype"
    CONTEXT = "context before the prompt"
    EMBEDDING = "embedding at position 0"
    POSITIONS = "positions"
    ROTATION = "rotation"
    LOGITS = "logits"
    VISIBILITY = "visibility"
    ORIGIN = "read of position 0"
    OWN = "what an edit object without a text changes"


class NamedEdit(Edit):
    """An edit with a name: `text` is what `--edit` takes and what results carry.

    causal: queries still do not see later keys under it; otherwise leakage at equal offsets is not defined.
    needs_causal: it is only defined where queries do not see later keys.
    null: by its own text it changes nothing, as `shift=0`: a control. Any other edit that changes nothing is an error.
    """

    site: ClassVar[Site]
    causal: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = False

    @property
    def text(self) -> str:
        raise AssertionError(f"{type(self).__name__} has no text")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Read an edit from JSON, where it is its text."""
        from pydantic_core import core_schema

        from .parse import parse_edit

        return core_schema.no_info_after_validator_function(parse_edit, core_schema.str_schema())

    def require_within(self, calibration: Calibration) -> None:
        """Refuse a model that does not have what it names."""

    def require_length(self, length: int) -> None:
        """Refuse prompts that are too short for it to change anything."""

    @property
    def null(self) -> bool:
        return False

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype of the copy of the weights that the edit makes; None if it makes no copy."""
        return None


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
        """The call, changed at the heads with heads [H] true; there is at least one."""
        raise AssertionError(f"{type(self).__name__} does nothing")


@dataclass(frozen=True)
class EditKind:
    """A name that `--edit` takes.

    form      how it is written;  example: one that can be tried
    changes   what it changes, and what it leaves alone;  refuses: what it cannot be used with
    make      (text after the =, scope) -> the edit; KeyError or ValueError if the text cannot be read
    scoped    may it be given layers and heads, as in sink=cut@3.1?
    """

    name: str
    form: str
    changes: str
    refuses: str
    example: str
    make: Callable[[str, Scope], NamedEdit]
    scoped: bool = False


KINDS: dict[str, EditKind] = {}
"""Every kind of edit, by name."""


def register(kind: EditKind) -> None:
    """Let `--edit NAME=…` make edits of this kind."""
    reject_builtin_name("edit", kind.name, KINDS.get(kind.name), kind)
    KINDS[kind.name] = kind
