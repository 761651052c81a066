"""How much memory work on a model will hold, computed before it starts, and the one guard that refuses too much.

A plan is meant as an upper bound of the memory above the loaded model; `--profile` shows it beside what was used. That
of a measurement is linear in the number of tokens per batch, as posleak's memory is. Families that compute their
attention themselves hold tokens² numbers per head under any tool, which the plan includes (`own_bytes`). Those that
only compute with a full mask hold tokens² per prompt, which it does not.

memory_plan    of a measurement; origin, doctor and bench have plans of their own, made of the same pieces
require_room   the guard: a plan against --max-memory and what the machine has free
fitting        the largest batch that stays within --max-memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from posleak.errors import InputError
from posleak.leakage.power import NEIGHBOURS
from posleak.metrics.glimpse import FULL_LENGTH
from posleak.models import Subject, available_bytes, exclusive
from posleak.probe import Plan, takes_positions
from posleak.probe.head import LOGIT_BYTES
from posleak.probe.kernel import QUERY_BLOCK
from posleak.probe.rows import PROFILE_POSITIONS
from posleak.probe.tracer import computes_own_attention
from posleak.text import format_bytes

from .sizes import HEADS, INNER, LIBRARIES, ROWS, SLACK, STATES
from .spec import MeasureSpec

EXPLICIT = 3
"""Blocks of logits at the same time, where the softmax is written out; of whole matrices, in eager attention."""

GLIMPSES = 5
"""Copies of the rows that meters look at: logits, masked, attention, and two in between."""

GRAPHS = 6
"""Copies, in float64, of attention averaged over heads, while graphs are made of it."""

LOGITS = 4
"""Copies of the logits of a few positions, while their loss is taken: as they are, in float32, and two in between."""

MOVED = 6
"""Copies, in float64, of the logits of moved keys."""

KEPT = 3
"""Copies of the results: in batches, joined, and as they are written."""

COMPONENTS, BETWEEN = 8, 3
"""Components of the leakage that are laid out at every pair at the same time, and arrays of that size in between."""

PRODUCTS = 2 * 14 + 1
"""Products of prompts (leakage/power.py) of all components and shares, for early and all queries, and one between."""

REPLICATES = 5 * 9
"""Numbers per prompt that the interval of one number holds at the same time: nine replicates per prompt, five times."""

RECORDS = 32 * 1000
"""Bytes of one head's numbers as records of a table."""

FIRST_USE = 64 * 10**6
"""What libraries take when they are first used: to write files, and for small tensors of any kind."""

CALIBRATION_LENGTH, LONGEST_WINDOW = 96, 1024
"""Tokens of calibration, which goes past windows up to this one."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes above the loaded model: activations of a batch (with weights that are copied), sampled rows, and the
    results of all prompts."""

    activations: int
    rows: int
    results: int

    @property
    def total(self) -> int:
        return self.activations + self.rows + self.results

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


# -- pieces of plans --------------------------------------------------------------------------------------------------


def weight_count(subject: Subject) -> int:
    return sum(parameter.numel() for parameter in subject.model.parameters())


def weight_bytes(subject: Subject) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in subject.model.parameters())


def pass_bytes(subject: Subject, tokens: int, item: int) -> int:
    """The activations of one forward pass over so many tokens."""
    identity = subject.identity
    per_token = STATES * identity.width + HEADS * identity.heads * identity.head_dim + INNER * _inner_width(subject)
    return int(SLACK * tokens * per_token * item)


def state_bytes(subject: Subject, tokens: int, item: int) -> int:
    """The residual stream of so many tokens, at all depths."""
    return (subject.identity.layers + 1) * tokens * subject.identity.width * item


