"""Compute the hashes that identify a model in every result.

Folders:     sha256 over (relative path, content) of the files, sorted by path: the weight files, the tokenizer's files
             and, if it was run, the code. It does not depend on the dtype of loading.
Objects:     sha256 over (name, dtype, shape, bytes) of every parameter and buffer, in the order of the modules.
             Offloaded weights are read where they are stored, and packed weights (torchao, bitsandbytes) as they are
             packed. `state_dict()` is not called: some quantised modules change their weights when it is. It differs
             from the hash of the folder by construction.
Checksum:    xxh3 over the same bytes, twenty times as fast, to detect changes of weights in memory. All bytes are read:
             version counters of tensors miss changes through `.data`.

Converted models (built-in or GGUF): every file is hashed at every load and compared with posleak.json.
Other folders and GGUF files: small files are hashed at every load. Hashes of weights are cached in <cache>/hashes under
    path, size, inode, mtime and ctime; a program can set mtime back, but not ctime. A file is flushed to disk before it
    is hashed: a page that another process has mapped and written to is then clean, and its next change updates both
    times. Some file systems (tmpfs) do not update them. So the checksum of the loaded weights is cached as well: if
    files with the same hashes have loaded as other weights before, they are hashed again (`confirm_hashes`).
    `load(..., verify=True)` always hashes them again.

Not covered: a program that can write to the cache can also forge posleak.json or a cached hash, and a file that changes
while it is loaded may be hashed before the change and read after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, StorageError, translate_errors
from posleak.files import read_regular, remove_leftovers, write_json
from posleak.models.parallel import release, whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

CHUNK = 1 << 24
"""Bytes hashed at once: large, since between two chunks a thread waits for the interpreter lock."""

PendingHashes = Callable[[], dict[str, str]]
"""Function that waits for the hashes of files, and returns them by name."""


def file_sha256(path: Path, cache: Path | None = None, keep_going: Callable[[], bool] = lambda: True) -> str:
    """Return the sha256 of a file; from `cache` if the file is unchanged since it was hashed.

    `keep_going` is called between chunks. If it returns False, the result is incomplete and must not be used.
    """
    record = None
    if cache is not None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.fsync(file.fileno())  # writes pages that are mapped and changed, as far as the system allows it
        record = _record_of(path.resolve(), cache)
        if (cached := _read_hash(record)) is not None:
            return cached
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK, max(path.stat().st_size, 1))))
    with path.open("rb", buffering=0) as file:
        while keep_going() and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
    if cache is not None and record == _record_of(path.resolve(), cache) and keep_going():
        _write_hash(record, path.resolve(), digest.hexdigest())
    return digest.hexdigest()


def joined_sha256(hashes: Mapping[str, str]) -> str:
    """Return one hash of many files, from their relative paths and their hashes."""
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(os.fsencode(name) + f"\0{hashes[name]}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def background_hashes(folder: Path, names: list[str], cache: Path | None = None) -> Iterator[PendingHashes]:
    """Hash files of a folder in a thread, while the caller imports libraries and reads the model.

    Leaving the block early, because the model was rejected, does not wait for the thread.
    """
    stopped, pool = threading.Event(), ThreadPoolExecutor(1, "posleak-sha256")

    def run() -> dict[str, str]:
        return {name: file_sha256(folder / name, cache, lambda: not stopped.is_set()) for name in names}

    def result() -> dict[str, str]:
        with translate_errors("a file of the model cannot be read", folder, "grant yourself read permission"):
            return future.result()

    future = pool.submit(run)
    try:
        yield result
    finally:
        stopped.set()
        pool.shutdown(wait=False)


def confirm_hashes(folder: Path, hashes: dict[str, str], cache: Path, checksum: str, conditions: str) -> dict[str, str]:
    """Return the hashes of files, computed again if files with these hashes have loaded as other weights before.

    `checksum` is that of the weights in memory, and `conditions` is all else that determines it: dtype, config,
    versions of libraries.
    """
    seen = hashlib.sha256(checksum.encode()).hexdigest()

    def record() -> Path:
        key = hashlib.sha256(f"{joined_sha256(hashes)} {conditions}".encode()).hexdigest()
        return cache / "loaded" / f"{key}.json"

    if _read_hash(record()) not in (None, seen):
        hashes = {name: file_sha256(folder / name) for name in hashes}
    _write_hash(record(), folder, seen)
    return hashes


def _record_of(path: Path, cache: Path) -> Path:
    """Return the file in the cache that holds the hash of `path` in its current state."""
    stat = path.stat()
    state = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    key = os.fsencode(path) + "".join(f"\0{number}" for number in state).encode()
    return cache / "hashes" / f"{hashlib.sha256(key).hexdigest()}.json"


def _read_hash(record: Path) -> str | None:
    """Return a cached hash; None if it is missing or invalid."""
    try:
        digest: str = json.loads(read_regular(record))["sha256"]
        return digest if re.fullmatch("[0-9a-f]{64}", digest) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write_hash(record: Path, path: Path, digest: str) -> None:
    """Cache a hash. A failure is ignored: the next load only takes longer."""
    with contextlib.suppress(StorageError, OSError):
        write_json(record, {"path": str(path), "sha256": digest})
        remove_leftovers(record.parent, lambda name: name.endswith(".json"))


def model_sha256(model: torch.nn.Module) -> str:
    """Return the sha256 of every parameter and buffer of a model in memory."""
    return _digested(model, hashlib.sha256())


def adapter_sha256(model: torch.nn.Module, adapter: str) -> str:
    """Return the sha256 of the tensors of one of PEFT's adapters, which have its name in their path."""
    return _digested(model, hashlib.sha256(), lambda name: adapter in name.split("."))


