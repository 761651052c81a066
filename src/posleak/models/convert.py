"""GGUF -> a safetensors folder in the cache, once. The first load takes half a minute, the next under a second.

The way is the same for built-in models and for the user's own files: lock, obtain the GGUF, convert in a workspace,
reload and compare, write the manifest, publish by one rename. Whatever fails on the way leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, PosleakWarning
from posleak.models import (
    bounds,
    cache as caching,
    gguf_facts,
    hashing,
    manifest,
    memory,
    pretrained,
    tokenizer as words,
    weights,
)
from posleak.models.library_errors import disk_is_full, escape_surrogates, translate_errors
from posleak.models.manifest import ConversionManifest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Say = Callable[[str], None]
TOLERANCE = 1e-5
"""Largest |Δlogit| / max|logit| between the GGUF and the reloaded model. The weights must be equal to the bit; kernels
may still round differently where memory is aligned differently."""


@dataclass(frozen=True)
class ConversionOrder:
    """What to convert: `key` names the folder, `obtain(workspace, say)` brings the GGUF file, whose hash is known."""

    key: str
    name: str
    source: str
    gguf_sha256: str
    obtain: Callable[[Path, Say], Path]
    need_bytes: int
    packages: tuple[str, ...] = ()
    licence: str | None = None


def ensure(order: ConversionOrder, cache: Path, say: Say) -> Path:
    """The converted folder; made now if it is not there. Safe to call from many processes."""
    final = caching.model_folder(cache, order.key)
    with caching.writing(cache), caching.lock(cache, order.key):
        if manifest.find(final, order.gguf_sha256) is not None:
            return final
        caching.require_disk(cache, order.need_bytes, order.name)
        with caching.workspace(cache, order.key) as workspace:
            finished = _make(order, workspace, say)
            caching.publish(finished, final, workspace / "replaced")
    return final


def _make(order: ConversionOrder, workspace: Path, say: Say) -> Path:
    gguf = order.obtain(workspace, say)
    facts = gguf_facts.read(gguf)
    need = 4 * facts.elements
    memory.require_memory(need, where=str(gguf), device="cpu", available=lambda: memory.available_bytes("cpu"))
    say(f"{order.name}: converting {facts.quantisation}, once")
    finished = workspace / "finished"
    _convert(facts, _alone(gguf, workspace), finished)
    if gguf.is_relative_to(workspace):
        gguf.unlink()
    _write_manifest(order, facts, finished)
    say(f"{order.name}: ready")
    return finished


def _alone(gguf: Path, workspace: Path) -> Path:
    """The file in a folder of its own: transformers would also read what lies beside it, and might run it."""
    alone = workspace / "alone" / "model.gguf"
    alone.parent.mkdir()
    for put in (os.symlink, os.link):
        with contextlib.suppress(OSError, NotImplementedError):
            put(gguf.resolve(), alone)
            return alone
    shutil.copyfile(gguf, alone)
    return alone


def _write_manifest(order: ConversionOrder, facts: gguf_facts.Facts, finished: Path) -> None:
    files = manifest.contents(finished)
    record = ConversionManifest(
        name=escape_surrogates(order.name),
        source=order.source,
        packages=order.packages,
        gguf_sha256=order.gguf_sha256,
        quantisation=facts.quantisation,
        licence=order.licence or facts.licence,
        weights_sha256=hashing.joined_sha256({name: files[name].sha256 for name in weights.files(finished)}),
        files=files,
    )
    manifest.write(finished, record)


def _convert(facts: gguf_facts.Facts, gguf: Path, finished: Path) -> None:
    """Load, save, reload, compare. `gguf` is the file of `facts`, in a folder of its own."""
    import torch

    with _about(facts):
        config = pretrained.read_config(gguf.parent, gguf_file=gguf.name)
        bounds.require_held(facts.path, memory.needed(config), facts.elements, spare=0)
        gguf_facts.require_positions_kept(facts, config)
        with contextlib.redirect_stderr(io.StringIO()):  # transformers shows its GGUF bar even if bars are off
            model = pretrained.read_model(gguf.parent, config, dtype=torch.float32, gguf_file=gguf.name)
        savable, before = _savable(model), _Portrait.of(model)
    _report_dropped(facts, model)
    with pretrained.silence_transformers():
        savable.save_pretrained(str(finished))
    del model, savable  # two copies of a large model need not be in memory at once
    _save_tokenizer(facts, gguf, finished)
    with _about(facts):
        again = pretrained.read_model(finished, pretrained.read_config(finished), dtype=torch.float32)
        before.require_same(_Portrait.of(again), finished)


@contextlib.contextmanager
def _about(facts: gguf_facts.Facts) -> Iterator[None]:
    """Name the user's file in errors about its copy in the workspace."""
    try:
        with translate_errors("transformers cannot load the GGUF file", facts.path, pretrained.REMEDY):
            yield
    except ModelError as error:
        raise type(error)(
            error.what, where=str(facts.path), got=error.got, expected=error.expected, remedy=error.remedy
        ) from error


