"""A forward pass of the model by itself, under its own attention: what everything else is compared with."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from .attachment import body
from .experts import runnable_experts
from .hold import exclusive
from .rotary import own_rotation


def native(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], *, padding: Shaped[Tensor, "..."] | None = None, **kwargs: Any
) -> Any:
    """The model's body on ids, without the head; nobody else may use the model meanwhile."""
    mask, inner = torch.ones_like(ids) if padding is None else padding, body(model)
    with exclusive(model), runnable_experts(model), own_rotation(model, inner), torch.inference_mode():
        return inner(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs)
