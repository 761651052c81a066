"""Which heads write position, and which read it: interventions on prompts that were not used for ranking.

    removed(Ω) = [P(∅) − P(Ω)] / [P(∅) − P(all heads)]     lending.py

It is measured for the first k heads of the ranking, k = 1, 2, 3, 5, 8, …, with two controls: `others`, all heads except
these, and `random`, sets of k other heads, matched by layer. The **writers** are the smallest of the first sets that
removes at least 90%. The **readers** are the heads with the largest power of the source `earlier` (trace). An **edge**
is what lending in one writer alone removes of the power of one reader.

How to read `others`: if all other heads attend to lent keys, only the first k still write position, and 1 − others of
the power remains. So a small value means that the first k heads write position alone, and a large one that others
contribute. P is quadratic: of two parts that add up, one with half of the amplitude removes 75% of the power, and so
does the other. Both shares above 50% do not show that one part replaces the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from posleak.analyses.trace.trace import Trace
from posleak.arrays import Array
from posleak.errors import CheckError
from posleak.inputs.bodies import draw
from posleak.leakage import Estimate, Sampled, combined, component
from posleak.leakage.power import unbiased
from posleak.leakage.sampled import LEVEL
from posleak.leakage.summary import EVEN, LEADING, Summary
from posleak.rounding import AGREE
from posleak.typed import Number

from .lending import NO_HEAD, Heads, LendingStudy, later_power, products_of
from .ranking import Ranking

SIZE_ROUNDS = (1, 2, 3, 5, 8), (13, 21), (34,)
"""Sizes k of the sets of heads; those of later rounds are only measured if no smaller set removes TARGET_SHARE."""

SIZES = tuple(k for sizes in SIZE_ROUNDS for k in sizes)

CONTROLLED, DRAWS = (1, 3, 8), 8
"""Sizes that random sets are drawn for, besides the number of writers, and the number of sets of each size."""

NO_SINGLE_CONTROLS = 60
"""Models with at least this many heads need no random sets of one head."""

TARGET_SHARE = 0.9
"""The writers are the smallest set that removes this share."""

MAX_READERS = 8
"""Number of readers, and largest number of writers whose edges are reported."""

MAX_MISMATCH = 0.1
"""Largest difference of P between the branches of the trace and lending by head, as a share of P(∅) − P(all heads)."""


@dataclass(frozen=True)
class SetEffect:
    """What sets of k heads remove, in one norm.

    removed      by the first k heads of the ranking
    others       by all heads but these; None without significant leakage from earlier layers
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
    """A head: the model's layer id, the attention call, the index of the head, and its name, such as `14.5`.

    In models that call attention twice per layer, the name says which call it is: `14a.5`.
    """

    layer: int
    call: int
    head: int
    name: str


@dataclass(frozen=True)
class Writer(Head):
    """A head that writes position.

    attribution   share of the sum of all attributions
    alone         share that is removed if this head alone attends to lent keys
    even          the same, evenly weighted
    """

    attribution: Number
    alone: Estimate
    even: Estimate


@dataclass(frozen=True)
class Reader(Head):
    """A head with a large power of the source `earlier`.

    earlier   that power in nats²;  share: the same as a share of the head's leakage
    """

    earlier: Estimate
    share: Estimate


@dataclass(frozen=True)
class Edge:
    """The effect of one writer on one reader: the power that the reader loses if only the writer attends to lent keys.

    writer, reader   indices in `Writing.writers` and `Writing.readers`
    removed          in nats²;  share: as a share of what the reader loses if all heads attend to lent keys
    """

    writer: int
    reader: int
    removed: Estimate
    share: Estimate


