"""Next-token loss at chosen positions: the model's own head, with all that it does to logits, on a few states at once.

What stands between the last state and the logits (scales, soft caps, biases) differs between families and is written in
each one's forward method. So the model's own method runs, with a stand-in for its body that hands out states already
there. Logits of the whole vocabulary exist for a few positions at a time only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError

LOGIT_BYTES = 128 * 10**6
"""Of logits in float32 that are held at once; one position of every prompt, if that is more."""


def token_losses(
    model: PreTrainedModel, output: Any, ids: Int[Tensor, "B T"], positions: Sequence[int]
) -> Float[Tensor, "B P"]:
    """−log p(token i + 1 | tokens up to i) in nats at positions i, from what the model's body gave for ids."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    at_once = max(1, LOGIT_BYTES // (4 * len(ids) * vocabulary))
    found = []
    with torch.inference_mode():
        for first in range(0, len(positions), at_once):
            some = torch.as_tensor(positions[first : first + at_once], device=ids.device)
            logits = logits_of(model, output, ids, some).float()
            wanted = ids[:, some + 1].to(logits.device)
            found.append(logits.logsumexp(-1) - logits.gather(-1, wanted[..., None])[..., 0])
    return torch.cat(found, dim=1)


def logits_of(
    model: PreTrainedModel, output: Any, ids: Int[Tensor, "B T"], positions: Int[Tensor, " P"]
) -> Float[Tensor, "B P V"]:
    """Logits at these positions, as the model itself makes them from its body's output."""
    if "logits" in output:  # the body has a head of its own: the logits are there
        there: Tensor = output.logits[:, positions]
        return there
    states, read = output.last_hidden_state[:, positions], ids[:, positions]
    answer = type(output)(**{**dict(output.items()), "last_hidden_state": states})
    with _standing_in(model, answer):
        logits: Tensor = model(input_ids=read, attention_mask=torch.ones_like(read), use_cache=False).logits
    if logits.shape[:2] != states.shape[:2]:
        raise UnsupportedError(
            "the model's head does not give logits for each state", where=type(model).__name__,
            got=tuple(logits.shape), expected=f"{tuple(states.shape[:2])} and the vocabulary",
            remedy="measure it without --loss",
        )  # fmt: skip
    return logits


class _Answer(torch.nn.Module):
    """In the place of a model's body: gives an answer that is there already; all else is the body's own.

    Some heads call a part of the body that is a model itself, as `self.model.decoder`: that gives the same answer.
    """

    def __init__(self, inner: torch.nn.Module, answer: Any, given: list[bool]) -> None:
        super().__init__()
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "given", given)
        self.answer = answer

    def forward(self, *_: Any, **__: Any) -> Any:
        self.given.append(True)
        return self.answer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(object.__getattribute__(self, "inner"), name)
        return _Answer(found, self.answer, self.given) if isinstance(found, PreTrainedModel) else found


@contextmanager
def _standing_in(model: PreTrainedModel, answer: Any) -> Iterator[None]:
    """While it lasts, the body gives this answer; a head that does not ask for it would have run on something else."""
    name = model.base_model_prefix
    inner = model._modules.get(name)
    if inner is None or inner is not model.base_model:
        raise UnsupportedError(
            "the model has no head apart from its body, so that its loss at chosen positions cannot be had",
            where=type(model).__name__, remedy="measure it without --loss",
        )  # fmt: skip
    given = list[bool]()
    model._modules[name] = _Answer(inner, answer, given)
    try:
        yield
    finally:
        model._modules[name] = inner
    if not given:
        raise UnsupportedError(
            "the model's head does not read what its body gives, so that its loss at chosen positions cannot be had",
            where=type(model).__name__, remedy="measure it without --loss",
        )  # fmt: skip
