"""What a model is: hashes that travel with every result, so that two runs can be known to be of one model.

Folders:     sha256 over (relative path, content) of the files, sorted by path: the weight files, the tokenizer's files
             and, if it was run, the code. It does not depend on the dtype of loading.
Objects:     sha256 over (name, dtype, shape, bytes) of every parameter and buffer, in the order of the modules.
             Offloaded weights are read where they are stored. Packed weights (torchao, bitsandbytes) are hashed as
             they are packed. `state_dict()` is not called: some quantised modules change their weights when it is.
Checksum:    xxh3 over the same bytes, twenty times as fast. It says whether the weights in memory are still those that
             a hash was taken of. All bytes are read: version counters of tensors miss changes through `.data`.

The hash of a folder and of the object loaded from it differ by construction; each is stable in itself.

What is read when:

Converted models (built-in or GGUF): every file is hashed at every load and compared with posleak.json.
Folders and GGUF files of the user's: small files are hashed at every load. Weights are hashed once and then remembered
    in <cache>/hashes under their path, size, inode, time of writing and time of change; a program can set the time of
    writing back, but not the time of change. A file is flushed to the disk before it is hashed: a page that another
    process has mapped and written to is then clean, and its next change sets both times. Where a file system does not
    do that (tmpfs), the weights in memory tell: if files with these hashes have loaded as others before, they are
    hashed again (`confirmed`), and so they are with `load(..., verify=True)`.

What is not defended: whoever can write to the cache can also write a matching posleak.json or a wrong memory, and a
file that is changed while it is loaded may be hashed before the change and read after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from posleak.errors import ModelError, StorageError
from posleak.files import read_regular, write_atomically
from posleak.models.library_errors import translate_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

CHUNK = 1 << 24
"""Bytes hashed at once: large, since between two chunks a thread waits for its turn among Python's threads."""
HEX = frozenset("0123456789abcdef")


# -- files ----------------------------------------------------------------------------------------------------------


def file_sha256(path: Path, cache: Path | None = None, go_on: Callable[[], bool] = lambda: True) -> str:
    """sha256 of one file; taken from the memory in `cache` if the file is the same as when it was hashed.

    `go_on` is asked now and then; if it says no, the hash is not finished, and of no use.
    """
    if cache is not None:
        _flushed(path)
    known = None if cache is None else _memory_of(path.resolve(), cache)
    remembered = None if known is None else _recall(known)
    if remembered is not None:
        return remembered
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK, max(path.stat().st_size, 1))))
    with path.open("rb", buffering=0) as file:
        while go_on() and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
    if cache is not None and known == _memory_of(path.resolve(), cache) and go_on():
        _remember(known, path.resolve(), digest.hexdigest())
    return digest.hexdigest()


