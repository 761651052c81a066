"""Passes in which sets of heads attend to lent keys, and the power of the leakage that remains.

    P(Ω) = power of the total if the heads in Ω attend to keys of a donor, summed over the layers after the first,
           each layer being the mean over its heads
    removed(Ω) = [P(∅) − P(Ω)] / [P(∅) − P(all heads)]

Totals are those of rows without lent keys (part D of a trace), so that only what the residual stream carries changes.
Several sets are measured in one pass after a donor (probe/lending.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64
from torch import Tensor

from posleak.arrays import Array
from posleak.axes import HEAD, LAYER, OFFSET, PROMPT, QUERY
from posleak.defaults import TOKENS_AT_ONCE
from posleak.edits.base import NamedEdit
from posleak.edits.context import LendByHead
from posleak.errors import CheckError
from posleak.inputs import Prompts
from posleak.leakage import Jackknife, Sampled, sampled_total
from posleak.leakage.dataset import stack_calls
from posleak.leakage.power import NEIGHBOURS
from posleak.leakage.summary import LEADING, Products
from posleak.models import Subject, exclusive, input_device
from posleak.probe import Call, Collector, Plan, attach, call_rows
from posleak.probe.kernels import rounding_dtype
from posleak.runs.folder import finished_step
from posleak.runs.memory import FIRST_USE_BYTES, MemoryPlan, ModelSizes
from posleak.runs.spec import batches

Heads = frozenset[tuple[int, int]]
"""A set of heads, each an attention call and the index of a head in it."""

NO_HEAD: Heads = frozenset()

TOKENS_WITH_GRAPH = 1024
"""Largest number of tokens per pass whose graph is kept for derivatives, unless one prompt takes more."""

MAX_COPIES = 24
"""Largest number of sets that one pass measures."""

ROW_COPIES = 8
"""Copies in float64 of the sampled rows of one layer."""

FEW_SETS = 100
"""Largest number of sets whose products are kept, unless every head is lent alone."""


def tokens_after_donor(length: int, copies: int, *, apart: bool) -> int:
    """Return the tokens that the model reads for one prompt."""
    sequences, tokens = LendByHead(torch.empty(copies, 0, 0), apart).sequences(length)
    return sequences * tokens


def copies_at_once(length: int, tokens: int, *, apart: bool) -> int:
    """Return the number of copies of a prompt of this length that one pass of `tokens` tokens reads after a donor."""
    fitting = (c for c in range(MAX_COPIES, 1, -1) if tokens_after_donor(length, c, apart=apart) <= tokens)
    return next(fitting, 1)


def circuit_plan(
    subject: Subject, plan: Plan, prompts: int, nodes: int, *, tokens: int, apart: bool, keep_graph: bool
) -> MemoryPlan:  # fmt: skip
    """Return the memory plan of a circuit that is evaluated on `prompts` prompts.

    nodes        integration nodes; 0: heads are ranked by intervention
    tokens       tokens per pass, more if one prompt takes more
    apart        each copy of a prompt is a sequence of its own
    keep_graph   the whole graph of a pass is kept for the gradients
    """
    sizes, N = ModelSizes.of(subject), plan.length
    narrow = nodes > 0 and subject.dtype.itemsize < 4  # gradients, and the totals before them, are in float32
    item = 4 if narrow else subject.dtype.itemsize
    copies = max(copies_at_once(N, tokens, apart=apart), nodes + 2 if nodes else 0)
    tokens = max(tokens, tokens_after_donor(N, copies, apart=apart))
    with_graph = max(min(TOKENS_WITH_GRAPH, tokens), tokens_after_donor(N, max(nodes, 1), apart=apart))
    documents = 4 * copies * sizes.all_heads * tokens_after_donor(N, 1, apart=apart) * item  # keys and values
    forward = sizes.forward(tokens, item) + documents + sizes.own_pairs(1, tokens, item)
    graph = sizes.graph(with_graph, item, whole=keep_graph) if nodes else 0
    wide = 4 * sizes.parameters if narrow else 0
    cells = sizes.layers * sizes.heads
    totals = 3 * 8 * prompts * copies * len(plan.queries) * len(plan.offsets)
    sets = FEW_SETS if nodes else max(FEW_SETS, cells + 2)
    products = 2 * 8 * sets * prompts * (1 + min(NEIGHBOURS, prompts // 2))
    return MemoryPlan(
        max(forward, graph) + wide, sizes.sampled(plan, 1, tokens, item, ROW_COPIES),
        cells * (totals + products) + FIRST_USE_BYTES,
    )  # fmt: skip


def total_of_copies(call: Call, out: Tensor, plan: Plan) -> Float64[Tensor, "BC H Q D"]:
    """Return the totals of every prompt and copy of a pass."""
    assert call.copies is not None
    return sampled_total(call.copies.call, plan)


def weight_of_references(call: Call, out: Tensor, plan: Plan) -> Float64[Tensor, "B H D"]:
    """Return the attention of references by offset."""
    rows = call_rows(call, plan)
    return rows.references.by_offset(rows.offsets)


@dataclass(frozen=True)
class LendingPasses:
    """Passes over some prompts of one model, each after a donor.

    heads    number of heads of each attention call
    apart    each copy of a prompt is a sequence of its own
    tokens   tokens per pass, more if one prompt takes more
    edits    further edits of the passes
    """

    subject: Subject
    plan: Plan
    prompts: Prompts
    indices: range
    heads: tuple[int, ...]
    apart: bool
    tokens: int = TOKENS_AT_ONCE
    edits: tuple[NamedEdit, ...] = ()

    def shares_of(self, sets: Sequence[Heads]) -> Tensor:
        """Return the shares of lent keys [C, L, H]: 1 for the heads of a set, 0 for all others."""
        share = torch.zeros(len(sets), len(self.heads), max(self.heads))
        for copy, heads in enumerate(sets):
            for call, head in heads:
                share[copy, call, head] = 1
        return share

    @cached_property
    def every_head(self) -> Heads:
        return frozenset((call, head) for call, heads in enumerate(self.heads) for head in range(heads))

    def batches(self, prompts: Prompts, at_once: int) -> Iterator[tuple[range, Tensor]]:
        """Yield the prompts of each batch, with their ids. at_once: prompts per batch"""
        for batch in batches(len(self.indices), max(1, at_once)):
            ids = prompts.batch([self.indices[b] for b in batch])
            yield batch, torch.from_numpy(ids).to(input_device(self.subject.model))

    def batches_after_donor(self, edit: LendByHead, tokens: int) -> Iterator[tuple[range, Tensor]]:
        """Yield the prompts of each batch of at most this many tokens, or of one prompt, with the ids of documents."""
        at_once = tokens // tokens_after_donor(self.plan.length, edit.copies, apart=self.apart)
        return self.batches(edit.prompts(self.prompts), at_once)

    def rounding_dtype(self) -> torch.dtype:
        """Return the dtype whose tolerances the passes have."""
        _, ids = next(self.batches(self.prompts, 1))
        return rounding_dtype(self.subject, ids)

    def totals(self, share: Tensor, progress: Callable[[str], None]) -> Float64[np.ndarray, "B C L H Q D"]:
        """Return the totals of every prompt under every copy's shares, NaN at heads and pairs that do not exist."""
        edit, collector = LendByHead(share, self.apart), Collector(partial(total_of_copies, plan=self.plan))
        chunks, edits = [], [*self.edits, edit]
        with exclusive(self.subject.model), attach(self.subject.model, [collector], edits) as probe:
            for batch, ids in self.batches_after_donor(edit, self.tokens):
                progress(f"prompts {batch.start + 1} to {batch.stop} of {len(self.indices)}")
                probe.forward(ids)
                layers = stack_calls([x.cpu().numpy() for x in collector.collect()])
                chunks.append(layers.reshape(len(batch), len(share), *layers.shape[1:]))
        return np.concatenate(chunks)

    def weight(self) -> Float64[xr.DataArray, "B L H D"]:
        """Return the attention of references by offset when the model reads each prompt alone."""
        collector, chunks = Collector(partial(weight_of_references, plan=self.plan)), []
        with exclusive(self.subject.model), attach(self.subject.model, [collector], self.edits) as probe:
            for _, ids in self.batches(self.prompts, self.tokens // self.plan.length):
                probe.forward(ids)
                chunks.append(stack_calls([x.cpu().numpy() for x in collector.collect()]))
        return xr.DataArray(np.concatenate(chunks), dims=(PROMPT, LAYER, HEAD, OFFSET))


def products_of(
    totals: Float64[np.ndarray, "B C L H Q D"], weight: Float64[xr.DataArray, "B L H D"], plan: Plan
) -> dict[str, Float64[np.ndarray, "C L H sums"]]:
    """Return the products of prompts (leakage/power.py) of the totals of every copy, by norm.

    weight: attention of references by offset
    """
    dims, by_norm = (PROMPT, LAYER, HEAD, QUERY, OFFSET), dict[str, list[Array]]()
    for copy in range(totals.shape[1]):
        total = xr.DataArray(totals[:, copy], dims=dims, coords={QUERY: list(plan.queries)})
        for norm, products in Products.by_queries({"total": total}, weight, ())["all"].norms.items():
            by_norm.setdefault(norm, []).append(products.own["total"])
    return {norm: np.stack(copies) for norm, copies in by_norm.items()}


def later_power(by_head: Float64[np.ndarray, "L H *sums"]) -> Float64[np.ndarray, "*sums"]:
    """Return the sum over the layers after the first of the mean over heads."""
    return np.asarray(np.nanmean(by_head[1:], axis=1).sum(0))


@dataclass
class LendingStudy:
    """Sets of heads that are measured on the same prompts; with a folder, finished passes are stored in it.

    weight   attention of references by offset
    digest   of everything that determines the results, except the sets
    """

    passes: LendingPasses
    weight: Float64[xr.DataArray, "B L H D"]
    folder: Path | None
    digest: str
    progress: Callable[[str], None]
    _measured: dict[Heads, dict[str, Array]] = field(default_factory=dict, init=False)

    def measure(self, sets: Iterable[Heads], label: str) -> None:
        """Measure the sets that are not yet measured, or load them. label: name of the sets in progress messages"""
        todo = [heads for heads in dict.fromkeys(sets) if heads not in self._measured]
        at_once = copies_at_once(self.passes.plan.length, self.passes.tokens, apart=self.passes.apart)
        for first in range(0, len(todo), at_once):
            sets_of_pass = todo[first : first + at_once]
            name = f"{label}, sets {first + 1} to {first + len(sets_of_pass)} of {len(todo)}"
            arrays = self._measure_or_load(sets_of_pass, name)
            for copy, heads in enumerate(sets_of_pass):
                self._measured[heads] = {norm: x[copy] for norm, x in arrays.items()}

    def by_head(self, heads: Heads, norm: str = LEADING) -> Float64[np.ndarray, "L H sums"]:
        """Return the products of the power of every head under a set that was measured."""
        return self._measured[heads][norm]

    def power(
        self, heads: Heads, norm: str = LEADING, of: Callable[[Array], Array] = later_power
    ) -> Sampled:  # fmt: skip
        """Return P(Ω) of a set that was measured. of: products of every head -> those of another power"""
        return Jackknife(len(self.passes.indices)).inner(of(self.by_head(heads, norm)))

    def removed(
        self, heads: Heads, norm: str = LEADING, of: Callable[[Array], Array] = later_power
    ) -> tuple[Sampled, Sampled]:
        """Return P(∅) − P(Ω), and removed(Ω), which is NaN where P(∅) − P(all heads) is not significantly above 0."""
        before, after, least = (self.power(x, norm, of) for x in (NO_HEAD, heads, self.passes.every_head))
        return before - after, (before - after).over(before - least)

    def _measure_or_load(self, sets: Sequence[Heads], name: str) -> dict[str, Array]:
        """Measure sets in one series of passes, or load them from the folder."""
        contents = [f"the circuit of {self.digest}", f"prompts {self.passes.indices}", *(str(sorted(x)) for x in sets)]

        def measured() -> dict[str, Array]:
            totals = self.passes.totals(self.passes.shares_of(sets), lambda line: self.progress(f"{name}: {line}"))
            self._require_finite(totals)
            return products_of(totals, self.weight, self.passes.plan)

        return finished_step(self.folder, contents, measured)

    def _require_finite(self, totals: Array) -> None:
        """Raise a CheckError if a total is infinite, or missing in one copy and not in another."""
        missing = np.isnan(totals)
        if np.isinf(totals).any() or (missing != missing[:1, :1]).any():
            raise CheckError(
                "the totals contain NaN or infinity", where=self.passes.subject.identity.name,
                remedy="load the model with a wider --dtype, and check its weights",
            )  # fmt: skip
