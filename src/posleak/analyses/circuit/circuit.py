"""The circuit of absolute position: the heads that write it, the direction that carries it, the heads that read it.

One half of the prompts ranks the heads (ranking.py). The other half evaluates the ranking: the trace, interventions on
sets of heads (writing.py), and the directions of the residual stream (carrier.py, erasure.py), which are fitted on
separate prompts. A run folder holds circuit.json next to the trace; until it is written, steps/ holds the finished
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from posleak.analyses.trace.trace import Trace, traced
from posleak.arrays import Array
from posleak.defaults import CIRCUIT_LENGTH, CIRCUIT_PROMPTS, NODES, TOKENS_AT_ONCE
from posleak.edits import parse_edits
from posleak.edits.context import Branches
from posleak.errors import InputError, RunError, UnsupportedError, did_you_mean, warn
from posleak.files import Sealed
from posleak.inputs import InputFacts, Inputs, is_source_name, repeat_notes
from posleak.leakage import Estimate
from posleak.models import AnyModel
from posleak.models.parallel import require_whole_model
from posleak.models.quantisation import require_convertible
from posleak.probe.interface import computes_own_attention
from posleak.probe.kernels import CUT_OFF_REMEDY
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.conditions import Conditions
from posleak.runs.folder import STEPS, clear_steps, finished_step
from posleak.runs.memory import MemoryPlan, describe_prompts, fit_batch
from posleak.runs.software import measurement_hash
from posleak.runs.spec import parse_bytes, require_between
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .carrier import Carrier, fit_of, significant_depths
from .erasure import Erased, erasure, loss_prompts
from .lending import LendingPasses, LendingStudy, circuit_plan
from .ranking import GRADIENTS, INTERVENE, METHODS, Ranking, rank, rank_by_intervention
from .sentences import sentences_of
from .writing import Writing, evaluate

CIRCUIT_FILE = "circuit.json"

HALVES = "one half ranks the heads, the other half evaluates the ranking"

TOLERANCE = 0.1
"""Largest difference between the sum of the attributions and the truth, as a share, without a warning."""


@dataclass(frozen=True)
class CircuitParts:
    """The results in circuit.json.

    carrier       None if the model does not have one residual stream; `warnings` has the reason
    erasure       empty without a carrier;  loss_inputs: the prompts of its losses, None without a carrier
    warnings      warnings about these results
    """

    writing: Writing
    carrier: Carrier | None
    erasure: tuple[Erased, ...]
    loss_inputs: InputFacts | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class CircuitFile:
    """circuit.json: the digest of everything that determines the results, and the results."""

    digest: str
    parts: CircuitParts


SEALED = Sealed("posleak circuit", 1, CircuitFile, "delete it; `posleak circuit` makes it again from the stored runs")


@dataclass(frozen=True, repr=False)
class Circuit(CircuitParts):
    """The circuit of one model: `writing` (writers, readers, edges), `carrier`, `erasure`, and the `trace` below them.

    Estimates use the prompts of the trace, except `Erased.loss_change`, which uses crops of a text. Neither the ranking
    that selects the writers nor the fit of the directions uses the prompts of the trace.
    """

    trace: Trace

    @classmethod
    def of(cls, trace: Trace, parts: CircuitParts) -> Circuit:
        """Return the circuit of these parts above a trace."""
        return cls(**vars(parts), trace=trace)

    @classmethod
    def load(cls, path: str | Path, trace: Trace | None = None) -> Circuit | None:
        """Load what `posleak circuit` wrote into a folder; None if it has no circuit.

        trace: the folder's trace, if it is loaded already.
        """
        folder = Path(path)
        if not (folder / CIRCUIT_FILE).is_file():
            return None
        file, loaded = SEALED.read(folder / CIRCUIT_FILE), trace or Trace.load(folder)
        if loaded is None:
            return None
        ranking = file.parts.writing.attribution
        if file.digest != circuit_digest(loaded, ranking.method, ranking.nodes):
            raise RunError(
                "the circuit belongs to another measurement", where=str(folder / CIRCUIT_FILE),
                remedy="run `posleak circuit` again with --fresh",
            )  # fmt: skip
        return cls.of(loaded, file.parts)

    def __repr__(self) -> str:
        return f"Circuit({self.trace.ordinary.name}: {' '.join(self.sentences)})"

    def _repr_html_(self) -> str:
        """Return the sentences as a list, for notebooks."""
        lines = "".join(f"<li>{escape(visible(sentence))}</li>" for sentence in self.sentences)
        return f"<div><b>{escape(visible(self.trace.ordinary.name))}</b>: the circuit of position<ul>{lines}</ul></div>"

    @cached_property
    def leading(self) -> tuple[int, Estimate] | None:
        """The depth in the middle of the model, and the share of the positional variance along one direction there."""
        if self.carrier is None:
            return None
        depth = self.carrier.middle
        return depth, self.carrier.leading[depth]

    def erased(self, method: str, k: int) -> Erased | None:
        """Return the row of one erasure at every depth."""
        return next((row for row in self.erasure if (row.method, row.k, row.depths) == (method, k, "")), None)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The result in sentences, with intervals."""
        return tuple(sentences_of(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak circuit --json` (docs/json.md)."""
        writing, header = self.writing, self.trace.as_dict()
        keys = (
            "model", "identity", "positions", "inputs", "length", "prompts", "seed", "norm", "edits", "definitions",
            "donor", "origin", "remainder", "calibration", "run",
        )  # fmt: skip
        document: dict[str, Any] = plain(
            {
                **{name: header[name] for name in keys}, "heads": writing.heads, "sentences": self.sentences,
                "writers": writing.writers, "reached": writing.reached,
                "removed": [row.as_row() for row in writing.removed], "attribution": writing.attribution,
                "carrier": None if self.carrier is None else self.carrier.as_list(),
                "curve_positions": None if self.carrier is None else self.carrier.positions,
                "fit": None if self.carrier is None else self.carrier.fit,
                "erasure": self.erasure, "loss_inputs": self.loss_inputs, "readers": writing.readers,
                "edges": writing.edges,
                "units": {
                    "removed": "1", "alone": "1", "earlier": "nats²", "edges": "nats²", "loss_change": "nats per token",
                },
                "warnings": [*header["warnings"], *self.warnings],
            }
        )  # fmt: skip
        return document


def circuit_digest(trace: Trace, method: str, nodes: int) -> str:
    """Return the hash of everything that determines a circuit. nodes: of the integral of the gradients, else 0"""
    return measurement_hash(trace.ordinary.record.digest, trace.branches.record.digest, method, nodes)


class CircuitConditions(Conditions):
    """The conditions of a circuit."""

    extra_files = (CIRCUIT_FILE,)


@checked
def circuit(
    subject: AnyModel,
    inputs: Inputs = "random",
    *,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    origin: int = DEFAULT_ORIGIN,
    rank: str = GRADIENTS,
    nodes: int = NODES,
    out: str | Path | None = None,
    root: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Circuit:
    """Find the heads that write position, the direction that carries it, and the heads that read it.

    subject     a Subject, a transformers model, or anything that `load` accepts
    inputs      source of the prompts, or your own prompts, as in `measure`
    length      tokens per prompt (default 128); your own prompts are truncated to `length`, as in `measure`
    prompts     number of prompts (default 48, or all of your own): one half ranks the heads, the other half evaluates
                the ranking
    seed        random seed for the prompts
    bos         token at position 0, as in `measure`
    origin      number of leading tokens treated as the origin
    rank        `gradients` (integrated gradients), or `intervene`: let one head at a time attend to lent keys, for
                small models and for weights that have no gradients
    nodes       number of integration nodes, for `gradients`
    out         folder for the trace and the circuit; finished passes in it are reused
    root        parent of the folder if `out` is not given, as in `measure`
    fresh       discard results in the folder and measure again
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.circuit("smollm2-135m").sentences`
    """
    if rank not in METHODS:
        raise InputError("unknown method of ranking", where="--rank", got=rank, remedy=did_you_mean(rank, METHODS))
    require_between("nodes", nodes, 1, 64)
    named = isinstance(inputs, str) and is_source_name(inputs)
    total = CIRCUIT_PROMPTS if named and prompts is None else prompts
    if total is not None:
        require_between("prompts", total, 4, why=HALVES)
    conditions = CircuitConditions.of(
        subject, inputs, length=length, prompts=total, default_length=CIRCUIT_LENGTH, seed=seed, bos=bos, origin=origin,
        prefix="circuit-", out=out, root=root, fresh=fresh, max_memory=max_memory, progress=progress,
    )  # fmt: skip
    require_between("prompts", count := conditions.spec.prompts, 4, why=HALVES)
    if count % 2:
        warn(f"{count} prompts cannot be split into two equal halves: the last one is not used")
    conditions = replace(conditions, spec=replace(conditions.spec, prompts=count // 2))
    with conditions.writing():
        return circuit_of(conditions, rank, nodes)


def circuit_of(conditions: Conditions, method: str = GRADIENTS, nodes: int = NODES) -> Circuit:
    """Return the circuit on the prompts of these conditions; the heads are ranked on as many further prompts.

    Call it inside `conditions.writing()`.
    """
    require_whole_model(conditions.subject.model, "a circuit")
    count, available = conditions.spec.prompts, conditions.tokens.available
    if available is not None and available < 2 * count:
        raise InputError(
            "the ranking and its evaluation need different prompts, but there are too few",
            got=f"{available} prompts", expected=f"{2 * count}",
            remedy="use a source of prompts, such as random or text:PATH",
        )  # fmt: skip
    trace, folder = traced(conditions), conditions.folder
    _require_later_layers(trace)
    nodes = nodes if method == GRADIENTS else 0
    digest = circuit_digest(trace, method, nodes)
    if folder is not None and (folder / CIRCUIT_FILE).is_file():
        stored = SEALED.read(folder / CIRCUIT_FILE)
        if stored.digest == digest:
            return Circuit.of(trace, stored.parts)
    study = _study(conditions, trace, digest)
    writing = _writing(conditions, study, trace, method, nodes)
    carrier, rows, loss_inputs, notes = _carried(conditions, trace)
    warnings = [*_repeats(conditions), *_doubts(writing), *notes]
    for note in warnings:
        warn(note)
    parts = CircuitParts(writing, carrier, rows, loss_inputs, tuple(warnings))
    if folder is not None:
        SEALED.write(folder / CIRCUIT_FILE, CircuitFile(digest, parts))
        clear_steps(folder)
    return Circuit.of(trace, parts)


def stored_ranking(folder: Path | None) -> tuple[str, int]:
    """Return method and nodes of the circuit in a folder, so that further work does not replace it; else defaults."""
    if folder is None or not (folder / CIRCUIT_FILE).is_file():
        return GRADIENTS, NODES
    ranking = SEALED.read(folder / CIRCUIT_FILE).parts.writing.attribution
    return ranking.method, ranking.nodes


def _carried(
    conditions: Conditions, trace: Trace
) -> tuple[Carrier | None, tuple[Erased, ...], InputFacts | None, list[str]]:  # fmt: skip
    """Return the carrier, its erasure, the prompts of the losses, and notes about what is left out."""
    try:
        fit = fit_of(conditions)
        carrier, depths = Carrier.measure(conditions, fit), significant_depths(conditions, fit)
    except (UnsupportedError, InputError) as error:
        return None, (), None, [f"the direction that carries position is left out: {error}"]
    text = loss_prompts(conditions)
    rows, notes = erasure(conditions, trace, text, depths if len(depths) < carrier.last else ())
    return carrier, rows, text.describe(), notes


def _doubts(writing: Writing) -> Iterator[str]:
    """Yield warnings about the ranking and its controls."""
    ranking, chosen = writing.attribution, writing.chosen
    if chosen is None:
        return
    if ranking.method == GRADIENTS and not abs(ranking.error) <= TOLERANCE:
        yield (
            f"the attributions sum to {ranking.sum:.3g} nats², but the exact difference is {ranking.truth:.3g}: the "
            "order of the heads is less reliable. The reported shares are measured by intervention and do not depend "
            "on this sum; try more --prompts or --nodes"
        )
    if chosen.leading.random is None:
        yield (f"the {chosen.k} writers have no random control: in some layer, fewer other heads are left than writers")


def _repeats(conditions: Conditions) -> Iterator[str]:
    """Yield warnings about prompts of both halves together, unless the half of the trace has one itself."""
    count, prompts = conditions.spec.prompts, conditions.tokens
    if not any(repeat_notes(prompts, count)):
        yield from repeat_notes(prompts, 2 * count)


def _require_later_layers(trace: Trace) -> None:
    calls, name = len(trace.ordinary.record.calibration.heads), trace.ordinary.name
    if calls < 2:
        raise UnsupportedError(
            "no earlier layer passes position on: the model has one attention layer", where=name,
            remedy="use `posleak trace`, which measures the sources of its leakage",
        )  # fmt: skip


def _within_memory(conditions: Conditions, nodes: int, *, apart: bool) -> tuple[int, bool]:
    """Return the tokens per pass, and whether the whole graph of a pass is kept; raise an InputError if nothing fits.

    The graph is kept where there is room: the gradients are the same to the bit.
    """
    subject, spec, limit = conditions.baseline.subject, conditions.spec, parse_bytes(conditions.max_memory)
    request = describe_prompts(spec.prompts, spec.length) + (f" with gradients at {nodes} nodes" if nodes else "")
    remedy = "a shorter --length, fewer --prompts" + (", fewer --nodes or --rank intervene" if nodes else "")
    recomputes = nodes > 0 and not computes_own_attention(subject.model)  # tracing cannot compute a layer again

    def tokens(keep_graph: bool) -> int:
        def plan(tokens: int) -> MemoryPlan:
            return circuit_plan(
                subject, spec.plan, spec.prompts, nodes, tokens=tokens, apart=apart, keep_graph=keep_graph
            )

        return fit_batch(
            subject, plan, TOKENS_AT_ONCE, limit, what="the circuit", of=lambda _: request, remedy=remedy,
            fixed=recomputes and keep_graph,
        )  # fmt: skip

    if recomputes:
        with suppress(InputError):
            return tokens(True), True
    return tokens(not recomputes), not recomputes


def _study(conditions: Conditions, trace: Trace, digest: str) -> LendingStudy:
    """Return the study of sets of heads on the prompts of the trace."""
    spec, record = conditions.spec, trace.ordinary.record
    (edit,) = (edit for edit in trace.branches.record.spec.edits if isinstance(edit, Branches))
    passes = LendingPasses(
        conditions.baseline.subject, spec.plan, conditions.tokens, range(spec.prompts), record.calibration.heads,
        edit.apart,
    )  # fmt: skip
    steps = None if conditions.folder is None else conditions.folder / STEPS
    return LendingStudy(passes, trace.ordinary.data["weight"], steps, digest, conditions.progress)


def _writing(conditions: Conditions, study: LendingStudy, trace: Trace, method: str, nodes: int) -> Writing:
    """Rank the heads on both halves of the prompts, and evaluate the ranking of the second half on the first one."""
    count = len(study.passes.indices)
    tokens, keep_graph = _within_memory(conditions, nodes, apart=study.passes.apart)
    study = replace(study, passes=replace(study.passes, tokens=tokens))
    narrow = method == GRADIENTS and study.passes.subject.dtype.itemsize < 4  # gradients are computed in float32
    edits = parse_edits("dtype=float32") if narrow else ()
    for edit in edits:
        require_convertible(study.passes.subject.model, edit.weights_dtype, "--rank gradients", CUT_OFF_REMEDY)

    def ranked(indices: range) -> Ranking:
        half = replace(study, passes=replace(study.passes, indices=indices, edits=edits))
        return rank_by_intervention(half) if method == INTERVENE else _rank_or_load(half, nodes, keep_graph)

    ranking, other = ranked(range(count, 2 * count)), ranked(range(count))
    return evaluate(study, ranking, other, trace, conditions.spec.seed)


def _rank_or_load(study: LendingStudy, nodes: int, keep_graph: bool) -> Ranking:
    """Rank the heads by gradients on the prompts of a study, or load the ranking."""
    passes = study.passes

    def ranked() -> dict[str, Array]:
        ranking = rank(passes, study.progress, nodes=nodes, keep_graph=keep_graph)
        return {"heads": ranking.heads, "truth": np.array(ranking.truth)}

    arrays = finished_step(study.folder, [f"the ranking of {study.digest}", f"prompts {passes.indices}"], ranked)
    return Ranking(GRADIENTS, arrays["heads"], float(arrays["truth"]), len(passes.indices), nodes)
