"""The value that every later stage takes: a model, its tokenizer if it has one, and its identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posleak.errors import ModelError
from posleak.models import hashing
from posleak.models.identity import Identity, Provenance, describe
from posleak.text import visible

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
        _require_objects(model, tokenizer)
        model.eval()
        provenance = Provenance(
            name=name,
            source="object",
            weights_sha256=hashing.model_sha256(model),
            tokenizer_sha256=hashing.tokenizer_sha256(tokenizer),
        )
        return cls(model, tokenizer, describe(model, tokenizer, provenance))

    @property
    def device(self) -> torch.device:
        """Where input ids must be put."""
        return next(self.model.get_input_embeddings().parameters()).device

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
