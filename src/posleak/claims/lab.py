"""One subject under many conditions: the same prompts under different edits, each an ordinary run, measured once.

Everything is paired: every condition reads the same prompts, and all intervals come from the same resamples. With a
folder, conditions are kept below it as runs, and are read back when the work is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from posleak.arrays import Array
from posleak.edits import parse_edits
from posleak.inputs import Prompts, prepare
from posleak.leakage import Bootstrap, Estimate, Sampled
from posleak.models import Subject, available_bytes
from posleak.origin import Origin, alone, origin, projections
from posleak.origin.cosines import pair_cosines
from posleak.origin.fingerprint import written
from posleak.probe import Plan
from posleak.runs import Measurement, MeasureSpec, Run
from posleak.runs.folder import RECORD, remove_run
from posleak.runs.measure import Progress
from posleak.runs.record import slug

from .finding import Edited, Kept

ORIGIN_PROMPTS = 8
ORIGIN_TOKENS = 1024
TEXT_CROPS = 64

CONDITIONS = "conditions"
"""Where a folder keeps the runs of its conditions."""

LATER = slice(1, None)
"""The layers after the first."""

Edits = tuple[str, ...]


@dataclass
class Lab:
    """`run(*edits)` is a measurement; `run()` is the baseline that all others are compared with."""

    subject: Subject
    spec: MeasureSpec
    folder: Path | None = None
    fresh: bool = False
    max_memory: str | int | None = None
    progress: Callable[[str], None] = lambda what: None
    _runs: dict[Edits, Run] = field(default_factory=dict)

    @cached_property
    def baseline(self) -> Measurement:
        """The measurement without edits, made ready."""
        return Measurement.of(self.subject, self.spec, max_memory=self.max_memory)

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def tokens(self) -> Prompts:
        return self.baseline.base

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The baseline's prompts [B, T]."""
        return self.tokens.batch(range(self.spec.prompts))

    @cached_property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap.of(self.spec.prompts, self.spec.seed)

    def run(self, *edits: str) -> Run:
        """The run under these edits: from memory, from its folder, or measured now."""
        key = tuple(edit.text for edit in parse_edits(edits))
        if key not in self._runs:
            name = ", ".join(key) or "baseline"
            self.progress(name)
            self._runs[key] = self._measured(key, lambda done, of: self.progress(f"{name}: {done} of {of} prompts"))
        return self._runs[key]

    def _measured(self, key: Edits, progress: Progress) -> Run:
        """Conditions share the baseline's prompts and calibration; warnings are issued once, for the baseline."""
        if not key:
            return self.baseline.run_with_warnings(self.folder, fresh=self.fresh, progress=progress)
        spec = replace(self.spec, edits=key)
        ready = Measurement.of(self.subject, spec, max_memory=self.max_memory, base=self.tokens)
        known = self.run().record.calibration
        return ready.run(self._place(key), fresh=self.fresh, calibration=known, progress=progress)

    def _place(self, key: Edits) -> Path | None:
        return None if self.folder is None else self.folder / CONDITIONS / slug("+".join(key))

    def remove_conditions(self) -> None:
        """Remove the runs of conditions that the folder has from earlier, and no other files."""
        for record in sorted((self.folder / CONDITIONS).glob(f"*/{RECORD}")) if self.folder is not None else ():
            remove_run(record.parent)
            if not any(record.parent.iterdir()):
                record.parent.rmdir()

    def layers(self, name: str, *edits: str) -> Sampled:
        """One component's power by layer [L], mean over heads."""
        return self.bootstrap.inner(np.nanmean(self.run(*edits).grams["all"].own[name], axis=1))

    def power(self, name: str, *edits: str, early: bool = False, layers: slice = slice(None)) -> Sampled:
        """One component's power, mean over heads and the chosen layers."""
        gram = self.run(*edits).grams["early" if early else "all"].own[name][layers]
        return self.bootstrap.inner(np.nanmean(gram, axis=(0, 1)))

    def kept(self, name: str, edit: str, *, early: bool = False, later: bool = False) -> Kept:
        """How much of a component's power an edit leaves, paired; `later`: in the layers after the first."""
        at = LATER if later else slice(None)
        after, before = (self.power(name, *edits, early=early, layers=at) for edits in ((edit,), ()))
        layers = "after the first" if later else "all"
        return Kept(name, after.over(before).estimate, "early" if early else "all", layers)

    def edited(self, edit: str, about: str, *kept: Kept) -> Edited:
        """The condition, with mean attention of reference queries to position 0 before and after."""
        before, after = (float(self.run(*edits).data["sink_attention"].mean()) for edits in ((), (edit,)))
        return Edited(edit, about, kept, before, after)

    def mean(self, x: Array) -> Estimate:
        """The mean of numbers [n], one per prompt or head, with a bootstrap interval over them."""
        return Bootstrap.of(len(x), self.spec.seed).mean(np.asarray(x, dtype=float)).estimate

    @cached_property
    def origin(self) -> Origin:
        """What is found at position 0, on prompts made with the same seed; measured once."""
        self.progress("position 0")
        return origin(
            self.subject, length=self.spec.length, prompts=ORIGIN_PROMPTS, tokens=ORIGIN_TOKENS, seed=self.spec.seed,
            bos=self.spec.bos,
        )  # fmt: skip

    def text_fingerprint(self) -> Estimate | None:
        """Mean cosine of W_O v_0 between the first tokens of text crops; None without a sink-reading head.

        By closure one-token sequences are enough: what follows cannot change what position 0 becomes.
        """
        readers = self.origin.reading.readers
        crops = prepare(self.subject, "text:stdlib", bos="none", length=16, seed=self.spec.seed)
        firsts = torch.from_numpy(crops.batch(range(TEXT_CROPS))[:, 0])
        values = alone(self.subject.model, firsts).values
        found = projections(self.subject.model, torch.from_numpy(self.ids[:1, :16]).to(self.subject.device))
        wrote = [
            row
            for projection, heads, v in zip(found, readers, values, strict=True)
            if heads.any()
            for row in written(projection, v, np.flatnonzero(heads).tolist())
        ]
        return pair_cosines(wrote, Bootstrap.of(TEXT_CROPS, self.spec.seed))[1] if wrote else None

    def fits_float64(self) -> bool:
        """Is there room for a second copy of the weights in float64?"""
        need = 8 * sum(parameter.numel() for parameter in self.subject.model.parameters())
        return need < 0.5 * available_bytes(self.subject.device)
