"""Text -> edits, and which of them can be combined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from posleak.errors import InputError, RunError, did_you_mean
from posleak.plugins import load_plugins

from .base import KINDS, EditKind, NamedEdit, Site
from .own import OwnText
from .positions import Ring
from .scope import Scope


def parse_edit(text: str) -> NamedEdit:
    """One edit from its text."""
    if isinstance(text, OwnText):
        return text.edit
    load_plugins()
    name, _, value = text.strip().partition("=")
    if name not in KINDS:
        raise InputError("unknown edit", where=f"--edit {text}", got=name, remedy=did_you_mean(name, KINDS))
    value, at, where = value.partition("@")
    scope, kind = Scope.parse(where if at else None), KINDS[name]
    if at and not kind.scoped:
        raise _unreadable(text, kind)
    try:
        return kind.make(value, scope)
    except (KeyError, ValueError) as error:
        raise _unreadable(text, kind) from error


def _unreadable(text: str, kind: EditKind) -> InputError:
    return InputError(
        "the edit cannot be read", where=f"--edit {text}", expected=kind.form, remedy=f"as in --edit {kind.example}"
    )


def parse_edits(texts: Sequence[str]) -> tuple[NamedEdit, ...]:
    """Edits in the order in which they are applied, or an error that says which two do not go together, and why."""
    edits = sorted((parse_edit(text) for text in texts), key=lambda edit: list(Site).index(edit.site))
    for position, first in enumerate(edits):
        for second in edits[position + 1 :]:
            _require_compatible(first, second)
    return tuple(edits)


BY_PLACE = (Site.EMBEDDING, Site.LOGITS, Site.VISIBILITY, Site.ORIGIN)
"""Edits of position 0, of logits by position, and of what is seen."""


def _require_compatible(first: NamedEdit, second: NamedEdit) -> None:
    reason = None
    if first.site is second.site is not Site.OWN:
        reason = f"both change the {first.site.value}"
    for one, other in ((first, second), (second, first)):
        if not one.causal and other.needs_causal:
            reason = f"{other.text} is defined by what causal queries do not see; {one.text} shows them everything"
        if one.site is Site.CONTEXT and other.site in BY_PLACE:
            reason = f"{other.text} acts by place in the prompt, which is no longer the first thing that is read"
        if isinstance(one, Ring) and other.site in (Site.POSITIONS, Site.VISIBILITY):
            reason = f"ring sets positions and visibility itself, so {other.text} would have no effect"
    if reason is not None:
        raise InputError(
            "these edits cannot be combined", where=f"--edit {first.text} --edit {second.text}", got=reason,
            remedy="run them one at a time",
        )  # fmt: skip


def require_measurable(edits: Sequence[NamedEdit]) -> None:
    """Leakage compares causal queries at equal offsets; refuse an edit that makes them see the future."""
    for edit in edits:
        if not edit.causal:
            raise InputError(
                "leakage is not defined under this edit: queries see keys after themselves",
                where=f"--edit {edit.text}",
                remedy="`posleak claims` uses it to show where position enters; measure with window= or sink= instead",
            )


def unreadable(edits: Iterable[str]) -> Iterator[str]:
    """The texts from which an edit cannot be made again."""
    for text in edits:
        if isinstance(text, OwnText):
            try:
                same = parse_edit(str(text)) == text.edit
            except InputError:
                same = False
            if not same:
                yield str(text)


def require_readable(edits: Iterable[str], where: str) -> None:
    """Refuse to write results whose edits cannot be read back from the record."""
    if found := list(unreadable(edits)):
        raise RunError(
            "a run under an edit that was given as an object stays in memory: from its record nobody could make the "
            "edit again", where=where, got=", ".join(found), expected="edits that are registered",
            remedy="derive it from posleak.edits.NamedEdit, register its EditKind (docs/extending.md), and let its "
            "text make an equal edit; or keep the run in memory",
        )  # fmt: skip
