"""Observation of the residual stream: the input of each decoder layer, and the output of the last one.

Observers with a method `stream` receive it during the forward pass, one depth at a time, so that only one is in memory.
Depth 0 is the embedding, depth d the output of d layers. The decoder layers are the module list with the most
parameters, so that no model family is treated specially. If layers exchange anything but one tensor [B, T, W] (several
streams, for example), observers receive nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from posleak.models.hold import this_thread_only


@runtime_checkable
class StreamObserver(Protocol):
    """An observer of the residual stream."""

    def stream(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        """Receive the stream at one depth. Called once per depth and forward pass, in order; must not change x."""
        ...


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the module list of the decoder that has the most parameters; empty if there is none.

    transformers knows the text decoder of a multimodal model.
    """
    decoder = model.get_decoder()
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    size = {id(layers): sum(parameter.numel() for parameter in layers.parameters()) for layers in lists}
    return list(max(lists, key=lambda layers: size[id(layers)], default=()))


@contextmanager
def streaming(
    model: PreTrainedModel, body: torch.nn.Module, observers: Callable[[], Sequence[Any]]
) -> Iterator[None]:  # fmt: skip
    """Pass the residual stream of every forward pass of the backbone to the observers that have a method `stream`."""
    depth, last = 0, None

    def show(x: Tensor | None) -> None:
        nonlocal depth
        if x is not None:
            for observer in observers():
                if isinstance(observer, StreamObserver):
                    observer.stream(depth, x)
        depth += 1

    def begin(*_: Any) -> None:
        nonlocal depth, last
        depth, last = 0, None

    def enters(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        show(one_stream((*args, kwargs.get("hidden_states"))))

    def leaves(_: torch.nn.Module, __: Any, output: Any) -> None:
        nonlocal last
        last = one_stream(output if isinstance(output, (tuple, list)) else (output,))

    def end(*_: Any) -> None:
        show(last)
        begin()

    with ExitStack() as hooks:
        hooks.callback(body.register_forward_pre_hook(this_thread_only(begin)).remove)
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_pre_hook(this_thread_only(enters), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(this_thread_only(leaves)).remove)
        hooks.callback(body.register_forward_hook(this_thread_only(end)).remove)
        yield


def one_stream(given: Sequence[Any]) -> Float[Tensor, "B T W"] | None:
    """Return the first tensor if it is a residual stream [B, T, W]; else None."""
    first = next((x for x in given if isinstance(x, Tensor)), None)
    return first if first is not None and first.ndim == 3 and first.is_floating_point() else None
