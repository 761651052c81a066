"""Two variants of Llama that transformers has no class for. The zoo trains them, and posleak ships them.

kept_window        a query sees its nearest W − 1 keys and position 0: W keys, as many as with a window of W
learned_positions  a learned vector per position is added to the token embedding; queries and keys are not rotated

Everything else, attention included, is Llama's own code, so that the probe works as for any other model. Importing
this module registers the classes with transformers' Auto classes.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.masking_utils import create_causal_mask

from posleak.models.identity import SIBLING_MODEL_TYPE


@strict
class SiblingConfig(LlamaConfig):
    """Llama's config with the keys of the two variants."""

    model_type = SIBLING_MODEL_TYPE

    kept_window: int | None = None
    learned_positions: bool = False


class Unrotated(nn.Module):
    """Rotary embeddings with all angles 0."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, 1)  # broadcast over the dimensions of a head
        return x.new_ones(shape), x.new_zeros(shape)


def nearest_and_first(window: int) -> Any:
    """Return a mask function that shows the nearest `window` − 1 keys, and position 0."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key < window - 1) | (key == 0)

    return seen


class SiblingModel(LlamaModel):
    """Llama's decoder with the variants that the config selects."""

    config_class = SiblingConfig

    def __init__(self, config: SiblingConfig) -> None:
        super().__init__(config)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.rotary_emb = Unrotated()  # type: ignore[assignment]
            self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            before = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + before)[None]
        if self.config.learned_positions:
            x = x + self.embed_positions(position_ids)
        if self.config.kept_window is not None:
            attention_mask = create_causal_mask(  # type: ignore[assignment]
                config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
                position_ids=position_ids, and_mask_function=nearest_and_first(self.config.kept_window),
            )  # fmt: skip
        return super().forward(
            inputs_embeds=x, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            **kwargs,
        )  # fmt: skip


class SiblingForCausalLM(LlamaForCausalLM):
    """Llama's language model on top of `SiblingModel`."""

    config_class = SiblingConfig

    def __init__(self, config: SiblingConfig) -> None:
        super().__init__(config)
        self.model = SiblingModel(config)
        self.post_init()


AutoConfig.register(SIBLING_MODEL_TYPE, SiblingConfig, exist_ok=True)
AutoModelForCausalLM.register(SiblingConfig, SiblingForCausalLM, exist_ok=True)
