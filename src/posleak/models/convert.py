"""Convert GGUF to a safetensors folder in the cache, once. The first load takes half a minute, the next under a second.

Built-in models and the user's own files take the same steps: lock, obtain the GGUF, convert in a workspace, reload and
compare, write the manifest, publish by one rename. A failure leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, is_disk_full, translate_errors, warn
from posleak.models import cache as caching, gguf_file, hashing, memory, pretrained
from posleak.models.builtin import OnStatus
from posleak.models.configs import parse_config, prepended_ids
from posleak.text import escape_surrogates

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 1e-5
"""Largest |Δlogit| / max|logit| between the GGUF and the reloaded model. The weights must be bit-identical; kernels may
still round differently where memory is aligned differently."""
COMPARED_KEYS = ("rope_parameters", "layer_types", "sliding_window", "max_position_embeddings", "bos_token_id")


@dataclass(frozen=True)
class ConversionOrder:
    """What to convert: `key` names the folder, and `obtain(workspace, on_status)` returns the GGUF file."""

    key: str
    name: str
    source: str
    gguf_sha256: str
    obtain: Callable[[Path, OnStatus], Path]
    disk_bytes: int
    packages: tuple[str, ...] = ()
    licence: str | None = None


def convert_once(order: ConversionOrder, cache: Path, on_status: OnStatus) -> Path:
    """Return the converted folder; convert if it is not in the cache. Safe to call from several processes."""
    target = caching.model_folder(cache, order.key)
    if caching.read_manifest(target, order.gguf_sha256) is not None:
        return target
    with caching.translate_write_errors(cache), caching.lock(cache, order.key):
        if caching.read_manifest(target, order.gguf_sha256) is None:  # another process may have converted it meanwhile
            caching.require_disk_space(cache, order.disk_bytes, order.name)
            with caching.workspace(cache, order.key) as workspace:
                finished = _convert_in(workspace, order, on_status)
                caching.publish(finished, target, workspace / "replaced")
    return target


def convert_file(path: Path, cache: Path, on_status: OnStatus, *, verify: bool = False) -> Path:
    """Return the converted folder of a GGUF file of the user, keyed by its sha256 (hashed again if `verify`)."""
    disk_bytes = 4 * gguf_file.read_header(path).elements  # before hashing, which takes half a minute for 10 GB
    digest = hashing.file_sha256(path, None if verify else cache)
    order = ConversionOrder(f"gguf-{digest[:24]}", path.name, "gguf", digest, lambda *_: path, disk_bytes)
    return convert_once(order, cache, on_status)


def _convert_in(workspace: Path, order: ConversionOrder, on_status: OnStatus) -> Path:
    gguf = order.obtain(workspace, on_status)
    header = gguf_file.read_header(gguf)
    memory.Target("cpu").require_memory(4 * header.elements, str(gguf))
    on_status(f"{order.name}: converting {header.quantisation}, once")
    finished = workspace / "finished"
    _convert(header, _isolated(gguf, workspace), finished)
    if gguf.is_relative_to(workspace):
        gguf.unlink()
    stated, sizes = header.fields.get("general.license"), caching.file_sizes(finished)
    files = {name: caching.FileContent(sizes[name], hashing.file_sha256(finished / name)) for name in sizes}
    record = caching.ConversionManifest(
        name=escape_surrogates(order.name),
        source=order.source,
        packages=order.packages,
        gguf_sha256=order.gguf_sha256,
        quantisation=header.quantisation,
        licence=order.licence or (None if stated is None else str(stated)),
        weights_sha256=hashing.joined_sha256({name: files[name].sha256 for name in pretrained.weight_files(finished)}),
        files=files,
    )
    caching.MANIFEST.write(finished / caching.MANIFEST_FILE, record)
    on_status(f"{order.name}: ready")
    return finished


def _isolated(gguf: Path, workspace: Path) -> Path:
    """Return the file alone in a folder: transformers would also read its neighbours, and might run them."""
    alone = workspace / "alone" / "model.gguf"
    alone.parent.mkdir()
    for link in (os.symlink, os.link):
        with contextlib.suppress(OSError, NotImplementedError):
            link(gguf.resolve(), alone)
            return alone
    shutil.copyfile(gguf, alone)
    return alone


def _convert(header: gguf_file.GGUFHeader, gguf: Path, finished: Path) -> None:
    """Load, save, reload and compare. `gguf` is the file of `header`, alone in a folder."""
    import torch

    with _errors_about(header):
        config = parse_config(gguf.parent, gguf_file=gguf.name)
        memory.require_backed_by_files(header.path, memory.memory_need(config), header.elements, extra=0)
        gguf_file.require_positions_kept(header, config)
        with contextlib.redirect_stderr(io.StringIO()):  # transformers shows its GGUF bar even if bars are off
            model = pretrained.read_model(gguf.parent, config, dtype=torch.float32, gguf_file=gguf.name)
        savable, before = _savable(model), _ModelState.of(model)
    kept = sum(parameter.numel() for parameter in model.parameters())  # tied parameters are counted once
    if header.elements > kept:  # such as heads for speculative decoding
        warn(f"{header.path}: the model does not use {header.elements - kept} of {header.elements} stored elements")
    with pretrained.silence_transformers():
        savable.save_pretrained(str(finished))
    del model, savable  # so that only one copy of a large model is in memory
    _save_tokenizer(header, gguf, finished)
    with _errors_about(header):
        again = pretrained.read_model(finished, parse_config(finished), dtype=torch.float32)
        before.require_same(_ModelState.of(again), finished)


@contextlib.contextmanager
def _errors_about(header: gguf_file.GGUFHeader) -> Iterator[None]:
    """Name the user's file in errors about its copy in the workspace."""
    try:
        with translate_errors("transformers cannot load the GGUF file", header.path, pretrained.REMEDY):
            yield
    except ModelError as error:
        raise type(error)(
            error.what, where=str(header.path), got=error.got, expected=error.expected, remedy=error.remedy
        ) from error


