"""The model under test: `Subject` holds a model, its tokenizer if it has one, and its identity; `load` makes one.

Models are rejected before their weights are read. Hashing starts earlier.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from posleak.errors import ModelError, translate_errors
from posleak.models import (
    cache as caching,
    configs,
    forms,
    hashing,
    memory,
    offload as offloading,
    parallel as sharing,
    pretrained,
    sources,
)
from posleak.models.adapters import Adapter, by_name, is_adapter, with_adapters
from posleak.models.builtin import OnStatus, known_names
from posleak.models.identity import Identity, Provenance, config_sha256, describe, input_device
from posleak.models.parallel import ALONE, Ranks
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
    `probe.fingerprint.identified` adds a fingerprint). `attributes` are those of its modules at that time. `ranks` are
    the processes that share the work.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    identity: Identity
    provenance: Provenance
    attributes: tuple[Any, ...] = ()
    ranks: Ranks = ALONE

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "object",
        *,
        parallel: str | None = None,
    ) -> Subject:
        """Return a subject for a model in memory. It is measured in evaluation mode, and its own modes are restored.

        Wrappers of torch and peft are removed: the model inside torch.compile, DataParallel or a PeftModel is measured.

        parallel    "data": all processes of torch.distributed call posleak, each on a part of the prompts. Processes
                    that share the model itself (tensor parallel, FSDP2) are recognised
        """
        model = forms.unwrapped(model)
        _require_objects(model, tokenizer)
        configs.require_decoder(type(model).__name__, model.config, model.main_input_name)
        _require_plain(model, name)
        provenance = Provenance(
            name=name,
            source="object",
            checksum=stable_checksum(model),
            weights_sha256=hashing.model_sha256(model),
            tokenizer_sha256=hashing.tokenizer_sha256(tokenizer),
        )
        parallel = parallel or _shared(model)
        identity = describe(model, tokenizer, provenance)
        return cls(model, tokenizer, identity, provenance, ranks=_ranks(parallel))

    def current(self, fingerprint: tuple[float, ...] | None = None) -> Subject:
        """Return the subject with the identity that the model has now.

        All weights are read. If they have changed since they were hashed, they are hashed again.
        """
        _require_plain(self.model, self.identity.name)
        provenance = self.provenance
        if (checksum := hashing.checksum(self.model)) != provenance.checksum:
            suffix = "" if provenance.source == "object" else CHANGED_SUFFIX
            provenance = replace(
                provenance, checksum=checksum, weights_sha256=hashing.model_sha256(self.model), revision=None,
                adapters=(), source=provenance.source.removesuffix(CHANGED_SUFFIX) + suffix,
            )  # fmt: skip
        identity = replace(describe(self.model, self.tokenizer, provenance), fingerprint=fingerprint)
        return replace(self, identity=identity, provenance=provenance, attributes=())

    def is_unchanged(self) -> bool:
        """Return whether weights, config and attributes of all modules are as they were when it was identified."""
        from posleak.models.hold import exclusive

        with exclusive(self.model):
            now = describe(self.model, self.tokenizer, self.provenance)
            same = replace(self.identity, fingerprint=None) == now and self.attributes == module_attributes(self.model)
            return same and self.provenance.checksum == hashing.checksum(self.model)

    @property
    def splits_prompts(self) -> bool:
        """Whether processes share the prompts, each with the whole model."""
        return self.ranks.size > 1 and _shared(self.model) is None

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


def _require_plain(model: PreTrainedModel, name: str) -> None:
    """Reject forms of a model that a probe cannot observe."""
    forms.require_eager(model, name)
    forms.require_no_autocast(input_device(model).type)


def _shared(model: PreTrainedModel) -> str | None:
    """Return how processes share this model itself; None if each has all of it."""
    return sharing.TENSOR if sharing.split_heads(model) or sharing.sharded(model) else None


def _ranks(kind: str | None) -> Ranks:
    return ALONE if kind is None else sharing.everyone()


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
    adapter: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    base: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    offload: str | os.PathLike[str] | None = None,
    parallel: str | None = None,
    max_memory: str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    verify: bool = False,
    cache: str | os.PathLike[str] | None = None,
    progress: OnStatus | None = None,
    notice: OnStatus | None = None,
) -> Subject:
    """Load a built-in model, a folder, a GGUF file, a hub id, or an adapter with its base model.

    name               a built-in name (`posleak models` lists them), a folder, a .gguf file, or a hub id, optionally
                       with its revision: org/name@revision; or an adapter of PEFT, which names its base model
    device             device to compute on; the default is the accelerator if there is one, else the CPU
    dtype              dtype of the weights; the default is float32 on a CPU, and the stored dtype elsewhere
    device_map         device map for transformers, which distributes the model over devices; excludes `device`
    adapter            one or several adapters of PEFT, by folder or hub id; all are applied
    base               base model of the adapter `name`; the default is the one that the adapter's config names
    tokenizer          folder or hub id with a tokenizer, if the model's own folder has none or another one
    offload            folder for weights that stay on disk and are read once per forward pass. Files that the model
                       was loaded from are read in place; only weights that must be converted are written there
    parallel           under torchrun: "tensor" splits the model over the processes, "data" splits the prompts
    max_memory         memory limit of the process ("8GB", or bytes): weights that exceed it stay on disk
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
    limit = memory.parse_bytes(max_memory)
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
        chosen = pretrained.choose_device(joined)
        folder = None if offload is None else Path(offload)
        return memory.Target(chosen, pretrained.choose_dtype(dtype, chosen), device_map, folder, limit, parallel)

    joined = sharing.join(parallel, device)
    paths = [adapter] if isinstance(adapter, str | os.PathLike) else list(adapter)
    adapters = [
        Adapter.read(sources.locate_adapter(os.fspath(path), options), allow_pickle=allow_pickle) for path in paths
    ]
    located = sources.locate_offline(text, options.cache) or sources.resolve(text, options, target())
    if is_adapter(located.folder):
        adapters.insert(0, Adapter.read(located.folder, allow_pickle=allow_pickle))
        full_name = adapters[0].base_of(base)
        text, pinned = sources.split_revision(full_name)
        options = replace(options, revision=pinned)
        with adapters[0].naming_its_base(base):
            located = sources.locate_offline(text, options.cache) or sources.resolve(text, options, target())
    elif base is not None:
        raise ModelError(
            "only an adapter has a base model", where=full_name, got=f"base {base}",
            remedy="pass the adapter as the model, or omit --base",
        )  # fmt: skip
    words = None if tokenizer is None else sources.locate_tokenizer(os.fspath(tokenizer), options)
    about = translate_errors("the model cannot be loaded", located.folder, pretrained.REMEDY)
    with _hashing(located, options) as hashes, about:  # files are hashed while torch is imported and the model is read
        return _read(full_name, located, target(), options, hashes, adapters, words)


