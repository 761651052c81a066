"""Whether a model fits, asked before its weights are read: a machine that swaps gives neither result nor message."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, TooLargeError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

CGROUP = Path("/sys/fs/cgroup")
PAGE = 4096
"""Bytes of the smallest memory page: reading one byte brings at least so many into memory."""

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_CAST = ("F64", "F32", "F16", "BF16")
"""Header dtypes that from_pretrained(dtype=...) casts; the others (8-bit floats, integers) keep their size."""


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes that can still be allocated on `device`: free memory, within the container's limit if there is one."""
    import torch

    kind = torch.device(device)
    if kind.type == "cuda":
        return int(torch.cuda.mem_get_info(kind)[0])
    if kind.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    import psutil

    return min(int(psutil.virtual_memory().available), _container_bytes(CGROUP))


def _container_bytes(cgroup: Path) -> int:
    """What the container still allows (cgroup v2), page cache counted as free; a huge number if it has no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
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


def files_bytes(files: list[Path], dtype: torch.dtype | None) -> int:
    """Bytes of the weights in `files` once loaded as `dtype` (None: as stored); reads only safetensors headers."""
    return sum(_header_bytes(path, dtype) if path.suffix == ".safetensors" else path.stat().st_size for path in files)


def _header_bytes(path: Path, dtype: torch.dtype | None) -> int:
    try:
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length)) if length <= path.stat().st_size else None
    except (struct.error, ValueError) as error:
        raise _broken(path) from error
    if not isinstance(header, dict):
        raise _broken(path)
    return sum(_tensor_bytes(entry, dtype) for name, entry in header.items() if name != "__metadata__")


def _tensor_bytes(entry: dict[str, list[int]], dtype: torch.dtype | None) -> int:
    stored = str(entry["dtype"])
    size = dtype.itemsize if dtype is not None and stored in _CAST else _BYTES.get(stored, 1)
    return math.prod(entry["shape"]) * size


def _broken(path: Path) -> ModelError:
    return ModelError(
        "a weight file is not a whole safetensors file",
        where=str(path),
        got=f"{path.stat().st_size} bytes without a readable header",
        remedy="fetch or write the file again; an interrupted download looks like this",
    )


def config_bytes(config: PreTrainedConfig, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> int:
    """Bytes of a model that is not downloaded yet: it is built without storage, and its parameters are counted."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    size = (dtype or stored).itemsize
    return int(size * sum(parameter.numel() for parameter in model.parameters()))


def require_memory(need: int, *, where: str, device: str, available: Callable[[], int]) -> None:
    """Refuse a model that is larger than what `available()` says there is."""
    have = available()
    if need > have:
        raise TooLargeError(
            f"the model's weights do not fit in the memory of {device}",
            where=where,
            got=f"{need / 1e9:.2f} GB of weights",
            expected=f"at most {have / 1e9:.2f} GB",
            remedy="load it with dtype bfloat16, spread it with device_map='auto', or take a smaller model",
        )