def _savable(model: PreTrainedModel) -> PreTrainedModel:
    """Return a fresh model with the same tensors: transformers refuses to save one that came from GGUF.

    Loading is strict about shapes, unlike transformers when it reads a GGUF file.
    """
    import torch

    config = model.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        fresh = type(model)(type(model.config).from_dict(config))
    fresh.load_state_dict(model.state_dict(), assign=True, strict=True)
    return fresh


def _save_tokenizer(header: gguf_file.GGUFHeader, gguf: Path, folder: Path) -> None:
    """Save the file's tokenizer. Warn if transformers cannot read it: random tokens can still be measured."""
    from transformers import AutoTokenizer

    if "tokenizer.ggml.model" not in header.fields:
        return
    complete = gguf.parent / "tokenizer"
    try:
        with translate_errors("the tokenizer cannot be read", header.path, pretrained.REMEDY):
            with pretrained.offline_transformers():
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                    str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False, local_files_only=True
                )
            prepended_ids(tokenizer)
            for key in ("is_local", "local_files_only"):  # would make the tokenizer's hash depend on the machine
                tokenizer.init_kwargs.pop(key, None)
            tokenizer.save_pretrained(str(complete))
    except ModelError as error:
        if is_disk_full(error):
            raise
        warn(f"{header.path}: {error.what} ({error.got}); text inputs will not be possible")
        return
    for path in complete.iterdir():
        os.replace(path, folder / path.name)


@dataclass(frozen=True)
class _ModelState:
    """The properties that conversion must preserve: the weights to the bit, config keys about positions, and logits."""

    weights: str
    config: dict[str, object]
    logits: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> _ModelState:
        import torch

        ids = torch.linspace(0, model.config.vocab_size - 1, 24).long().unsqueeze(0)
        with torch.no_grad():
            logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        config = {name: getattr(model.config, name, None) for name in COMPARED_KEYS}
        return cls(hashing.model_sha256(model), config, logits)

    def require_same(self, other: _ModelState, folder: Path) -> None:
        gap = ((self.logits - other.logits).abs().max() / self.logits.abs().max()).item()
        if self.weights == other.weights and self.config == other.config and gap <= TOLERANCE:
            return
        raise ModelError(
            "conversion from GGUF changed the model, so it is not kept", where=str(folder),
            got=f"weights equal: {self.weights == other.weights}, {other.config}, relative logit gap {gap:.2g}",
            expected=f"equal weights, {self.config}, gap at most {TOLERANCE}",
            remedy="report this with the file's name; meanwhile use the original safetensors",
        )  # fmt: skip
