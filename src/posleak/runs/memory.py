"""The one memory planner: bytes that work on a model will hold, computed before it starts, checked against limits.

    sizes = ModelSizes.of(subject)                     dimensions of the model -> bytes of the tensors that work holds
    plan = MemoryPlan(activations, rows, results)      what a piece of work holds at the same time
    batch = fit_batch(subject, plan_of_batch, ...)     largest batch whose plan is within the limits

A plan is an upper bound of the memory above the loaded model; `--profile` shows it next to the measured peak. The plan
of a measurement is linear in the number of tokens per batch, as posleak's memory is. Model families that compute their
attention themselves hold tokens² numbers per head under any tool; the plan includes them (`own_attention`). Families
that compute with a full mask also hold tokens² numbers per prompt; the plan does not include those.

Importing this module does not import torch: sweeps estimate the memory of models that are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from posleak.defaults import TOKENS_AT_ONCE
from posleak.errors import USE_LESS_MEMORY, InputError, TooLargeError
from posleak.models import available_bytes
from posleak.models.memory import LIBRARY_BYTES
from posleak.models.offload import is_offloaded
from posleak.models.quantisation import largest_unpacked, stored_tensors
from posleak.text import format_bytes

from .spec import MeasureSpec

if TYPE_CHECKING:
    from posleak.models import Subject
    from posleak.probe import Plan

# Copies of a tensor that work holds at the same time, at most.
STATE_COPIES, HEAD_COPIES, INNER_COPIES = 6, 5, 4  # per token and layer: residual stream, all heads, inner width
ROW_COPIES = 3  # of sampled rows: logits, exponentials, one intermediate; queries scaled by position fit into the slack
EXPLICIT_COPIES = 3  # of a block of logits where the softmax is computed explicitly; of a matrix in eager attention
UNPACKED_BYTES = (
    24  # per number of the largest packed layer, unpacked in a pass; the most that was measured is that of AWQ
)
GLIMPSE_COPIES = 5  # of the rows that meters read: logits, masked logits, attention, two intermediates
GRAPH_COPIES = 6  # in float64, of attention averaged over heads while graphs are built from it
LOGIT_COPIES = 4  # of the logits of a few positions for the loss: model dtype, float32, two intermediates
GRAPH_LAYERS = 2  # autograd memory of one layer, in units of its forward pass; it runs two attention kernels
MOVED_COPIES = 6  # in float64, of the logits of moved keys
RESULT_COPIES = 3  # of the results: in batches, joined, and as they are written
COMPONENT_COPIES = 8 + 3  # components of the leakage at every pair, and intermediates of the same size
PRODUCTS = 2 * 14 + 1  # products of prompts (leakage/power.py), for early and all queries; one intermediate
REPLICATES = 5 * 9  # numbers per prompt that one interval holds: five copies of nine replicates

SLACK = 1.5
"""Factor for memory that the allocator keeps between tensors; 1.4 was measured with many small tensors."""

TABLE_BYTES = 32 * 1000  # table rows of one head
FIRST_USE_BYTES = 64 * 10**6  # allocated by libraries when they are first used, for files and for small tensors

CALIBRATION_LENGTH, LONGEST_WINDOW = 96, 1024
"""Tokens that calibration reads, and the longest sliding window that it reads past."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes above the loaded model: activations of a batch and copies of weights, sampled rows, results of all
    prompts."""

    activations: int
    rows: int
    results: int

    @property
    def total(self) -> int:
        return self.activations + self.rows + self.results

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class ModelSizes:
    """Dimensions of a model. Methods return the bytes of tensors; `item` is the bytes per number.

    parameters       floating-point numbers of the weights: an edit of the dtype copies these, and not packed ones
    inner            feed-forward width per token; in a mixture of experts, of all experts that a token passes
    all_heads        width of all heads of a layer together
    explicit         the softmax is computed explicitly in blocks of queries, since no fused kernel supports it
    own_attention    the model computes its attention itself, with logits and weights of all pairs
    unpacked         elements of the largest packed linear layer, which its kernel may unpack
    """

    parameters: int
    layers: int
    width: int
    heads: int
    all_heads: int
    inner: int
    explicit: bool = False
    own_attention: bool = False
    unpacked: int = 0

    @classmethod
    def of(cls, subject: Subject) -> ModelSizes:
        from posleak.probe.interface import computes_own_attention

        identity, own = subject.identity, computes_own_attention(subject.model)
        parameters = sum(tensor.numel() for tensor in stored_tensors(subject.model) if tensor.is_floating_point())
        return cls(
            parameters, identity.layers, identity.width, identity.heads, identity.heads * identity.head_dim,
            _inner_width(subject), explicit=own or _is_explicit(subject), own_attention=own,
            unpacked=largest_unpacked(subject.model),
        )  # fmt: skip

    def forward(self, tokens: int, item: int) -> int:
        """Return the activations of one forward pass, and what kernels of quantised weights hold."""
        per_token = STATE_COPIES * self.width + HEAD_COPIES * self.all_heads + INNER_COPIES * self.inner
        return int(SLACK * tokens * per_token * item) + UNPACKED_BYTES * self.unpacked

    def graph(self, tokens: int, item: int, *, whole: bool = True) -> int:
        """Return the autograd memory of a pass; not `whole`: the inputs of all layers, and the graph of one layer."""
        one = GRAPH_LAYERS * self.forward(tokens, item)
        return self.layers * one if whole else one + 2 * self.states(tokens, item)

    def states(self, tokens: int, item: int) -> int:
        """Return the residual stream at all depths."""
        return (self.layers + 1) * tokens * self.width * item

    def logits(self, tokens: int, rows: int, item: int, copies: int = ROW_COPIES) -> int:
        """Return the sampled rows of logits of one layer."""
        return tokens * self.heads * rows * copies * max(4, item)

    def sampled(self, plan: Plan, prompts: int, length: int, item: int, copies: int = ROW_COPIES) -> int:
        """Return the plan's rows of one layer, and the masks that all layers share."""
        tokens, R, Q, block = prompts * length, len(plan.references), len(plan.queries), 0
        if self.explicit:
            from posleak.probe.call import QUERY_BLOCK

            block = self.logits(tokens, QUERY_BLOCK, item, EXPLICIT_COPIES)
        moved = int(SLACK * prompts * self.heads * R * Q * plan.origin * MOVED_COPIES * 8)
        shared = plan.length * (len(plan.rows) * 8 + R * (2 * Q + R) * 4 * 2)  # masks, and keys to sum
        return self.logits(tokens, len(plan.rows), item, copies) + block + moved + shared

    def glimpses(self, prompts: int, length: int, item: int) -> int:
        """Return the rows of one layer that meters read."""
        from posleak.metrics.meter import FULL_LENGTH

        rows = min(FULL_LENGTH, length)
        return self.logits(prompts * length, rows, item, GLIMPSE_COPIES) + prompts * rows * length * 8 * GRAPH_COPIES

    def eager(self, prompts: int, length: int, item: int) -> int:
        """Return all attention weights of one layer, as eager attention computes them, and its mask."""
        return prompts * (self.heads * EXPLICIT_COPIES + 2) * length**2 * max(4, item)

    def own_pairs(self, prompts: int, length: int, item: int) -> int:
        """Return the logits and weights of all pairs in a model that computes its attention itself; otherwise 0."""
        return self.eager(prompts, length, item) if self.own_attention else 0

    def results(self, plan: Plan, prompts: int, layers: int | None = None) -> int:
        """Return the results of all prompts, and what is computed from those of `layers` layers, by default all:
        components at every pair, products of prompts, jackknife replicates, and table rows."""
        from posleak.leakage.power import NEIGHBOURS
        from posleak.probe.plan import PROFILE_POSITIONS

        Q, D, first = len(plan.queries), len(plan.offsets), PROFILE_POSITIONS + plan.origin
        stored = RESULT_COPIES * (Q * D + 6 * Q + D + first)
        products = PRODUCTS * (1 + min(NEIGHBOURS, prompts // 2))
        work = max(COMPONENT_COPIES * Q * D, REPLICATES * first) + products
        summed = self.heads * (self.layers if layers is None else layers)
        numbers = self.layers * self.heads * stored + summed * work
        return 8 * prompts * numbers + summed * TABLE_BYTES + FIRST_USE_BYTES


def _is_explicit(subject: Subject) -> bool:
    capped = getattr(subject.model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return capped or any(name.endswith("sinks") for name, _ in subject.model.named_parameters())


def _inner_width(subject: Subject) -> int:
    config: Any = subject.model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None)
    inner = max(inner) if isinstance(inner, (list, tuple)) and inner else inner  # some families have one per layer
    inner = inner if isinstance(inner, int) and inner else 4 * subject.identity.width
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(max(inner, experts * (getattr(config, "moe_intermediate_size", None) or inner)))


def weight_bytes(subject: Subject) -> int:
    """Return the bytes of a model's weights in memory, packed as they are.

    Of modules whose weights are on disk, those of the largest one count.
    """
    tensors, modules = list(stored_tensors(subject.model)), subject.model.modules()
    streamed = (sum(p.nbytes for p in module.parameters(recurse=False) if p.is_meta) for module in modules)
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta) + max(streamed, default=0)


# -- the check against limits -----------------------------------------------------------------------------------------


def fit_batch(
    subject: Subject,
    plan: Callable[[int], MemoryPlan],
    batch: int,
    limit: int | None,
    *,
    what: str,
    of: Callable[[int], str],
    remedy: str,
    batched: bool = False,
    fixed: bool = False,
) -> int:
    """Return `batch`, halved until its plan is within the limit; raise an InputError if no batch fits.

    The batch depends on the limit and the model, never on the free memory of the machine: it affects the last bits
    of the results and is part of a run's digest, and a resumed run must find its own folder.

    plan         batch size -> its memory plan
    limit        of the whole process in bytes; None: no limit, and the batch is not reduced
    what         the work, in error messages: "the measurement";  of: batch size -> what the memory is for
    remedy       options that reduce the memory;  batched: a smaller --batch does, too
    fixed        do not reduce the batch
    """
    if limit is not None and not fixed:
        room = _room(subject, limit)
        while batch > 1 and plan(batch).total > room:
            batch //= 2
    smaller = "a smaller --batch, " if batched and batch > 1 else ""
    require_room(subject, plan(batch), limit, what=what, of=of(batch), remedy=f"use {smaller}{remedy}")
    return batch


def require_room(
    subject: Subject, plan: MemoryPlan, limit: int | None, *, what: str, of: str, remedy: str
) -> None:  # fmt: skip
    """Raise an InputError if a plan exceeds --max-memory (`limit`, None: no limit) or the free memory of the machine.

    what: the work;  of: what the memory is for;  remedy: how to need less
    """
    free = available_bytes(subject.device)
    allowed = free if limit is None else _room(subject, limit)
    if limit is not None and allowed < 0:
        raise TooLargeError(
            "the model's weights and its libraries alone exceed --max-memory", where=subject.identity.name,
            got=f"{format_bytes(limit - allowed)} for weights and libraries", expected=f"at most {format_bytes(limit)}",
            remedy="pass a larger --max-memory" if is_offloaded(subject.model) else USE_LESS_MEMORY,
        )  # fmt: skip
    have, need = min(free, allowed), plan.total
    if need <= have:
        return
    whose, larger = "the machine has free", ""
    if limit is not None and allowed <= free:
        taken = format_bytes(limit - allowed)
        whose = "--max-memory allows"
        larger = f", or a larger --max-memory: the model and its libraries take {taken} of it"
        if 2 * weight_bytes(subject) > limit:
            larger += "; --dtype bfloat16 or --offload FOLDER leave more of it"
    shown = [format_bytes(need), format_bytes(have)]
    if shown[0] == shown[1]:
        shown = [f"{need:,} bytes", f"{have:,} bytes"]
    raise InputError(
        f"{what} needs more memory than {whose}", where=subject.identity.name, got=f"{shown[0]} for {of}",
        expected=f"at most {shown[1]} above the loaded model", remedy=remedy + larger,
    )  # fmt: skip


def describe_prompts(prompts: int, length: int) -> str:
    """Return, for example, `3 prompts of 64 tokens`."""
    return f"{prompts} prompt{'s' if prompts != 1 else ''} of {length} tokens"


def _room(subject: Subject, limit: int) -> int:
    """Return the bytes that a limit of the whole process leaves above the model and its libraries."""
    from posleak.models import exclusive

    with exclusive(subject.model):  # an edit of another thread may have changed the size of its weights
        return limit - weight_bytes(subject) - LIBRARY_BYTES


# -- a measurement ----------------------------------------------------------------------------------------------------


def memory_plan(subject: Subject, spec: MeasureSpec) -> MemoryPlan:
    """Return the plan of a measurement with batches of `spec.batch` prompts."""
    from posleak.probe import takes_positions

    sizes, (sequences, read), own = ModelSizes.of(subject), spec.sequences, subject.dtype.itemsize
    batch = spec.batch * sequences
    edited = [edit.weights_dtype for edit in spec.edits if edit.weights_dtype is not None]
    item = edited[-1].itemsize if edited else own
    weights = sizes.parameters * item if edited and not is_offloaded(subject.model) else 0  # rejected on disk
    fits = fit_bytes(spec, sizes)
    weights += fits
    # In a model without position ids, the effect of positions is read from two prompts of one repeated token each.
    positions = 0 if takes_positions(subject.model) else 2 * spec.length
    tokens = max(batch * read, positions, TOKENS_AT_ONCE if fits else 0)
    pairs = max(sizes.own_pairs(batch, read, item), sizes.own_pairs(2, spec.length, item))
    rows = sizes.sampled(spec.plan, batch, read, item, ROW_COPIES if not spec.edits else 2 * ROW_COPIES)
    if spec.metrics:
        rows += sizes.glimpses(batch, read, item)
        weights += 2 * sizes.parameters if "shift" in spec.metrics else 0  # a copy in bfloat16
    if spec.loss:
        rows += loss_bytes(subject, spec.batch)
    return MemoryPlan(
        sizes.forward(tokens, item) + pairs + weights,
        max(rows, sizes.eager(1, min(calibration_length(subject), read), own)),
        sizes.results(spec.plan, spec.prompts) * (2 if sequences * read > 3 * spec.length else 1),  # totals of branches
    )


def fit_bytes(spec: MeasureSpec, sizes: ModelSizes) -> int:
    """Return the bytes of the fits of a measurement's edits, without the activations of their passes."""
    return sum(edit.fit_bytes(sizes.layers + 1, sizes.width, spec.length) for edit in spec.edits)


def loss_bytes(subject: Subject, batch: int) -> int:
    """Return the bytes of the logits from which the loss of a batch is computed."""
    from posleak.probe.native import LOGIT_BYTES

    return LOGIT_COPIES * max(LOGIT_BYTES, 4 * batch * subject.identity.vocab)


def calibration_length(subject: Subject) -> int:
    """Return how many tokens calibration reads: past every sliding window of at most LONGEST_WINDOW tokens."""
    windows = [w * 5 // 4 for w in subject.identity.windows if w is not None and w <= LONGEST_WINDOW]
    return max([CALIBRATION_LENGTH, *windows])


def within_memory(spec: MeasureSpec, subject: Subject, limit: int | None) -> MeasureSpec:
    """Return the spec with defaults filled in and a batch that fits; raise an InputError if none does."""
    resolved = spec.resolved()
    batch = fit_batch(
        subject, lambda batch: memory_plan(subject, replace(resolved, batch=batch)), resolved.batch, limit,
        what="the measurement", of=lambda batch: f"{describe_prompts(batch, resolved.length)} at once",
        remedy="fewer --prompts or a shorter --length", batched=True, fixed=bool(spec.batch),
    )  # fmt: skip
    return replace(resolved, batch=batch)