@dataclass(frozen=True)
class Writing:
    """The heads that write position, with what sets of them remove, and the heads that read it.

    heads     number of heads of the model
    writers   empty if the leakage from earlier layers is not significantly above 0
    reached   whether a set removes at least 90%; otherwise the writers are the largest measured set
    """

    heads: int
    attribution: Ranking
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

    count   number of writers;  reached: whether they remove TARGET_SHARE
    """

    tops: dict[int, Heads]
    others: dict[int, Heads]
    random: dict[int, list[Heads]]
    count: int
    reached: bool


def evaluate(study: LendingStudy, ranking: Ranking, other: Ranking, trace: Trace, seed: int) -> Writing:
    """Measure the writers of a ranking on the prompts of the study, with controls, readers and edges.

    other: the ranking on the prompts of the study, for the overlap only;  trace: on the prompts of the study
    """
    order = ranking.order
    sets = measured_sets(study, order, seed)
    require_branches(study, trace)
    rows = [
        RemovedBySize(
            k, *(set_effect(study, heads, sets.others.get(k), sets.random.get(k, ()), norm) for norm in (LEADING, EVEN))
        )
        for k, heads in sets.tops.items()
    ]
    readers, writers = _readers(trace), order[: sets.count]
    return Writing(
        len(order), ranking.compared(other, sizes(len(order))), tuple(rows),
        tuple(_writers(study, ranking, writers, trace.ordinary.summary)), sets.reached, readers,
        tuple(_edges(study, writers[:MAX_READERS], readers, trace.ordinary.summary.layer_ids)),
    )  # fmt: skip


def measured_sets(study: LendingStudy, order: Sequence[tuple[int, int]], seed: int) -> MeasuredSets:
    """Measure the first heads of an order, more of them until they remove TARGET_SHARE, then the controls."""
    tops, reaching = dict[int, Heads](), list[int]()
    for sizes_of_round in SIZE_ROUNDS:
        larger = {k: frozenset(order[:k]) for k in sizes(len(order)) if k in sizes_of_round and not reaching}
        study.measure([NO_HEAD, study.passes.every_head, *larger.values()], "first k heads")
        tops |= larger
        reaching += [k for k, heads in larger.items() if study.removed(heads)[1].value >= TARGET_SHARE]
    defined = bool(np.isfinite(study.removed(tops[1])[1].value))
    count = reaching[0] if reaching else max(tops) if defined else 0
    controlled = {count, *(k for k in CONTROLLED if k > 1 or len(order) < NO_SINGLE_CONTROLS)} if count else set()
    others = {k: study.passes.every_head - heads for k, heads in tops.items()} if count else {}
    random = {k: random_sets(order[:k], study.passes.heads, seed) for k in tops if k in controlled}
    study.measure(others.values(), "all heads except the first k")
    study.measure([drawn for draws in random.values() for drawn in draws], "random heads")
    study.measure([frozenset([head]) for head in order[:count]], "single heads")
    return MeasuredSets(tops, others, random, count, bool(reaching))


def set_effect(
    study: LendingStudy, heads: Heads, others: Heads | None, drawn: Sequence[Heads], norm: str = LEADING
) -> SetEffect:
    """Return the effect of a set with its controls."""
    removed, rest = study.removed(heads, norm)[1], None if others is None else study.removed(others, norm)[1].estimate
    if not drawn:
        return SetEffect(removed.estimate, rest)
    draws = [study.removed(x, norm)[1] for x in drawn]
    values = [float(x.value) for x in draws]
    mean: Sampled = combined(lambda *x: sum(x) / len(x), *draws)
    spread = float(stdtrit(len(draws) - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1) / len(draws) ** 0.5)
    over_draws = Estimate(np.array(0.0), np.array(-spread), np.array(spread), mean.n)
    random, difference = (x.estimate.minus_independent(over_draws) for x in (mean, removed - mean))
    return SetEffect(removed.estimate, rest, random, difference, tuple(values))


def random_sets(heads: Sequence[tuple[int, int]], counts: Sequence[int], seed: int) -> list[Heads]:
    """Return DRAWS sets with as many heads in every layer as `heads` has, drawn from the other heads of the layer.

    Return none if a layer has too few other heads. counts: number of heads of every attention call
    """
    needed = Counter(call for call, _ in heads)
    others = {call: [head for head in range(counts[call]) if (call, head) not in heads] for call in sorted(needed)}
    if any(len(pool) < needed[call] for call, pool in others.items()):
        return []

    def drawn(index: int) -> Heads:
        random = iter(draw(seed, index, sum(map(len, others.values())), 2**31).tolist())
        shuffled = {call: sorted(pool, key=lambda _: next(random)) for call, pool in others.items()}
        return frozenset((call, head) for call, pool in shuffled.items() for head in pool[: needed[call]])

    return [drawn(DRAWS * len(heads) + k) for k in range(DRAWS)]


def _writers(
    study: LendingStudy, ranking: Ranking, writers: Sequence[tuple[int, int]], summary: Summary
) -> Iterator[Writer]:
    """Yield the writers, with the share that is removed if only this head attends to lent keys."""
    for call, head in writers:
        alone = (study.removed(frozenset([(call, head)]), norm)[1].estimate for norm in (LEADING, EVEN))
        yield Writer(*_labels(summary, call, head), float(ranking.heads[call, head]) / ranking.sum, *alone)


def _labels(summary: Summary, call: int, head: int) -> tuple[int, int, int, str]:
    """Return the fields of a `Head`."""
    return summary.layer_ids[call], call, head, f"{summary.layer_names[call]}.{head}"


def _readers(trace: Trace) -> tuple[Reader, ...]:
    """Return the heads with the largest power of the source `earlier`, of those for which it is significant."""
    heads, summary = trace.heads["all"], trace.ordinary.summary
    power, share = heads.power["earlier"], heads.share["earlier"]
    value = np.where(np.asarray(power.low) > 0, power.value, -np.inf)
    value[np.array(summary.layer_ids) == summary.layer_ids[0]] = -np.inf  # the first layer reads no earlier one
    order = [divmod(int(at), value.shape[1]) for at in np.argsort(-value, axis=None, kind="stable")[:MAX_READERS]]
    found = [(c, h) for c, h in order if np.isfinite(value[c, h])]
    return tuple(Reader(*_labels(summary, c, h), power[c, h], share[c, h]) for c, h in found)


def _edges(
    study: LendingStudy, writers: Sequence[tuple[int, int]], readers: Sequence[Reader], layer_ids: Sequence[int]
) -> Iterator[Edge]:
    """Yield the edges from every writer to every reader of a later layer."""
    for w, writer in enumerate(writers):
        for r, reader in enumerate(readers):
            if reader.layer > layer_ids[writer[0]]:

                def of_reader(by_head: Array, at: tuple[int, int] = (reader.call, reader.head)) -> Array:
                    return np.asarray(by_head[at])

                removed, share = study.removed(frozenset([writer]), of=of_reader)
                yield Edge(w, r, removed.estimate, share.estimate)


def require_branches(study: LendingStudy, trace: Trace) -> None:
    """Raise a CheckError unless lending in no head and in all heads gives the branches A and B of the trace.

    Products of single heads are compared within rounding, which is large in narrow dtypes and in some kernels of
    quantised weights, and P within MAX_MISMATCH.
    """
    data, subject = trace.branches.data, study.passes.subject
    dtype = study.passes.rounding_dtype()
    totals = {NO_HEAD: data["total_a"].where(data["pairs"]), study.passes.every_head: component(data, "total")}
    change = study.removed(study.passes.every_head)[0]
    defined = float(np.asarray(change.interval[0])) > 0
    for heads, total in totals.items():
        x = total.transpose("prompt", "layer", "head", "query", "offset").values
        expected = products_of(x[:, None], study.weight, study.passes.plan)[LEADING][0]
        gap = np.nanmax(np.abs(study.by_head(heads) - expected)) / np.nanmax(np.abs(expected))
        of_power = unbiased(later_power(study.by_head(heads)) - later_power(expected), change.n)
        share = abs(float(of_power / change.value)) if defined else 0.0
        for got, bound in ((gap, max(AGREE.of(dtype), AGREE.float32)), (share, MAX_MISMATCH)):
            if not got <= bound:
                raise CheckError(
                    "lending by head disagrees with the branches of the trace", where=subject.identity.name,
                    got=f"{got:.1e}, relative", expected=f"at most {bound:.1e}",
                    remedy="please report it: results for this model would be wrong" if dtype == subject.dtype
                    else "measure the unquantised weights: kernels of quantised layers round activations too much here",
                )  # fmt: skip
