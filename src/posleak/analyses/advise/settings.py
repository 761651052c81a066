"""Settings that can be changed without training, as edits, each with a description."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from posleak.defaults import LENGTH
from posleak.edits import parse_edits
from posleak.errors import InputError, did_you_mean
from posleak.inputs import Prompts
from posleak.models import Subject

_SEPARATOR = re.compile(r",\s*(?=[a-z])")
"""Comma between two edits; other commas belong to a scope, as in @3-5,7.0."""

GROUPS = ("bos", "window", "rope", "scale", "dtype")
"""The groups of settings, in the order of the table."""

FACTORS = {"ntk": (2, 4), "linear": (2,), "yarn": (4,)}
"""Factors of each scaling of the rotation."""

NARROW = ("bfloat16", "float16")
"""Precisions that are tried on a model with a wider one."""

KEPT_TOKENS = (1, 4)
"""Numbers of first tokens that a streaming cache keeps in addition to its window."""


def usual_length(subject: Subject) -> int:
    """Return the default length of prompts."""
    return min(LENGTH, subject.context or LENGTH)


@dataclass(frozen=True)
class Setting:
    """One setting: edits that are applied together, and a description."""

    group: str
    about: str
    edits: tuple[str, ...]

    @property
    def name(self) -> str:
        """The edits, separated by commas."""
        return ", ".join(self.edits)


def settings_for(subject: Subject, base: Prompts, length: int, groups: Sequence[str] = GROUPS) -> list[Setting]:
    """Return the settings that can be tried on this model, without those that equal its own."""
    require_groups(groups)
    settings = [*_first_tokens(subject, base), *_windows(length)]
    for kind, factors in FACTORS.items() if subject.identity.rotary else ():
        words = f"{kind} scaling of the rotation, for {{}} times the context length"
        settings += [Setting("rope", words.format(factor), (f"rope={kind}:{factor}",)) for factor in factors]
    logn = "logits of query i multiplied by log(i + 1) / log(length of the prompt)"
    settings.append(Setting("scale", logn, ("scale=logn",)))
    for name in NARROW if subject.identity.dtype not in NARROW else ():
        settings.append(Setting("dtype", f"weights and activations in {name}", (f"dtype={name}",)))
    return [setting for setting in settings if setting.group in groups]


def require_groups(groups: Iterable[str]) -> None:
    """Raise InputError for an unknown group of settings."""
    for group in groups:
        if group not in GROUPS:
            raise InputError("unknown group of settings", where="--try", got=group, remedy=did_you_mean(group, GROUPS))


def of_edits(texts: Iterable[str]) -> list[Setting]:
    """Return the user's own settings: each text is an edit, or several separated by commas."""
    settings = []
    for text in texts:
        edits = tuple(part.strip() for part in _SEPARATOR.split(text) if part.strip())
        settings.append(Setting("own", "your own setting", tuple(edit.text for edit in parse_edits(edits))))
    return settings


def _first_tokens(subject: Subject, base: Prompts) -> Iterator[Setting]:
    """Yield other BOS policies than the current one: none, the BOS of the config, the BOS of the tokenizer."""
    current, bos = base.describe().bos_id, subject.identity.bos
    prepended = bos.get("tokenizer_prepends") or [None]
    if current is not None:
        yield Setting("bos", "no BOS: the text starts at position 0 (--bos none)", ("bos=none",))
    for token, words in ((bos.get("config_id"), "config names as BOS"), (prepended[0], "tokenizer prepends")):
        if isinstance(token, int) and token != current:
            current = token
            yield Setting("bos", f"at position 0, the token that the {words}", (f"bos=token:{token}",))


def _windows(length: int) -> Iterator[Setting]:
    """Yield windows of a quarter and a half of the prompt, alone and with the first tokens kept."""
    for size in (length // 4, length // 2):
        yield Setting("window", f"a window of {size} tokens", (f"window={size}",))
        for kept in KEPT_TOKENS:
            text = f"window={size}+sink" + (str(kept) if kept > 1 else "")
            words = f"a streaming cache: {size} tokens and the first {f'{kept} tokens' if kept > 1 else 'token'}"
            yield Setting("window", words, (text,))
