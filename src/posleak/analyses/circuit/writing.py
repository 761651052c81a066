"""Which heads write position, and which read it: evidence by intervention, on prompts that were not used for ranking.

    removed(Ω) = [P(∅) − P(Ω)] / [P(∅) − P(all heads)]     lending.py

For k = 1, 2, 3, 5, 8, … it is measured for the first k heads of the ranking, for all heads but these (`others`: can
other heads take over?), and for sets of k random heads, matched by layer. The **writers** are the smallest of the first
sets that removes at least 90%. The **readers** are the heads with the largest power of the source `earlier` (trace). An
**edge** is what lending in one writer alone removes of the power of one reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from posleak.analyses.trace.trace import Trace
from posleak.errors import CheckError
from posleak.leakage import Estimate, Jackknife, Sampled
from posleak.leakage.sampled import LEVEL
from posleak.leakage.summary import EVEN, LEADING, Products
from posleak.rounding import AGREE
from posleak.typed import Number

from .lending import NO_HEAD, Heads, LendingStudy
from .ranking import Ranking

AT_ONCE = (1, 2, 3, 5, 8), (13, 21), (34,)
"""Sizes k of the sets of heads; larger ones are only measured if no smaller one removes MOST_REMOVED."""

SIZES = tuple(k for some in AT_ONCE for k in some)

LEAST_COMPLEMENT = 3
"""Smallest set whose complement is measured, unless the writers are fewer."""

CONTROLLED = (1, 3, 8)
"""Sizes that random sets are drawn for, besides the number of writers; MANY heads need no sets of one."""

MANY = 60

DRAWS = 8
"""Random sets of each size."""

MOST_REMOVED = 0.9
"""The writers are the smallest set that removes this share."""

SHOWN = 8
"""Number of readers, and largest number of writers whose edges are reported."""

MOST_ALONE = 10
"""Largest number of writers that are measured alone."""


@dataclass(frozen=True)
class SetEffect:
    """What sets of k heads remove, in one norm.

    removed      by the first k heads of the ranking
    others       by all heads but these; None: not measured
    random       mean over random sets of k heads, matched by layer; its interval covers prompts and draws; None: none
                 were drawn, or a layer has too few other heads
    difference   removed − random
    draws        by each random set
    """

    removed: Estimate
    others: Estimate | None = None
    random: Estimate | None = None
    difference: Estimate | None = None
    draws: tuple[Number, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """Return the JSON form: the estimate in place, the controls below it."""
        own = {"value": self.removed.value, "low": self.removed.low, "high": self.removed.high, "n": self.removed.n}
        return own | {name: getattr(self, name) for name in ("others", "random", "difference", "draws")}


@dataclass(frozen=True)
class RemovedBySize:
    """The effect of sets of k heads, in both norms."""

    k: int
    leading: SetEffect
    even: SetEffect

    @property
    def norms(self) -> dict[str, SetEffect]:
        return {LEADING: self.leading, EVEN: self.even}

    def as_row(self) -> dict[str, Any]:
        return {"k": self.k, **self.leading.as_row(), EVEN: self.even.as_row()}


@dataclass(frozen=True)
class Head:
    """A head: the model's layer id, the attention call, and the index of the head."""

    layer: int
    call: int
    head: int

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True)
class Writer(Head):
    """A head that writes position.

    attribution   share of the sum of all attributions
    alone         share that lending in this head alone removes; None: not measured
    even          the same, evenly weighted
    """

    attribution: Number
    alone: Estimate | None
    even: Estimate | None


@dataclass(frozen=True)
class Reader(Head):
    """A head that reads position which earlier layers have written. earlier: power of that source in nats²;  share: of
    its total"""

    earlier: Estimate
    share: Estimate


@dataclass(frozen=True)
class Edge:
    """What lending in one writer alone removes of the power of one reader: in nats², and as a share of what lending in
    all heads removes of it. writer, reader: indices in the lists"""

    writer: int
    reader: int
    removed: Estimate
    share: Estimate


@dataclass(frozen=True)
class Attribution:
    """The ranking, as stored in results.

    method      `gradients` (integrated gradients) or `intervene` (lending in every head alone)
    sum, truth  of the attributions, and P(no head) − P(all heads) on the same prompts, which it approximates;  error:
                their difference as a share of the truth
    overlap     share of the first k heads that a ranking on the other half of the prompts has among its first k, by k
    correlation rank correlation (Spearman) of the attributions of the two halves over heads
    heads       attribution of every head in nats² [L, H]
    """

    method: str
    sum: Number
    truth: Number
    error: Number
    nodes: int
    prompts: int
    overlap: dict[int, Number]
    correlation: Number
    heads: tuple[tuple[Number, ...], ...]

    @classmethod
    def of(cls, ranking: Ranking, other: Ranking) -> Attribution:
        """Describe a ranking; other: the ranking on the other half of the prompts."""
        from scipy.stats import spearmanr

        one, two = (x.attribution[np.isfinite(ranking.attribution)] for x in (ranking, other))
        overlap = {k: ranking.overlap(other, k) for k in sizes(len(one))}
        return cls(
            ranking.method, ranking.sum, ranking.truth, ranking.error, ranking.nodes, ranking.prompts, overlap,
            float(spearmanr(one, two).statistic) if len(one) > 2 else float("nan"),
            tuple(map(tuple, ranking.attribution.tolist())),
        )  # fmt: skip


