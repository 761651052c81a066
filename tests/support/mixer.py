"""A causal model with code of its own, as somebody writes one: one self-contained file, no class named after attention.

style    how attention is computed, by layer; the last one is repeated
output   what forward returns: "named", "tuple", "tensor", "dict" or "object"
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAMED, TUPLE, TENSOR, DICT, OBJECT = OUTPUTS = ("named", "tuple", "tensor", "dict", "object")


class MixerConfig(PreTrainedConfig):
    model_type = "mixer"

    def __init__(
        self,
        vocab_size: int = 101,
        hidden_size: int = 30,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 3,
        style: tuple[str, ...] = ("causal",),
        output: str = NAMED,
        table: bool = False,
        **more: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.style, self.output, self.table = num_attention_heads, style, output, table
        super().__init__(**more)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 100 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def plain(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> tuple[Tensor, None]:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return ((scores if mask is None else scores + mask).softmax(-1) @ v).transpose(1, 2), None


def mix(module: Any, q: Tensor, k: Tensor, v: Tensor, style: str) -> Tensor:
    T = q.shape[2]
    past = torch.ones(T, T, dtype=torch.bool).tril()
    if style in ("causal", "grouped"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=style == "grouped")
    if style == "mask":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=past)
    if style == "everything":
        return F.scaled_dot_product_attention(q, k, v)
    if style == "one ahead":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=past | past.roll(-1, 0))
    mixed: Tensor
    if style == "softmax":
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~past, -torch.inf).softmax(-1) @ v
        return mixed
    if style == "einsum":
        return torch.einsum("bhij,bhjd->bhid", (q @ k.mT).masked_fill(~past, -torch.inf).softmax(-1), v)
    if style == "none":
        return v.cumsum(2) / torch.arange(1, T + 1)[:, None]
    attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, plain)
    mask = torch.zeros(1, 1, T, T).masked_fill(~past, -1e9) if style == "interface" else None
    mixed = attend(module, q, k, v, mask, is_causal=True)[0].transpose(1, 2)
    return mixed


class Mixer(nn.Module):
    def __init__(self, config: MixerConfig, layer: int) -> None:
        super().__init__()
        W, H = config.hidden_size, config.num_attention_heads
        self.config, self.style = config, (*config.style, *[config.style[-1]] * layer)[layer]
        self.norm, self.out = nn.LayerNorm(W), nn.Linear(W, W)
        self.q, *kv = (nn.Linear(W, W // (H if self.style == "grouped" and i else 1)) for i in range(3))
        self.k, self.v = kv
        self.multihead = nn.MultiheadAttention(W, H, batch_first=True) if "multihead" in self.style else None
        self.up, self.down = nn.Linear(W, 41), nn.Linear(41, W)

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        if self.multihead is not None:
            hides, n = torch.ones(T, T, dtype=torch.bool).triu(1), self.norm(x)
            y: Tensor = x + self.multihead(n, n, n, attn_mask=hides, need_weights="weights" in self.style)[0]
        else:
            y = x + self.out(mix(self, *self.heads(x), self.style).transpose(1, 2).reshape(B, T, W))
        y = y + self.down(F.gelu(self.up(y)))
        return y

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, heads = self.norm(x), self.config.num_attention_heads
        q, k, v = (
            part(n).unflatten(-1, (-1, self.config.hidden_size // heads)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        return rotated(q), rotated(k), v


class MixerLM(PreTrainedModel):
    config_class = MixerConfig
    _supports_sdpa = True

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(512, config.hidden_size) if config.table else None
        self.blocks = nn.ModuleList(Mixer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm, self.head = nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.config.output == NAMED:
            return CausalLMOutputWithPast(logits=logits)
        if self.config.output == DICT:
            return {"logits": logits}
        if self.config.output == OBJECT:
            return SimpleNamespace(loss=None, logits=logits)
        return (logits, None) if self.config.output == TUPLE else logits


def mixer(*style: str, seed: int = 0, **more: Any) -> MixerLM:
    """Return a random model with sharp attention, in evaluation mode."""
    torch.manual_seed(seed)
    model = MixerLM(MixerConfig(style=style or ("causal",), **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    return model
