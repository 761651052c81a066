"""`load`: a name -> a `Subject`. Refusals come before the weights are read, but for hashes, which are taken then."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError
from posleak.models import (
    bounds,
    cache as caching,
    hashing,
    manifest,
    memory,
    pretrained,
    refusals,
    sources,
    tokenizer,
    trust,
    weights,
)
from posleak.models.identity import Provenance, config_sha256, describe
from posleak.models.library_errors import translate_errors
from posleak.models.sources import split_revision
from posleak.models.subject import Subject, stable_checksum
from posleak.signatures import checked
from posleak.text import visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from posleak.models.convert import Say


@dataclass(frozen=True)
class _Allowed:
    """What the caller allows, and where hashes are remembered."""

    cache: Path
    trust_remote_code: bool
    allow_pickle: bool
    verify: bool

    def hashing(self, located: sources.Located) -> hashing.Background:
        """Begin to hash the weights of a folder; the small files of a converted model are compared at once."""
        with translate_errors("the model's files cannot be read", located.folder, pretrained.REMEDY):
            names = weights.files(located.folder, allow_pickle=self.allow_pickle)
            if located.record is not None:
                manifest.require_small(located.folder, located.record, names)
        fresh = self.verify or located.record is not None
        return hashing.Background(located.folder, names, None if fresh else self.cache)


@dataclass(frozen=True)
class _Target:
    """On which device, and in which dtype, the weights will be in memory."""

    device: str
    dtype: torch.dtype | str
    device_map: str | dict[str, Any] | None

    @property
    def placement(self) -> str | dict[str, Any] | None:
        """For from_pretrained: straight onto the accelerator, without a copy in main memory first."""
        return self.device_map or (None if self.device == "cpu" else {"": self.device})

    def cast(self, config: PreTrainedConfig) -> torch.dtype | None:
        """The dtype that the weights will have; None if that is decided file by file."""
        import torch

        chosen = config.dtype if self.dtype == "auto" else self.dtype
        return chosen if isinstance(chosen, torch.dtype) else None

    def bytes(self, config: PreTrainedConfig, need: memory.MemoryNeed) -> int:
        """What a model takes in memory, at least: how far quantised weights are packed is not known."""
        import torch

        if getattr(config, "quantization_config", None) is not None:
            return need.numbers // 8 + need.tables
        return need.bytes_as(self.cast(config) or torch.float32)

    def require(self, need: int, where: str) -> None:
        """Refuse what does not fit on the device or, with a device map, on the whole machine."""
        spread = self.device_map is not None
        memory.require_memory(
            need,
            where=where,
            device="this machine" if spread else self.device,
            available=memory.machine_bytes if spread else lambda: memory.available_bytes(self.device),
        )


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
    progress: Say | None = None,
    notice: Say | None = None,
) -> Subject:
    """Load a built-in model, a folder, a GGUF file or a hub id.

    name               a built-in name (`posleak models` lists them), a folder, a .gguf file, or a hub id, which may
                       name its revision: org/name@revision
    device             where it computes: the accelerator if there is one, else the CPU
    dtype              of its weights: float32 on a CPU, and as stored elsewhere
    device_map         how transformers shall spread it over devices, instead of `device`
    revision           of a hub id: a branch, a tag or a commit
    trust_remote_code  let code run that comes with the model; it is refused otherwise
    allow_pickle       read weights that are pickles, which can run code; they are refused otherwise
    verify             hash all weights again, instead of trusting what is remembered of files that look unchanged
    cache              a folder for what is fetched and converted, instead of the platform's cache
    progress           called with each step while a built-in model is fetched; by default it prints to stderr
    notice             called with the terms of use of a built-in model; by default it prints to stderr
    """
    pretrained.require_docstrings()
    text, pinned = split_revision(_name(name))
    if pinned is not None and revision not in (None, pinned):
        raise ModelError("two revisions are asked for", where=text, got=f"{pinned} and {revision}", remedy="name one")
    revision = pinned or revision
    if revision is not None and text in sources.known_names():
        raise sources.no_revisions(text, revision, "this model")
    pretrained.require_dtype(dtype)
    sources.require_path(text)
    asked = _Allowed(caching.cache_folder(cache), trust_remote_code, allow_pickle, verify)
    with ExitStack() as stack:
        located = sources.at_hand(text, asked.cache)
        if located is not None:  # hashed while torch is imported
            hashes = stack.enter_context(asked.hashing(located))
        target = _target(device, dtype, device_map)
        if located is None:
            located = sources.resolve(text, _wish(text, asked, target, revision, progress, notice))
            hashes = stack.enter_context(asked.hashing(located))
        with translate_errors("the model cannot be loaded", located.folder, pretrained.REMEDY):
            return _read(_name(name), located, target, asked, hashes)


def _name(name: str | os.PathLike[str]) -> str:
    if isinstance(name, str | os.PathLike) and os.fspath(name):
        return os.fsdecode(name)
    raise ModelError(
        "this is no name of a model", where="load", got=f"{name!r:.80}",
        expected="a built-in name, a folder, a .gguf file or a hub id",
        remedy="pass a model that is in memory to Subject.of",
    )  # fmt: skip


def _wish(
    name: str, asked: _Allowed, target: _Target, revision: str | None, progress: Say | None, notice: Say | None
) -> sources.Wish:
    def fits(config: PreTrainedConfig) -> None:
        target.require(target.bytes(config, memory.needed(config, trust_remote_code=asked.trust_remote_code)), name)

    return sources.Wish(
        cache=asked.cache,
        revision=revision,
        trust_remote_code=asked.trust_remote_code,
        allow_pickle=asked.allow_pickle,
        verify=asked.verify,
        fits=fits,
        progress=progress or _to_stderr,
        notice=notice or _to_stderr,
    )


def _to_stderr(message: str) -> None:
    print(f"posleak: {visible(message)}", file=sys.stderr, flush=True)


def _target(
    device: str | torch.device | None, dtype: str | torch.dtype | None, device_map: str | dict[str, Any] | None
) -> _Target:
    if device is not None and device_map is not None:
        raise ModelError(
            "device and device_map exclude each other", got=f"{device} and {device_map}", remedy="pass one"
        )
    chosen = pretrained.pick_device(device)
    return _Target(chosen, pretrained.pick_dtype(dtype, chosen), device_map)


def _read(name: str, located: sources.Located, target: _Target, asked: _Allowed, hashes: hashing.Background) -> Subject:
    config = refusals.read_config(located.folder, trust_remote_code=asked.trust_remote_code)
    _require_room(located.folder, config, target, asked)
    model = pretrained.read_model(
        located.folder,
        config,
        dtype=target.dtype,
        device_map=target.placement,
        trust_remote_code=asked.trust_remote_code,
        allow_pickle=asked.allow_pickle,
    )
    words = tokenizer.read(located.folder, config, trust_remote_code=asked.trust_remote_code)
    checksum, config_hash = stable_checksum(model), config_sha256(model.config)
    how = f"{model.dtype} {config_hash} {version('torch')} {version('transformers')}"
    found = hashing.confirmed(hashes, asked.cache, checksum, how)
    if located.record is not None:
        manifest.require_same(located.folder, located.record, found)
    provenance = Provenance(
        name=name,
        source=located.source,
        weights_sha256=hashing.joined_sha256(found),
        checksum=checksum,
        revision=located.revision,
        quantisation=located.quantisation,
        licence=located.licence,
        tokenizer_sha256=None if words is None else _sha256(located.folder, tokenizer.files(located.folder)),
        code_sha256=_sha256(located.folder, trust.code(located.folder)) if trust.ran_code(model, words) else None,
    )
    return Subject(model, words, describe(model, words, provenance), provenance)


def _sha256(folder: Path, names: list[str]) -> str:
    """One hash of small files, which are never taken from memory."""
    return hashing.joined_sha256({name: hashing.file_sha256(folder / name) for name in names})


def _require_room(folder: Path, config: PreTrainedConfig, target: _Target, asked: _Allowed) -> None:
    """Refuse a model that its files cannot hold, or that memory cannot."""
    held = weights.read_headers(folder, allow_pickle=asked.allow_pickle)
    bounds.require_layers(folder, config, held)
    need = memory.needed(config, trust_remote_code=asked.trust_remote_code)
    packed = getattr(config, "quantization_config", None) is not None
    bounds.require_held(folder / "config.json", need, 8 * held.bytes if packed else held.elements)
    target.require(max(held.bytes_as(target.cast(config)), target.bytes(config, need)), str(folder))
