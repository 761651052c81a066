"""A run as the page shows it: numbers and words, and nothing that still has to be computed."""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from posleak.analyses.claims.catalogue import ClaimResult
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.origin.origin import Origin
from posleak.analyses.origin.store import StoredOrigin
from posleak.analyses.trace.trace import SOURCES, Ladder, Trace
from posleak.arrays import Array
from posleak.axes import HEAD, LEFT, PROMPT, layer_coordinates, layer_names
from posleak.edits import unreadable
from posleak.leakage import Estimate, tidy
from posleak.leakage.profile import KEYS_AFTER_ORIGIN, sink_width
from posleak.leakage.sampled import LEVEL
from posleak.leakage.summary import Decomposition, LeakageDecomposition
from posleak.papers import ALL, POSITION, by_paper
from posleak.runs.record import Record
from posleak.runs.run import Run
from posleak.runs.spec import GIVEN
from posleak.show import numbers, words

from .curves import parts
from .gather import ShownRun
from .related import RelatedMetrics

MOST_CURVES = 640
"""Most heads on one page that have curves, so that it stays below 10 MB: those with most leakage are chosen."""

POSITIONS = 16
"""The sink profile is shown for so many first positions, and for more where the origin is wide."""


@dataclass(frozen=True)
class Layers:
    """By layer: powers and stabilisation of all and of early queries, and attention to position 0."""

    numbers: dict[str, LeakageDecomposition]
    sink_attention: Estimate


@dataclass(frozen=True)
class SinkProfile:
    """Attention of late queries to the first positions [L, first]; the width of the sink by layer [L]; the origin's."""

    attention: Estimate
    width: Int64[np.ndarray, "L"]
    origin: int


@dataclass(frozen=True)
class Traced:
    """Where position comes from: shares of the model and numbers by layer, of all and of early queries.

    ladder      what is left where a context was lent up to layer K only; None: not measured
    attention   to the origin, by layer, in both passes
    """

    lead: str
    answer: dict[str, dict[str, Estimate]]
    layers: dict[str, Decomposition]
    ladder: Ladder | None
    attention: dict[str, Estimate]
    remainder: float

    @classmethod
    def of(cls, trace: Trace) -> Traced:
        answer = {queries: numbers.share for queries, numbers in trace.model.items()}
        return cls(words.lead(answer["all"]), answer, trace.layers, trace.ladder, trace.attention, trace.remainder)


@dataclass(frozen=True)
class Pictures:
    """What the page's script draws of position 0, as base64: the portrait [J, token, 2], cosines of fingerprints."""

    tokens: list[str]
    picture: str
    depths: int
    cosine: str | None
    cosine_size: int
    readers: list[list[int]]


