"""What the weights are: a sha256 that travels with every result, so that two runs can be known to be of one model.

Folders:  sha256 over (name, content) of the weight files, sorted by name. It does not depend on the dtype of loading.
Objects:  sha256 over (name, dtype, shape, bytes) of the state dict, sorted by name.

The two differ for the same model by construction; each is stable in itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 22


def file_sha256(path: Path, cache: Path | None = None) -> str:
    """sha256 of one file; remembered in `cache` under its path, size and modification time, since models are large."""
    stat = path.stat()
    known = _memory_of(path.resolve(), stat, cache)
    if known is not None and known.is_file():
        remembered = json.loads(known.read_text())
        return str(remembered["sha256"])
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if known is not None:
        _remember(known, {"path": str(path.resolve()), "bytes": stat.st_size, "sha256": digest})
    return digest


def _memory_of(path: Path, stat: os.stat_result, cache: Path | None) -> Path | None:
    if cache is None:
        return None
    key = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    return cache / "hashes" / f"{hashlib.sha256(key).hexdigest()}.json"


def _remember(where: Path, record: dict[str, object]) -> None:
    """Write atomically; a cache that cannot be written costs time at the next load, nothing else."""
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=where.parent, suffix=".part", delete=False) as handle:
            json.dump(record, handle)
        os.replace(handle.name, where)
    except OSError:
        return


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The weight files, sorted by name: safetensors, or pickles if they are allowed and there are no safetensors."""
    safe = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if safe or not allow_pickle:
        return safe
    return sorted(folder.glob("pytorch_model*.bin"))


def folder_sha256(folder: Path, cache: Path | None = None, *, allow_pickle: bool = False) -> str:
    """sha256 over the names and contents of the weight files of a folder."""
    digest = hashlib.sha256()
    for path in weight_files(folder, allow_pickle=allow_pickle):
        digest.update(f"{path.name}\0{file_sha256(path, cache)}\n".encode())
    return digest.hexdigest()


def model_sha256(model: torch.nn.Module) -> str:
    """sha256 over the tensors of a model in memory; refuses tensors that were offloaded and hold no numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise ModelError(
                "the model's weights are not in memory, so they cannot be identified",
                where=name,
                got="a tensor on the meta device",
                remedy="pass a model whose weights are on cpu or on an accelerator",
            )
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        _update(digest, tensor)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    """Feed a tensor's bytes, whatever its dtype: numpy has no bfloat16, but every dtype can be seen as bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK):
        digest.update(flat[start : start + CHUNK].numpy().data)
