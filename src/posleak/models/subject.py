"""The value that every later stage takes: a model, its tokenizer if it has one, and its identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posleak.models import hashing
from posleak.models.identity import Identity, Provenance, describe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, repr=False, eq=False)
class Subject:
    """A model that can be measured. Nothing in posleak changes it; edits are applied around a forward pass."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    identity: Identity

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "object"
    ) -> Subject:
        """A subject from a model in memory, which is put into eval mode: dropout would be measured as leakage."""
        model.eval()
        provenance = Provenance(name=name, source="object", weights_sha256=hashing.model_sha256(model))
        return cls(model, tokenizer, describe(model, tokenizer, provenance))

    @property
    def device(self) -> torch.device:
        """Where input ids must be put."""
        return next(self.model.get_input_embeddings().parameters()).device

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
