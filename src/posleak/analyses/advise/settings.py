"""Settings that an engineer can change without training, as edits or BOS policies; each with what it is in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from posleak.defaults import LENGTH
from posleak.edits import parse_edits
from posleak.errors import InputError, did_you_mean
from posleak.inputs import Prompts
from posleak.models import Subject

_BETWEEN = re.compile(r",\s*(?=[a-z])")
"""Between two edits; other commas stand in a scope, as in @3-5,7.0."""

GROUPS = ("bos", "window", "rope", "scale", "dtype")
"""What can be asked for, in the order of the table."""

FACTORS = {"ntk": (2, 4), "linear": (2,), "yarn": (4,)}
"""Of each scaling of the rotation."""

KEPT = (1, 4)
"""First tokens that a streaming cache keeps beside its window."""


def usual_length(subject: Subject) -> int:
    """Of prompts whose length nobody chose."""
    return min(LENGTH, subject.context or LENGTH)


@dataclass(frozen=True)
class Setting:
    """One setting: edits that act together, and what it is in words."""

    group: str
    about: str
    edits: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its edits, joined by commas."""
        return ", ".join(self.edits)


def settings_for(subject: Subject, base: Prompts, length: int, groups: Sequence[str] = GROUPS) -> list[Setting]:
    """What can be tried on this model, on prompts of this length; settings that are those it has are left out."""
    require_groups(groups)
    makers = {
        "bos": lambda: _first_tokens(subject, base), "window": lambda: _windows(length),
        "rope": lambda: _rotations(subject), "scale": lambda: _scales(), "dtype": lambda: _dtypes(subject),
    }  # fmt: skip
    return [setting for group in GROUPS if group in groups for setting in makers[group]()]


def require_groups(groups: Iterable[str]) -> None:
    """Refuse groups of settings that there are not."""
    for group in groups:
        if group not in GROUPS:
            raise InputError("no such group of settings", where="--try", got=group, remedy=did_you_mean(group, GROUPS))


def of_edits(texts: Iterable[str]) -> list[Setting]:
    """Settings of the user's own: each an edit, or several joined by commas."""
    found = []
    for text in texts:
        edits = tuple(part.strip() for part in _BETWEEN.split(text) if part.strip())
        spelled = tuple(edit.text for edit in parse_edits(edits))
        found.append(Setting("own", "as asked for", spelled))
    return found


def _first_tokens(subject: Subject, base: Prompts) -> Iterator[Setting]:
    """What BOS policies would put first, if it is not there already: nothing, the config's or the tokenizer's BOS."""
    here, named = base.describe().bos_id, subject.identity.bos
    prepended = named.get("tokenizer_prepends") or [None]
    if here is not None:
        yield Setting("bos", "no BOS: the text's own token stands first (--bos none)", ("bos=none",))
    for token, words in ((named.get("config_id"), "config names as BOS"), (prepended[0], "tokenizer prepends")):
        if isinstance(token, int) and token != here:
            here = token
            yield Setting("bos", f"the token that the {words}, first", (f"bos=token:{token}",))


def _windows(length: int) -> Iterator[Setting]:
    """A quarter and a half of the prompt, alone and with the first tokens kept."""
    for size in (length // 4, length // 2):
        yield Setting("window", f"a window of {size} tokens", (f"window={size}",))
        for kept in KEPT:
            text = f"window={size}+sink" + (str(kept) if kept > 1 else "")
            words = f"a streaming cache: {size} tokens and the first{f' {kept}' if kept > 1 else ''}"
            yield Setting("window", words, (text,))


def _rotations(subject: Subject) -> Iterator[Setting]:
    if subject.identity.rotary:
        for kind, factors in FACTORS.items():
            for factor in factors:
                text = f"rope={kind}:{factor}"
                words = f"{kind} scaling of the rotation, as for {factor} times the context"
                yield Setting("rope", words, (text,))


def _scales() -> Iterator[Setting]:
    yield Setting("scale", "logits times log n, divided by the log of the prompt's length", ("scale=logn",))


def _dtypes(subject: Subject) -> Iterator[Setting]:
    for name in ("bfloat16", "float16"):
        if subject.identity.dtype not in (name, "float16", "bfloat16"):
            yield Setting("dtype", f"weights and activations in {name}", (f"dtype={name}",))
