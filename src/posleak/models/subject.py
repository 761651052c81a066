"""The value that every later stage takes: a model, its tokenizer if it has one, and its identity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, UnsupportedError
from posleak.models import hashing
from posleak.models.identity import Identity, Provenance, describe, input_device
from posleak.models.library_errors import translate_errors
from posleak.text import visible

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


RUN_IN_TRANSFORMERS = "run it once in transformers, without posleak, to see the cause"
CHANGED = ", then changed in memory"
"""Follows the source of a model whose weights are no longer those that were loaded."""


@dataclass(frozen=True, repr=False, eq=False)
class Subject:
    """A model that can be measured. Nothing in posleak changes it; edits are applied around a forward pass.

    `identity` describes the model at the time when it was taken. Every measurement takes it again (`current`, which
    `probe.fingerprint.identified` completes by a fingerprint). `attributes` are those of its modules at that time.
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
        _require_whole(model, name)
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
        _require_whole(self.model, self.identity.name)
        provenance = self.provenance
        if (checksum := hashing.checksum(self.model)) != provenance.checksum:
            provenance = replace(
                provenance, checksum=checksum, weights_sha256=hashing.model_sha256(self.model), revision=None,
                source=provenance.source.removesuffix(CHANGED) + ("" if provenance.source == "object" else CHANGED),
            )  # fmt: skip
        identity = replace(describe(self.model, self.tokenizer, provenance), fingerprint=fingerprint)
        return Subject(self.model, self.tokenizer, identity, provenance)

    def is_unchanged(self) -> bool:
        """Return whether weights, config and attributes of all modules are those of when the subject was identified."""
        from posleak.models.hold import exclusive

        with exclusive(self.model):
            now = describe(self.model, self.tokenizer, self.provenance)
            same = replace(self.identity, fingerprint=None) == now and self.attributes == module_attributes(self.model)
            return same and self.provenance.checksum == hashing.checksum(self.model)

    @property
    def device(self) -> torch.device:
        """Where input ids must be put."""
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights, whatever an edit makes of them for the time of a pass."""
        import torch

        found: torch.dtype = getattr(torch, self.identity.dtype)
        return found

    @property
    def vocab_size(self) -> int:
        """Ids below this number can be embedded."""
        return self.identity.vocab

    @property
    def context(self) -> int | None:
        """Positions that the model was made for, if its config says."""
        return self.identity.context

    def __repr__(self) -> str:
        return f"Subject({self.identity.short()})"


def module_attributes(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return the attributes of all modules, hooks included, in a form that can be compared at another time.

    A simple value stands for itself, a container for its items, and anything else for which object it is. Parameters
    and buffers are left to the checksum.
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

    Some quantised modules pack their weights anew in their first forward pass. It is run before the checksum is taken.
    """
    if any(hashing.is_packed(parameter) for parameter in model.parameters()):
        import torch

        from posleak.models.hold import exclusive

        ids = torch.zeros(1, 2, dtype=torch.long, device=input_device(model))
        with (
            translate_errors("the model cannot be run", type(model).__name__, RUN_IN_TRANSFORMERS),
            exclusive(model),
            torch.no_grad(),
        ):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return hashing.checksum(model)


def _require_whole(model: PreTrainedModel, name: str) -> None:
    """Refuse a model of which this process holds only a part."""
    sharded = next((where for where, p in model.named_parameters() if type(p).__name__ == "DTensor"), None)
    parallel = getattr(model, "_tp_size", None) or 1
    if sharded is None and parallel == 1:
        return
    raise UnsupportedError(
        "the model is spread over several processes (tensor parallel or FSDP): each would measure only its own part",
        where=name,
        got=f"tensor parallel over {parallel} processes" if sharded is None else f"{sharded} is a DTensor",
        expected="a model whose weights are whole in this process",
        remedy="load it in one process, with device_map='auto' if it needs several devices",
    )  # fmt: skip


def _require_objects(model: object, tokenizer: object) -> None:
    """A model and a tokenizer as transformers makes them; the annotations are not checked when code runs."""
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel):
        raise _not_an_object("the model is no model of transformers", model, "a PreTrainedModel with a config")
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _not_an_object("the tokenizer is none of transformers", tokenizer, "a PreTrainedTokenizerBase, or None")


def _not_an_object(what: str, given: object, expected: str) -> ModelError:
    return ModelError(
        what,
        where="Subject.of",
        got=f"{type(given).__name__} {visible(repr(given)):.80}",
        expected=expected,
        remedy="load a name, a folder or a file with posleak.load",
    )
