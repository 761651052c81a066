"""Passes in which sets of heads attend to lent keys, and the power of the leakage that remains.

    P(Ω) = power of the total if the heads in Ω attend to keys of a donor, summed over the layers after the first,
           each layer being the mean over its heads
    removed(Ω) = [P(∅) − P(Ω)] / [P(∅) − P(all heads)]

Totals are those of rows without lent keys (part D of a trace), so that only what the residual stream carries changes.
Several sets are measured in one pass after a donor (probe/lending.py).
"""

from __future__ import annotations

import hashlib
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
from posleak.edits.base import NamedEdit
from posleak.edits.context import LendByHead
from posleak.errors import CheckError
from posleak.inputs import Prompts
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.leakage import sampled_total
from posleak.leakage.dataset import stack_calls
from posleak.leakage.power import NEIGHBOURS
from posleak.leakage.summary import LEADING, Products
from posleak.models import Subject, exclusive, input_device
from posleak.probe import Call, Collector, Observer, Plan, attach
from posleak.runs.folder import read_arrays, write_arrays
from posleak.runs.memory import FIRST_USE_BYTES, MemoryPlan, ModelSizes
from posleak.runs.spec import TOKENS_AT_ONCE, batches

Heads = frozenset[tuple[int, int]]
"""A set of heads, each an attention call and the index of a head in it."""

NO_HEAD: Heads = frozenset()

TOKENS_WITH_GRAPH = 1024
"""Tokens per pass whose graph is kept for derivatives."""

COPIES = 24
"""Largest number of sets that one pass measures."""

ROW_COPIES = 8
"""Copies in float64 of the sampled rows of one layer."""

SETS = 100
"""Largest number of sets whose products are kept."""


