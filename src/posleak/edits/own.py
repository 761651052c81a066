"""Edits that a Python user hands over as objects: `measure(subject, edits=[MyEdit()])`.

Everything that carries edits carries their texts. The text of an object is an `OwnText`, which has the object with it:
no parser can make it again. So results under such an edit cannot be resumed or read back, and stay in memory, unless
the edit is registered and its text makes an equal one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from posleak.errors import InputError
from posleak.inputs import Prompts
from posleak.probe.edit import Edit
from posleak.text import visible

from .base import NamedEdit, Site

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from posleak.probe import Call, Probe


class OwnText(str):
    """The text of an edit, with the edit itself."""

    edit: NamedEdit

    @classmethod
    def of(cls, edit: NamedEdit, text: str) -> OwnText:
        found = cls(text)
        found.edit = edit
        return found


@dataclass(frozen=True, eq=False)
class Unnamed(NamedEdit):
    """An `Edit` without a text, named by its class; it acts after all edits that have one."""

    inner: Edit

    site: ClassVar[Site] = Site.OWN

    @property
    def text(self) -> str:
        return label(self.inner)

    @property
    def placing(self) -> bool:  # type: ignore[override]
        return self.inner.placing

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "causal", True))

    @property
    def needs_causal(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "needs_causal", False))

    @property
    def weights_dtype(self) -> torch.dtype | None:
        found: torch.dtype | None = getattr(self.inner, "weights_dtype", None)
        return found

    def prompts(self, prompts: Prompts) -> Prompts:
        return self.inner.prompts(prompts)

    def reads(self, ids: Int[Tensor, "B T"]) -> None:
        self.inner.reads(ids)

    def positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        return self.inner.positions(positions)

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        if type(self.inner).installed is not Edit.installed:
            probe.effect_of(self).note("what it installs")
        with self.inner.installed(probe):
            yield

    def edit(self, call: Call) -> Call:
        return self.inner.edit(call)


def label(edit: Edit) -> str:
    """How an edit without a text is shown: its repr, or the name of its class where it has none of its own."""
    own = type(edit).__repr__ is not object.__repr__
    return visible(" ".join(repr(edit).split()))[:80] if own else type(edit).__name__


def texts(edits: str | Edit | Iterable[str | Edit]) -> tuple[str, ...]:
    """The texts of edits that are given as one or several texts or objects."""
    return tuple(_text(edit) for edit in ((edits,) if isinstance(edits, str | Edit) or _unfit(edits) else edits))


def texts_of(parsed: Sequence[NamedEdit], given: Iterable[str]) -> tuple[str, ...]:
    """The texts of edits that were parsed; of those that were given as objects, with the object."""
    own = {id(text.edit): text for text in given if isinstance(text, OwnText)}
    return tuple(own.get(id(edit), edit.text) for edit in parsed)


def _unfit(edits: object) -> bool:
    return isinstance(edits, type) or not isinstance(edits, Iterable)


def _text(edit: object) -> str:
    if isinstance(edit, str):
        return edit
    if not isinstance(edit, Edit):
        made = isinstance(edit, type) and issubclass(edit, Edit)
        raise InputError(
            "this is no edit", where="edits", got=f"{edit!r:.80}",
            expected='a text such as "window=64", or an object of a class derived from posleak.probe.Edit',
            remedy=f"pass an object of the class: {edit.__name__}()" if isinstance(edit, type) and made else None,
        )  # fmt: skip
    if isinstance(edit, NamedEdit) and hasattr(edit, "site"):
        return OwnText.of(edit, edit.text)
    return OwnText.of(Unnamed(edit), label(edit))