@dataclass(frozen=True)
class View:
    """One run. `heads.numbers` are the rows of heads.parquet, unrounded, and the sources of every head after a trace;
    `claims`: by the headings of their papers; `edited`: those that compare a condition; `others`: what others measure,
    None without metrics."""

    label: str
    record: Record
    facts: list[str]
    prompts: int
    partial: bool
    lead: str
    answer: dict[str, dict[str, Estimate]]
    trace: Traced | None
    layers: Layers
    profile: SinkProfile
    parts: tuple[str, ...]
    heads: dict[str, Any]
    curves: dict[str, Any]
    claims: dict[str, list[ClaimResult]]
    edited: tuple[ClaimResult, ...]
    origin: Origin | None
    pictures: Pictures | None
    doctor: Diagnosis | None
    others: RelatedMetrics | None
    remainder: float
    command: str
    notes: list[str]
    level: float = LEVEL

    @property
    def length(self) -> int:
        return self.record.spec.length

    @property
    def names(self) -> tuple[str, ...]:
        """What the layers are called."""
        return layer_names(self.record.calibration.numbers)

    @property
    def places(self) -> Array:
        """Where the layers stand on an axis."""
        return np.array(layer_coordinates(self.record.calibration.numbers))

    @property
    def stays(self) -> str:
        """Layers in which the origin stays where it is."""
        return ", ".join(self.names[call] for call in self.record.motion.stays)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of what position comes from; none without a trace."""
        return () if self.trace is None else SOURCES


def view(shown: ShownRun, most_curves: int = MOST_CURVES) -> View:
    run, claims = shown.run, shown.claims or ()
    answer = {queries: numbers.share for queries, numbers in run.summary.model.items()}
    return View(
        label=shown.label, record=run.record, facts=_facts(run), prompts=run.prompts, partial=shown.partial,
        lead=words.lead(answer["all"]), answer=answer, trace=None if shown.trace is None else Traced.of(shown.trace),
        layers=Layers(run.summary.layers, run.summary.layer_sink_attention), profile=_profile(run),
        parts=parts(run.data), heads=_heads(run, shown.trace),
        curves=_curves(shown, most_curves), claims=by_paper(claims),
        edited=tuple(result for result in claims if result.edited is not None),
        origin=None if shown.origin is None else shown.origin.record,
        pictures=None if shown.origin is None else _pictures(shown.origin), doctor=shown.doctor,
        others=RelatedMetrics.of(run, shown.trace) if shown.metrics else None,
        remainder=run.remainder, command=command(shown),
        notes=[*_borrowed(run), *run.record.warnings, *shown.notes],
    )  # fmt: skip


def _facts(run: Run) -> list[str]:
    record = run.record
    first, size, *rest = record.model_facts
    edits = [f"edits: {', '.join(record.spec.edit_texts)}"] if record.spec.edits else []
    return [
        f"{first}, {size}", *rest, f"n = {run.prompts} prompts of {record.spec.length} tokens",
        f"inputs: {record.spec.inputs}", f"position 0: {record.inputs.first_token}", f"seed {record.spec.seed}", *edits,
    ]  # fmt: skip


def _borrowed(run: Run) -> list[str]:
    """Says what the numbers of a run under a borrowed context are."""
    if LEFT not in run.summary.model["all"].power:
        return []
    left, total = (numbers.estimate(run.summary.model["all"].power[name]) for name in (LEFT, "total"))
    return [
        "this run has a borrowed context: its numbers are of rows without the lent keys, whose power is "
        f"{total} nats²; with them {left} nats² are left"
    ]


def _profile(run: Run) -> SinkProfile:
    origin, ordinary = run.record.plan.origin, run.data["ordinary"].mean((PROMPT, HEAD)).values
    found = run.summary.layer_profile
    return SinkProfile(found[:, : max(POSITIONS, origin + KEYS_AFTER_ORIGIN)], sink_width(found.value, ordinary), origin)


def _heads(run: Run, trace: Trace | None) -> dict[str, Any]:
    """heads.parquet as columns: `numbers` is float64 [column, layer, head, (value, low, high)]."""
    layers, heads = run.data.sizes["layer"], run.data.sizes["head"]
    columns: dict[tuple[str, str, str | None], Any] = {}
    for row in tidy(run.summary):
        key = row["queries"], row["quantity"], row["component"]
        cells = columns.setdefault(key, np.full((layers, heads, 3), np.nan))
        cells[row["call"], row["head"]] = row["value"], row["low"], row["high"]
    for queries, found in () if trace is None else trace.heads.items():
        for name in SOURCES:
            for quantity, cell in (("power", found.power[name]), ("share", found.share[name])):
                columns[queries, quantity, name] = np.stack([cell.value, cell.low, cell.high], axis=-1)
    there = np.isfinite(run.data["profile"].values[0, ..., 0]).sum(-1)
    return {
        "shape": [layers, heads], "heads": there.tolist(), "columns": [list(key) for key in columns],
        "numbers": packed(np.stack(list(columns.values())), "<f8"),
    }  # fmt: skip


def _curves(shown: ShownRun, most: int) -> dict[str, Any]:
    """Curves of the heads with most leakage, float32; `at[layer][head]` is where in the arrays a head is, or −1."""
    found, run = shown.curves, shown.run
    total = run.summary.heads["all"].power["total"].value
    there = np.isfinite(run.data["profile"].values[0, ..., 0])
    order = np.argsort(-np.where(np.isfinite(total), total, -np.inf), axis=None, kind="stable")
    chosen = np.sort(np.array([k for k in order.tolist() if there.flat[k]][:most], dtype=np.int64))
    at = np.full(total.size, -1)
    at[chosen] = np.arange(len(chosen))

    def pack(estimate: Estimate) -> str:
        cells = np.stack([estimate.value, estimate.low, estimate.high], axis=-2)  # [L, H, 3, X]
        return packed(cells.reshape(total.size, *cells.shape[2:])[chosen], "<f4")

    return {
        "queries": found.queries, "offsets": found.offsets, "at": at.reshape(total.shape).tolist(),
        "mean": {name: pack(estimate) for name, estimate in found.mean.items()},
        "power": {name: pack(estimate) for name, estimate in found.power.items()},
        "attention": pack(found.attention), "early": pack(found.early), "late": pack(found.late),
    }  # fmt: skip


def packed(array: Any, dtype: str) -> str:
    """Base64 of little-endian numbers, C order."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def _pictures(stored: StoredOrigin) -> Pictures:
    arrays = stored.arrays
    names = [str(name or f"token {token}") for name, token in zip(arrays["spelled"].values, arrays["token"].values)]
    cosine, readers = arrays["cosine"].values, arrays["reader_head"].values.tolist()
    matrices = np.concatenate([cosine.mean(0, keepdims=True), cosine]) if readers else None
    return Pictures(
        tokens=names, picture=packed(np.moveaxis(arrays["picture"].values, 1, 0), "<f4"),
        depths=int(arrays.sizes["depth"]), cosine=None if matrices is None else packed(matrices, "<f4"),
        cosine_size=int(arrays.sizes["token_a"]), readers=readers,
    )  # fmt: skip


