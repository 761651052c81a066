"""`load`: a name -> a `Subject`. Models are rejected before their weights are read; hashing starts earlier."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from posleak.errors import ModelError, translate_errors
from posleak.models import cache as caching, configs, hashing, memory, pretrained, sources
from posleak.models.builtin import OnStatus, known_names
from posleak.models.identity import Provenance, config_sha256, describe
from posleak.models.sources import LoadOptions, LocatedModel
from posleak.models.subject import Subject, stable_checksum
from posleak.signatures import checked
from posleak.text import visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    AnyModel: TypeAlias = Subject | PreTrainedModel | str | os.PathLike[str]
else:  # transformers is imported only when a model is used
    AnyModel = Any
"""A subject, a model of transformers, or what `load` takes: a built-in name, a folder, a .gguf file or a hub id."""


@checked
def load(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    verify: bool = False,
    cache: str | os.PathLike[str] | None = None,
    progress: OnStatus | None = None,
    notice: OnStatus | None = None,
) -> Subject:
    """Load a built-in model, a folder, a GGUF file or a hub id.

    name               a built-in name (`posleak models` lists them), a folder, a .gguf file, or a hub id, optionally
                       with its revision: org/name@revision
    device             device to compute on; the default is the accelerator if there is one, else the CPU
    dtype              dtype of the weights; the default is float32 on a CPU, and the stored dtype elsewhere
    device_map         how transformers spreads the model over devices, instead of `device`
    revision           branch, tag or commit of a hub id
    trust_remote_code  run code that comes with the model, which is rejected otherwise
    allow_pickle       read weights that are pickles, which can run code, and are rejected otherwise
    verify             hash all weights again, instead of using cached hashes of files that look unchanged
    cache              folder for fetched and converted models, instead of the platform's cache
    progress           callback that receives a status line while a model is fetched; the default prints to stderr
    notice             callback that receives the terms of use of a built-in model; the default prints to stderr
    """
    pretrained.require_docstrings()
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ModelError(
            "this is not the name of a model", where="load", got=f"{name!r:.80}",
            expected="a built-in name, a folder, a .gguf file or a hub id",
            remedy="pass a model that is in memory to Subject.of",
        )  # fmt: skip
    if device is not None and device_map is not None:
        got = f"{device} and {device_map}"
        raise ModelError("device and device_map exclude each other", got=got, remedy="pass one")
    full_name = os.fsdecode(name)
    text, pinned = sources.split_revision(full_name)
    if pinned is not None and revision not in (None, pinned):
        raise ModelError("two revisions are given", where=text, got=f"{pinned} and {revision}", remedy="name one")
    revision = pinned or revision
    if revision is not None and text in known_names():
        raise sources.no_revisions_error(text, revision, "this model")
    pretrained.require_dtype(dtype)
    sources.require_existing_path(text)
    options = LoadOptions(
        caching.cache_folder(cache), revision, trust_remote_code, allow_pickle, verify,
        progress or _to_stderr, notice or _to_stderr,
    )  # fmt: skip
    with ExitStack() as stack:
        located = sources.locate_offline(text, options.cache)
        if located is not None:  # hashed while torch is imported
            hashes = stack.enter_context(_hashing(located, options))
        device = pretrained.choose_device(device)
        target = _Target(device, pretrained.choose_dtype(dtype, device), device_map)
        if located is None:
            located = sources.resolve(text, options, lambda config: target.require_fit(config, text, options))
            hashes = stack.enter_context(_hashing(located, options))
        with translate_errors("the model cannot be loaded", located.folder, pretrained.REMEDY):
            return _read(full_name, located, target, options, hashes)


def subject_of(model: AnyModel) -> Subject:
    """Return a subject unchanged, load a name as `load` does, and wrap a model in memory without a tokenizer."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, str | os.PathLike):
        return load(model)
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return Subject.of(model)
    raise ModelError(
        "this cannot be measured", where="subject", got=f"{type(model).__name__} {visible(repr(model)):.80}",
        expected="a Subject, a model of transformers, or the name of a model",
        remedy='pass posleak.load("smollm2-135m"), Subject.of(model, tokenizer), or the name itself',
    )  # fmt: skip


def _to_stderr(message: str) -> None:
    print(f"posleak: {visible(message)}", file=sys.stderr, flush=True)