def row_bytes(subject: Subject, plan: Plan, prompts: int, length: int, item: int, copies: int = ROWS) -> int:
    """The plan's rows of one layer, for so many prompts of so many tokens, and what all layers share of them."""
    identity, tokens = subject.identity, prompts * length
    R, Q = len(plan.references), len(plan.queries)
    block = 0 if not _explicit(subject) else tokens * identity.heads * QUERY_BLOCK * EXPLICIT
    rows = (tokens * identity.heads * len(plan.rows) * copies + block) * max(4, item)
    moved = int(SLACK * prompts * identity.heads * R * Q * plan.origin * MOVED * 8)
    shared = plan.length * (len(plan.rows) * 8 + R * (2 * Q + R) * 4 * 2)  # what rows see, and which keys are summed
    return rows + moved + shared


def glimpse_bytes(subject: Subject, prompts: int, length: int, item: int) -> int:
    """The rows of one layer that meters look at, at most FULL_LENGTH of them."""
    rows = min(FULL_LENGTH, length)
    attention = prompts * subject.identity.heads * rows * length * max(4, item) * GLIMPSES
    return attention + prompts * rows * length * 8 * GRAPHS


def square_bytes(subject: Subject, prompts: int, length: int, item: int) -> int:
    """All attention weights of one layer, as eager attention makes them, and its mask."""
    return prompts * (subject.identity.heads * EXPLICIT + 2) * length**2 * max(4, item)


def own_bytes(subject: Subject, prompts: int, length: int, item: int) -> int:
    """What a model that computes its attention itself holds beside posleak's: logits and weights of all pairs."""
    return square_bytes(subject, prompts, length, item) if computes_own_attention(subject.model) else 0


