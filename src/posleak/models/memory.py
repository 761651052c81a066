"""Reject models of implausible size, or too large for this machine, before transformers builds them.

A config may state any number. transformers builds one module per layer and one label per `num_labels`, and initialises
weights that the files lack: a few digits in a small file can cost hours, or all memory. A model of plausible size must
fit into memory: a machine that swaps never finishes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import FETCH_AGAIN, USE_LESS_MEMORY, InputError, ModelError, TooLargeError, translate_errors
from posleak.models import pretrained
from posleak.models.parallel import local_part
from posleak.text import format_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_CONFIG = 1 << 25
"""Bytes of a config. Most have a few thousand, but some list their whole vocabulary."""
MAX_TOKENIZER = 1 << 27
"""Bytes of a tokenizer file. 262,144 tokens take 33 MB; reading them takes several times as much memory."""

MAX_COUNTS = (
    (re.compile(r"layers$|^n_layer$|^num_layer$"), 2_000),
    (re.compile(r"(experts|labels|heads?|groups|blocks|codebooks|channels|stages|_count)$"), 100_000),
)
"""Largest values of keys for which transformers builds one object per unit."""
MAX_LISTED = 1_000_000
"""Largest integer inside a list: GPT-Neo repeats layer types as often as a list says."""
MAX_ITEMS, MAX_INTEGERS = 100_000, 10_000
"""Longest list, and longest list of integers. Quantised models list thousands of modules by name."""

EXTRA_PARAMETERS = 1 << 26
"""Parameters that a model may have in addition to those in its files. transformers initialises them before it can
report which tensors are missing."""
EXTRA_BUFFER_BYTES = 1 << 28
"""Bytes of buffers (masks, frequencies) that a model may create, in addition to 4 bytes per parameter."""

CGROUP_ROOT, PROCESS_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PAGE_BYTES = 4096
"""The smallest memory page: reading one byte maps at least this many."""
UNLIMITED = 1 << 62

LIBRARY_BYTES = 500 * 10**6
"""A Python process with torch and transformers imported, without weights."""


DECIMAL_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str | int | None) -> int | None:
    """Return `8GB`, `500MB` or `2GiB` in bytes; an integer is bytes already, and None means no limit."""
    if text is None or type(text) is int:
        return text
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
    if match is None or (match[3] and not match[2]):
        raise InputError(
            "not an amount of memory", where="--max-memory", got=f"{text!r:.80}",
            expected="a number with a unit, like 8GB",
        )  # fmt: skip
    return int(float(match[1]) * (BINARY_UNITS if match[3] else DECIMAL_UNITS)[match[2]])


def require_max_size(path: Path, limit: int) -> None:
    """Reject a file that is larger than any of its kind, before it is read."""
    if (stored := path.stat().st_size) > limit:
        raise ModelError(
            f"{path.name} is too large", where=str(path), got=format_bytes(stored),
            expected=f"at most {format_bytes(limit)}", remedy=FETCH_AGAIN,
        )  # fmt: skip


def require_plausible(path: Path, raw: Any) -> None:
    """Reject a config with counts or lists that are larger than those of any model. `path` is its file."""
    for name, value, limit in _bounded_values(raw):
        if value > limit:
            raise ModelError(
                "the config contains an implausibly large number", where=str(path), got=f"{name} = {value}",
                expected=f"at most {limit:,}", remedy="correct that number, or download the file again",
            )  # fmt: skip


def _bounded_values(raw: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (name, value, limit) for every bounded integer, and for the length of every list."""
    pending: list[tuple[str, Any]] = [("", raw)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list):
            is_numeric = bool(value) and type(value[0]) is int
            yield f"items of {name or 'a list'}", len(value), MAX_INTEGERS if is_numeric else MAX_ITEMS
            pending += [("", item) for item in value]
        elif isinstance(value, int):
            limits = [limit for pattern, limit in MAX_COUNTS if pattern.search(name)] if name else [MAX_LISTED]
            yield from ((name or "a number in a list", value, limit) for limit in limits)


def require_tensors_for_layers(folder: Path, config: PreTrainedConfig, weights: pretrained.Weights) -> None:
    """Reject a config with more layers than the weight files have tensors."""
    text = config.get_text_config(decoder=True)
    types = [getattr(text, name, None) or [] for name in ("layer_types", "attention_layers")]
    layers = max(int(getattr(text, "num_hidden_layers", None) or 0), *map(len, types))
    if weights.tensors is not None and layers > weights.tensors:
        raise ModelError(
            "the config has more layers than the weight files have tensors", where=str(folder / "config.json"),
            got=f"{layers} layers", expected=f"at most {weights.tensors}, in {', '.join(weights.names[:3])}",
            remedy="download both again: they do not belong together",
        )  # fmt: skip