def subject_of(model: AnyModel, max_memory: str | int | None = None) -> Subject:
    """Return a subject unchanged, load a name as `load` does, and wrap a model in memory without a tokenizer."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, str | os.PathLike):
        return load(model, max_memory=max_memory)
    from torch.nn import Module

    if isinstance(model, Module):
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
    name: str,
    located: LocatedModel,
    target: memory.Target,
    options: LoadOptions,
    hashes: hashing.PendingHashes,
    adapters: Sequence[Adapter] = (),
    words: Path | None = None,
) -> Subject:
    """Read a model from its folder; reject one that is larger than its files, or than the memory.

    adapters   are applied to the model;  words: folder of the tokenizer, by default that of the model
    """
    folder, trusted = located.folder, options.trust_remote_code
    config = configs.read_config(folder, trust_remote_code=trusted)
    stored = pretrained.read_headers(folder, allow_pickle=options.allow_pickle)
    memory.require_tensors_for_layers(folder, config, stored)
    need = memory.memory_need(config, trust_remote_code=trusted)
    elements = 8 * stored.bytes if need.is_quantised else stored.elements
    memory.require_backed_by_files(folder / "config.json", need, elements)
    loaded_dtype = target.loaded_dtype(config)
    weights = max(stored.bytes_as(loaded_dtype), need.bytes_as(loaded_dtype))
    with offloading.placement(target, weights, str(folder), options.notice) as (device_map, offload_folder):
        if offload_folder is not None:
            offloading.require_offloadable(need, stored, adapters, str(folder))
        model = pretrained.read_model(
            folder, config, dtype=target.dtype, device_map=device_map, trust_remote_code=trusted,
            allow_pickle=options.allow_pickle, offload_folder=offload_folder,
            tensor_parallel=target.parallel == sharing.TENSOR,
        )  # fmt: skip
        if adapters:
            model = with_adapters(model, by_name(adapters))
        offloading.release_between_layers(model)
    at = words or folder
    tokenizer = configs.read_tokenizer(at, config, trust_remote_code=trusted, required=words is not None)
    checksum = stable_checksum(model)
    conditions = f"{model.dtype} {config_sha256(model.config)} {version('torch')} {version('transformers')}"
    hashed = [(name, adapter.sha256) for name, adapter in by_name(adapters).items()]
    conditions += f" {hashed}" if hashed else ""
    confirmed = hashing.confirm_hashes(folder, hashes(), options.cache, checksum, conditions)
    if located.record is not None:
        caching.require_hashes(folder, located.record, confirmed)
    provenance = Provenance(
        name=" + ".join([name, *(adapter.title for adapter in adapters)]),
        source=located.source,
        weights_sha256=hashing.joined_sha256(confirmed),
        checksum=checksum,
        revision=located.revision,
        quantisation=located.quantisation,
        licence=located.licence,
        tokenizer_sha256=None if tokenizer is None else _sha256(at, configs.tokenizer_files(at)),
        code_sha256=_sha256(folder, folder.rglob("*.py")) if configs.ran_local_code(model, tokenizer) else None,
        adapters=tuple(hashed),
    )
    return Subject(model, tokenizer, describe(model, tokenizer, provenance), provenance, ranks=_ranks(target.parallel))


def _sha256(folder: Path, paths: Iterable[Path]) -> str:
    """Return one hash of small files in a folder, without the cache of hashes."""
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    return hashing.joined_sha256({name: hashing.file_sha256(path) for name, path in files.items()})