def _flushed(path: Path) -> None:
    """Write pages of the file that are mapped and changed to the disk, as far as the system allows it."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())


def joined_sha256(hashes: Mapping[str, str]) -> str:
    """One hash of many files, from their relative paths and their hashes."""
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(os.fsencode(name) + f"\0{hashes[name]}\n".encode())
    return digest.hexdigest()


class Background:
    """Files of a folder, hashed in a thread while the caller imports libraries and reads the model.

    Use as a context: whoever leaves it early, because the model was refused, does not wait for the thread.
    """

    def __init__(self, folder: Path, names: Iterable[str], cache: Path | None = None) -> None:
        self.folder, self._names, self._cache = folder, list(names), cache
        self._left = threading.Event()
        self._hashes: dict[str, str] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="posleak-sha256", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _run(self) -> None:
        try:
            for name in self._names:
                self._hashes[name] = file_sha256(self.folder / name, self._cache, lambda: not self._left.is_set())
        except BaseException as error:
            self._error = error

    def result(self) -> dict[str, str]:
        """The hashes by name, once they are all there."""
        self._thread.join()
        with translate_errors("a file of the model cannot be read", self.folder, "make it readable for you"):
            if self._error is not None:
                raise self._error
        return self._hashes


def confirmed(hashes: Background, cache: Path, loaded: str, how: str) -> dict[str, str]:
    """Return the hashes of the files, taken anew if files with these hashes have loaded as other weights before.

    Not every file system changes the times of a file that is written through a memory map. `loaded` is the checksum of
    the weights in memory, and `how` is all else that decides it: dtype, config, versions of libraries.
    """
    found, seen = hashes.result(), hashlib.sha256(loaded.encode()).hexdigest()
    if _recall(_loads_as(found, how, cache)) not in (None, seen):
        found = {name: file_sha256(hashes.folder / name) for name in found}
    _remember(_loads_as(found, how, cache), hashes.folder, seen)
    return found


def _loads_as(hashes: Mapping[str, str], how: str, cache: Path) -> Path:
    """Where it is remembered as which weights the files with these hashes load."""
    return cache / "loaded" / f"{hashlib.sha256(f'{joined_sha256(hashes)} {how}'.encode()).hexdigest()}.json"


# -- the memory of hashes -------------------------------------------------------------------------------------------


def _memory_of(path: Path, cache: Path) -> Path:
    """Where the hash of this file, in its present state, is remembered."""
    stat = path.stat()
    state = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    key = os.fsencode(path) + "".join(f"\0{number}" for number in state).encode()
    return cache / "hashes" / f"{hashlib.sha256(key).hexdigest()}.json"


def _recall(known: Path) -> str | None:
    """What is remembered; None if there is nothing, or nothing that can be read as a hash."""
    try:
        found = json.loads(read_regular(known))
    except (OSError, ValueError, RecursionError):
        return None
    digest = found.get("sha256") if isinstance(found, dict) else None
    return digest if isinstance(digest, str) and len(digest) == 64 and HEX.issuperset(digest) else None


def _remember(known: Path, path: Path, digest: str) -> None:
    """A cache that cannot be written costs time at the next load, nothing else."""
    text = json.dumps({"path": str(path), "sha256": digest})
    with contextlib.suppress(StorageError, OSError):
        write_atomically(known, lambda temporary: temporary.write_text(text + "\n", encoding="ascii"))
        for left in known.parent.glob("tmp*.part"):  # of versions of posleak that wrote otherwise
            left.unlink()


# -- objects in memory ----------------------------------------------------------------------------------------------


def model_sha256(model: torch.nn.Module) -> str:
    """Return the sha256 of every parameter and buffer of a model in memory."""
    return _digested(model, hashlib.sha256())


def checksum(model: torch.nn.Module) -> str:
    """Return a fast checksum of every parameter and buffer of a model in memory."""
    import xxhash

    return _digested(model, xxhash.xxh3_128())


def _digested(model: torch.nn.Module, digest: Any) -> str:
    for name, tensor in tensors(model):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        _update(digest, tensor)
    found: str = digest.hexdigest()
    return found


def _update(digest: Any, tensor: torch.Tensor) -> None:
    """Feed a tensor's bytes, whatever its dtype: numpy has no bfloat16, but every dtype can be viewed as bytes."""
    import torch

    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK):
        digest.update(flat[start : start + CHUNK].numpy().data)


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer by name, as the plain tensors that hold its data; tied parameters once."""
    seen = set[int]()
    for place, module in model.named_modules():
        own = [(name, tensor) for name, tensor in module._parameters.items() if id(tensor) not in seen]
        seen |= {id(tensor) for _, tensor in own}
        for name, tensor in (*own, *module._buffers.items()):
            if tensor is not None:
                yield from _plain(f"{place}.{name}".lstrip("."), _stored(module, place, name, tensor))
        if hasattr(module, "_weight_bias"):  # torch.ao's eager quantisation keeps weights in an opaque object
            weight, bias = module._weight_bias()
            yield f"{place}.weight", weight.dequantize()
            yield from () if bias is None else [(f"{place}.bias", bias)]


def _stored(module: torch.nn.Module, place: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of a parameter that accelerate has offloaded; any other tensor as it is."""
    if not tensor.is_meta:
        return tensor
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):  # a SequentialHook has several
        with contextlib.suppress(KeyError, TypeError):  # TypeError: this hook has no map
            found: torch.Tensor = getattr(each, "weights_map", None)[name]  # type: ignore[index]
            return found
    raise ModelError(
        "the model's weights are not in memory, so they cannot be identified", where=f"{place}.{name}",
        got="a tensor on the meta device, without a hook of accelerate that knows where its data is",
        remedy="pass a model whose weights are loaded, or offloaded by accelerate",
    )  # fmt: skip


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor itself, or those that a wrapper such as torchao's is made of; then the tensors that are attached
    to it, such as the scales of bitsandbytes."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = {key: getattr(tensor, key) for key in tensor.__tensor_flatten__()[0]}
    else:
        yield name, tensor
        inner = vars(tensor) if is_packed(tensor) else {}
    yield from _attached(name, inner)


def _attached(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield from _plain(f"{name}.{key}", value)
        elif type(value).__name__ == "QuantState":  # of bitsandbytes: its scales may have scales of their own
            yield from _attached(f"{name}.{key}", vars(value))


def is_packed(tensor: torch.Tensor) -> bool:
    """Is this a tensor of a subclass that packs or wraps its data, as quantised weights do?"""
    import torch

    return type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """sha256 of a tokenizer in memory: all that its backend would save, or else its vocabulary, and special tokens."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{words}\0{special}".encode("utf-8", "surrogatepass")).hexdigest()
