"""Fingerprint of a model: some logits of its own forward pass on a fixed prompt of a few tokens.

A fingerprint detects changes that a hash of the weights does not: a disabled adapter, a hook, a replaced function,
autocast. It does not detect changes that affect only other tokens or longer prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import signature

import numpy as np
import torch
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError, translate_errors
from posleak.models import Identity, Subject, exclusive
from posleak.models.hold import random_models, undraw
from posleak.models.subject import RUN_IN_TRANSFORMERS, module_attributes
from posleak.rounding import PARITY

from .native import native, states_of, unmodified

FINGERPRINT_TOKENS, FINGERPRINT_LOGITS = 8, 16
"""Number of tokens of the fixed prompt, and number of logits that are read at its end."""

HIDDEN_LOGIT = 1e3
"""Logits beyond this size hide tokens, if they do not change."""


def fingerprint(subject: Subject) -> tuple[float, ...]:
    """Return FINGERPRINT_LOGITS logits at the last position of the fixed prompt, and log Σ exp(logits) there.

    The tokens of the prompt and of the logits are spread evenly over the vocabulary. If the model has no logits at each
    position, its last hidden state is used instead. The caller must hold the unmodified model.
    """
    model, embedding = subject.model, subject.model.get_input_embeddings()
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)  # subject.identity may be outdated
    tokens = _spread(FINGERPRINT_TOKENS, min(vocabulary, getattr(embedding, "num_embeddings", vocabulary)))
    ids = tokens.to(subject.device)[None]
    with translate_errors("cannot run the model", subject.identity.name, RUN_IN_TRANSFORMERS):
        passes = list[torch.Tensor]()
        undraw(model, lambda: passes.append(_outputs(model, ids)))
        outputs = _require_fixed(subject, passes)
    read = _spread(FINGERPRINT_LOGITS, outputs.shape[-1]).to(outputs.device)
    values: list[float] = torch.cat([outputs[read], outputs.logsumexp(-1)[None]]).tolist()
    return tuple(values)


def _spread(count: int, over: int) -> torch.Tensor:
    return torch.arange(count) * (over - 1) // (count - 1)


def _outputs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits at the last position; other positions are omitted if the model supports it."""
    options = {"attention_mask": torch.ones_like(ids), "use_cache": False, "logits_to_keep": 1}
    known = signature(model.forward).parameters
    output = model(input_ids=ids, **{name: value for name, value in options.items() if name in known})
    logits = output.get("logits") if isinstance(output, Mapping) else states_of(output)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        logits = states_of(native(model, ids))
    outputs: torch.Tensor = logits[0, -1].double()
    return outputs


def _require_fixed(subject: Subject, passes: list[torch.Tensor]) -> torch.Tensor:
    """Return the output. Raise UnsupportedError if it is random, so that every pass would be of another function."""
    if subject.model in random_models and len(passes) > 1 and not torch.equal(*passes):
        gap = float((passes[0] - passes[1]).abs().max())
        raise UnsupportedError(
            "the model's output is random, even in evaluation mode", where=subject.identity.name,
            got=f"differences of up to {gap:.3g} between two passes over one prompt",
            remedy="disable random operations in its forward pass, such as dropout that ignores evaluation mode",
        )  # fmt: skip
    return passes[0]


def identified(subject: Subject) -> Subject:
    """Return the subject with the current identity of its model; the same object if the identity is unchanged."""
    with exclusive(subject.model):
        with unmodified(subject.model):
            now = subject.current(fingerprint(subject))  # after the pass, which may repack quantised weights
        if difference(subject.identity, now.identity) is None:
            return subject
        return replace(now, attributes=module_attributes(now.model))


def changed(subject: Subject) -> str | None:
    """Return a sentence if the model has changed since the subject was identified; None otherwise.

    A model whose weights and attributes are unchanged is not run again.
    """
    now = subject if subject.is_unchanged() else identified(subject)
    if now is subject:
        return None
    return (
        f"the model changed while it was measured, so that the results are not of a single model "
        f"({difference(subject.identity, now.identity)}, before and after)"
    )


def behaviour_difference(one: Identity, other: Identity) -> str | None:
    """Return how two identities differ, ignoring the hash of the weights: a buffer may count passes."""
    return difference(one, replace(other, weights_sha256=one.weights_sha256, source=one.source, revision=one.revision))


def difference(one: Identity, other: Identity) -> str | None:
    """Return the fields in which two identities differ, with both values; None if they agree.

    Fingerprints are compared up to rounding: other machines and numbers of threads sum in another order.
    """
    names = [field.name for field in fields(Identity) if field.name != "fingerprint"]
    changes = [
        f"{name} {before!r} and {after!r}"
        for name in names
        if (before := getattr(one, name)) != (after := getattr(other, name))
    ]
    return "; ".join([*changes, *fingerprint_difference(one, other)]) or None


def fingerprint_difference(one: Identity, other: Identity) -> list[str]:
    """Return both values of the output that differs most; empty if all agree within PARITY of the largest logit.

    Logits that hide a token are as low as the dtype allows, and are excluded from that scale.
    """
    if one.fingerprint is None or other.fingerprint is None:
        missing = "fingerprint missing in one of them, written by an earlier version of posleak"
        return [] if one.fingerprint is other.fingerprint else [missing]
    a, b = np.array(one.fingerprint), np.array(other.fingerprint)
    if a.shape != b.shape:
        return [f"fingerprint of {len(a)} and {len(b)} outputs"]
    with np.errstate(invalid="ignore"):
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    worst, logits = int(gap.argmax()), np.abs(a[:FINGERPRINT_LOGITS])
    hidden = ~np.isfinite(logits) | ((logits > HIDDEN_LOGIT) & (gap[:FINGERPRINT_LOGITS] == 0))
    scale = logits[~hidden].max(initial=0.0) or 1.0
    if gap[worst] <= PARITY.of(getattr(torch, other.dtype)) * scale:
        return []
    return [f"fingerprint {a[worst]:.6g} and {b[worst]:.6g} (output {worst} of {len(a)} on the fixed prompt)"]
