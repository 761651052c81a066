"""Check that a model fits into memory before its weights are read: a machine that swaps never finishes."""

from __future__ import annotations

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

CGROUP_ROOT, PROCESS_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PAGE_BYTES = 4096
"""The smallest memory page: reading one byte maps at least this many."""
UNLIMITED = 1 << 62


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Return how many bytes can still be allocated on `device`, within the limits of the process and its container."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    import psutil

    limits = [int(psutil.virtual_memory().available), _process_bytes(), *map(_cgroup_bytes, _cgroups())]
    return max(min(limits), 0)


def _process_bytes() -> int:
    """Return what `ulimit -v` and `ulimit -d` still allow this process."""
    try:
        import resource
    except ModuleNotFoundError:  # not POSIX
        return UNLIMITED
    import psutil

    used = psutil.Process().memory_info()
    limits = ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0)))
    allowed = [(resource.getrlimit(kind)[0], taken) for kind, taken in limits]
    return min((limit - taken for limit, taken in allowed if limit != resource.RLIM_INFINITY), default=UNLIMITED)


def _cgroups() -> list[Path]:
    """Return the cgroup (v2) of this process and all that contain it: each may have a limit."""
    try:
        name = next(line[4:] for line in PROCESS_CGROUP.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        name = ""
    folder = CGROUP_ROOT / name
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUP_ROOT))]


def _cgroup_bytes(cgroup: Path) -> int:
    """Return what a cgroup (v2) still allows, with the page cache counted as free."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return UNLIMITED
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNLIMITED
    return int(limit) - used + int(stat.get("inactive_file", 0))


def machine_bytes() -> int:
    """Return the free memory that a device map can use: main memory and every CUDA device."""
    import torch

    return sum(map(available_bytes, ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]))


def read_weights(model: PreTrainedModel) -> None:
    """Read every weight in main memory once: weights are mapped from their file, and enter memory on first use."""
    import torch

    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()


@dataclass(frozen=True)
class MemoryNeed:
    """The size of a model that was not loaded: its number of parameters, and the bytes of its buffers."""

    parameters: int
    buffer_bytes: int

    def bytes_as(self, dtype: torch.dtype) -> int:
        return self.parameters * dtype.itemsize + self.buffer_bytes


def memory_need(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> MemoryNeed:
    """Return the size of the model of this config, which is built without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    about = translate_errors("no model can be built from the config", str(config.name_or_path), pretrained.REMEDY)
    with about, pretrained.offline_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones are counted once
    return MemoryNeed(parameters, sum(buffer.numel() * buffer.itemsize for buffer in model.buffers()))


def require_memory(need: int, available: int, *, where: str, device: str) -> None:
    """Reject a model of `need` bytes if fewer are `available`."""
    if need > available:
        got, expected = f"{format_bytes(need)} of weights", f"at most {format_bytes(available)}"
        what = f"the model's weights do not fit in the memory of {device}"
        raise TooLargeError(what, where=where, got=got, expected=expected, remedy=USE_LESS_MEMORY)
