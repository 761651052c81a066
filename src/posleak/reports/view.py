"""A run as reports show it: the results of its folder, and what page, figures and tables derive from them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Int64

from posleak.analyses.circuit.circuit import Circuit
from posleak.analyses.claims.catalogue import ClaimResult, Edited
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.origin.origin import StoredOrigin
from posleak.analyses.trace.trace import Trace
from posleak.arrays import Array
from posleak.axes import EARLY, HEAD, LAYER, LEFT, PROMPT
from posleak.edits import unreadable
from posleak.leakage import Estimate, Jackknife, Summary, component
from posleak.leakage.power import by_cell, sum_products
from posleak.leakage.summary import KEYS_AFTER_ORIGIN, LEADING, sink_width
from posleak.papers import ALL, POSITION, named_papers
from posleak.runs.record import Record
from posleak.runs.run import Run
from posleak.runs.spec import GIVEN
from posleak.show.numbers import estimate
from posleak.show.terminal import parts_of

from .related import RelatedMetrics

POSITIONS = 16
"""Number of leading positions in the sink profile; wide origins have more."""

HeadColumn = tuple[str, str, str | None]
"""(queries, quantity, component) of a number that every head has."""


@dataclass(frozen=True)
class SinkProfile:
    """Attention of late queries to the first positions [L, first], the width of each layer's sink [L], and m."""

    attention: Estimate
    width: Int64[np.ndarray, "L"]
    origin: int


@dataclass(frozen=True)
class Curves:
    """Curves of every head, with intervals over prompts.

    by_query     by (quantity, component), at the positions `queries` [L, H, Q]
                 mean: expectation over prompts, averaged over offsets; parts add up to the total
                 power: unbiased power, weighted by attention as in the summary; nothing cancels
                 attention_0: attention a_i0 to position 0, without a component
    by_offset    mean logit at `offsets` [L, H, D], over the early queries (before EARLY) and over the reference queries
    """

    queries: list[int]
    offsets: list[int]
    by_query: dict[tuple[str, str | None], Estimate]
    by_offset: dict[str, Estimate]