def copies_at_once(length: int) -> int:
    """Return how many copies of a prompt of this length one pass reads after their donor."""
    return max(1, min(COPIES, (TOKENS_AT_ONCE - length - DONOR_MARGIN) // length))


def circuit_plan(subject: Subject, plan: Plan, prompts: int, nodes: int, *, whole: bool) -> MemoryPlan:
    """Return the memory plan of a circuit with `prompts` prompts of evidence.

    nodes   of the integral of the gradients; 0: heads are ranked by intervention
    whole   the whole graph of a pass is kept for the gradients
    """
    sizes, item, N = ModelSizes.of(subject), subject.dtype.itemsize, plan.length
    copies, donor = copies_at_once(N), N + DONOR_MARGIN
    tokens = max(TOKENS_AT_ONCE, donor + copies * N)
    rows = ROW_COPIES * 8 * tokens * sizes.heads * len(plan.rows)
    forward = sizes.forward(tokens, item) + 4 * tokens * sizes.all_heads * 3 * item  # keys and values of documents
    graph = sizes.graph(max(TOKENS_WITH_GRAPH, donor + nodes * N), max(4, item), whole=whole) if nodes else 0
    wide = 4 * sizes.parameters if nodes and item < 4 else 0  # a copy in float32
    cells = sizes.layers * sizes.heads
    totals = 3 * 8 * prompts * (max(copies, nodes + 2) if nodes else copies) * len(plan.queries) * len(plan.offsets)
    products = 2 * 8 * SETS * prompts * (1 + min(NEIGHBOURS, prompts // 2))
    return MemoryPlan(max(forward, graph) + wide, rows, cells * (totals + products) + FIRST_USE_BYTES)


def total_of_copies(call: Call, out: Tensor, plan: Plan) -> Float64[Tensor, "BC H Q D"]:
    """Return the totals of every prompt and copy of a pass."""
    assert call.copies is not None
    return sampled_total(call.copies.call, plan)


@dataclass(frozen=True)
class LendingPasses:
    """Passes over some prompts of one model, each after a donor.

    heads      number of heads of each attention call;  layer_ids: the model's layer id of each
    apart      each copy of a prompt is a sequence of its own
    edits      further edits of the passes
    """

    subject: Subject
    plan: Plan
    prompts: Prompts
    indices: range
    heads: tuple[int, ...]
    layer_ids: tuple[int, ...]
    apart: bool
    edits: tuple[NamedEdit, ...] = ()

    def share(self, sets: Sequence[Heads]) -> Tensor:
        """Return the shares of lent keys [C, L, H]: 1 for the heads of a set, 0 for all others."""
        share = torch.zeros(len(sets), len(self.heads), max(self.heads))
        for copy, heads in enumerate(sets):
            for call, head in heads:
                share[copy, call, head] = 1
        return share

    @cached_property
    def every_head(self) -> Heads:
        return frozenset((call, head) for call, heads in enumerate(self.heads) for head in range(heads))

    def batches(self, edit: LendByHead, tokens: int = TOKENS_AT_ONCE) -> Iterator[tuple[range, Tensor]]:
        """Yield the prompts of each batch of about this many tokens, with the ids that the model reads."""
        documents = edit.prompts(self.prompts)
        sequences, length = edit.sequences(self.plan.length)
        for batch in batches(len(self.indices), max(1, tokens // (sequences * length))):
            ids = documents.batch([self.indices[b] for b in batch])
            yield batch, torch.from_numpy(ids).to(input_device(self.subject.model))

    def totals(
        self, share: Tensor, progress: Callable[[str], None], more: Sequence[Observer] = ()
    ) -> Float64[np.ndarray, "B C L H Q D"]:
        """Return the totals of every prompt under every copy's shares, NaN at heads and pairs that do not exist.

        more: further observers of the passes
        """
        edit, collector = LendByHead(share, self.apart), Collector(partial(total_of_copies, plan=self.plan))
        chunks = []
        edits = [*self.edits, edit]
        with exclusive(self.subject.model), attach(self.subject.model, [collector, *more], edits) as probe:
            for batch, ids in self.batches(edit):
                progress(f"prompts {batch.start + 1} to {batch.stop} of {len(self.indices)}")
                probe.forward(ids)
                layers = stack_calls([x.cpu().numpy() for x in collector.collect()])
                chunks.append(layers.reshape(len(batch), len(share), *layers.shape[1:]))
        return np.concatenate(chunks)


def products_of(
    totals: Float64[np.ndarray, "B C L H Q D"], weight: xr.DataArray, plan: Plan
) -> dict[str, Float64[np.ndarray, "C L H sums"]]:
    """Return the products of prompts (leakage/power.py) of the totals of every copy, by norm.

    weight: attention by offset of the ordinary condition [B, L, H, D]
    """
    dims, own = (PROMPT, LAYER, HEAD, QUERY, OFFSET), dict[str, list[Array]]()
    for copy in range(totals.shape[1]):
        total = xr.DataArray(totals[:, copy], dims=dims, coords={QUERY: list(plan.queries)})
        for norm, products in Products.by_queries({"total": total}, weight, ())["all"].norms.items():
            own.setdefault(norm, []).append(products.own["total"])
    return {norm: np.stack(copies) for norm, copies in own.items()}


def later_power(by_head: Float64[np.ndarray, "L H *sums"]) -> Float64[np.ndarray, "*sums"]:
    """Return the sum over the layers after the first of the mean over heads."""
    return np.asarray(np.nanmean(by_head[1:], axis=1).sum(0))


@dataclass
class LendingStudy:
    """Sets of heads that are measured on the same prompts; with a folder, finished passes are stored in it.

    weight   attention by offset of the ordinary condition
    digest   of everything that determines the results, except the sets
    """

    passes: LendingPasses
    weight: xr.DataArray
    folder: Path | None
    digest: str
    progress: Callable[[str], None]
    _measured: dict[Heads, dict[str, Array]] = field(default_factory=dict, init=False)

    def measure(self, sets: Iterable[Heads], what: str) -> None:
        """Measure the sets that are not measured yet, or load them; `what` names them in progress messages."""
        todo = [heads for heads in dict.fromkeys(sets) if heads not in self._measured]
        at_once = copies_at_once(self.passes.plan.length)
        for first in range(0, len(todo), at_once):
            some = todo[first : first + at_once]
            arrays = self._group(some, f"{what}, sets {first + 1} to {first + len(some)} of {len(todo)}")
            for copy, heads in enumerate(some):
                self._measured[heads] = {norm: x[copy] for norm, x in arrays.items()}

    def by_head(self, heads: Heads, norm: str = LEADING) -> Float64[np.ndarray, "L H sums"]:
        """Return the products of the power of every head under a set that was measured."""
        return self._measured[heads][norm]

    def later(self, heads: Heads, norm: str = LEADING) -> Float64[np.ndarray, "sums"]:
        """Return the products of P(Ω) of a set that was measured."""
        return later_power(self.by_head(heads, norm))

    def _group(self, sets: Sequence[Heads], name: str) -> dict[str, Array]:
        """Measure sets in one series of passes, or load them from the folder."""
        seal = [
            f"the circuit of {self.digest}",
            f"prompts {self.passes.indices}",
            *(str(sorted(heads)) for heads in sets),
        ]
        path = None
        if self.folder is not None:
            path = self.folder / f"{hashlib.sha256(chr(10).join(seal).encode()).hexdigest()[:16]}.npz"
            if (stored := read_arrays(path, seal)) is not None:
                return stored
        totals = self.passes.totals(self.passes.share(sets), lambda line: self.progress(f"{name}: {line}"))
        self._require_finite(totals)
        arrays = products_of(totals, self.weight, self.passes.plan)
        if path is not None:
            write_arrays(path, seal, arrays)
        return arrays

    def _require_finite(self, totals: Array) -> None:
        """Raise a CheckError if a total is infinite, or missing in one copy and not in another."""
        missing = np.isnan(totals)
        if np.isinf(totals).any() or (missing != missing[:1, :1]).any():
            raise CheckError(
                "the totals contain NaN or infinity", where=self.passes.subject.identity.name,
                remedy="load the model with a wider --dtype, and check its weights",
            )  # fmt: skip
