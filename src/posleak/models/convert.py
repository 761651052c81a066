"""GGUF -> a safetensors folder in the cache, once. The first load takes half a minute, the next under a second.

The way is the same for built-in models and for the user's own files: lock, obtain the GGUF, convert in a workspace,
reload and compare, write the manifest, publish by one rename. Whatever fails on the way leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, PosleakWarning
from posleak.models import cache as caching
from posleak.models import gguf_facts, hashing, manifest, memory, pretrained
from posleak.models.manifest import Manifest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Say = Callable[[str], None]
TOLERANCE = 1e-5
"""Largest |Δlogit| / max|logit| between the GGUF and the reloaded model. The weights must be equal to the bit; kernels
may still round differently where memory is aligned differently."""


@dataclass(frozen=True)
class Order:
    """What to convert: `key` names the folder, `obtain(workspace, say)` brings the GGUF file, whose hash is known."""

    key: str
    name: str
    source: str
    gguf_sha256: str
    obtain: Callable[[Path, Say], Path]
    need_bytes: int
    packages: tuple[str, ...] = ()
    licence: str | None = None


def find(cache: Path, key: str) -> Path | None:
    """The converted folder, if it is there and whole."""
    folder = caching.model_folder(cache, key)
    return folder if manifest.read(folder) is not None else None


def ensure(order: Order, cache: Path, say: Say) -> Path:
    """The converted folder; made now if it is not there. Safe to call from many processes."""
    from safetensors import SafetensorError

    with caching.lock(cache, order.key):
        found = find(cache, order.key)
        if found is not None:
            return found
        caching.require_disk(cache, order.need_bytes, order.name)
        with caching.workspace(cache, order.key) as workspace:
            try:
                finished = _make(order, workspace, say)
                caching.publish(finished, caching.model_folder(cache, order.key), workspace / "replaced")
            except (OSError, SafetensorError) as error:
                raise _unwritten(order, cache, error) from error
    return caching.model_folder(cache, order.key)


def _unwritten(order: Order, cache: Path, error: Exception) -> ModelError:
    return ModelError(
        "the model could not be written to the cache",
        where=str(cache),
        got=error,
        expected=f"{order.need_bytes / 1e6:.0f} MB of writable space for {order.name}",
        remedy=f"free some space, or set {caching.ENVIRONMENT} to another folder",
    )


def _make(order: Order, workspace: Path, say: Say) -> Path:
    gguf = order.obtain(workspace, say)
    facts = gguf_facts.read(gguf)
    need = 4 * facts.elements
    memory.require_memory(need, where=str(gguf), device="cpu", available=lambda: memory.available_bytes("cpu"))
    say(f"{order.name}: converting {facts.quantisation}, once")
    finished = workspace / "finished"
    weights = _convert(facts, finished)
    if gguf.is_relative_to(workspace):
        gguf.unlink()
    _write_manifest(order, facts, finished, weights)
    say(f"{order.name}: ready")
    return finished


def _write_manifest(order: Order, facts: gguf_facts.Facts, finished: Path, weights: str) -> None:
    record = Manifest(
        name=order.name,
        source=order.source,
        packages=order.packages,
        gguf_sha256=order.gguf_sha256,
        quantisation=facts.quantisation,
        licence=order.licence or facts.licence,
        weights_sha256=weights,
        files=manifest.sizes(finished),
    )
    manifest.write(finished, record)


def _convert(facts: gguf_facts.Facts, finished: Path) -> str:
    """Load, save, reload, compare; returns the sha256 of the weight files."""
    import torch

    with contextlib.redirect_stderr(io.StringIO()):  # transformers shows its GGUF progress bar even if bars are off
        model = pretrained.read_model(facts.path.parent, dtype=torch.float32, gguf_file=facts.path.name)
    gguf_facts.require_positions_kept(facts, model.config)
    _report_dropped(facts, model)
    _save(model, finished)
    _save_tokenizer(facts, finished)
    before = _Portrait.of(model)
    del model  # two copies of a large model need not be in memory at once
    before.require_same(_Portrait.of(pretrained.read_model(finished, dtype=torch.float32)), finished)
    return hashing.folder_sha256(finished)


def _report_dropped(facts: gguf_facts.Facts, model: PreTrainedModel) -> None:
    """Warn of numbers in the file that the model has no place for, such as heads for speculative decoding."""
    kept = sum(parameter.numel() for parameter in model.parameters())  # tied parameters are counted once
    if facts.elements > kept:
        message = (
            f"{facts.path}: {facts.elements - kept} of {facts.elements} numbers in the file have no place in the model"
        )
        warnings.warn(message, PosleakWarning, stacklevel=2)


def _save(model: PreTrainedModel, folder: Path) -> None:
    """A model that came from GGUF refuses to be saved; a fresh one of the same config with its tensors does not."""
    import torch

    config = model.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        fresh = type(model)(type(model.config).from_dict(config))
    fresh.load_state_dict(model.state_dict(), assign=True, strict=True)
    with pretrained.quiet():
        fresh.save_pretrained(str(folder))


def _save_tokenizer(facts: gguf_facts.Facts, folder: Path) -> None:
    """Save the file's tokenizer; warn if transformers cannot read it: random tokens can still be measured."""
    if not facts.has_tokenizer:
        return
    from transformers import AutoTokenizer

    try:
        with pretrained.quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(facts.path.parent), gguf_file=facts.path.name
            )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        message = f"{facts.path}: its tokenizer cannot be read ({error}); text inputs will not be possible"
        warnings.warn(message, PosleakWarning, stacklevel=2)
        return
    tokenizer.save_pretrained(str(folder))


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


def user_gguf(path: Path, cache: Path, say: Say) -> Path:
    """The converted folder of a GGUF file of the user's, keyed by the file's sha256."""
    digest = hashing.file_sha256(path, cache)
    key = f"gguf-{digest[:24]}"
    found = find(cache, key)
    if found is not None:
        return found
    need = 4 * gguf_facts.read(path).elements
    return ensure(Order(key, path.name, "gguf", digest, lambda _workspace, _say: path, need), cache, say)