@dataclass(frozen=True)
class RunView:
    """A run with the other results of its folder.

    Everything derived from them is computed on first use and kept: a page and its assets share one RunView.

    trace, claims, origin, doctor, circuit   None if the folder does not have them; a circuit has the same trace
    notes          results that could not be used, with the reason
    show_metrics   False: ignore metrics of other papers
    """

    run: Run
    label: str
    trace: Trace | None = None
    claims: tuple[ClaimResult, ...] | None = None
    origin: StoredOrigin | None = None
    doctor: Diagnosis | None = None
    notes: tuple[str, ...] = ()
    show_metrics: bool = True
    circuit: Circuit | None = None

    @property
    def alone(self) -> RunView:
        """The view without any other result and without metrics; the same object if it has none."""
        metrics = self.run.metrics if self.show_metrics else None
        others = (self.trace, self.claims, self.origin, self.doctor, self.circuit, metrics)
        if all(result is None for result in others):
            return self
        return RunView(self.run, self.label, notes=self.notes, show_metrics=False)

    @cached_property
    def curves(self) -> Curves:
        """Curves of every head."""
        return curves(self.run.data, self.parts)

    @cached_property
    def related(self) -> RelatedMetrics | None:
        """Metrics of other papers and their rank agreement with the leakage; None without metrics."""
        return RelatedMetrics.of(self.run, self.trace) if self.show_metrics else None

    @cached_property
    def head_columns(self) -> dict[HeadColumn, Estimate]:
        """Numbers by layer and head [L, H] in the leading norm: those of heads.parquet, and of a trace by source."""
        columns: dict[HeadColumn, Estimate] = {}
        for queries, decomposition in self.summary.heads.items():
            for number in decomposition.labelled():
                if number.labels["norm"] == LEADING:
                    columns[queries, number.labels["quantity"], number.labels["component"]] = number.estimate
        columns["reference", "sink_attention", None] = self.summary.sink_attention
        for queries, sources in () if self.trace is None else self.trace.heads.items():
            for name in self.by_source:
                columns[queries, "power", name] = sources.power[name]
                columns[queries, "share", name] = sources.share[name]
        return columns

    @cached_property
    def profile(self) -> SinkProfile:
        """The sink profile by layer, means over heads."""
        origin, ordinary = self.record.plan.origin, self.run.data["ordinary"].mean((PROMPT, HEAD)).values
        profile = self.summary.layer_profile
        first = max(POSITIONS, origin + KEYS_AFTER_ORIGIN)
        return SinkProfile(profile[:, :first], sink_width(profile.value, ordinary), origin)

    @property
    def summary(self) -> Summary:
        return self.run.summary

    @property
    def record(self) -> Record:
        return self.run.record

    @property
    def partial(self) -> bool:
        """Whether the run is unfinished."""
        return self.run.prompts < self.record.spec.prompts

    @property
    def title(self) -> str:
        """Title of printed figures."""
        return f"{self.label}, n = {self.run.prompts}, {self.record.spec.length} tokens"

    @property
    def parts(self) -> tuple[str, ...]:
        """Mask, drift and sink, and scaling if the model scales its queries by position."""
        return parts_of(self.summary.model["all"])

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that the model has; empty without a trace."""
        return () if self.trace is None else self.trace.sources

    @property
    def by_source(self) -> tuple[str, ...]:
        """Names of the sources, and what is left; empty without a trace."""
        return (*self.sources, LEFT) if self.sources else ()

    @cached_property
    def existing(self) -> Array:
        """Which heads exist [L, H]: layers may have different numbers of them."""
        return np.asarray(np.isfinite(self.run.data["profile"].values[0, ..., 0]))

    @property
    def edited(self) -> list[tuple[ClaimResult, Edited]]:
        """Claims that compare an edit with the baseline, and their comparisons."""
        return [(claim, claim.edited) for claim in self.claims or () if claim.edited is not None]

    @property
    def first_tokens(self) -> list[str]:
        """Spellings of the first tokens in the portrait; the reference token is the first of them."""
        if self.origin is None:
            return []
        spelled, token = (self.origin.arrays[name].values for name in ("spelled", "token"))
        return [str(name or f"token {number}") for name, number in zip(spelled, token)]

    @property
    def readers(self) -> list[list[int]]:
        """[call, head] of every sink-reading head."""
        return [] if self.origin is None else self.origin.arrays["reader_head"].values.tolist()

    @property
    def warnings(self) -> list[str]:
        """Everything that a reader should know about the numbers."""
        power, borrowed = self.summary.model["all"].power, list[str]()
        if LEFT in power:
            borrowed.append(
                f"this run has a borrowed context: the total power is {estimate(power['total'])} nats² in rows "
                f"without the borrowed keys, which are shown here, and {estimate(power[LEFT])} nats² with them"
            )
        return [*borrowed, *self.record.warnings, *self.notes]

    @property
    def command(self) -> str:
        """The command line that repeats the measurement.

        If prompts or edits were given as objects, it is a call in Python with placeholders for them.
        """
        run, spec = self.run, self.record.spec
        others = {"claims": self.claims, "circuit": self.circuit, "trace": self.trace}
        verb = next((name for name, result in others.items() if result is not None), "measure")
        # claims without a paper are tested with every paper
        papers = {claim.paper for claim in self.claims or () if claim.paper is not None}
        paper = ALL if papers == set(named_papers(ALL)) else ",".join(sorted(papers)) or POSITION
        options: dict[str, Any] = {"length": spec.length, "prompts": spec.prompts, "seed": spec.seed, "bos": spec.bos}
        options |= {"paper": paper} if verb == "claims" else {"origin": spec.origin}
        if verb == "circuit" and self.circuit is not None:  # half of its prompts are those of the run
            ranking = self.circuit.writing.attribution
            options |= {"prompts": 2 * spec.prompts, "rank": ranking.method}
            options |= {"nodes": ranking.nodes} if ranking.nodes else {}
        options |= {"batch": spec.batch, "density": spec.density} if verb == "measure" else {}
        options |= {"metrics": ",".join(spec.metrics)} if verb == "measure" and spec.metrics else {}
        trace = self.trace if verb == "trace" else None
        long = trace is not None and any(text.endswith(":long") for text in trace.branches.record.spec.edit_texts)
        options |= {"donor": "long"} if long else {}
        edits = () if verb == "claims" else spec.edits
        by_layer = trace is not None and bool(trace.steps)
        own = unreadable(spec.edits)
        if spec.inputs == GIVEN or own:
            inputs = f"{run.record.inputs.source}_that_were_given" if spec.inputs == GIVEN else repr(spec.inputs)
            texts = ", ".join(edit.text if edit in own else repr(edit.text) for edit in edits)
            arguments = [f"{name}={value!r}" for name, value in options.items()] + [f"edits=[{texts}]"] * bool(edits)
            return f"posleak.{verb}({run.name!r}, {inputs}, {', '.join(arguments + ['by_layer=True'] * by_layer)})"
        line = ["posleak", verb, run.name, "--inputs", spec.inputs]
        line += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        line += [word for edit in edits for word in ("--edit", edit.text)]
        return shlex.join(line + ["--by-layer"] * by_layer)


def run_facts(run: Run) -> list[str]:
    """Return model, prompts, inputs and edits of a run as short phrases."""
    record, spec = run.record, run.record.spec
    first, size, *rest = record.model_facts
    edits = [f"edits: {', '.join(spec.edit_texts)}"] if spec.edits else []
    return [
        f"{first}, {size}", *rest, f"n = {run.prompts} prompts of {spec.length} tokens", f"inputs: {spec.inputs}",
        f"position 0: {record.inputs.first_token}", f"seed {spec.seed}", *edits,
    ]  # fmt: skip


def curves(data: xr.Dataset, parts: tuple[str, ...]) -> Curves:
    """Compute the curves of all heads, one layer at a time to limit memory."""
    layers = [_layer_curves(data.isel({LAYER: [layer]}), parts) for layer in range(data.sizes[LAYER])]
    by_query, by_offset = (
        {key: Estimate.concatenate([layer[key] for layer in some]) for key in some[0]} for some in zip(*layers)
    )
    return Curves(data["query"].values.tolist(), data["offset"].values.tolist(), by_query, by_offset)


def _layer_curves(layer: xr.Dataset, parts: tuple[str, ...]) -> tuple[dict[Any, Estimate], dict[Any, Estimate]]:
    """Return `by_query` and `by_offset` of one layer.

    Logits of queries that have the key at offset δ: s_i(δ) = drift + renormalisation + logit.
    """
    jackknife = Jackknife(layer.sizes["prompt"])
    x = {name: component(layer, name).values for name in ("total", *parts)}  # [B, 1, H, Q, D]
    by_query: dict[Any, Estimate] = {("attention_0", None): jackknife.mean(layer["attention_0"].values).estimate}
    by_query |= {("mean", name): jackknife.mean(nan_mean(x[name], -1)).estimate for name in x}
    root = np.nan_to_num(np.sqrt(layer["weight"].values.mean(0)))[:, :, None]  # [1, H, 1, D]
    exists = np.isfinite(x["total"][0])
    for name, values in x.items():
        weighted = by_cell(values * root, exists)
        sums = np.where(exists.any(-1, keepdims=True), sum_products(weighted, weighted), np.nan)
        by_query["power", name] = jackknife.inner(sums).estimate
    s = (layer["drift"] + layer["renormalisation"] + layer["logit"]).where(layer["pairs"])
    s = s.transpose("prompt", "layer", "head", "query", "offset").sel(query=layer["query"] < EARLY)
    early, reference = jackknife.mean(nan_mean(s.values, -2)), jackknife.mean(layer["logit"].values)
    return by_query, {"early": early.estimate, "reference": reference.estimate}


def nan_mean(x: Array, axis: int) -> Array:
    """Return the mean of the finite values; NaN if there are none."""
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(finite, x, 0.0).sum(axis) / finite.sum(axis))
