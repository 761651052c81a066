"""Next-token loss at chosen positions, computed by the model's own language-model head on a few states at a time.

The operations between the last hidden state and the logits (scales, soft-caps, biases) differ between families and are
part of each family's forward method. Therefore the model's own forward method runs, with its backbone replaced by a
stand-in that returns states computed earlier. Logits of the whole vocabulary exist for only a few positions at a time.
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
"""Maximum size of float32 logits held at once, but at least one position of every prompt."""


def token_losses(
    model: PreTrainedModel, output: Any, ids: Int[Tensor, "B T"], positions: Sequence[int]
) -> Float[Tensor, "B P"]:
    """Compute −log p(token i + 1 | tokens up to i) in nats at positions i from the backbone's output for ids."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    at_once = max(1, LOGIT_BYTES // (4 * len(ids) * vocabulary))
    losses = []
    with torch.inference_mode():
        for first in range(0, len(positions), at_once):
            some = torch.as_tensor(positions[first : first + at_once], device=ids.device)
            logits = logits_of(model, output, ids, some).float()
            targets = ids[:, some + 1].to(logits.device)
            losses.append(logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0])
    return torch.cat(losses, dim=1)


def logits_of(
    model: PreTrainedModel, output: Any, ids: Int[Tensor, "B T"], positions: Int[Tensor, " P"]
) -> Float[Tensor, "B P V"]:
    """Compute the logits at these positions with the model's own head from the backbone's output."""
    if "logits" in output:  # the backbone has its own head
        own: Tensor = output.logits[:, positions]
        return own
    states, read = output.last_hidden_state[:, positions], ids[:, positions]
    answer = type(output)(**{**dict(output.items()), "last_hidden_state": states})
    with _replaced_backbone(model, answer):
        logits: Tensor = model(input_ids=read, attention_mask=torch.ones_like(read), use_cache=False).logits
    if logits.shape[:2] != states.shape[:2]:
        raise UnsupportedError(
            "the model's head does not return logits for each state", where=type(model).__name__,
            got=tuple(logits.shape), expected=f"{tuple(states.shape[:2])} and the vocabulary",
            remedy="omit --loss",
        )  # fmt: skip
    return logits


class _StandIn(torch.nn.Module):
    """Stand-in for a model's backbone that returns a given output; all other attributes are those of the backbone.

    Some heads call a submodel of the backbone, such as `self.model.decoder`: it returns the same output.
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
            inner = getattr(object.__getattribute__(self, "inner"), name)
        return _StandIn(inner, self.answer, self.given) if isinstance(inner, PreTrainedModel) else inner


@contextmanager
def _replaced_backbone(model: PreTrainedModel, answer: Any) -> Iterator[None]:
    """Replace the backbone by a stand-in. Raise UnsupportedError if the model's head did not use its output."""
    name = model.base_model_prefix
    inner = model._modules.get(name)
    if inner is None or inner is not model.base_model:
        raise _no_loss(model, "has no language-model head separate from its backbone")
    given = list[bool]()
    model._modules[name] = _StandIn(inner, answer, given)
    try:
        yield
    finally:
        model._modules[name] = inner
    if not given:
        raise _no_loss(model, "has a language-model head that does not use the output of its backbone")


def _no_loss(model: PreTrainedModel, why: str) -> UnsupportedError:
    what = f"the loss at chosen positions cannot be computed: the model {why}"
    return UnsupportedError(what, where=type(model).__name__, remedy="omit --loss")
