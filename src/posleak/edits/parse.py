"""Convert texts and objects to edits, and check which edits can be combined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posleak.errors import InputError, RunError, did_you_mean
from posleak.plugins import load_plugins
from posleak.probe.edit import Edit

from .base import KINDS, EditKind, NamedEdit, Site
from .objects import StoredEdit, UnnamedEdit
from .positions import Ring
from .scope import Scope

ACTS_BY_PLACE = (Site.EMBEDDING, Site.LOGITS, Site.VISIBILITY, Site.ORIGIN)
"""Sites whose edits depend on positions within the prompt. A document before the prompt would shift them."""


def parse_edit(text: str) -> NamedEdit:
    """Return the edit that a text describes, such as `window=64` or `sink=cut@3.1`."""
    load_plugins()
    name, _, value = text.strip().partition("=")
    if name not in KINDS:
        raise InputError("unknown edit", where=f"--edit {text}", got=name, remedy=did_you_mean(name, KINDS))
    value, at, scope_text = value.partition("@")
    scope, kind = Scope.parse(scope_text if at else None), KINDS[name]
    if at and not kind.scoped:
        raise _malformed(text, kind)
    try:
        return kind.make(value, scope)
    except (KeyError, ValueError) as error:
        raise _malformed(text, kind) from error


def _malformed(text: str, kind: EditKind) -> InputError:
    return InputError(
        "the edit cannot be read", where=f"--edit {text}", expected=kind.form, remedy=f"as in --edit {kind.example}"
    )


def parse_edits(edits: str | Edit | Iterable[str | Edit]) -> tuple[NamedEdit, ...]:
    """Return edits in the order in which they are applied; raise an InputError if two of them cannot be combined.

    edits       one or several, each a text or an object of a class derived from posleak.probe.Edit
    """
    if isinstance(edits, str | Edit | type) or not isinstance(edits, Iterable):
        edits = (edits,)
    named = sorted(map(_named, edits), key=lambda edit: list(Site).index(edit.site))
    for position, first in enumerate(named):
        for second in named[position + 1 :]:
            _require_compatible(first, second)
    return tuple(named)


def _named(edit: object) -> NamedEdit:
    if isinstance(edit, str):
        return parse_edit(edit)
    if isinstance(edit, NamedEdit) and hasattr(edit, "site"):
        return edit
    if isinstance(edit, Edit):
        return UnnamedEdit(edit)
    remedy = None
    if isinstance(edit, type) and issubclass(edit, Edit):
        remedy = f"pass an object of the class: {edit.__name__}()"
    raise InputError(
        "not an edit", where="edits", got=f"{edit!r:.80}", remedy=remedy,
        expected='a text such as "window=64", or an object of a class derived from posleak.probe.Edit',
    )  # fmt: skip


def _require_compatible(first: NamedEdit, second: NamedEdit) -> None:
    reason = None
    if first.site is second.site is not Site.OWN:
        reason = f"both change the {first.site.value}"
    for one, other in ((first, second), (second, first)):
        if not one.causal and other.needs_causal:
            reason = f"{other.text} is defined for causal queries only, and under {one.text} they see later keys"
        if one.site is Site.CONTEXT and other.site in ACTS_BY_PLACE:
            reason = f"{other.text} depends on positions in the prompt, and {one.text} puts another document before it"
        if isinstance(one, Ring) and other.site in (Site.POSITIONS, Site.VISIBILITY):
            reason = f"ring sets positions and visibility itself, so {other.text} would have no effect"
    if reason is not None:
        raise InputError(
            "these edits cannot be combined", where=f"--edit {first.text} --edit {second.text}", got=reason,
            remedy="measure them in separate runs",
        )  # fmt: skip


def require_measurable(edits: Sequence[NamedEdit]) -> None:
    """Raise an InputError if queries see later keys under an edit: leakage is not defined there."""
    for edit in edits:
        if not edit.causal:
            raise InputError(
                "leakage is not defined under this edit: queries attend to later keys",
                where=f"--edit {edit.text}",
                remedy="`posleak claims` tests laws with it; measure with window= or sink= instead",
            )


def unreadable(edits: Iterable[NamedEdit]) -> list[NamedEdit]:
    """Return the edits whose text does not describe them: parsing it fails or makes another edit."""
    return [edit for edit in edits if not _is_readable(edit)]


def _is_readable(edit: NamedEdit) -> bool:
    try:
        parsed = parse_edit(edit.text)
    except InputError:
        return False
    if type(edit).__eq__ is object.__eq__:  # a class without equality: compare what its objects hold
        return type(parsed) is type(edit) and vars(parsed) == vars(edit)
    return parsed == edit


def unstorable(edits: Iterable[NamedEdit]) -> list[NamedEdit]:
    """Return the edits that the record of a run cannot hold, neither as text nor by class and fields."""
    return [edit for edit in unreadable(edits) if isinstance(edit.stored, str)]


def require_storable(edits: Iterable[NamedEdit], where: str) -> None:
    """Raise a RunError if an edit cannot be made again from what the record of a run would hold."""
    if objects := unstorable(edits):
        raise RunError(
            "the run cannot be stored: an edit was passed as an object, and neither its text nor the import path of "
            "its class and its fields describe it",
            where=where, got=", ".join(edit.text for edit in objects),
            expected="registered edits, or dataclasses of an importable module with fields that JSON can hold",
            remedy="move the class to the top level of a module of its own, as a dataclass; or derive it from "
            "posleak.edits.NamedEdit and register an EditKind (docs/extending.md); or keep the run in memory",
        )  # fmt: skip


def read_edit(stored: str | dict[str, object]) -> NamedEdit:
    """Return the edit that a record holds: of a text the edit itself, of a class and fields a `StoredEdit`."""
    return parse_edit(stored) if isinstance(stored, str) else StoredEdit.read(stored)