def result_bytes(subject: Subject, plan: Plan, prompts: int, layers: int | None = None) -> int:
    """The results of all prompts, and of some layers or all what is made of them: components at every pair, products of
    prompts with each other, numbers without each prompt, and records."""
    Q, D, first = len(plan.queries), len(plan.offsets), PROFILE_POSITIONS + plan.origin
    depth, H = subject.identity.layers, subject.identity.heads
    kept = KEPT * (Q * D + 6 * Q + D + first)
    products = PRODUCTS * (1 + min(NEIGHBOURS, prompts // 2))
    work = max((COMPONENTS + BETWEEN) * Q * D, REPLICATES * first) + products
    summed = H * (depth if layers is None else layers)
    return 8 * prompts * (depth * H * kept + summed * work) + summed * RECORDS + FIRST_USE


def _explicit(subject: Subject) -> bool:
    """Is the softmax computed explicitly, in blocks of queries, because no fused kernel supports it? What a model that
    computes its attention itself adds to logits is not known before it runs."""
    if computes_own_attention(subject.model):
        return True
    capped = getattr(subject.model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith("sinks") for name, _ in subject.model.named_parameters())


def _inner_width(subject: Subject) -> int:
    """The feed-forward width of one token; of a mixture of experts, of all experts that a token goes through."""
    config = subject.model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None)
    inner = max(inner) if isinstance(inner, (list, tuple)) and inner else inner  # some families have one per layer
    inner = inner if isinstance(inner, int) and inner else 4 * subject.identity.width
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(max(inner, experts * (getattr(config, "moe_intermediate_size", None) or inner)))


# -- a measurement ----------------------------------------------------------------------------------------------------


def memory_plan(subject: Subject, spec: MeasureSpec) -> MemoryPlan:
    """What `spec.batch` prompts at once will hold; an upper bound for decoders as they are built today."""
    read, own = spec.borrowed + spec.length, subject.dtype.itemsize
    edited = [edit.weights_dtype for edit in spec.edits if edit.weights_dtype is not None]
    item = edited[-1].itemsize if edited else own
    weights = weight_count(subject) * item if edited else 0
    # Of a model that takes no position ids, two prompts of one token each show what positions do.
    at_once = spec.batch * read if takes_positions(subject.model) else max(spec.batch * read, 2 * spec.length)
    pairs = max(own_bytes(subject, spec.batch, read, item), own_bytes(subject, 2, spec.length, item))
    rows = row_bytes(subject, spec.plan, spec.batch, read, item, ROWS if not spec.edits else 2 * ROWS)
    if spec.metrics:
        rows += glimpse_bytes(subject, spec.batch, read, item)
        weights += 2 * weight_count(subject) if "shift" in spec.metrics else 0  # a copy in bfloat16
    if spec.loss:
        rows += LOGITS * max(LOGIT_BYTES, 4 * spec.batch * subject.identity.vocab)
    return MemoryPlan(
        pass_bytes(subject, at_once, item) + pairs + weights,
        max(rows, square_bytes(subject, 1, min(calibration_length(subject), read), own)),
        result_bytes(subject, spec.plan, spec.prompts),
    )


def calibration_length(subject: Subject) -> int:
    """Tokens that calibration reads, where there are so many: past every window that is not too long for that."""
    windows = [w * 5 // 4 for w in subject.identity.windows if w is not None and w <= LONGEST_WINDOW]
    return max([CALIBRATION_LENGTH, *windows])


def within_memory(spec: MeasureSpec, subject: Subject, limit: int | None) -> MeasureSpec:
    """The spec, resolved, with a batch that fits.

    The batch size depends on the limit and the model, never on what else the machine does. It affects the last bits, so
    it is part of the digest, and a run that is started again must find its own folder.
    """
    resolved = spec.resolved()
    if not spec.batch:
        most = fitting(subject, resolved.batch, lambda b: memory_plan(subject, replace(resolved, batch=b)), limit)
        resolved = replace(resolved, batch=most)
    smaller = "a smaller --batch, " if resolved.batch > 1 else ""
    require_room(
        subject, memory_plan(subject, resolved), limit, what="the measurement",
        of=f"{many(resolved.batch, resolved.length)} at once",
        remedy=f"use {smaller}fewer --prompts or a shorter --length",
    )  # fmt: skip
    return resolved


# -- the guard --------------------------------------------------------------------------------------------------------


def fitting(subject: Subject, batch: int, plan: Callable[[int], MemoryPlan], limit: int | None) -> int:
    """The batch, halved until its plan stays within the limit; as it is without a limit."""
    if limit is None:
        return batch
    room = _within(subject, limit)
    while batch > 1 and plan(batch).total > room:
        batch //= 2
    return batch


def require_room(
    subject: Subject, plan: MemoryPlan, limit: int | None, *, what: str, of: str, remedy: str
) -> None:  # fmt: skip
    """Refuse work that would hold more than --max-memory allows (`limit`, None without one) or the machine has free.

    what: that is refused;  of: what the memory is for;  remedy: how less would do
    """
    free = available_bytes(subject.device)
    allowed = free if limit is None else _within(subject, limit)
    have, need = min(free, allowed), plan.total
    if need <= have:
        return
    whose, larger = "the machine has free", ""
    if limit is not None and allowed <= free:
        taken = format_bytes(limit - allowed)
        whose = "--max-memory allows"
        larger = f", or a larger --max-memory: the model and its libraries take {taken} of it"
    shown = (
        [format_bytes(need), format_bytes(have)]
        if format_bytes(need) != format_bytes(have)
        else [f"{need:,} bytes", f"{have:,} bytes"]
    )
    raise InputError(
        f"{what} needs more memory than {whose}", where=subject.identity.name, got=f"{shown[0]} for {of}",
        expected=f"at most {shown[1]} above the loaded model", remedy=remedy + larger,
    )  # fmt: skip


def many(prompts: int, length: int) -> str:
    return f"{prompts} prompt{'s' if prompts != 1 else ''} of {length} tokens"


def _within(subject: Subject, limit: int) -> int:
    """What a limit on the whole process leaves for work."""
    with exclusive(subject.model):  # an edit of another thread may have changed the size of its weights
        return limit - weight_bytes(subject) - LIBRARIES
