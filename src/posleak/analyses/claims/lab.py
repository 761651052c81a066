"""The measurements that claims are tested with: one model under many conditions on the same prompts.

Conditions are compared with the baseline prompt by prompt (paired), and their powers are weighted by the baseline's
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from posleak.analyses.circuit.circuit import CIRCUIT_FILE, Circuit, circuit_of, stored_ranking
from posleak.analyses.origin.fingerprint import FINGERPRINT_TOKENS, projections, written_by_readers
from posleak.analyses.origin.origin import ARRAYS_FILE, ORIGIN_FILE, Origin, origin
from posleak.analyses.origin.portrait import joined_cosines, pair_cosine
from posleak.analyses.origin.states import alone
from posleak.analyses.trace.trace import Trace
from posleak.arrays import Array
from posleak.defaults import ORIGIN_TOKENS
from posleak.errors import BusyError, InputError, RunError, StorageError
from posleak.inputs import prepare
from posleak.leakage import Contrast, Estimate, Jackknife, Sampled
from posleak.leakage.summary import EVEN, LEADING, Decomposition, Products
from posleak.models import exclusive
from posleak.runs.conditions import METRICS, Conditions
from posleak.runs.folder import has_record
from posleak.runs.memory import (
    FIRST_USE_BYTES,
    MemoryPlan,
    ModelSizes,
    describe_prompts,
    require_room,
    within_memory,
)
from posleak.runs.record import clear_run
from posleak.runs.run import Run
from posleak.runs.short_prompts import PROSE
from posleak.runs.spec import parse_bytes

from .catalogue import ENOUGH, Edited, Finding, Kept, Test

T = TypeVar("T")

TEXT_CROPS = 64

CLAIMS_FILE = "claims.json"

METERS = ("all",)
"""Metrics that are measured: all, because the report shows them next to the claims."""

LAW_TOKENS = 32
"""Tokens of each prompt that are used for laws which hold at any length."""

LATER = slice(1, None)
"""The layers after the first."""


@dataclass
class Lab(Conditions):
    """The conditions of one model, with the comparisons that the tests of claims need.

    norm        norm of the powers and shares that a test reads
    reads_norm  whether the current test has read any
    """

    extra_files = (CLAIMS_FILE, ORIGIN_FILE, ARRAYS_FILE, CIRCUIT_FILE)

    norm: str = LEADING
    reads_norm: bool = False
    _products: dict[tuple[str, ...], dict[str, Products]] = field(default_factory=dict)

    def tested(self, test: Test) -> Finding:
        """Run a test. One that reads powers or shares is run in both norms: the detail `even` is the second effect."""
        self.reads_norm = False
        finding = test(self)
        if not self.reads_norm or finding.reason is not None:
            return finding
        self.norm = EVEN
        try:
            even = test(self)
        finally:
            self.norm = LEADING
        return replace(finding, details={**finding.details, EVEN: even.estimate})

    def in_norm(self, norms: Mapping[str, T]) -> T:
        """Return the entry for the current norm."""
        self.reads_norm = True
        return norms[self.norm]

    def products(self, *edits: str, early: bool = False) -> Products:
        """Return the products of a condition in the current norm, weighted by the baseline's attention."""
        run, baseline = self.run(*edits), self.run()
        texts = run.record.spec.edit_texts
        if texts not in self._products:
            self._products[texts] = baseline.products if run is baseline else run.weighted_by(baseline)
        return self.in_norm(self._products[texts]["early" if early else "all"].norms)

    @cached_property
    def jackknife(self) -> Jackknife:
        return Jackknife(self.spec.prompts)

    @cached_property
    def trace(self) -> Trace:
        """The trace: the baseline, and the run of the three branches after a donor."""
        return Trace.of(self)

    @cached_property
    def circuit(self) -> Circuit:
        """The circuit on the prompts of the baseline; heads are ranked on as many further prompts."""
        return circuit_of(self, *stored_ranking(self.folder))

    @property
    def sources(self) -> Decomposition:
        """Powers and shares of the sources, of the whole model and all queries, in the current norm."""
        return self.in_norm(self.trace.model["all"].norms)

    @property
    def branches(self) -> str:
        """The edit of the branches. The arrays of its run are those of branch B, in which all layers lend keys."""
        (edit,) = self.trace.branches.record.spec.edit_texts
        return edit

    @cached_property
    def metrics(self) -> xr.Dataset:
        """The arrays of the baseline with all metrics (METERS), per prompt.

        If the baseline was measured without metrics, they are measured in a run of their own on the same prompts.
        """
        baseline, spec = self.run(), replace(self.spec, metrics=METERS)
        if baseline.record.spec.metrics == spec.metrics:
            return baseline.data
        return self.condition(spec, METRICS).data

    def measure_baseline(self, *, metrics: bool) -> Run:
        """Return the baseline; with `metrics`, a new baseline is measured together with METERS.

        If the metrics fail or do not fit into memory, the baseline is measured alone, so that claims without metrics
        can still be tested.
        """
        alone = self.baseline
        is_new = not self._runs and (self.folder is None or not has_record(self.folder))
        if metrics and is_new:
            spec = replace(self.spec, metrics=METERS)
            with suppress(InputError):  # no room for them
                resolved = within_memory(spec, alone.subject, parse_bytes(self.max_memory))
                if resolved.batch == alone.spec.batch:  # a smaller batch changes the last bits
                    self.baseline = replace(alone, requested=spec, spec=resolved)
        try:
            return self.run()
        except (RunError, StorageError, BusyError, Warning):
            raise
        except Exception:
            if self.baseline is alone:
                raise
            self.baseline = alone
            if self.folder is not None:
                clear_run(self.folder)
            return self.run()

    def metric(self, name: str) -> NDArray[np.float64]:
        """Return one metric as an array (prompt, layer, …); raise InputError if the prompts are too short for it."""
        if name not in self.metrics:
            raise InputError("the prompts are too short for this metric", got=name, remedy="use a longer --length")
        values: NDArray[np.float64] = self.metrics[name].values
        return values

    @property
    def rotary(self) -> bool:
        """Whether the model has rotary positions, by its configuration or by its keys."""
        return bool(self.subject.identity.rotary) or "rotation" in self.run().record.motion.layers

    def layers(self, name: str, *edits: str) -> Sampled:
        """Return the power of a component by layer [L], mean over heads."""
        return self.jackknife.inner(np.nanmean(self.products(*edits).own[name], axis=1))

    def power(self, name: str, *edits: str, early: bool = False, layers: slice = slice(None)) -> Sampled:
        """Return the power of a component, mean over heads and the chosen layers."""
        sums = self.products(*edits, early=early).own[name][layers]
        return self.jackknife.inner(np.nanmean(sums, axis=(0, 1)))

    def kept(self, name: str, edit: str, *, early: bool = False, later: bool = False) -> Kept:
        """Return the share of a component's power that remains under an edit, paired.

        early   use early queries only;  later: use the layers after the first only
        """
        at = LATER if later else slice(None)
        after, before = (self.power(name, *edits, early=early, layers=at) for edits in ((edit,), ()))
        ratio = Contrast(after, before).ratio.estimate
        return Kept(name, ratio, "early" if early else "all", "after the first" if later else "all")

    def edited(self, edit: str, about: str, *kept: Kept) -> Edited:
        """Describe the condition, with mean attention of reference queries to position 0 before and after."""
        before, after = (float(self.run(*edits).data["profile"][..., 0].mean()) for edits in ((), (edit,)))
        return Edited(edit, about, kept, before, after)

    def mean(self, x: Array) -> Estimate:
        """Return the mean over the first axis of x (prompts, heads or tokens), with a jackknife interval."""
        return Jackknife(len(x)).mean(np.asarray(x, dtype=float)).estimate

    @property
    def enough(self) -> int:
        """Number of prompts for a law that holds for each prompt: as many as a verdict needs."""
        return min(self.spec.prompts, ENOUGH)

    @property
    def few(self) -> NDArray[np.int64]:
        """The first LAW_TOKENS tokens of the first `enough` prompts of the baseline."""
        return self.ids[: self.enough, :LAW_TOKENS]

    @cached_property
    def origin(self) -> Origin:
        """The analysis of position 0, on prompts with the same seed.

        No claim reads the portrait: it has all first tokens only if it is stored.
        """
        self.progress("position 0")
        tokens = FINGERPRINT_TOKENS if self.folder is None else ORIGIN_TOKENS
        return origin(
            self.subject, length=self.spec.length, prompts=self.spec.prompts, tokens=tokens, seed=self.spec.seed,
            bos=self.tokens.policy, probe=False, max_memory=self.max_memory,
        )  # fmt: skip

    def text_fingerprint(self) -> Estimate | None:
        """Return the mean cosine of W_O v_0 between the first tokens of text crops; None without a sink-reading head.

        By closure, one-token sequences are enough.
        """
        readers, jackknife = self.origin.reading.is_reader, Jackknife(TEXT_CROPS)
        start = torch.from_numpy(self.ids[:1, :16]).to(self.subject.device)
        crops = prepare(self.subject, PROSE, bos="none", length=16, seed=self.spec.seed)
        firsts = torch.from_numpy(crops.batch(range(TEXT_CROPS))[:, 0])
        with exclusive(self.subject.model):
            values, outputs = alone(self.subject.model, firsts).values, projections(self.subject.model, start)
            written = written_by_readers(outputs, readers, values)
            cosines = [pair_cosine(head, jackknife) for _, heads in written for head in heads]
        return joined_cosines(cosines, jackknife)[1] if cosines else None

    def require_float64(self, prompts: int) -> None:
        """Raise InputError if a float64 copy of the weights and the states of the prompts do not fit into memory."""
        sizes, tokens = ModelSizes.of(self.subject), prompts * min(self.spec.length, LAW_TOKENS)
        states = 4 * sizes.states(tokens, 8)  # of two passes, and rolled
        wide = 8 * sizes.parameters + sizes.forward(tokens, 8) + states
        require_room(
            self.subject, MemoryPlan(wide, 0, FIRST_USE_BYTES), parse_bytes(self.max_memory), what="a copy in float64",
            of=f"the weights and {describe_prompts(prompts, tokens // prompts)} at all depths",
            remedy="use a shorter --length or a smaller model",
        )  # fmt: skip
