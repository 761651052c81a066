"""Work that several processes share: heads of one model (tensor parallel), layers (FSDP2), or prompts (data parallel).

Every process runs the same code on the same prompts, and only the first one writes files and prints.

tensor   transformers splits each layer's heads over the processes. The probe gathers queries, keys and values, so that
         every process observes all heads, and returns the part of the output that belongs to its own.
data     every process holds the whole model and measures its part of the batches; all receive all results.
FSDP2    parameters are gathered while the model is held; heads are complete in every process.

Start the processes with torchrun; `load(..., parallel="tensor")` joins them. CUDA is untested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from posleak.errors import InputError, UnsupportedError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

T = TypeVar("T")

TENSOR, DATA = "tensor", "data"
KINDS = (TENSOR, DATA)


@dataclass(frozen=True)
class Ranks:
    """A group of processes, and the place of this one in it."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def writes(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the parts of all processes, joined along an axis in the order of the ranks."""
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor that was gathered."""
        return x.chunk(self.size, dim)[self.rank]

    def share(self, value: T) -> list[T]:
        """Return the values of all processes in the order of the ranks."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


ALONE = Ranks()
"""A process that shares no work."""


def join(kind: str | None, device: str | torch.device | None) -> str | torch.device | None:
    """Join the processes that torchrun started, if any are requested; return the device of this one."""
    if kind is None:
        return device
    if kind not in KINDS:
        raise InputError(
            "unknown kind of parallel work", where="--parallel", got=kind, remedy=did_you_mean(kind, KINDS)
        )
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not (dist.is_initialized() or "RANK" in os.environ):
        raise InputError(
            "parallel work needs several processes, and this is a single one", where=f"--parallel {kind}",
            expected="processes started by torchrun",
            remedy="torchrun --nproc-per-node 2 -m posleak ...; or omit --parallel",
        )  # fmt: skip
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if not dist.is_initialized():
        dist.init_process_group("nccl" if str(device).startswith("cuda") else "gloo")
    return device


def everyone() -> Ranks:
    """Return all processes of torch.distributed; a group of one if it is not used."""
    import torch.distributed as dist

    used = dist.is_available() and dist.is_initialized()
    return Ranks(dist.get_rank(), dist.get_world_size()) if used else ALONE


def split_heads(model: PreTrainedModel) -> Ranks | None:
    """Return the processes over which transformers splits the model's heads; None if heads are complete here."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    mesh: Any = model._device_mesh
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    return Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def sharded(model: torch.nn.Module) -> list[Any]:
    """Return the modules whose parameters FSDP2 shards, the outermost first."""
    return [module for module in model.modules() if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)]


@contextmanager
def gathered(model: PreTrainedModel) -> Iterator[None]:
    """Gather the parameters that FSDP2 shards with the whole model: a probe runs the backbone, whose hooks gather only
    those of each layer."""
    modules = sharded(model)
    inner = {id(parameter) for layer in modules[1:] for parameter in layer.parameters()}
    outer = [parameter for parameter in model.parameters() if id(parameter) not in inner]
    if modules[:1] != [model] or all(local_part(parameter) is parameter for parameter in outer):  # gathered already
        yield
        return
    root = modules[0]
    if root._get_fsdp_state()._is_root is None:  # its first pass decides which module is the outermost
        import torch

        ids = torch.zeros(1, 2, dtype=torch.long, device=outer[0].device)
        with torch.no_grad():
            root(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    root.unshard()
    try:
        yield
    finally:
        root.reshard()


def release(model: torch.nn.Module) -> None:
    """Release gathered parameters, so that a module holds its part again. numpy would pin gathered ones."""
    for root in sharded(model):
        root.reshard()


def whole(tensor: Any) -> Any:
    """Return the complete tensor of which this process holds a part; any other tensor unchanged."""
    return tensor.full_tensor() if type(tensor).__name__ == "DTensor" else tensor


def local_part(tensor: Any) -> Any:
    """Return the part of a tensor that this process holds; any other tensor unchanged."""
    return tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor


def require_whole_model(model: PreTrainedModel, what: str) -> None:
    """Reject work on gradients and on weights outside of forward passes if processes share the model."""
    if split_heads(model) is None and not sharded(model):
        return
    raise UnsupportedError(
        f"{what} needs the whole model in one process", where=type(model).__name__,
        got="a model that several processes share (tensor parallel or FSDP2)",
        remedy="load the model in one process, with --offload or --dtype bfloat16 if it is large",
    )  # fmt: skip


def own_batches(batches: Sequence[T], ranks: Ranks) -> Sequence[T]:
    """Return the batches that this process measures."""
    return batches[ranks.rank :: ranks.size]
