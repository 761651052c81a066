"""The circuit of absolute position: the heads that write it, the direction that carries it, the heads that read it.

One half of the prompts ranks the heads (ranking.py); the other half is evidence: the trace, interventions on sets of
heads (writing.py), and the directions of the residual stream (carrier.py, erasure.py), which are fitted on further
prompts. A run folder holds circuit.json next to the trace; until it is written, steps/ holds the finished passes.
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
from posleak.defaults import CIRCUIT_LENGTH, CIRCUIT_PROMPTS, NODES
from posleak.edits import parse_edits
from posleak.edits.context import Branches
from posleak.edits.direction import ERASE
from posleak.errors import InputError, RunError, UnsupportedError, did_you_mean, warn
from posleak.files import Sealed
from posleak.inputs import Inputs, is_source_name
from posleak.leakage import Estimate
from posleak.models import AnyModel
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.conditions import STEPS, Conditions, clear_steps
from posleak.runs.folder import read_arrays, write_arrays
from posleak.runs.memory import describe_prompts, require_room
from posleak.runs.software import measurement_hash
from posleak.runs.spec import parse_bytes, require_between
from posleak.show.numbers import estimate
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .carrier import Carrier, fit_of
from .erasure import Erased, erasure
from .lending import LendingPasses, LendingStudy, circuit_plan
from .ranking import GRADIENTS, INTERVENE, METHODS, Ranking, rank, rank_by_intervention
from .writing import Writing, evidence

CIRCUIT_FILE = "circuit.json"

TOLERANCE = 0.1
"""Largest difference between the sum of the attributions and the truth, as a share, without a warning."""


@dataclass(frozen=True)
class CircuitParts:
    """What circuit.json holds besides the trace.

    rank, nodes   method of the ranking, and nodes of its integral;  warnings: about these results
    carrier       None, with the reason in `warnings`, if the layers exchange more than one stream
    """

    writing: Writing
    carrier: Carrier | None
    erasure: tuple[Erased, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class CircuitFile:
    """circuit.json: the digest of everything that determines the results, and the results."""

    digest: str
    parts: CircuitParts


SEALED = Sealed("posleak circuit", 1, CircuitFile, "delete it; `posleak circuit` makes it again from the stored runs")


@dataclass(frozen=True, repr=False)
class Circuit:
    """The circuit of one model: `writing` (writers, readers, edges), `carrier`, `erasure`, and the `trace` below them.

    All estimates are over the prompts of the trace, which neither the ranking nor the fit of the directions has read.
    """

    trace: Trace
    writing: Writing
    carrier: Carrier | None
    erasure: tuple[Erased, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace, parts: CircuitParts) -> Circuit:
        """Return the circuit of these parts above a trace."""
        return cls(trace, parts.writing, parts.carrier, parts.erasure, parts.warnings)

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
        depth = (len(self.carrier.dimensions) - 1) // 2
        return depth, self.carrier.leading[depth]

    def erased(self, method: str, k: int) -> Erased | None:
        """Return the row of one erasure at every depth."""
        return next((row for row in self.erasure if row.edit == f"position={method}:{k}"), None)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The result in sentences, with intervals."""
        return tuple(_sentences(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak circuit --json` (docs/json.md)."""
        writing, header = self.writing, self.trace.as_dict()
        keys = (
            "model", "identity", "positions", "inputs", "length", "prompts", "seed", "norm", "definitions", "donor",
            "origin", "remainder", "calibration", "run",
        )  # fmt: skip
        document: dict[str, Any] = plain(
            {
                **{name: header[name] for name in keys}, "heads": writing.heads, "sentences": self.sentences,
                "writers": writing.writers, "reached": writing.reached,
                "removed": [row.as_row() for row in writing.removed], "attribution": writing.attribution,
                "carrier": None if self.carrier is None else self.carrier.as_list(),
                "curve_positions": None if self.carrier is None else self.carrier.positions,
                "fit": None if self.carrier is None else self.carrier.fit,
                "erasure": self.erasure, "readers": writing.readers, "edges": writing.edges,
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


def _sentences(circuit: Circuit) -> Iterator[str]:
    writing, chosen = circuit.writing, circuit.writing.chosen
    if chosen is None:
        yield "The position that earlier layers pass on is not significantly above 0, so that it has no writers."
        return
    effect, k = chosen.leading, chosen.k
    heads = f"{k} of {writing.heads} heads"
    verb = "account" if k > 1 else "accounts"
    first = f"{heads} {verb} for {estimate(effect.removed, 'share')} of the position that earlier layers pass on"
    first += f", {k} random heads of the same layers for {estimate(effect.random, 'share')}" if effect.random else ""
    yield f"{first} (n = {effect.removed.n})."
    even = chosen.even.removed
    if even.low > effect.removed.high or even.high < effect.removed.low:
        yield f"Evenly weighted, they {verb} for {estimate(even, 'share')}."
    if not writing.reached:
        yield f"No set of up to {k} heads removes 90% of it."
    if effect.others is not None:
        yield f"All other heads together account for {estimate(effect.others, 'share')}: {_redundancy(effect.others)}."
    if circuit.leading is not None:
        depth, leading = circuit.leading
        carried = "no significant share" if np.isnan(leading.value) else estimate(leading, "share")
        yield f"At depth {depth}, one direction of the residual stream carries {carried} of the positional variance."
    if (row := circuit.erased("erase", 1)) is not None:
        random = "" if row.random is None else f", erasing a random one {estimate(row.random, 'share')}"
        loss = f"; the loss on {row.loss_inputs} changes by {estimate(row.loss_change)} nats per token"
        removed = f"{estimate(row.earlier_removed, 'share')} of what earlier layers pass on"
        yield f"Erasing that direction at every depth removes {removed}{random}{loss}."
    for row in circuit.erasure:
        if row.method == ERASE and "@" in row.edit:
            removed, loss = estimate(row.earlier_removed, "share"), estimate(row.loss_change)
            where = "only at depths with a significant positional share"
            yield f"Erasing it {where} (`{row.edit}`) removes {removed}; the loss changes by {loss} nats per token."


def _redundancy(others: Estimate) -> str:
    if others.low > 0.5:
        return "other heads can take over"
    return "other heads cannot take over" if others.high < 0.5 else "whether other heads can take over is not decided"


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
    prompts     number of prompts (default 48, or all of your own): one half ranks the heads, the other half is evidence
    seed        random seed for the prompts
    bos         token at position 0, as in `measure`
    origin      number of leading tokens treated as the origin
    rank        `gradients` (integrated gradients), or `intervene`: lend in every head alone, for small models and for
                weights that have no gradients
    nodes       nodes of the integral
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
        require_between("prompts", total, 4, why="one half ranks the heads, the other half is evidence")
    conditions = CircuitConditions.of(
        subject, inputs, length=length, prompts=total, default_length=CIRCUIT_LENGTH, seed=seed, bos=bos, origin=origin,
        prefix="circuit-", out=out, root=root, fresh=fresh, max_memory=max_memory, progress=progress,
    )  # fmt: skip
    require_between("prompts", conditions.spec.prompts, 4, why="one half ranks the heads, the other half is evidence")
    conditions.spec = replace(conditions.spec, prompts=conditions.spec.prompts // 2)
    conditions.__dict__.pop("baseline", None)  # that of all prompts, if it named the folder
    with conditions.writing():
        return circuit_of(conditions, rank, nodes)


def circuit_of(conditions: Conditions, method: str = GRADIENTS, nodes: int = NODES) -> Circuit:
    """Return the circuit on the prompts of these conditions; the heads are ranked on as many further prompts."""
    count, available = conditions.spec.prompts, conditions.tokens.available
    if available is not None and available < 2 * count:
        raise InputError(
            "too few prompts: the heads are ranked on others than those of the evidence", got=f"{available} prompts",
            expected=f"{2 * count}", remedy="use a source of prompts, such as random or text:PATH",
        )  # fmt: skip
    trace, folder = traced(conditions), conditions.folder
    _require_later_layers(trace)
    nodes = nodes if method == GRADIENTS else 0
    digest = circuit_digest(trace, method, nodes)
    if folder is not None and (folder / CIRCUIT_FILE).is_file():
        stored = SEALED.read(folder / CIRCUIT_FILE)
        if stored.digest == digest:
            return Circuit.of(trace, stored.parts)
    whole = _fitting(conditions, nodes)
    study = _study(conditions, trace, digest)
    warnings = list[str]()
    writing = _writing(conditions, study, trace, method, nodes, whole)
    if method == GRADIENTS and not abs(writing.attribution.error) <= TOLERANCE:
        warnings.append(
            f"the attributions add up to {writing.attribution.sum:.3g} nats² instead of "
            f"{writing.attribution.truth:.3g}: the order of the heads is less reliable. What is claimed was measured "
            "by intervention; more prompts or --nodes bring the sum closer"
        )
    carrier: Carrier | None = None
    rows: tuple[Erased, ...] = ()
    try:
        carrier = Carrier.measure(conditions, fit_of(conditions))
        some = carrier.significant
        rows = erasure(conditions, trace, some if len(some) < len(carrier.dimensions) - 1 else ())
    except UnsupportedError as error:
        warnings.append(f"the direction that carries position is left out: {error}")
    for note in warnings:
        warn(note)
    parts = CircuitParts(writing, carrier, rows, tuple(warnings))
    if folder is not None:
        SEALED.write(folder / CIRCUIT_FILE, CircuitFile(digest, parts))
        clear_steps(folder)
    return Circuit.of(trace, parts)


def _require_later_layers(trace: Trace) -> None:
    calls, name = len(trace.ordinary.record.calibration.heads), trace.ordinary.name
    if calls < 2:
        raise UnsupportedError(
            "no earlier layer passes position on: the model has one attention layer", where=name,
            remedy="use `posleak trace`, which measures the sources of its leakage",
        )  # fmt: skip


def _fitting(conditions: Conditions, nodes: int) -> bool:
    """Return whether the whole graph of a pass fits into memory; raise an InputError if nothing does."""
    subject, spec, limit = conditions.baseline.subject, conditions.spec, parse_bytes(conditions.max_memory)
    plans = {whole: circuit_plan(subject, spec.plan, spec.prompts, nodes, whole=whole) for whole in (True, False)}
    what = f"{describe_prompts(spec.prompts, spec.length)}" + (f" with gradients at {nodes} nodes" if nodes else "")
    remedy = "a shorter --length, fewer --prompts" + (", fewer --nodes or --rank intervene" if nodes else "")
    with suppress(InputError):
        require_room(subject, plans[True], limit, what="the circuit", of=what, remedy=remedy)
        return True
    require_room(subject, plans[False], limit, what="the circuit", of=what, remedy=f"use {remedy}")
    return False


def _study(conditions: Conditions, trace: Trace, digest: str) -> LendingStudy:
    """Return the study of sets of heads on the prompts of the trace."""
    spec, record = conditions.spec, trace.ordinary.record
    (edit,) = (edit for edit in trace.branches.record.spec.edits if isinstance(edit, Branches))
    passes = LendingPasses(
        conditions.baseline.subject, spec.plan, conditions.tokens, range(spec.prompts), record.calibration.heads,
        trace.ordinary.summary.layer_ids, edit.apart,
    )  # fmt: skip
    steps = None if conditions.folder is None else conditions.folder / STEPS
    return LendingStudy(passes, trace.ordinary.data["weight"], steps, digest, conditions.progress)


def _writing(
    conditions: Conditions, study: LendingStudy, trace: Trace, method: str, nodes: int, whole: bool
) -> Writing:  # fmt: skip
    count = len(study.passes.indices)
    narrow = method == GRADIENTS and study.passes.subject.dtype.itemsize < 4  # gradients are computed in float32
    edits = parse_edits("dtype=float32") if narrow else ()
    ranking, other = (
        _ranked(replace(study, passes=replace(study.passes, indices=indices, edits=edits)), method, nodes, whole)
        for indices in (range(count, 2 * count), range(count))
    )
    return evidence(study, ranking, other, trace, conditions.spec.seed)


def _ranked(study: LendingStudy, method: str, nodes: int, whole: bool) -> Ranking:
    """Rank the heads on the prompts of a study, or load the ranking. whole: keep the whole graph of a pass"""
    if method == INTERVENE:
        return rank_by_intervention(study)
    passes = study.passes
    seal = [f"the ranking of {study.digest}", f"prompts {passes.indices}"]
    path = None if study.folder is None else study.folder / f"ranking{passes.indices.start:06d}.npz"
    if path is not None and (stored := read_arrays(path, seal)) is not None:
        return Ranking(GRADIENTS, stored["attribution"], float(stored["truth"]), len(passes.indices), nodes)
    ranking = rank(passes, study.progress, nodes=nodes, keep_graph=whole)
    if path is not None:
        write_arrays(path, seal, {"attribution": ranking.attribution, "truth": np.array(ranking.truth)})
    return ranking
