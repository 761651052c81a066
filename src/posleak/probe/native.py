"""A forward pass of the model by itself, under its own attention: what everything else is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from posleak.models import exclusive

from .attachment import body
from .experts import runnable_experts
from .rotary import own_rotation


def native(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], *, padding: Shaped[Tensor, "..."] | None = None, **kwargs: Any
) -> Any:
    """The model's body on ids, without the head; nobody else may use the model meanwhile."""
    mask = torch.ones_like(ids) if padding is None else padding
    with by_itself(model):
        return body(model)(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs)


@contextmanager
def by_itself(model: PreTrainedModel) -> Iterator[None]:
    """Run the model as it is: nobody else uses it, and a pass depends on its own positions alone.

    Not in inference mode: what a module makes in its first pass and keeps, such as packed weights, could not be used in
    training afterwards.
    """
    with exclusive(model), runnable_experts(model), own_rotation(model, body(model)), torch.no_grad():
        yield
