"""Forward passes of the unmodified model with its own attention: the reference for all comparisons."""

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
    """Run the backbone of the model on ids, without the language-model head, with exclusive use of the model."""
    mask = torch.ones_like(ids) if padding is None else padding
    with by_itself(model):
        return backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs)


@contextmanager
def by_itself(model: PreTrainedModel) -> Iterator[None]:
    """Use the unmodified model exclusively; every pass depends only on its own positions.

    Inference mode is not used: tensors that a module creates in its first pass and keeps, such as packed weights, could
    not be used in training afterwards.
    """
    before = list(model.modules())
    with exclusive(model), runnable_experts(model), own_rotation(model, backbone(model)), torch.no_grad():
        yield
    _require_same_modules(model, before)


def _require_same_modules(model: PreTrainedModel, before: list[torch.nn.Module]) -> None:
    """Raise UnsupportedError if the model replaced its own modules, which some models do depending on prompt length."""
    replaced = {id(module) for module in model.modules()} - {id(module) for module in before}
    if replaced:
        kinds = sorted({type(module).__name__ for module in model.modules() if id(module) in replaced})
        raise UnsupportedError(
            "the model replaces its own modules permanently on a short prompt, so that results on short prompts do not "
            "apply to longer ones",
            where=type(model).__name__, got=f"new modules: {', '.join(kinds)}",
            remedy="select the attention type to be measured in config.json, if a causal one is available",
        )  # fmt: skip
