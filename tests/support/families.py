"""Tiny random models of many families: two or three layers, and axis sizes that are different primes where possible.

Queries and keys are scaled up, so that attention is far from uniform and a dropped term shows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posleak.models import Subject

VOCAB = 101
WINDOW = 13

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 30,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LOCAL: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = {**LOCAL, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 2}
"""Grouped expert products need strides of whole 16 bytes."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": LOCAL,
    "qwen2": {},
    "qwen3": {},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 7},
    "gpt_neox": {"num_key_value_heads": 3, "rotary_pct": 0.4},
    "phi": {"partial_rotary_factor": 0.4},
    "phi3": {**LOCAL, "partial_rotary_factor": 1.0},
    "olmo2": {},
    "olmo3": MIXED,
    "cohere2": MIXED,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt_oss": {**MIXED, **EXPERTS},
    "granite": {"attention_multiplier": 0.3},
    "stablelm": {"partial_rotary_factor": 0.4},
    "starcoder2": LOCAL,
    "mixtral": {**LOCAL, **EXPERTS},
    "glm4": {"partial_rotary_factor": 0.4},
    "diffllama": {"hidden_size": 28, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 2},
    "nemotron": {"partial_rotary_factor": 0.4},
    "exaone4": MIXED,
    "apertus": {},
    "bitnet": {},
}

DERIVED = {"falcon": ("head_dim",)}
"""Sizes that a family's config computes itself."""


def tiny(
    family: str, *, seed: int = 0, scale: float = 12.0, dtype: torch.dtype = torch.float32, **more: Any
) -> PreTrainedModel:
    """Return a random model of this family with sharpened attention, in evaluation mode."""
    torch.manual_seed(seed)
    sizes = {name: size for name, size in BASE.items() if name not in DERIVED.get(family, ())}
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {}), **more})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "query_key_value")) and parameter.ndim > 1:
                parameter.mul_(scale**0.5)
            if name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
    return model.eval().requires_grad_(False)


def subject(family: str = "llama", name: str | None = None, **changes: Any) -> Subject:
    """Return a `tiny` model as a Subject; its name is "tiny-<family>" unless another is given."""
    return Subject.of(tiny(family, **changes), name=name or f"tiny-{family}")
