"""What every edit declares: where in the equation it acts, its short text, and whom it can stand beside."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from posleak.probe import Edit


class Site(Enum):
    """Where an edit acts; the order in which edits of one run are applied."""

    DTYPE = "dtype"
    EMBEDDING = "embedding at position 0"
    POSITIONS = "positions"
    ROTATION = "rotation"
    VISIBILITY = "visibility"
    ORIGIN = "read of position 0"
    DENOMINATOR = "denominator"


class NamedEdit(Edit):
    """An edit with a name: `text` is what `--edit` takes and what results carry.

    causal: it leaves queries blind to later keys, without which leakage at equal offsets is not defined.
    needs_causal: it is only defined where that is so.
    """

    site: ClassVar[Site]
    causal: ClassVar[bool] = True
    needs_causal: ClassVar[bool] = False

    @property
    def text(self) -> str:
        raise AssertionError(f"{type(self).__name__} has no text")
