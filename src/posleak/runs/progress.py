"""Progress of a run, attention call by attention call: a run may consist of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from posleak.probe import Call


@dataclass(frozen=True)
class Progress:
    """`layer` of `layers` attention calls are finished for the prompts of the current batch, of `of` prompts in all."""

    prompts: range
    of: int
    layer: int
    layers: int

    @property
    def done(self) -> float:
        """Return the number of finished prompts; those of the current batch count in proportion to its layers."""
        return self.prompts.start + len(self.prompts) * self.layer / self.layers

    @property
    def text(self) -> str:
        """Return, for example, `prompts 0–7 of 16, layer 3 of 30`."""
        first, last = self.prompts[0], self.prompts[-1]
        which = f"prompts {first}–{last}" if last > first else f"prompt {first}"
        return f"{which} of {self.of}, layer {self.layer} of {self.layers}"


OnProgress = Callable[[Progress], None]


@dataclass
class LayerCounter:
    """An observer that counts attention calls and reports progress. Every pass makes `layers` of them."""

    on_progress: OnProgress
    batches: Sequence[range]
    layers: int
    calls: int = 0

    def observe(self, call: Call, out: Tensor) -> None:
        batch, layer = divmod(self.calls, self.layers)
        self.calls += 1
        if batch < len(self.batches):
            self.on_progress(Progress(self.batches[batch], self.batches[-1].stop, layer + 1, self.layers))
