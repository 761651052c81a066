"""The model under test: `Subject` holds a model, its tokenizer if it has one, and its identity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from posleak.errors import ModelError, UnsupportedError, translate_errors
from posleak.models import hashing
from posleak.models.identity import Identity, Provenance, describe, input_device
from posleak.text import visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    if any(hashing.is_packed(parameter) for parameter in model.parameters()):
        import torch

        from posleak.models.hold import exclusive

        ids = torch.zeros(1, 2, dtype=torch.long, device=input_device(model))
        about = translate_errors("the model cannot be run", type(model).__name__, RUN_IN_TRANSFORMERS)
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
        "the model is spread over several processes (tensor parallel or FSDP): each would measure only its own part",
        where=name, got=f"tensor parallel over {parallel} processes" if sharded is None else f"{sharded} is a DTensor",
        expected="a model whose weights are complete in this process",
        remedy="load it in one process, with device_map='auto' if it needs several devices",
    )  # fmt: skip


def _require_objects(model: object, tokenizer: object) -> None:
    """Reject objects that are not a model and a tokenizer of transformers."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    for what, given, kind in (("model", model, PreTrainedModel), ("tokenizer", tokenizer, PreTrainedTokenizerBase)):
        if not isinstance(given, kind) and (what == "model" or given is not None):
            raise ModelError(
                f"this is not a {what} of transformers", where="Subject.of",
                got=f"{type(given).__name__} {visible(repr(given)):.80}", expected=f"a {kind.__name__}",
                remedy="load a name, a folder or a file with posleak.load",
            )  # fmt: skip
