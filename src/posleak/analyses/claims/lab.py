"""What claims are tested with: one subject under many conditions, and the numbers that compare them.

All intervals come from the same prompts, so that conditions are paired.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from posleak.analyses.origin.directions import pair_cosines
from posleak.analyses.origin.fingerprint import written
from posleak.analyses.origin.origin import Origin, origin
from posleak.analyses.origin.projection import projections
from posleak.analyses.origin.states import alone
from posleak.analyses.origin.store import ARRAYS_FILE, ORIGIN_FILE
from posleak.analyses.trace.trace import Trace
from posleak.arrays import Array
from posleak.errors import InputError
from posleak.inputs import prepare
from posleak.leakage import Contrast, Estimate, Jackknife, Sampled, combined
from posleak.models import exclusive
from posleak.runs.conditions import METRICS, Conditions
from posleak.runs.memory import FIRST_USE_BYTES, MemoryPlan, ModelSizes, describe_prompts, require_room
from posleak.runs.spec import parse_bytes

from .finding import ENOUGH, Edited, Kept

ORIGIN_TOKENS = 1024
TEXT_CROPS = 64

CLAIMS_FILE = "claims.json"

METERS = ("all",)
"""What other papers measure: all of it, for the page shows it beside the claims."""

LAW_TOKENS = 64
"""Of each prompt, for laws that hold at any length."""

LATER = slice(1, None)
"""The layers after the first."""


def drawn(edit: str, draws: int) -> list[str]:
    """The texts of an edit that draws something at random, by number; the edit itself if it does not."""
    return [edit] if draws == 1 else [f"{edit}:{draw}" for draw in range(draws)]


@dataclass
class Lab(Conditions):
    """Conditions of one subject, compared."""

    extra_files = (CLAIMS_FILE, ORIGIN_FILE, ARRAYS_FILE)

    @cached_property
    def jackknife(self) -> Jackknife:
        return Jackknife(self.spec.prompts)

    @cached_property
    def trace(self) -> Trace:
        """Where position comes from: the ordinary pass beside the one over a borrowed context."""
        return Trace.of(self)

    @cached_property
    def metrics(self) -> xr.Dataset:
        """The baseline with what other papers measure (METERS), per prompt, beside the arrays of every run.

        A run of its own, on the same prompts: most claims do not need it, and a folder whose baseline was measured
        without it gets it later.
        """
        self.progress(METRICS)
        spec = replace(self.spec, metrics=METERS)
        return self.condition(spec, METRICS, lambda reached: self.progress(f"{METRICS}: {reached.text}")).data

    def metric(self, name: str) -> NDArray[np.float64]:
        """One array of the metrics, (prompt, layer, …); refused where the prompts are too short to have it."""
        if name not in self.metrics:
            raise InputError("the prompts are too short for this metric", got=name, remedy="use a longer --length")
        found: NDArray[np.float64] = self.metrics[name].values
        return found

    @property
    def rotary(self) -> bool:
        """Does the model turn keys by their positions: by its configuration, or by what was read off its keys?"""
        return bool(self.subject.identity.rotary) or "rotation" in self.run().record.motion.layers

    def layers(self, name: str, *edits: str) -> Sampled:
        """One component's power by layer [L], mean over heads."""
        return self.jackknife.inner(np.nanmean(self.run(*edits).products["all"].own[name], axis=1))

    def power(self, name: str, *edits: str, early: bool = False, layers: slice = slice(None)) -> Sampled:
        """One component's power, mean over heads and the chosen layers."""
        sums = self.run(*edits).products["early" if early else "all"].own[name][layers]
        return self.jackknife.inner(np.nanmean(sums, axis=(0, 1)))

    def kept(self, name: str, edit: str, *, early: bool = False, later: bool = False, draws: int = 1) -> Kept:
        """How much of a component's power an edit leaves, paired; `later`: in the layers after the first.

        `draws`: an edit that draws something at random is run so often, as EDIT:0, EDIT:1, …; the mean is taken, and
        its interval has the spread of prompts and that of draws.
        """
        at = LATER if later else slice(None)
        before = self.power(name, early=early, layers=at)
        after = [self.power(name, text, early=early, layers=at) for text in drawn(edit, draws)]
        ratios = [Contrast(power, before).ratio for power in after]
        mean = (combined(lambda *x: sum(x) / draws, *ratios)).estimate
        if draws > 1:
            mean = mean.widened(self.mean(np.array([float(ratio.value) for ratio in ratios])))
        return Kept(name, mean, "early" if early else "all", "after the first" if later else "all")

    def edited(self, edit: str, about: str, *kept: Kept, draws: int = 1) -> Edited:
        """The condition, with mean attention of reference queries to position 0 before and after."""
        conditions = [(), *((text,) for text in drawn(edit, draws))]
        before, *after = (float(self.run(*edits).data["profile"][..., 0].mean()) for edits in conditions)
        return Edited(edit if draws == 1 else f"{edit}, {draws} draws", about, kept, before, sum(after) / draws)

    def mean(self, x: Array) -> Estimate:
        """The mean of numbers [n], one per prompt or head, with an interval over them."""
        return Jackknife(len(x)).mean(np.asarray(x, dtype=float)).estimate

    @property
    def enough(self) -> int:
        """How many prompts a law is tested on that holds for each of them: as many as a verdict needs."""
        return min(self.spec.prompts, ENOUGH)

    @property
    def few(self) -> NDArray[np.int64]:
        """The starts of the baseline's first prompts, for such a law: it holds at any length."""
        return self.ids[: self.enough, :LAW_TOKENS]

    @cached_property
    def origin(self) -> Origin:
        """What is found at position 0, on prompts made with the same seed; measured once."""
        self.progress("position 0")
        return origin(
            self.subject, length=self.spec.length, prompts=self.spec.prompts, tokens=ORIGIN_TOKENS, seed=self.spec.seed,
            bos=self.tokens.policy, probe=False, max_memory=self.max_memory,
        )  # fmt: skip

    def text_fingerprint(self) -> Estimate | None:
        """Mean cosine of W_O v_0 between the first tokens of text crops; None without a sink-reading head.

        By closure one-token sequences are enough: what follows cannot change what position 0 becomes.
        """
        readers, start = self.origin.reading.is_reader, torch.from_numpy(self.ids[:1, :16]).to(self.subject.device)
        crops = prepare(self.subject, "text:stdlib", bos="none", length=16, seed=self.spec.seed)
        firsts = torch.from_numpy(crops.batch(range(TEXT_CROPS))[:, 0])
        with exclusive(self.subject.model):
            values, found = alone(self.subject.model, firsts).values, projections(self.subject.model, start)
            wrote = [
                row
                for projection, heads, v in zip(found, readers, values, strict=True)
                if heads.any()
                for row in written(projection, v, np.flatnonzero(heads).tolist())
            ]
        return pair_cosines(wrote, Jackknife(TEXT_CROPS))[1] if wrote else None

    def require_float64(self, prompts: int) -> None:
        """Refuse where a second copy of the weights, in float64, does not fit, with the states of so many prompts."""
        sizes, tokens = ModelSizes.of(self.subject), prompts * min(self.spec.length, LAW_TOKENS)
        states = 4 * sizes.states(tokens, 8)  # of two passes, and rolled
        wide = 8 * sizes.parameters + sizes.forward(tokens, 8) + states
        require_room(
            self.subject, MemoryPlan(wide, 0, FIRST_USE_BYTES), parse_bytes(self.max_memory), what="a copy in float64",
            of=f"the weights and {describe_prompts(prompts, tokens // prompts)} at all depths",
            remedy="use a shorter --length or a smaller model",
        )  # fmt: skip