@dataclass(frozen=True)
class Writing:
    """The heads that write position, with the evidence, and the heads that read it.

    heads     number of heads of the model
    writers   empty if the position that earlier layers pass on is not significantly above 0
    reached   whether a set removes at least 90%; otherwise the writers are the largest set that was measured
    """

    heads: int
    attribution: Attribution
    removed: tuple[RemovedBySize, ...]
    writers: tuple[Writer, ...]
    reached: bool
    readers: tuple[Reader, ...]
    edges: tuple[Edge, ...]

    def of_size(self, k: int) -> RemovedBySize | None:
        """Return the effect of the sets of k heads, if they were measured."""
        return next((row for row in self.removed if row.k == k), None)

    @property
    def chosen(self) -> RemovedBySize | None:
        """The effect of the writers together; None without writers."""
        return self.of_size(len(self.writers))


def sizes(heads: int) -> list[int]:
    """Return the sizes of the sets in a model with this many heads."""
    return [k for k in SIZES if k < heads] or [1]


@dataclass(frozen=True)
class MeasuredSets:
    """The sets that a study has measured, by size k: the first k heads, all others, and random sets.

    alone   the first writers, each as a set;  count: number of writers;  reached: whether they remove MOST_REMOVED
    """

    tops: dict[int, Heads]
    others: dict[int, Heads]
    random: dict[int, list[Heads]]
    alone: list[Heads]
    count: int
    reached: bool


def evidence(study: LendingStudy, ranking: Ranking, other: Ranking, trace: Trace, seed: int) -> Writing:
    """Measure the writers of a ranking on the prompts of the study, with controls, readers and edges.

    other: the ranking on the prompts of the study, for the overlap only;  trace: on the prompts of the study
    """
    order = ranking.order
    sets = measured_sets(study, order, seed)
    _require_branches(study, trace)
    removals = [Removal(study, norm) for norm in (LEADING, EVEN)]
    rows = [
        RemovedBySize(k, *(removal.effect(heads, sets.others.get(k), sets.random.get(k, ())) for removal in removals))
        for k, heads in sets.tops.items()
    ]
    readers = _readers(trace)
    return Writing(
        len(order), Attribution.of(ranking, other), tuple(rows),
        _writers(ranking, order[: sets.count], study.passes.layer_ids, removals, sets.alone), sets.reached, readers,
        tuple(_edges(study, sets.alone[:SHOWN], readers)),
    )  # fmt: skip


def measured_sets(study: LendingStudy, order: Sequence[tuple[int, int]], seed: int) -> MeasuredSets:
    """Measure the first heads of an order, more of them until they remove MOST_REMOVED, then the controls."""
    removal, tops, reaching = Removal(study), dict[int, Heads](), list[int]()
    for some in AT_ONCE:
        more = {k: frozenset(order[:k]) for k in sizes(len(order)) if k in some and not reaching}
        study.measure([NO_HEAD, study.passes.every_head, *more.values()], "first heads")
        tops |= more
        reaching += [k for k, heads in more.items() if removal.of(heads).value >= MOST_REMOVED]
    defined = bool(np.isfinite(removal.of(tops[1]).value))
    count = reaching[0] if reaching else max(tops) if defined else 0
    others = {k: study.passes.every_head - tops[k] for k in tops if min(count, LEAST_COMPLEMENT) <= k <= count}
    sizes_of_random = {count, *(k for k in CONTROLLED if k < count and (k > 1 or len(order) < MANY))}
    random = {k: random_sets(order[:k], study.passes.heads, seed) for k in tops if k in sizes_of_random}
    alone = [frozenset([head]) for head in order[: min(count, MOST_ALONE)]]
    study.measure(others.values(), "all heads but the first")
    study.measure([drawn for draws in random.values() for drawn in draws], "random heads")
    study.measure(alone, "single heads")
    return MeasuredSets(tops, others, random, alone, count, bool(reaching))


@dataclass(frozen=True)
class Removal:
    """removed(Ω) of sets that a study has measured, in one norm; all are paired."""

    study: LendingStudy
    norm: str = LEADING

    def sampled(self, heads: Heads) -> Sampled:
        """Return removed(Ω) with its replicates; NaN where P(∅) − P(all heads) is not significantly above 0."""
        jackknife = Jackknife(len(self.study.passes.indices))
        sets = NO_HEAD, heads, self.study.passes.every_head
        before, after, least = (jackknife.inner(self.study.later(x, self.norm)) for x in sets)
        return (before - after).over(before - least)

    def of(self, heads: Heads) -> Estimate:
        return self.sampled(heads).estimate

    def effect(self, heads: Heads, others: Heads | None, drawn: Sequence[Heads]) -> SetEffect:
        """Return the effect of a set with its controls."""
        own, rest = self.sampled(heads), None if others is None else self.of(others)
        if not drawn:
            return SetEffect(own.estimate, rest)
        draws = [self.sampled(x) for x in drawn]
        total = draws[0]
        for more in draws[1:]:
            total = total + more
        mean, values = total / len(draws), [float(x.value) for x in draws]
        spread = float(stdtrit(len(draws) - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1) / len(draws) ** 0.5)
        random, difference = (widened(x.estimate, spread) for x in (mean, own - mean))
        return SetEffect(own.estimate, rest, random, difference, tuple(values))


