"""How far a run is inside a batch, layer by layer, for whoever watches it: one batch may be all of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from posleak.probe import Call


@dataclass(frozen=True)
class Progress:
    """`layer` of `layers` attention calls are done on these prompts, of so many in all."""

    prompts: range
    of: int
    layer: int
    layers: int

    @property
    def done(self) -> float:
        """In prompts: those of earlier batches, and this batch's as far as it has come."""
        return self.prompts.start + len(self.prompts) * self.layer / self.layers

    @property
    def text(self) -> str:
        first, last = self.prompts[0], self.prompts[-1]
        which = f"prompts {first}–{last}" if last > first else f"prompt {first}"
        return f"{which} of {self.of}, layer {self.layer} of {self.layers}"


OnProgress = Callable[[Progress], None]


@dataclass
class LayerCounter:
    """An observer that counts attention calls. Every pass makes `layers` of them."""

    on_progress: OnProgress
    batches: Sequence[range]
    layers: int
    calls: int = 0

    def observe(self, call: Call, out: Tensor) -> None:
        batch, layer = divmod(self.calls, self.layers)
        self.calls += 1
        if batch < len(self.batches):
            self.on_progress(Progress(self.batches[batch], self.batches[-1].stop, layer + 1, self.layers))
