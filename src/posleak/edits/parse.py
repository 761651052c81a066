"""Text -> edits, and which of them can stand beside each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from posleak.errors import InputError, did_you_mean

from .base import NamedEdit, Site
from .denominator import FixDenominator
from .embedding import TOKENS, FirstEmbedding, FirstOrdinary
from .origin import CutSink, FreezeSink, PatchOrigin
from .positions import Ring, Rotation, Shift
from .precision import DTYPES, Precision
from .scope import Scope
from .visibility import MaskOff, Window

FORMS = {
    "bos": "bos=zero|mean|noise[:SEED]|token:ID|none|random",
    "mask": "mask=off",
    "window": "window=W|W+sink|off",
    "ring": "ring",
    "denominator": "denominator=fixed[@LAYERS]",
    "sink": "sink=cut|freeze[@LAYERS.HEADS]",
    "patch0": "patch0=ID",
    "rope": "rope=ntk:S|linear:S|yarn:S|base:B|none",
    "shift": "shift=K",
    "dtype": "dtype=" + "|".join(DTYPES),
}


def parse_edit(text: str) -> NamedEdit:
    """One edit from its text."""
    name, _, value = text.strip().partition("=")
    if name not in FORMS:
        raise InputError("unknown edit", where=f"--edit {text}", got=name, remedy=did_you_mean(name, FORMS))
    value, _, where = value.partition("@")
    scope = Scope.parse(where or None)
    if where and name not in ("denominator", "sink"):
        raise _unreadable(text, name)
    try:
        return _MAKERS[name](value, scope)
    except (KeyError, ValueError) as error:
        raise _unreadable(text, name) from error


def _unreadable(text: str, name: str) -> InputError:
    return InputError("the edit cannot be read", where=f"--edit {text}", expected=FORMS[name])


def _bos(value: str, scope: Scope) -> NamedEdit:
    kind, _, number = value.partition(":")
    if kind in TOKENS and not number:
        return FirstOrdinary(kind)
    if kind == "token" or (kind == "noise" and number):
        return FirstEmbedding(kind, int(number))
    return {k: FirstEmbedding(k) for k in ("zero", "mean", "noise")}[value]


def _window(value: str, scope: Scope) -> NamedEdit:
    if value == "off":
        return Window(0)
    match = re.fullmatch(r"([1-9]\d*)(\+sink)?", value)
    if match is None:
        raise ValueError(value)
    return Window(int(match[1]), match[2] is not None)


def _rope(value: str, scope: Scope) -> NamedEdit:
    kind, _, number = value.partition(":")
    if kind == "none" and not number:
        return Rotation("none")
    if kind not in ("ntk", "linear", "yarn", "base") or not float(number) > 0:
        raise ValueError(value)
    return Rotation(kind, float(number))


_MAKERS: dict[str, Callable[[str, Scope], NamedEdit]] = {
    "bos": _bos,
    "mask": lambda value, scope: {"off": MaskOff()}[value],
    "window": _window,
    "ring": lambda value, scope: {"": Ring()}[value],
    "denominator": lambda value, scope: {"fixed": FixDenominator(scope)}[value],
    "sink": lambda value, scope: {"cut": CutSink(scope), "freeze": FreezeSink(scope)}[value],
    "patch0": lambda value, scope: PatchOrigin(int(value)),
    "rope": _rope,
    "shift": lambda value, scope: Shift(int(value)),
    "dtype": lambda value, scope: {name: Precision(name) for name in DTYPES}[value],
}


def parse_edits(texts: Sequence[str]) -> tuple[NamedEdit, ...]:
    """Edits in the order in which they are applied, or an error that says which two do not go together, and why."""
    edits = sorted((parse_edit(text) for text in texts), key=lambda edit: list(Site).index(edit.site))
    for position, first in enumerate(edits):
        for second in edits[position + 1 :]:
            _require_compatible(first, second)
    return tuple(edits)


def _require_compatible(first: NamedEdit, second: NamedEdit) -> None:
    reason = None
    if first.site is second.site:
        reason = f"both change the {first.site.value}"
    for one, other in ((first, second), (second, first)):
        if not one.causal and other.needs_causal:
            reason = f"{other.text} is defined by what causal queries do not see; {one.text} shows them everything"
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
