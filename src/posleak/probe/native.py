"""A forward pass of the model by itself, under its own attention: what everything else is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import exclusive

from .attachment import backbone
from .experts import runnable_experts
from .rotary import own_rotation


def native(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], *, padding: Shaped[Tensor, "..."] | None = None, **kwargs: Any
) -> Any:
    """The model's body on ids, without the head; nobody else may use the model meanwhile."""
    mask = torch.ones_like(ids) if padding is None else padding
    with by_itself(model):
        return backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs)


@contextmanager
def by_itself(model: PreTrainedModel) -> Iterator[None]:
    """Run the model as it is: nobody else uses it, and a pass depends on its own positions alone.

    Not in inference mode: what a module makes in its first pass and keeps, such as packed weights, could not be used in
    training afterwards.
    """
    before = list(model.modules())
    with exclusive(model), runnable_experts(model), own_rotation(model, backbone(model)), torch.no_grad():
        yield
    _require_same_modules(model, before)


def _require_same_modules(model: PreTrainedModel, before: list[torch.nn.Module]) -> None:
    """Refuse a model that replaces its own modules when it sees how long the prompt is."""
    replaced = {id(module) for module in model.modules()} - {id(module) for module in before}
    if replaced:
        kinds = sorted({type(module).__name__ for module in model.modules() if id(module) in replaced})
        raise UnsupportedError(
            "the model replaces its own modules while it reads a short prompt, and keeps the new ones, so that what is "
            "found here says nothing about longer prompts",
            where=type(model).__name__, got=f"new: {', '.join(kinds)}",
            remedy="choose in its config.json the kind of attention that is to be measured, if it can be causal",
        )  # fmt: skip
