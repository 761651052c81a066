"""A family unknown to transformers: only the attention interface is shared, config and attention module are its own.

Heads of an odd width and order (values first), its own scaling, rotation of half the dimensions in interleaved pairs;
with `alibi` no rotation, but a bias by distance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class MadeUpConfig(PreTrainedConfig):
    model_type = "made_up"
    vocab_size: int = 101
    hidden_size: int = 35
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    head_dim: int = 12
    value_dim: int = 7
    max_position_embeddings: int = 2048
    alibi: bool = False
    bos_token_id: int = 1


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    s = query @ key.transpose(-1, -2) * scaling + mask
    bias = more.get("position_bias")
    return (torch.softmax(s if bias is None else s + bias, -1) @ value).transpose(1, 2), None


class Mixing(nn.Module):
    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__()
        self.config = config
        H, K, E, V = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.value_dim
        self.num_key_value_groups = H // K
        self.joint = nn.Linear(config.hidden_size, K * V + H * E + K * E, bias=False)
        self.back = nn.Linear(H * V, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor, **more: Any) -> Tensor:
        B, T, _ = x.shape
        H, K = self.config.num_attention_heads, self.config.num_key_value_heads
        E, V = self.config.head_dim, self.config.value_dim
        v, q, k = self.joint(x).split([K * V, H * E, K * E], dim=-1)
        q, k, v = (y.view(B, T, h, -1).transpose(1, 2) for y, h in ((q, H), (k, K), (v, K)))
        if self.config.alibi:
            distance = torch.arange(T)[:, None] - torch.arange(T)
            slopes = 2.0 ** -torch.arange(1, H + 1)
            more["position_bias"] = (-slopes[:, None, None] * distance)[None].to(x)
        else:
            q, k = turned(q, angles), turned(k, angles)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(self, q, k, v, mask, scaling=0.31, dropout=0.0, **more)
        return self.back(out.reshape(B, T, -1))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate half of the dimensions, in neighbouring pairs."""
    half = x.shape[-1] // 2
    pairs = torch.view_as_complex(x[..., :half].reshape(*x.shape[:-1], -1, 2).float().contiguous())
    moved = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
    return torch.cat([moved.to(x), x[..., half:]], dim=-1)


class MadeUpModel(PreTrainedModel):
    config_class = MadeUpConfig
    base_model_prefix = "body"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixings = nn.ModuleList(Mixing(config) for _ in range(config.num_hidden_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
        **more: Any,
    ) -> BaseModelOutput:
        x = self.words(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None,
            position_ids=position_ids,
        )  # fmt: skip
        frequencies = 50.0 ** -(torch.arange(self.config.head_dim // 4) / 3)
        angles, states = position_ids[..., None] * frequencies, [x]
        for mixing, norm in zip(self.mixings, self.norms):
            x = x + mixing(norm(x), angles, mask, **more)
            states.append(x)
        return BaseModelOutput(last_hidden_state=x, hidden_states=tuple(states) if output_hidden_states else None)


def made_up(**sizes: Any) -> MadeUpModel:
    """Return a random model with a fixed seed and sharp attention."""
    torch.manual_seed(0)
    model = MadeUpModel(MadeUpConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.8 * parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)