def require_backed_by_files(path: Path, need: MemoryNeed, stored: int, extra: int = EXTRA_PARAMETERS) -> None:
    """Reject a config whose model has more parameters than the `stored` ones plus `extra`, or huge buffers."""
    if need.parameters > stored + extra:
        raise ModelError(
            "the config describes a larger model than its weight files contain", where=str(path),
            got=f"a model of {need.parameters:,} parameters", expected=f"at most {stored:,}",
            remedy="download them again: config and weights do not belong together",
        )  # fmt: skip
    limit = EXTRA_BUFFER_BYTES + 4 * stored
    if need.buffer_bytes > limit:
        raise ModelError(
            "the config requires huge tables in addition to the weights", where=str(path),
            got=format_bytes(need.buffer_bytes), expected=f"at most {format_bytes(limit)}",
            remedy="correct max_position_embeddings, or download the file again",
        )  # fmt: skip


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Return the bytes that can still be allocated on `device`, within the limits of the process and its container."""
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
    """Return the bytes that `ulimit -v` and `ulimit -d` still allow this process to allocate."""
    try:
        import resource
    except ModuleNotFoundError:  # not POSIX
        return UNLIMITED
    import psutil

    memory = psutil.Process().memory_info()
    used = {resource.RLIMIT_AS: memory.vms, resource.RLIMIT_DATA: getattr(memory, "data", 0)}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    return min((limits[k] - used[k] for k in used if limits[k] != resource.RLIM_INFINITY), default=UNLIMITED)


def _cgroups() -> list[Path]:
    """Return the cgroup (v2) of this process and all that contain it: each may have a limit."""
    try:
        name = next(line[4:] for line in PROCESS_CGROUP.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        name = ""
    folder = CGROUP_ROOT / name
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUP_ROOT))]


def _cgroup_bytes(cgroup: Path) -> int:
    """Return the bytes that a cgroup (v2) still allows, with the page cache counted as free."""
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
    """Read every weight in main memory once: weights are mapped from their file, and enter memory on first use."""
    import torch

    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()


def loaded_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the parameters in memory; of offloaded modules, those of the largest one count."""

    def size(parameters: Iterable[torch.Tensor]) -> int:
        return sum(local_part(p).numel() * p.element_size() for p in parameters)

    resident = size(p for p in model.parameters() if not p.is_meta)
    streamed = (size(p for p in m.parameters(recurse=False) if p.is_meta) for m in model.modules())
    return resident + max(streamed, default=0)


@dataclass(frozen=True)
class MemoryNeed:
    """The size of a model that was not loaded: its number of parameters, and the bytes of its buffers."""

    parameters: int
    buffer_bytes: int
    is_quantised: bool

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Return a lower bound on the bytes in memory; None counts as float32.

        How densely quantised weights are packed is not known: one bit per parameter is assumed.
        """
        if self.is_quantised:
            return self.parameters // 8 + self.buffer_bytes
        return self.parameters * (4 if dtype is None else dtype.itemsize) + self.buffer_bytes


def memory_need(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> MemoryNeed:
    """Return the size of the model of this config, which is built without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    about = translate_errors("no model can be built from the config", str(config.name_or_path), pretrained.REMEDY)
    with about, pretrained.offline_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones are counted once
    buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    return MemoryNeed(parameters, buffer_bytes, getattr(config, "quantization_config", None) is not None)


@dataclass(frozen=True)
class Target:
    """The device and the dtype that the weights will have in memory.

    offload   folder for weights that stay on disk;  limit: bytes that the process may hold; None: no limit
    parallel  how several processes share the work; None: this is the only one
    """

    device: str
    dtype: torch.dtype | str = "auto"
    device_map: str | dict[str, Any] | None = None
    offload: Path | None = None
    limit: int | None = None
    parallel: str | None = None

    def loaded_dtype(self, config: PreTrainedConfig) -> torch.dtype | None:
        """Return the dtype that the weights will have; None if it is that of each file."""
        import torch

        dtype = config.dtype if self.dtype == "auto" else self.dtype
        return dtype if isinstance(dtype, torch.dtype) else None

    def require_fit(self, config: PreTrainedConfig, name: str, trust_remote_code: bool) -> None:
        """Reject a config whose model does not fit, unless its weights may stay on disk."""
        if self.offload is not None or self.limit is not None:
            return
        need = memory_need(config, trust_remote_code=trust_remote_code)
        self.require_memory(need.bytes_as(self.loaded_dtype(config)), name)

    def require_memory(self, need: int, where: str) -> None:
        """Reject `need` bytes that do not fit on the device or, with a device map, in main memory and CUDA devices."""
        import torch

        devices, place = [self.device], self.device
        if self.device_map is not None:
            devices, place = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))], "this machine"
        available = sum(map(available_bytes, devices))
        if need > available:
            raise TooLargeError(
                f"the model's weights do not fit in the memory of {place}", where=where, remedy=USE_LESS_MEMORY,
                got=f"{format_bytes(need)} of weights", expected=f"at most {format_bytes(available)}",
            )  # fmt: skip
