"""`load`: a name -> a `Subject`. Every refusal comes before the weights are read."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError
from posleak.models import cache as caching
from posleak.models import hashing, memory, pretrained, refusals, sources, tokenizer
from posleak.models.identity import Provenance, describe
from posleak.models.subject import Subject

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedConfig

    from posleak.models.convert import Say


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

    def require(self, need: int, where: str) -> None:
        """Refuse what does not fit on the device or, with a device map, on the whole machine."""
        spread = self.device_map is not None
        memory.require_memory(
            need,
            where=where,
            device="this machine" if spread else self.device,
            available=memory.machine_bytes if spread else lambda: memory.available_bytes(self.device),
        )


def load(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    cache: str | os.PathLike[str] | None = None,
    progress: Say | None = None,
    notice: Say | None = None,
) -> Subject:
    """Load a built-in model, a folder, a GGUF file or a hub id.

    Weights are float32 on a CPU and as stored elsewhere, unless `dtype` says otherwise; the device is the accelerator
    if there is one. Code and pickles from strangers are refused unless allowed. While a built-in model is fetched,
    `progress` is called with each step and `notice` with the terms of use; by default both print to stderr.
    """
    target = _target(device, dtype, device_map)
    root = caching.root(cache)

    def fits(config: PreTrainedConfig) -> None:
        need = memory.config_bytes(config, target.cast(config), trust_remote_code=trust_remote_code)
        target.require(need, str(name))

    wish = sources.Wish(
        root, revision, trust_remote_code, allow_pickle, fits, progress or _to_stderr, notice or _to_stderr
    )
    located = sources.resolve(os.fspath(name), wish)
    return _read(os.fspath(name), located, target, root, trust_remote_code, allow_pickle)


def _to_stderr(message: str) -> None:
    print(f"posleak: {message}", file=sys.stderr, flush=True)


def _target(
    device: str | torch.device | None, dtype: str | torch.dtype | None, device_map: str | dict[str, Any] | None
) -> _Target:
    if device is not None and device_map is not None:
        raise ModelError(
            "device and device_map exclude each other", got=f"{device} and {device_map}", remedy="pass one"
        )
    chosen = pretrained.pick_device(device)
    return _Target(chosen, pretrained.pick_dtype(dtype, chosen), device_map)


def _read(
    name: str, located: sources.Located, target: _Target, root: Path, trust_remote_code: bool, allow_pickle: bool
) -> Subject:
    config = refusals.read_config(located.folder, trust_remote_code=trust_remote_code)
    files = refusals.require_weights(located.folder, allow_pickle=allow_pickle)
    target.require(memory.files_bytes(files, target.cast(config)), str(located.folder))
    weights = _identified(located, root, allow_pickle)
    model = pretrained.read_model(
        located.folder,
        dtype=target.dtype,
        device_map=target.placement,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    words = tokenizer.read(located.folder, trust_remote_code=trust_remote_code)
    provenance = Provenance(name, located.source, weights, located.revision, located.quantisation, located.licence)
    return Subject(model, words, describe(model, words, provenance))


def _identified(located: sources.Located, root: Path, allow_pickle: bool) -> str:
    """The sha256 of the weights; for a converted model it must be what conversion wrote."""
    got = hashing.folder_sha256(located.folder, root, allow_pickle=allow_pickle)
    if located.weights_sha256 not in (None, got):
        raise ModelError(
            "the cached weights are not those that were converted",
            where=str(located.folder),
            got=f"sha256 {got}",
            expected=f"sha256 {located.weights_sha256}",
            remedy="delete that folder and load the model again; the disk or another program has changed it",
        )
    return got