def _hashing(located: LocatedModel, options: LoadOptions) -> AbstractContextManager[hashing.PendingHashes]:
    """Return the hashes of the weights, not started yet; compare the small files of a converted model at once."""
    with translate_errors("the model's files cannot be read", located.folder, pretrained.REMEDY):
        names = pretrained.weight_files(located.folder, allow_pickle=options.allow_pickle)
        if located.record is not None:
            caching.require_unchanged(located.folder, located.record, names)
    use_cache = located.record is None and not options.verify
    return hashing.background_hashes(located.folder, names, options.cache if use_cache else None)


@dataclass(frozen=True)
class _Target:
    """The device and the dtype that the weights will have in memory."""

    device: str
    dtype: torch.dtype | str
    device_map: str | dict[str, Any] | None

    def loaded_dtype(self, config: PreTrainedConfig) -> torch.dtype | None:
        """Return the dtype that the weights will have; None if it is that of each file."""
        import torch

        dtype = config.dtype if self.dtype == "auto" else self.dtype
        return dtype if isinstance(dtype, torch.dtype) else None

    def bytes(self, config: PreTrainedConfig, need: memory.MemoryNeed) -> int:
        """Return a lower bound on the bytes of a model: how densely quantised weights are packed is not known."""
        import torch

        if _is_quantised(config):
            return need.parameters // 8 + need.buffer_bytes
        return need.bytes_as(self.loaded_dtype(config) or torch.float32)

    def require_fit(self, config: PreTrainedConfig, name: str, options: LoadOptions) -> None:
        """Reject a config whose model does not fit."""
        need = memory.memory_need(config, trust_remote_code=options.trust_remote_code)
        self.require_memory(self.bytes(config, need), name)

    def require_memory(self, need: int, where: str) -> None:
        """Reject what does not fit on the device or, with a device map, on the whole machine."""
        spread = self.device_map is not None
        available = memory.machine_bytes() if spread else memory.available_bytes(self.device)
        memory.require_memory(need, available, where=where, device="this machine" if spread else self.device)


def _is_quantised(config: PreTrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _read(
    name: str, located: LocatedModel, target: _Target, options: LoadOptions, hashes: hashing.PendingHashes
) -> Subject:
    """Read a model from its folder; reject one that is larger than its files, or than the memory."""
    folder, trusted = located.folder, options.trust_remote_code
    config = configs.read_config(folder, trust_remote_code=trusted)
    stored = pretrained.read_headers(folder, allow_pickle=options.allow_pickle)
    memory.require_tensors_for_layers(folder, config, stored)
    need = memory.memory_need(config, trust_remote_code=trusted)
    elements = 8 * stored.bytes if _is_quantised(config) else stored.elements
    memory.require_backed_by_files(folder / "config.json", need, elements)
    need_bytes = max(stored.bytes_as(target.loaded_dtype(config)), target.bytes(config, need))
    target.require_memory(need_bytes, str(folder))
    placement = target.device_map or (None if target.device == "cpu" else {"": target.device})  # no copy in main memory
    model = pretrained.read_model(
        folder, config, dtype=target.dtype, device_map=placement, trust_remote_code=trusted,
        allow_pickle=options.allow_pickle,
    )  # fmt: skip
    tokenizer = configs.read_tokenizer(folder, config, trust_remote_code=trusted)
    checksum = stable_checksum(model)
    conditions = f"{model.dtype} {config_sha256(model.config)} {version('torch')} {version('transformers')}"
    confirmed = hashing.confirm_hashes(folder, hashes(), options.cache, checksum, conditions)
    if located.record is not None:
        caching.require_hashes(folder, located.record, confirmed)
    provenance = Provenance(
        name=name,
        source=located.source,
        weights_sha256=hashing.joined_sha256(confirmed),
        checksum=checksum,
        revision=located.revision,
        quantisation=located.quantisation,
        licence=located.licence,
        tokenizer_sha256=None if tokenizer is None else _sha256(folder, configs.tokenizer_files(folder)),
        code_sha256=_sha256(folder, folder.rglob("*.py")) if configs.ran_local_code(model, tokenizer) else None,
    )
    return Subject(model, tokenizer, describe(model, tokenizer, provenance), provenance)


def _sha256(folder: Path, paths: Iterable[Path]) -> str:
    """Return one hash of small files in a folder, without the cache of hashes."""
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    return hashing.joined_sha256({name: hashing.file_sha256(path) for name, path in files.items()})
