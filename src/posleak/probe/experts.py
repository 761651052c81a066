"""Mixtures of experts in float64: torch has products of all experts at once in narrower dtypes only.

There the experts are multiplied one after the other, as their own class writes it, and on exit as before. The numbers
are the same, and the pass is slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of grouped products."""

ANY_DTYPE = (None, "eager", "batched_mm")
"""Implementations that run in every dtype; None: the model has no experts, or chooses for itself."""

EAGER = "eager"
SETTING = "_experts_implementation_internal"


def ungrouped(model: PreTrainedModel, dtype: torch.dtype) -> list[Any]:
    """Configs of expert modules whose products do not exist in this dtype."""
    found = {id(m.config): m.config for m in model.modules() if _holds_experts(m)}
    return [] if dtype in GROUPED else [c for c in found.values() if getattr(c, SETTING, None) not in ANY_DTYPE]


@contextmanager
def runnable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Let experts run in the dtype that the model has now."""
    before = [(config, getattr(config, SETTING)) for config in ungrouped(model, model.dtype)]
    try:
        for config, _ in before:
            setattr(config, SETTING, EAGER)
        yield
    finally:
        for config, setting in before:
            setattr(config, SETTING, setting)


def _holds_experts(module: torch.nn.Module) -> bool:
    """transformers gives every class whose products it may replace this flag, and the config that it asks."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "config")
