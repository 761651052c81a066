"""The model under test: `Subject` holds a model, its tokenizer if it has one, and its identity; `load` makes one.

Models are rejected before their weights are read. Hashing starts earlier.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from posleak.errors import ModelError, UnsupportedError, translate_errors
from posleak.models import cache as caching, configs, hashing, memory, pretrained, sources
from posleak.models.builtin import OnStatus, known_names
from posleak.models.identity import Identity, Provenance, config_sha256, describe, input_device
from posleak.models.quantisation import KERNEL_REMEDY, is_quantised
from posleak.models.sources import LoadOptions, LocatedModel
from posleak.signatures import checked
from posleak.text import visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    AnyModel: TypeAlias = "Subject | PreTrainedModel | str | os.PathLike[str]"
else:  # transformers is imported only when a model is used
    AnyModel = Any
"""A Subject, a transformers model, or anything that `load` accepts: a built-in name, folder, .gguf file or hub id."""

RUN_IN_TRANSFORMERS = "run it once in transformers, without posleak, to see the cause"
CHANGED_SUFFIX = ", then changed in memory"
"""Appended to the source of a model whose weights have changed since they were loaded."""


@dataclass(frozen=True, repr=False, eq=False)
class Subject:
    """A model that can be measured. posleak does not change it; edits are applied around a forward pass.

    `identity` describes the model when it was last identified. Every measurement identifies it again (`current`; then
    `probe.fingerprint.identified` adds a fingerprint). `attributes` are those of its modules at that time.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    identity: Identity
    provenance: Provenance
    attributes: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "object"
    ) -> Subject:
        """Return a subject for a model in memory. It is measured in evaluation mode, and its own modes are restored."""
        _require_objects(model, tokenizer)
        _require_unsharded(model, name)
        provenance = Provenance(
            name=name,
            source="object",
            checksum=stable_checksum(model),
            weights_sha256=hashing.model_sha256(model),
            tokenizer_sha256=hashing.tokenizer_sha256(tokenizer),
        )
        return cls(model, tokenizer, describe(model, tokenizer, provenance), provenance)

    def current(self, fingerprint: tuple[float, ...] | None = None) -> Subject:
        """Return the subject with the identity that the model has now.

        All weights are read. If they have changed since they were hashed, they are hashed again.
        """
        _require_unsharded(self.model, self.identity.name)
        provenance = self.provenance
        if (checksum := hashing.checksum(self.model)) != provenance.checksum:
            suffix = "" if provenance.source == "object" else CHANGED_SUFFIX
            provenance = replace(
                provenance, checksum=checksum, weights_sha256=hashing.model_sha256(self.model), revision=None,
                source=provenance.source.removesuffix(CHANGED_SUFFIX) + suffix,
            )  # fmt: skip
        identity = replace(describe(self.model, self.tokenizer, provenance), fingerprint=fingerprint)
        return Subject(self.model, self.tokenizer, identity, provenance)

    def is_unchanged(self) -> bool:
        """Return whether weights, config and attributes of all modules are as they were when it was identified."""
        from posleak.models.hold import exclusive

        with exclusive(self.model):
            now = describe(self.model, self.tokenizer, self.provenance)
            same = replace(self.identity, fingerprint=None) == now and self.attributes == module_attributes(self.model)
            return same and self.provenance.checksum == hashing.checksum(self.model)

    @property
    def device(self) -> torch.device:
        """The device that input ids must be on."""
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, even while an edit computes in another."""
        import torch

        return cast("torch.dtype", getattr(torch, self.identity.dtype))

    @property
    def vocab_size(self) -> int:
        """The number of ids that can be embedded."""
        return self.identity.vocab

    @property
    def context(self) -> int | None:
        """The number of positions that the model was made for, if its config states it."""
        return self.identity.context

    def __repr__(self) -> str:
        return f"Subject({self.identity.short()})"


def module_attributes(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return the attributes of all modules, hooks included, in a form that can be compared later.

    A simple value represents itself, a container its items, and any other object its id. Parameters and buffers are
    covered by the checksum.
    """
    import torch

    def mark(value: Any, depth: int) -> Any:
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, dict) and depth:
            return [(key, mark(item, depth - 1)) for key, item in value.items()] if value else None
        if isinstance(value, list | tuple) and depth:
            return [mark(item, depth - 1) for item in value]
        if isinstance(value, torch.Tensor):
            return id(value), 0 if value.is_inference() else value._version
        return id(value)

    return tuple(
        [(name, mark(value, 2)) for name, value in vars(module).items() if name not in ("_parameters", "_buffers")]
        for module in model.modules()
    )


def stable_checksum(model: PreTrainedModel) -> str:
    """Return the checksum of the model's weights.

    Some quantised modules repack their weights in their first forward pass, so that one is run before.
    """
    if is_quantised(model):
        import torch

        from posleak.models.hold import exclusive

        ids = torch.zeros(1, 2, dtype=torch.long, device=input_device(model))
        about = translate_errors("the quantised weights do not run here", type(model).__name__, KERNEL_REMEDY)
        with about, exclusive(model), torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return hashing.checksum(model)


