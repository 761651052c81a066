"""Tolerances by dtype: the largest differences that count as rounding.

transformers computes rotations, norms and softmaxes in float32 for every dtype of the model, so that float64 models do
not reach float64 accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that counts as rounding, by dtype; other dtypes have the tolerance of bfloat16."""

    float64: float
    float32: float
    float16: float
    bfloat16: float

    def of(self, dtype: torch.dtype | str) -> float:
        """Return the tolerance for a dtype, or for its name without `torch.`."""
        tolerance: float = getattr(self, str(dtype).removeprefix("torch."), self.bfloat16)
        return tolerance


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which transformers computes rotations and softmaxes: float32 for a float64 model."""
    import torch

    return torch.float32 if dtype == torch.float64 else dtype


PARITY = Tolerance(1e-6, 1e-4, 2e-2, 8e-2)
"""States under the probe against those of the model's own attention, relative."""

PARTITION = Tolerance(1e-9, 1e-5, 2e-2, 1e-1)
"""log Z of the sampled rows against the kernel's, in nats, divided by the row's largest |logit| if that exceeds 1."""

CONSTANT = Tolerance(1e-3, 1e-3, 1e-2, 3e-2)
"""States of equal tokens at different positions, relative: deep models amplify the rounding of the rotation."""

EXACT = Tolerance(1e-9, 1e-6, 1e-1, 1.0)
"""A power that is zero in theory, in nats²: squared rounding of the logits."""

AGREE = Tolerance(1e-6, 1e-3, 2e-1, 1.0)
"""Two computations of the same quantity that differ only in the order of summation, relative or in nats."""

CLOSED = Tolerance(1e-6, 1e-5, 1e-2, 5e-2)
"""The state at position 0 in context against the one-token sequence, relative."""

RING = Tolerance(1e-12, 1e-4, 1e-1, 1.0)
"""States of a rolled prompt against rolled states, relative; no float32 rounding in float64 models there."""

AFFINE = Tolerance(1e-9, 1e-4, 1e-2, 5e-2)
"""A module's output against that of the matrix read from it, relative."""
