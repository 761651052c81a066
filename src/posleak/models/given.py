"""What may stand in the place of a subject: a subject, the name of a model, or a model in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

from posleak.errors import ModelError
from posleak.models.loading import load
from posleak.models.subject import Subject
from posleak.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    AnyModel: TypeAlias = Subject | PreTrainedModel | str | os.PathLike[str]
else:  # transformers is imported only where a model is touched
    AnyModel = Any
"""A subject, a model of transformers, or what `load` takes: a built-in name, a folder, a .gguf file or a hub id."""


def subject_of(model: AnyModel) -> Subject:
    """The subject itself; a name is loaded as `load` does, and a model in memory becomes one without a tokenizer."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, str | os.PathLike):
        return load(model)
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return Subject.of(model)
    raise ModelError(
        "this cannot be measured", where="subject", got=f"{type(model).__name__} {visible(repr(model)):.80}",
        expected="a Subject, a model of transformers, or the name of a model",
        remedy='pass posleak.load("smollm2-135m"), Subject.of(model, tokenizer), or the name itself',
    )  # fmt: skip