def checksum(model: torch.nn.Module) -> str:
    """Return a fast checksum of every parameter and buffer of a model in memory."""
    import xxhash

    return _digested(model, xxhash.xxh3_128())


def _digested(model: torch.nn.Module, digest: Any, chosen: Callable[[str], bool] = lambda name: True) -> str:
    """Return the digest of name, dtype, shape and bytes of every tensor whose name is chosen.

    numpy lacks bfloat16, but any dtype can be viewed as bytes.
    """
    import torch

    release(model)
    for name, tensor in tensors(model):
        if not chosen(name):
            continue
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        tensor = tensor.dequantize() if tensor.is_quantized else tensor
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        tensor = tensor.resolve_conj().resolve_neg()
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK):
            digest.update(flat[start : start + CHUNK].numpy().data)
    return str(digest.hexdigest())


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer by name, as the plain tensors that hold its data; tied parameters once."""
    seen = set[int]()
    for prefix, module in model.named_modules():
        parameters = [(name, tensor) for name, tensor in module._parameters.items() if id(tensor) not in seen]
        seen |= {id(tensor) for _, tensor in parameters}
        for name, tensor in (*parameters, *module._buffers.items()):
            if tensor is not None:
                yield from _plain_tensors(f"{prefix}.{name}".lstrip("."), _stored(module, prefix, name, tensor))
        if hasattr(module, "_weight_bias"):  # torch.ao's eager quantisation keeps weights in an opaque object
            weight, bias = module._weight_bias()
            yield f"{prefix}.weight", weight.dequantize()
            yield from () if bias is None else [(f"{prefix}.bias", bias)]


def _stored(module: torch.nn.Module, prefix: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of a parameter that accelerate has offloaded, or that processes share; others unchanged."""
    if not tensor.is_meta:
        full: torch.Tensor = whole(tensor)
        return full
    hook = getattr(module, "_hf_hook", None)
    for inner in getattr(hook, "hooks", (hook,)):  # a SequentialHook has several
        with contextlib.suppress(KeyError, TypeError):  # TypeError: this hook has no map
            data: torch.Tensor = getattr(inner, "weights_map", None)[name]  # type: ignore[index]
            return data
    raise ModelError(
        "the model's weights are not in memory, so they cannot be identified", where=f"{prefix}.{name}",
        got="a tensor on the meta device, without a hook of accelerate that knows where its data is",
        remedy="pass a model whose weights are loaded, or offloaded by accelerate",
    )  # fmt: skip


def _plain_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor, or the components of a wrapper such as torchao's; then the tensors attached to it, such as the
    scales of bitsandbytes, which may have scales of their own (in a `QuantState`)."""
    import torch

    inner: Mapping[str, Any] = {}
    if type(value).__name__ == "QuantState":
        inner = vars(value)
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        inner = {key: getattr(value, key) for key in value.__tensor_flatten__()[0]}
    elif isinstance(value, torch.Tensor):
        yield name, value
        inner = vars(value) if is_packed(value) else {}
    for key, item in inner.items():
        yield from _plain_tensors(f"{name}.{key}", item)


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that packs or wraps its data, as quantised weights are."""
    import torch

    return type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the sha256 of a tokenizer in memory: its serialised backend (else its vocabulary) and special tokens."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{vocabulary}\0{special}".encode("utf-8", "surrogatepass")).hexdigest()