def _require_unsharded(model: PreTrainedModel, name: str) -> None:
    """Reject a model of which this process holds only a part."""
    sharded = next((where for where, p in model.named_parameters() if type(p).__name__ == "DTensor"), None)
    parallel = getattr(model, "_tp_size", None) or 1
    if sharded is None and parallel == 1:
        return
    raise UnsupportedError(
        "the model is distributed over several processes (tensor parallel or FSDP): each would measure only its part",
        where=name, got=f"tensor parallel over {parallel} processes" if sharded is None else f"{sharded} is a DTensor",
        expected="a model whose weights are complete in this process",
        remedy="load it in one process, with device_map='auto' if it needs several devices",
    )  # fmt: skip


def _require_objects(model: object, tokenizer: object) -> None:
    """Reject objects that are not a model and a tokenizer of transformers."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    for what, value, kind in (("model", model, PreTrainedModel), ("tokenizer", tokenizer, PreTrainedTokenizerBase)):
        if not isinstance(value, kind) and (what == "model" or value is not None):
            raise ModelError(
                f"not a {what} of transformers", where="Subject.of",
                got=f"{type(value).__name__} {visible(repr(value)):.80}", expected=f"a {kind.__name__}",
                remedy="load a name, a folder or a file with posleak.load",
            )  # fmt: skip


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
    device_map         device map for transformers, which distributes the model over devices; excludes `device`
    revision           branch, tag or commit of a hub id
    trust_remote_code  allow code that comes with the model
    allow_pickle       allow weights stored as pickle files, which can run code when they are read
    verify             hash all weights again; ignore cached hashes
    cache              folder for downloaded and converted models (default: the cache folder of the platform)
    progress           callback that receives a status line during a download; the default prints to stderr
    notice             callback that receives the terms of use of a built-in model; the default prints to stderr

    Example: `posleak.load("smollm2-135m", dtype="bfloat16").identity`
    """
    pretrained.require_docstrings()
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ModelError(
            "not the name of a model", where="load", got=f"{name!r:.80}",
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
    sources.existing_path(text)  # raises for a path to nothing, before torch is imported
    options = LoadOptions(
        caching.cache_folder(cache), revision, trust_remote_code, allow_pickle, verify,
        progress or _to_stderr, notice or _to_stderr,
    )  # fmt: skip

    def target() -> memory.Target:
        chosen = pretrained.choose_device(device)
        return memory.Target(chosen, pretrained.choose_dtype(dtype, chosen), device_map)

    located = sources.locate_offline(text, options.cache) or sources.resolve(text, options, target())
    about = translate_errors("the model cannot be loaded", located.folder, pretrained.REMEDY)
    with _hashing(located, options) as hashes, about:  # files are hashed while torch is imported and the model is read
        return _read(full_name, located, target(), options, hashes)


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
        "not a model", where="subject", got=f"{type(model).__name__} {visible(repr(model)):.80}",
        expected="a Subject, a model of transformers, or the name of a model",
        remedy='pass posleak.load("smollm2-135m"), Subject.of(model, tokenizer), or the name itself',
    )  # fmt: skip


def _to_stderr(message: str) -> None:
    print(f"posleak: {visible(message)}", file=sys.stderr, flush=True)


def _hashing(located: LocatedModel, options: LoadOptions) -> AbstractContextManager[hashing.PendingHashes]:
    """Return a context that hashes the weights in the background; check the small files of a converted model now."""
    with translate_errors("the model's files cannot be read", located.folder, pretrained.REMEDY):
        names = pretrained.weight_files(located.folder, allow_pickle=options.allow_pickle)
        if located.record is not None:
            caching.require_unchanged(located.folder, located.record, names)
    use_cache = located.record is None and not options.verify
    return hashing.background_hashes(located.folder, names, options.cache if use_cache else None)


def _read(
    name: str, located: LocatedModel, target: memory.Target, options: LoadOptions, hashes: hashing.PendingHashes
) -> Subject:
    """Read a model from its folder; reject one that is larger than its files, or than the memory."""
    folder, trusted = located.folder, options.trust_remote_code
    config = configs.read_config(folder, trust_remote_code=trusted)
    stored = pretrained.read_headers(folder, allow_pickle=options.allow_pickle)
    memory.require_tensors_for_layers(folder, config, stored)
    need = memory.memory_need(config, trust_remote_code=trusted)
    elements = 8 * stored.bytes if need.is_quantised else stored.elements
    memory.require_backed_by_files(folder / "config.json", need, elements)
    loaded_dtype = target.loaded_dtype(config)
    target.require_memory(max(stored.bytes_as(loaded_dtype), need.bytes_as(loaded_dtype)), str(folder))
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