def widened(estimate: Estimate, spread: float) -> Estimate:
    """Return the estimate with its half-widths combined in quadrature with another one."""
    down, up = np.hypot(estimate.value - estimate.low, spread), np.hypot(estimate.high - estimate.value, spread)
    return Estimate(estimate.value, estimate.value - down, estimate.value + up, estimate.n)


def random_sets(heads: Sequence[tuple[int, int]], counts: Sequence[int], seed: int) -> list[Heads]:
    """Return DRAWS sets with as many heads in every layer as `heads` has, drawn from the other heads of the layer.

    Return none if a layer has too few other heads. counts: number of heads of every attention call
    """
    generator, needed = np.random.default_rng([seed, len(heads)]), Counter(call for call, _ in heads)
    others = {call: [head for head in range(counts[call]) if (call, head) not in heads] for call in sorted(needed)}
    if any(len(pool) < needed[call] for call, pool in others.items()):
        return []

    def drawn() -> Heads:
        chosen = ((call, generator.choice(pool, needed[call], replace=False)) for call, pool in others.items())
        return frozenset((call, int(head)) for call, some in chosen for head in some)

    return [drawn() for _ in range(DRAWS)]


def _writers(
    ranking: Ranking,
    order: Sequence[tuple[int, int]],
    ids: Sequence[int],
    removals: Sequence[Removal],
    alone: Sequence[Heads],
) -> tuple[Writer, ...]:
    """Return the first heads of a ranking, with what lending in each of them alone removes, as far as it was measured.

    removals: in the leading norm, and evenly weighted
    """
    shares = {head: float(ranking.attribution[head]) / ranking.sum for head in order}
    measured = {head: [removal.of(heads) for removal in removals] for heads in alone for head in heads}
    return tuple(
        Writer(ids[call], call, head, shares[call, head], *measured.get((call, head), (None, None)))
        for call, head in order
    )


def _readers(trace: Trace) -> tuple[Reader, ...]:
    """Return the heads with the largest power of the source `earlier`, of those for which it is significant."""
    heads, ids = trace.heads["all"], trace.ordinary.summary.layer_ids
    power, share = heads.power["earlier"], heads.share["earlier"]
    value = np.where(np.asarray(power.low) > 0, power.value, -np.inf)
    value[0] = -np.inf  # the first layer reads no earlier one
    order = [divmod(int(at), value.shape[1]) for at in np.argsort(-value, axis=None, kind="stable")[:SHOWN]]
    return tuple(Reader(ids[c], c, h, power[c, h], share[c, h]) for c, h in order if np.isfinite(value[c, h]))


def _edges(study: LendingStudy, writers: Sequence[Heads], readers: Sequence[Reader]) -> list[Edge]:
    """Return the edges from every writer to every reader of a later layer."""
    jackknife, edges = Jackknife(len(study.passes.indices)), []
    for w, writer in enumerate(writers):
        ((written, _),) = writer
        for r, reader in enumerate(readers):
            if reader.call > written:
                sets = NO_HEAD, writer, study.passes.every_head
                before, after, least = (jackknife.inner(study.by_head(x)[reader.call, reader.head]) for x in sets)
                removed = before - after
                edges.append(Edge(w, r, removed.estimate, removed.over(before - least).estimate))
    return edges


def _require_branches(study: LendingStudy, trace: Trace) -> None:
    """Raise a CheckError unless lending in no head and in all heads gives the branches A and B of the trace."""
    data, bound = trace.branches.data, max(AGREE.of(study.passes.subject.dtype), AGREE.float32)
    weight = study.weight
    for heads, name in ((NO_HEAD, "total_a"), (study.passes.every_head, "direct")):
        x = data[name].where(data["pairs"]) if name in data else trace.components[name]
        expected = Products.by_queries({"total": x.transpose("prompt", "layer", "head", "query", "offset")}, weight, ())
        one, other = study.by_head(heads), expected["all"].own["total"]
        gap = float(np.nanmax(np.abs(one - other)) / np.nanmax(np.abs(other)))
        if not gap <= bound:
            raise CheckError(
                "lending by head disagrees with the branches of the trace", where=study.passes.subject.identity.name,
                got=f"{gap:.1e}, relative", expected=f"at most {bound:.1e}",
                remedy="please report it: results for this model would be wrong",
            )  # fmt: skip