def _report_dropped(facts: gguf_facts.Facts, model: PreTrainedModel) -> None:
    """Warn of numbers in the file that the model has no place for, such as heads for speculative decoding."""
    kept = sum(parameter.numel() for parameter in model.parameters())  # tied parameters are counted once
    if facts.elements > kept:
        message = (
            f"{facts.path}: {facts.elements - kept} of {facts.elements} numbers in the file have no place in the model"
        )
        warnings.warn(message, PosleakWarning, stacklevel=2)


def _savable(model: PreTrainedModel) -> PreTrainedModel:
    """A model that came from GGUF refuses to be saved; a fresh one of the same config with its tensors does not.

    It also refuses tensors of other shapes than the config says, which transformers takes from GGUF without a word.
    """
    import torch

    config = model.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        fresh = type(model)(type(model.config).from_dict(config))
    fresh.load_state_dict(model.state_dict(), assign=True, strict=True)
    return fresh


def _save_tokenizer(facts: gguf_facts.Facts, gguf: Path, folder: Path) -> None:
    """Save the file's tokenizer; warn if transformers cannot read it: random tokens can still be measured."""
    if not facts.has_tokenizer:
        return
    try:
        with translate_errors("its tokenizer cannot be read", facts.path, pretrained.REMEDY):
            saved = _saved_tokenizer(gguf)
    except ModelError as error:
        if disk_is_full(error):
            raise
        message = f"{facts.path}: {error.what} ({error.got}); text inputs will not be possible"
        warnings.warn(message, PosleakWarning, stacklevel=2)
        return
    for path in saved.iterdir():
        os.replace(path, folder / path.name)


def _saved_tokenizer(gguf: Path) -> Path:
    """The tokenizer of a GGUF file, saved in a folder of its own."""
    from transformers import AutoTokenizer

    with pretrained.offline_transformers():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False, local_files_only=True
        )
    words.prepended(tokenizer)
    for circumstance in ("is_local", "local_files_only"):  # would make the tokenizer's hash depend on the machine
        tokenizer.init_kwargs.pop(circumstance, None)
    saved = gguf.parent / "tokenizer"
    tokenizer.save_pretrained(str(saved))
    return saved


@dataclass(frozen=True)
class _Portrait:
    """What conversion must not change: every bit of the weights, the config fields about positions, the logits."""

    weights: str
    config: dict[str, object]
    logits: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Portrait:
        import torch

        ids = torch.linspace(0, model.config.vocab_size - 1, 24).long().unsqueeze(0)
        with torch.no_grad():
            logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        names = ("rope_parameters", "layer_types", "sliding_window", "max_position_embeddings", "bos_token_id")
        config = {name: getattr(model.config, name, None) for name in names}
        return cls(hashing.model_sha256(model), config, logits)

    def require_same(self, other: _Portrait, folder: Path) -> None:
        gap = ((self.logits - other.logits).abs().max() / self.logits.abs().max()).item()
        if self.weights == other.weights and self.config == other.config and gap <= TOLERANCE:
            return
        raise ModelError(
            "conversion from GGUF changed the model, so it is not kept",
            where=str(folder),
            got=f"weights equal: {self.weights == other.weights}, {other.config}, relative logit gap {gap:.2g}",
            expected=f"equal weights, {self.config}, gap at most {TOLERANCE}",
            remedy="report this with the file's name; meanwhile use the original safetensors",
        )


def user_gguf(path: Path, cache: Path, say: Say, *, verify: bool = False) -> Path:
    """The converted folder of a GGUF file of the user's, keyed by the file's sha256, taken afresh if `verify`."""
    need = 4 * gguf_facts.read(path).elements  # before the hash: a header takes a moment, and 10 GB half a minute
    digest = hashing.file_sha256(path, None if verify else cache)
    key = f"gguf-{digest[:24]}"
    if manifest.find(caching.model_folder(cache, key), digest) is not None:
        return caching.model_folder(cache, key)
    return ensure(ConversionOrder(key, path.name, "gguf", digest, lambda _workspace, _say: path, need), cache, say)