def command(shown: ShownRun) -> str:
    """The command line that measures the same again; a call from Python, where no command line could name it."""
    spec = shown.run.record.spec
    verb = "claims" if shown.claims is not None else "measure" if shown.trace is None else "trace"
    if spec.inputs == GIVEN or unreadable(spec.edits):
        return _call(verb, shown)
    line = ["posleak", verb, shown.run.name, "--inputs", spec.inputs, "--bos", str(spec.bos)]
    line += ["--length", str(spec.length), "--prompts", str(spec.prompts), "--seed", str(spec.seed)]
    line += ["--origin", str(spec.origin)] if verb != "claims" else []
    if verb == "claims" and (paper := _paper(shown)) != POSITION:
        line += ["--paper", paper]
    if shown.trace is not None and shown.trace.steps and verb == "trace":
        line += ["--by-layer"]
    if verb == "measure":
        line += ["--batch", str(spec.batch), "--density", str(spec.density)]
        line += [word for edit in spec.edit_texts for word in ("--edit", edit)]
        line += ["--metrics", ",".join(spec.metrics)] if spec.metrics else []
    return shlex.join(line)


def _paper(shown: ShownRun) -> str:
    """The paper whose claims were tested, or `all` of several. Claims that name none are tested with every paper."""
    found = {result.paper for result in shown.claims or () if result.paper is not None}
    return ALL if len(found) > 1 else found.pop() if found else POSITION


def _call(verb: str, shown: ShownRun) -> str:
    """What was given as objects is named by what it is: prompts, and edits without a text."""
    run, spec = shown.run, shown.run.record.spec
    own = unreadable(spec.edits)
    inputs = f"{run.record.inputs.source}_that_were_given" if spec.inputs == GIVEN else repr(spec.inputs)
    edits = ", ".join(edit.text if edit in own else repr(edit.text) for edit in spec.edits)
    options = {"length": spec.length, "prompts": spec.prompts, "seed": spec.seed, "bos": repr(spec.bos)}
    if verb == "claims":
        options |= {"paper": repr(_paper(shown))}
    else:
        options |= {"origin": spec.origin}
    options |= {"batch": spec.batch, "density": spec.density, "edits": f"[{edits}]"} if verb == "measure" else {}
    options |= {"metrics": repr(",".join(spec.metrics))} if verb == "measure" and spec.metrics else {}
    return f"posleak.{verb}({run.name!r}, {inputs}, {', '.join(f'{name}={value}' for name, value in options.items())})"
