"""How much memory a measurement will hold, computed before it starts, and the batch that keeps it within a limit.

The plan is meant as an upper bound of the memory above the loaded model; `--profile` shows it beside what was used. It
is linear in the number of tokens per batch, as posleak's memory is. Families whose own code computes with the full mask
hold tokens² numbers under any tool; the plan does not include that.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace

from posleak.errors import InputError
from posleak.models import Subject, available_bytes
from posleak.probe.kernel import BLOCK

from .spec import MeasureSpec

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

STATES, HEADS, INNER = 6, 5, 4
"""Tensors of one token that a decoder layer holds at the same time, at most: as wide as the residual stream, as all
heads together, and as the inside of the feed-forward part."""

SLACK = 1.5
"""Factor for memory that the allocator keeps between tensors: 1.4 was seen with tensors too small to be given back."""

ROWS = 3
"""Copies of the sampled rows at the same time: logits, their exponentials, and one in between. Models that scale their
queries by position hold twice as many, which is little beside the slack of their activations."""

EXPLICIT = 3
"""Blocks of logits at the same time, where the softmax is written out."""

MOVED = 4
"""Copies, in float64, of the logits of moved keys."""

GRAMS, REPLICATES = 2 * 12, 4 * 9
"""Gram matrices of all components, for early and all queries; and arrays of one number per prompt and head that the
interval of one component holds at the same time: nine replicates per prompt, four times."""

LIBRARIES = 500 * 10**6
"""What Python holds with torch and transformers imported, besides weights."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes above the loaded model: activations of a batch (with weights that an edit copies), sampled rows, and the
    results of all prompts."""

    activations: int
    rows: int
    results: int

    @property
    def total(self) -> int:
        return self.activations + self.rows + self.results

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def memory_plan(subject: Subject, spec: MeasureSpec) -> MemoryPlan:
    """What `spec.batch` prompts at once will hold; an upper bound for decoders as they are built today."""
    identity, plan = subject.identity, spec.plan
    tokens = spec.batch * (spec.borrowed + spec.length)
    edited = [edit.weights_dtype for edit in spec.parsed_edits if edit.weights_dtype is not None]
    item = (edited or [subject.model.dtype])[-1].itemsize
    weights = sum(parameter.numel() for parameter in subject.model.parameters()) * item if edited else 0
    per_token = STATES * identity.width + HEADS * identity.heads * identity.head_dim + INNER * _inner_width(subject)
    activations = int(SLACK * tokens * per_token * item)
    R, Q = len(plan.references), len(plan.queries)
    copies = ROWS if not spec.edits else 2 * ROWS
    block = 0 if not _explicit(subject) else tokens * identity.heads * BLOCK * EXPLICIT
    rows = (tokens * identity.heads * len(plan.rows) * copies + block) * max(4, item)
    rows += spec.batch * identity.heads * R * Q * plan.origin * MOVED * 8
    shared = spec.length * (len(plan.rows) * 8 + R * (2 * Q + R) * 4 * 2)  # what rows see, and which keys are summed
    heads = identity.layers * identity.heads
    cells = 3 * heads * Q * (len(plan.offsets) + 4)
    numbers = heads * (GRAMS * spec.prompts + REPLICATES)
    return MemoryPlan(activations + weights, rows + shared, 8 * spec.prompts * (cells + numbers))


def _explicit(subject: Subject) -> bool:
    """Is the softmax computed explicitly, in blocks of queries, because no fused kernel supports it?"""
    capped = getattr(subject.model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith("sinks") for name, _ in subject.model.named_parameters())


def _inner_width(subject: Subject) -> int:
    """The feed-forward width of one token; of a mixture of experts, of all experts that a token goes through."""
    config = subject.model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * subject.identity.width
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner  # some families have one per layer
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(max(inner, experts * (getattr(config, "moe_intermediate_size", None) or inner)))


def within_memory(spec: MeasureSpec, subject: Subject, limit: int | None) -> MeasureSpec:
    """The spec, resolved, with a batch that fits.

    The batch size depends on the limit and the model, never on what else the machine does. It affects the last bits, so
    it is part of the digest, and a run that is started again must find its own folder.
    """
    resolved, have = spec.resolved(), available_bytes(subject.device)
    if limit is not None:
        room = limit - weight_bytes(subject) - LIBRARIES
        while not spec.batch and resolved.batch > 1 and memory_plan(subject, resolved).total > room:
            resolved = replace(resolved, batch=resolved.batch // 2)
        have = min(have, room)
    if (need := memory_plan(subject, resolved).total) > have:
        raise _too_large(subject, resolved, need, have, limited=limit is not None)
    return resolved


def _too_large(subject: Subject, spec: MeasureSpec, need: int, have: int, *, limited: bool) -> InputError:
    smaller = "a smaller --batch, " if spec.batch > 1 else ""
    taken = (weight_bytes(subject) + LIBRARIES) / 2**30
    larger = f", or a larger --max-memory: the model and its libraries take {taken:.1f} GiB of it" if limited else ""
    return InputError(
        f"the measurement needs more memory than {'--max-memory allows' if limited else 'the machine has free'}",
        where=subject.identity.name,
        got=f"{need / 2**30:.1f} GiB for {spec.batch} prompts of {spec.length} tokens at once",
        expected=f"at most {max(have, 0) / 2**30:.1f} GiB above the loaded model",
        remedy=f"use {smaller}fewer --prompts or a shorter --length{larger}",
    )


def weight_bytes(subject: Subject) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in subject.model.parameters())


def parse_bytes(text: str | int | None) -> int | None:
    """`8GB`, `500MB`, `2GiB` -> bytes; a number is bytes, and None is no limit."""
    if not isinstance(text, str):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None or (found[3] and not found[2]):
        raise InputError(
            "not an amount of memory", where="--max-memory", got=text, expected="a number with a unit, like 8GB"
        )
    return int(float(found[1]) * (BINARY if found[3] else UNITS)[found[2]])
