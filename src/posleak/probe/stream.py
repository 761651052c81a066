"""The residual stream as it passes by: what enters each decoder layer, and what leaves the last one.

Observers that have a method `stream` are shown it while the forward pass runs, one depth after the other, so that no
more than one of them is held. Depth 0 is the embedding, depth d the stream after d layers. The layers are found as the
list of modules with the most parameters: nothing here knows a model by name. Where they take or give anything but one
tensor [B, T, W] (several streams, for example), nothing is shown, and observers see no depth at all.
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
    """Looks at the residual stream."""

    def stream(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        """Called once for each depth of a forward pass, in order; it must not change x."""
        ...


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The list of modules in the decoder that has the most parameters; empty if there is none.

    A model that also sees or hears has a decoder among its parts, which transformers knows.
    """
    decoder = model.get_decoder()
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    size = {id(found): sum(parameter.numel() for parameter in found.parameters()) for found in lists}
    return list(max(lists, key=lambda found: size[id(found)], default=()))


@contextmanager
def streaming(
    model: PreTrainedModel, body: torch.nn.Module, observers: Callable[[], Sequence[Any]]
) -> Iterator[None]:  # fmt: skip
    """Show the stream of every forward pass of the model's body to those observers that want it."""
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
    """The first tensor, if it is the stream of one token after the other; else None."""
    first = next((x for x in given if isinstance(x, Tensor)), None)
    return first if first is not None and first.ndim == 3 and first.is_floating_point() else None
