"""One subject on the bench of a study: the same prompts under many edits, each measured once and kept.

Everything is paired: every condition reads the same prompts, and all intervals come from the same resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from posleak.axes import LAYER
from posleak.edits import parse_edits
from posleak.inputs import Prompts, prepare
from posleak.leakage import TOKENS_AT_ONCE, Bootstrap, Estimate, assemble, batches, measure_chunks
from posleak.leakage.power import Array
from posleak.leakage.summary import Grams
from posleak.models import Subject, available_bytes
from posleak.origin import Origin, alone, origin, projections
from posleak.origin.cosines import pair_cosines
from posleak.origin.fingerprint import written
from posleak.probe import Plan, calibrate, default_plan

ORIGIN_PROMPTS = 8
ORIGIN_TOKENS = 1024
TEXT_CROPS = 64


@dataclass
class Lab:
    """`data(*edits)` is a measurement; `()` is the baseline that all others are compared with."""

    subject: Subject
    length: int = 256
    prompts: int = 16
    seed: int = 0
    bos: str = "auto"
    inputs: str = "random"
    progress: Callable[[str], None] = lambda what: None
    _measured: dict[tuple[str, ...], xr.Dataset] = field(default_factory=dict)
    _grams: dict[tuple[bool, tuple[str, ...]], Grams] = field(default_factory=dict)

    def with_baseline(self, data: xr.Dataset) -> Lab:
        """Itself, with the baseline measured elsewhere on the same prompts."""
        self._measured[()] = data
        return self

    @property
    def has_origin(self) -> bool:
        return "origin" in self.__dict__

    @cached_property
    def plan(self) -> Plan:
        return default_plan(self.length)

    @cached_property
    def tokens(self) -> Prompts:
        return prepare(self.subject, self.inputs, bos=self.bos, length=self.length, seed=self.seed)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The baseline's prompts [B, T]."""
        return self.tokens.batch(range(self.prompts))

    @cached_property
    def layers(self) -> int:
        """Attention calls of one forward pass: those of the baseline, or those that calibration sees."""
        if () in self._measured:
            return int(self._measured[()].sizes[LAYER])
        ids = torch.from_numpy(self.ids[:1]).to(self.subject.device)
        return calibrate(self.subject.model, ids).require(self.subject.identity.name).layers

    @cached_property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap.of(self.prompts, self.seed)

    @cached_property
    def origin(self) -> Origin:
        """Position 0 of the subject, on prompts of its own seed; measured once."""
        self.progress("position 0")
        return origin(
            self.subject, length=self.length, prompts=ORIGIN_PROMPTS, tokens=ORIGIN_TOKENS, seed=self.seed, bos=self.bos
        )

    def text_fingerprint(self) -> Estimate | None:
        """Mean cosine of W_O v_0 between the first tokens of text crops; None without a sink-reading head.

        By closure one-token sequences are enough: what follows cannot change what position 0 becomes.
        """
        readers = self.origin.reading.readers
        crops = prepare(self.subject, "text:stdlib", bos="none", length=16, seed=self.seed)
        firsts = torch.from_numpy(crops.batch(range(TEXT_CROPS))[:, 0])
        values = alone(self.subject.model, firsts).values
        found = projections(self.subject.model, torch.from_numpy(self.ids[:1, :16]).to(self.subject.device))
        wrote = [
            row
            for projection, heads, v in zip(found, readers, values, strict=True)
            if heads.any()
            for row in written(projection, v, np.flatnonzero(heads).tolist())
        ]
        return pair_cosines(wrote, Bootstrap.of(TEXT_CROPS, self.seed))[1] if wrote else None

    def fits_float64(self) -> bool:
        """Is there room for a second copy of the weights in float64?"""
        need = 8 * sum(parameter.numel() for parameter in self.subject.model.parameters())
        return need < 0.5 * available_bytes(self.subject.device)

    def mean(self, x: Array) -> Estimate:
        """The mean of numbers [n], one per prompt or head, with a bootstrap interval over them."""
        return Bootstrap.of(len(x), self.seed).mean(np.asarray(x, dtype=float))

    def data(self, *edits: str) -> xr.Dataset:
        """The parts of all prompts under these edits, measured the first time they are asked for."""
        parsed = parse_edits(edits)
        key = tuple(edit.text for edit in parsed)
        if key not in self._measured:
            layers = self.layers
            self.progress(", ".join(key) or "baseline")
            prompts = self.tokens
            for edit in parsed:
                prompts = edit.prompts(prompts)
            ids = (prompts.batch(at) for at in batches(self.prompts, max(1, TOKENS_AT_ONCE // self.length)))
            chunks = list(measure_chunks(self.subject.model, ids, self.plan, layers=layers, edits=parsed))
            self._measured[key] = assemble(chunks, self.plan)
        return self._measured[key]

    def grams(self, *edits: str, early: bool = False) -> Grams:
        """Gram matrices [L, H, B, B] of a condition."""
        key = early, tuple(edit.text for edit in parse_edits(edits))
        if key not in self._grams:
            self._grams[key] = Grams.of(self.data(*edits), early)
        return self._grams[key]

    def own(self, name: str, *edits: str, early: bool = False, layers: slice = slice(None)) -> Array:
        """One component's Gram matrix [B, B], mean over heads and the chosen layers."""
        return np.nanmean(self.grams(*edits, early=early).own[name][layers], axis=(0, 1))

    def removed(self, name: str, *edits: str, early: bool = False, layers: slice = slice(None)) -> Estimate:
        """1 − power after / power before: how much of a component an edit takes away, paired."""
        ratio = self.bootstrap.ratio(
            self.own(name, *edits, early=early, layers=layers), self.own(name, early=early, layers=layers)
        )
        return Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.n)
