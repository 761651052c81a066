"""How large a difference may be and still count as rounding: all tolerances that depend on the dtype.

transformers computes rotations, norms and softmaxes in float32 whatever the model's dtype, so that float64 models do
not reach float64 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that counts as rounding, by dtype; dtypes narrower than these are judged as bfloat16."""

    float64: float
    float32: float
    float16: float
    bfloat16: float

    def of(self, dtype: torch.dtype) -> float:
        found: float = getattr(self, str(dtype).removeprefix("torch."), self.bfloat16)
        return found


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype by which a rotation or a softmax of transformers is judged: float32 where the model is wider."""
    import torch

    return torch.float32 if dtype == torch.float64 else dtype


PARITY = Tolerance(1e-6, 1e-4, 2e-2, 8e-2)
"""States under the probe against those of the model's own attention, relative."""

PARTITION = Tolerance(1e-9, 1e-5, 2e-2, 1e-1)
"""log Z of the sampled rows against the kernel's, in nats, divided by the row's largest |logit| if that exceeds 1."""

CONSTANT = Tolerance(1e-3, 1e-3, 1e-2, 3e-2)
"""States of equal tokens at different positions, relative: deep models amplify the rounding of the rotation."""

EXACT = Tolerance(1e-9, 1e-6, 1e-1, 1.0)
"""A power that theory says is zero, in nats²: rounding of the logits, squared."""

AGREE = Tolerance(1e-6, 1e-3, 2e-1, 1.0)
"""Two computations of the same thing that differ in the order of their sums only, relative or in nats."""

CLOSED = Tolerance(1e-6, 1e-5, 1e-2, 5e-2)
"""The state at position 0 in context against the one-token sequence, relative."""

RING = Tolerance(1e-12, 1e-4, 1e-1, 1.0)
"""States of a rolled prompt against rolled states, relative; float64 models do not round to float32 there."""

AFFINE = Tolerance(1e-9, 1e-4, 1e-2, 5e-2)
"""A module's output against that of the matrix that was read from it, relative."""
