"""What a model does, in a few numbers: outputs of its own forward pass on a fixed prompt of a few tokens.

A fingerprint sees what a hash of the weights cannot: an adapter that is switched off, a hook, a replaced function,
autocast. It does not see what acts only on other tokens or on longer prompts.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature

import numpy as np
import torch

from posleak.errors import UnsupportedError
from posleak.models import Identity, Subject, exclusive
from posleak.models.border import border
from posleak.models.subject import RUNNABLE
from posleak.rounding import PARITY

from .native import by_itself

TOKENS, READ = 8, 16
"""Tokens of the fixed prompt, and logits that are read at its end."""


def fingerprint(subject: Subject) -> tuple[float, ...]:
    """Return READ logits at the last of TOKENS positions of the fixed prompt, and log Σ exp(logits) there.

    The tokens of the prompt, and those whose logits are read, are spread evenly over the vocabulary.
    """
    ids = _spread(TOKENS, subject.vocab_size).to(subject.device)[None]
    with border("the model cannot be run", subject.identity.name, RUNNABLE), by_itself(subject.model):
        state = torch.get_rng_state()
        logits = _logits(subject, ids)
        if not torch.equal(state, torch.get_rng_state()):
            _require_same(subject, logits, _logits(subject, ids))
    read = _spread(READ, logits.shape[-1]).to(logits.device)
    found: list[float] = torch.cat([logits[read], logits.logsumexp(-1)[None]]).tolist()
    return tuple(found)


def _logits(subject: Subject, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits at the last position; models that can leave out the others do."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(subject.model.forward).parameters else {}
    found = subject.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **last)
    logits: torch.Tensor = found[0][0, -1].double()
    return logits


def _require_same(subject: Subject, first: torch.Tensor, second: torch.Tensor) -> None:
    """Refuse a model that uses random numbers, which it has drawn: every pass would be one of another function."""
    if not torch.equal(first, second):
        raise UnsupportedError(
            "the model's output is random, even in evaluation mode", where=subject.identity.name,
            got=f"logits that differ by up to {float((first - second).abs().max()):.3g} in two passes over one prompt",
            remedy="switch off what draws random numbers in its forward pass, such as dropout that is always on",
        )  # fmt: skip


def _spread(count: int, over: int) -> torch.Tensor:
    return torch.arange(count) * (over - 1) // (count - 1)


def identified(subject: Subject) -> Subject:
    """Return the subject with the identity that the model has now; the same object if that is its identity already."""
    with exclusive(subject.model):
        now = subject.current(fingerprint(subject))  # the pass comes first: it may pack quantised weights anew
    return subject if difference(subject.identity, now.identity) is None else now


def changed(subject: Subject) -> str | None:
    """Return a sentence if the model is no longer what it was when the subject was identified; None otherwise.

    A model whose weights and attributes are all the same need not run again: it computes the same.
    """
    now = subject if subject.is_unchanged() else identified(subject)
    if now is subject:
        return None
    return (
        f"the model changed while it was measured, so that the numbers belong to no single model "
        f"({difference(subject.identity, now.identity)}, before and after)"
    )


def difference(one: Identity, other: Identity) -> str | None:
    """Return how two identities differ, each field with both values; None if they agree, fingerprints up to rounding.

    Another machine, or another number of threads, sums in another order.
    """
    names = [field.name for field in fields(Identity) if field.name != "fingerprint"]
    found = [
        f"{name} {before!r} and {after!r}"
        for name in names
        if (before := getattr(one, name)) != (after := getattr(other, name))
    ]
    return "; ".join([*found, *fingerprint_difference(one, other)]) or None


def fingerprint_difference(one: Identity, other: Identity) -> list[str]:
    """Return both values of the output that differs most; empty if all agree within PARITY of the largest logit."""
    if one.fingerprint is None or other.fingerprint is None:
        return [] if one.fingerprint is other.fingerprint else ["fingerprint missing in one of them"]
    a, b = np.array(one.fingerprint), np.array(other.fingerprint)
    if a.shape != b.shape:
        return [f"fingerprint of {len(a)} and {len(b)} outputs"]
    with np.errstate(invalid="ignore"):
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    worst, logits = int(gap.argmax()), np.abs(a[:READ])
    scale = logits[np.isfinite(logits)].max(initial=0.0) or 1.0
    if gap[worst] <= PARITY.of(getattr(torch, other.dtype)) * scale:
        return []
    return [f"fingerprint {a[worst]:.6g} and {b[worst]:.6g} (output {worst} of {len(a)} on the fixed prompt)"]
