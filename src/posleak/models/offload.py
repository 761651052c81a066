"""Models that are larger than the memory: their weights stay on disk and enter memory module by module.

transformers and accelerate do the work: a module's weights are mapped from the safetensors files that the model was
loaded from when the module runs, and released afterwards. All prompts of a batch pass through a layer before the next
layer is read, so that each forward pass reads the weights once. This module decides when weights stay on disk, rejects
what cannot, and returns freed memory to the system between layers.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import UnsupportedError, translate_errors
from posleak.models.memory import LIBRARY_BYTES, MemoryNeed, Target
from posleak.models.parallel import TENSOR, everyone
from posleak.models.pretrained import Weights
from posleak.text import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from posleak.models.adapters import Adapter

Placement = tuple["str | dict[str, Any] | None", "str | None"]
"""The device map for transformers, and the folder for weights that must be converted before they are offloaded."""


@contextmanager
def placement(target: Target, weights: int, where: str, notice: Callable[[str], None]) -> Iterator[Placement]:
    """Yield where the weights go; raise a TooLargeError if they do not fit and must not stay on disk.

    weights   their bytes in memory;  where: the model, in messages
    """
    if target.parallel == TENSOR:
        weights //= everyone().size
    chosen = target.device_map is not None  # by the user: it decides, and a limit that is exceeded is refused later
    over = target.limit is not None and not chosen and weights + LIBRARY_BYTES > target.limit
    if target.offload is None and not over:
        target.require_memory(weights, where)
        own = None if target.device == "cpu" else {"": target.device}  # no copy in main memory
        yield target.device_map or own, None
        return
    if target.parallel == TENSOR:
        raise UnsupportedError(
            "the weights of a model whose heads are split over processes cannot stay on disk", where=where,
            got=f"{format_bytes(weights)} of weights in each process", expected="weights that fit into --max-memory",
            remedy="use more processes or --dtype bfloat16, and omit --offload",
        )  # fmt: skip
    device_map = target.device_map or ({"": "disk"} if target.device == "cpu" else "auto")
    if target.offload is not None:
        with translate_errors("the folder for weights cannot be created", target.offload, "choose another --offload"):
            target.offload.mkdir(parents=True, exist_ok=True)
        yield device_map, str(target.offload)
        return
    limit = format_bytes(target.limit or 0)
    notice(f"{format_bytes(weights)} of weights exceed --max-memory {limit}: they stay on disk (as with --offload)")
    with tempfile.TemporaryDirectory(prefix="posleak-", ignore_cleanup_errors=True) as folder:
        yield device_map, folder
        if written := [path.name for path in Path(folder).iterdir()]:
            raise UnsupportedError(
                "the weights of this model must be converted before they can stay on disk", where=where,
                got=f"{len(written)} converted files", expected="weights that are used as they are stored",
                remedy=f"pass --offload FOLDER, which will hold {format_bytes(weights)}; or --dtype bfloat16",
            )  # fmt: skip


def require_offloadable(need: MemoryNeed, stored: Weights, adapters: Sequence[Adapter], where: str) -> None:
    """Reject weights that cannot be mapped from their files: pickles, quantised weights, adapters."""
    why = (
        "pickle files cannot be read in parts" if stored.tensors is None
        else "quantised weights are not offloaded" if need.is_quantised
        else "adapters are not applied to weights on disk" if adapters
        else None
    )  # fmt: skip
    if why is not None:
        raise UnsupportedError(
            f"the weights cannot stay on disk: {why}", where=where, expected="unquantised weights in safetensors files",
            remedy="load them in memory with --dtype bfloat16" + (", or merge the adapter first" if adapters else ""),
        )  # fmt: skip


def is_offloaded(model: PreTrainedModel) -> bool:
    """Return whether weights of the model are on disk, or in main memory while it computes on another device."""
    return any(parameter.is_meta for parameter in model.parameters())


def release_between_layers(model: PreTrainedModel) -> None:
    """Return freed memory to the system after each layer of an offloaded model.

    Reading weights leaves small allocations among freed activations, so that the C library keeps both: without this,
    the process grows by the activations of several layers.
    """
    import torch

    if not is_offloaded(model) or (trim := _malloc_trim()) is None:
        return

    def release(*_: Any) -> None:
        trim(0)

    for layers in (module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
        for layer in layers:
            layer.register_forward_hook(release)


@cache
def _malloc_trim() -> Any:
    """Return the function of glibc that returns freed memory to the system; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
