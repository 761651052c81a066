"""Whether a model fits, asked before its weights are read: a machine that swaps gives neither result nor message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import TooLargeError
from posleak.models import pretrained
from posleak.models.library_errors import USE_LESS_MEMORY, translate_errors
from posleak.text import format_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

CGROUP, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PAGE = 4096
"""Bytes of the smallest memory page: reading one byte brings at least so many into memory."""

UNLIMITED = 1 << 62


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes that can still be allocated on `device`: free memory, within what the process and its container may use."""
    import torch

    kind = torch.device(device)
    if kind.type == "cuda":
        return int(torch.cuda.mem_get_info(kind)[0])
    if kind.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    import psutil

    limits = [int(psutil.virtual_memory().available), _process_bytes(), *map(_container_bytes, _containers())]
    return max(min(limits), 0)


def _process_bytes() -> int:
    """What `ulimit -v` and `ulimit -d` still allow this process; a huge number without such limits."""
    try:
        import resource
    except ModuleNotFoundError:  # not POSIX
        return UNLIMITED
    import psutil

    held = psutil.Process().memory_info()
    limits = ((resource.RLIMIT_AS, held.vms), (resource.RLIMIT_DATA, getattr(held, "data", 0)))
    allowed = [(resource.getrlimit(kind)[0], taken) for kind, taken in limits]
    return min((limit - taken for limit, taken in allowed if limit != resource.RLIM_INFINITY), default=UNLIMITED)


def _containers() -> list[Path]:
    """The cgroup (v2) of this process and all that it is in: each may have a limit."""
    try:
        own = next(line[4:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        own = ""
    folder = CGROUP / own
    return [folder, *(above for above in folder.parents if above.is_relative_to(CGROUP))]


def _container_bytes(cgroup: Path) -> int:
    """What the container still allows (cgroup v2), page cache counted as free; a huge number if it has no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return UNLIMITED
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNLIMITED
    return int(limit) - used + int(stat.get("inactive_file", 0))


def read_weights(model: PreTrainedModel) -> None:
    """Read every weight once: weights in main memory are mapped from their file, and come in when they are used."""
    import torch

    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.detach().flatten().view(torch.uint8)[::PAGE].sum()


def machine_bytes() -> int:
    """Everything that a device map can spread a model over: main memory and every CUDA device."""
    import torch

    accelerators = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return sum(available_bytes(device) for device in ["cpu", *accelerators])


@dataclass(frozen=True)
class MemoryNeed:
    """What the model of a config takes: how many numbers its parameters have, and bytes of tables beside them."""

    numbers: int
    tables: int

    def bytes_as(self, dtype: torch.dtype) -> int:
        return self.numbers * dtype.itemsize + self.tables


def needed(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> MemoryNeed:
    """What the model of this config takes: it is built without storage, and counted."""
    import torch
    from transformers import AutoModelForCausalLM

    about = translate_errors("no model can be built from the config", str(config.name_or_path), pretrained.REMEDY)
    with about, pretrained.offline_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones are counted once
    return MemoryNeed(parameters, sum(table.numel() * table.itemsize for table in model.buffers()))


def require_memory(need: int, *, where: str, device: str, available: Callable[[], int]) -> None:
    """Refuse a model that is larger than what `available()` says there is."""
    have = available()
    if need > have:
        raise TooLargeError(
            f"the model's weights do not fit in the memory of {device}",
            where=where,
            got=f"{format_bytes(need)} of weights",
            expected=f"at most {format_bytes(have)}",
            remedy=USE_LESS_MEMORY,
        )
