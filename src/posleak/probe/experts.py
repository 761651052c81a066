"""Mixtures of experts in float64: torch has grouped products of all experts only in narrower dtypes.

In other dtypes the experts are multiplied one after the other, by the eager implementation of their class. The results
are the same, and the forward pass is slower. The original setting is restored on exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which torch has grouped products."""

ANY_DTYPE = (None, "eager", "batched_mm")
"""Implementations that run in every dtype. None: the model has no experts, or chooses the implementation itself."""

SETTING = "_experts_implementation_internal"


def ungrouped(model: PreTrainedModel, dtype: torch.dtype) -> list[Any]:
    """Return the configs of expert modules whose implementation does not run in this dtype."""
    configs = {id(m.config): m.config for m in model.modules() if _holds_experts(m)}
    return (
        [] if dtype in GROUPED_DTYPES else [c for c in configs.values() if getattr(c, SETTING, None) not in ANY_DTYPE]
    )


@contextmanager
def runnable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Select an expert implementation that runs in the model's current dtype."""
    before = [(config, getattr(config, SETTING)) for config in ungrouped(model, model.dtype)]
    try:
        for config, _ in before:
            setattr(config, SETTING, "eager")
        yield
    finally:
        for config, setting in before:
            setattr(config, SETTING, setting)


def _holds_experts(module: torch.nn.Module) -> bool:
    """Return whether transformers may replace the products of a module: such classes have this flag and a config."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "config")
