"""A tiny random model of any family, from the defaults of its config class.

Sizes are set by the names of config fields, and lists with one entry per layer are cut to one layer of each kind. The
few families with other dependencies between sizes are in one table (`OVERRIDES`), with reasons. Parameters are counted
before memory is allocated.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from posleak.errors import ModelError
from posleak.models.pretrained import silence_transformers

MAX_PARAMETERS = 20_000_000
"""Largest number of parameters. A size with an unknown name would leave the model at full size."""

MAX_LAYERS = 6
"""Largest number of layers in models with several kinds of layers, which keep one layer of each kind."""

SIZES: dict[str, Any] = {
    # vocabulary
    "vocab_size": 100, "vocab_size_per_layer_input": 100, "shape_vocab_size": 100,
    "pronunciation_vocab_size": 100, "encoder_hash_byte_group_vocab": 100,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    # width
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "emb_dim": 64, "embedding_size": 64, "embedding_dim": 64,
    "hidden_size_global": 64,
    "word_embed_proj_dim": 64, "input_embedding_size": 64, "output_embedding_size": 64, "attention_hidden_size": 64,
    "lru_width": 64, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "ple_embed_dim": 16,
    # depth
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_blocks": 2, "num_layers_per_stack": 2,
    "num_kv_shared_layers": 0,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16,
    "global_head_dim": 16, "kv_channels": 16, "attention_head_dim": 16, "attention_head_size": 16, "dim_head": 16,
    "d_head": 16, "rotary_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "query_pre_attn_scalar": 7,
    # latent attention
    "q_lora_rank": 24, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 12, "index_head_dim": 16, "index_n_heads": 4, "o_lora_rank": 16, "o_groups": 2,
    # feed-forward
    "intermediate_size": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "n_inner": 96, "dff": 96,
    "d_inner": 96, "ffn_hidden_size": 96, "dim_ff": 96, "feed_forward_size": 96, "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96, "shared_intermediate_size": 48,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2, "moe_top_k": 2,
    "top_k_experts": 2, "n_group": 2, "topk_group": 1, "num_expert_group": 2, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48, "expert_ffn_hidden_size": 48,
    "router_hidden_size": 16, "num_nextn_predict_layers": 0,
    # recurrent and convolutional layers
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_d_ssm": 128, "mamba_dt_rank": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "state_size": 16, "ssm_state_size": 16,
    "time_step_rank": 8, "n_groups": 1, "chunk_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    "adapter_rank": 8, "block_size": 16,
    # visibility and context
    "sliding_window": 13, "sliding_window_size": 13, "attention_chunk_size": 16, "window_size": 13,
    "local_attention": 26, "attention_window_size": 13,
    "max_position_embeddings": 1024, "n_positions": 1024, "n_ctx": 1024, "max_seq_len": 1024,
    "max_target_positions": 1024, "floor_scale": 8, "log_scaling_n_floor": 8,
    # encoder and encoder-decoder families are measured as decoders
    "is_decoder": True, "is_encoder_decoder": False, "causal": True,
}  # fmt: skip
"""Values of config fields by name. Expert sizes are multiples of 16, because their products need 16-byte alignment;
windows are shorter than the prompts of the census; value heads are narrower than key heads."""

REQUIRED = ("head_dim", "num_key_value_heads", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
"""Fields that are set even if the default is None, which some configs leave to the checkpoint."""

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, dict[str, Any]] = {
    # hybrids without an attention layer in the first layers of their default
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    # shared attention reads the residual stream concatenated with the embeddings, so that it is twice as wide
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 4, "num_key_value_heads": 4,
              "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 4, "num_key_value_heads": 4,
               "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    # defaults that the constructor of the config or of the model rejects
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {"per_layer_config": {1: {"head_dim": 32}}},  # layers of different widths
    "gemma4_unified_text": {"per_layer_config": {1: {"head_dim": 32}}},
    "mamba2": {"num_heads": 8},
    "moshi": {"audio_vocab_size": 100},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
                       "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    # queries that are scaled by position within the length of a census prompt
    "ministral3": {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}},
}  # fmt: skip
"""Config fields of families with other dependencies between sizes, or whose defaults would hide a feature."""


def tiny_config(family: str) -> PreTrainedConfig:
    """Return the config of a family at tiny sizes."""
    config_class = CONFIG_MAPPING[family]
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the defaults of the config
        return config_class(**tiny_sizes(config_class))


def tiny_sizes(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the arguments that make a config tiny, from the names of its defaults."""
    default = config_class()
    names = {**default.to_dict(), **dict.fromkeys(default.attribute_map)}
    sizes = {name: size for name, size in SIZES.items() if name in names and _is_replaced(name, size, names[name])}
    if "qk_rope_head_dim" in names:
        # Latent attention: head_dim is the rotated width only, and every query head has its own key.
        sizes |= {"head_dim": 8, "num_key_value_heads": 4}
    sizes |= one_of_each_kind(default)
    for name in config_class.sub_configs:
        if isinstance(part := getattr(default, name, None), PreTrainedConfig):
            sizes[name] = {"model_type": part.model_type, **tiny_sizes(type(part))}
    return sizes | OVERRIDES.get(default.model_type, {})


def _is_replaced(name: str, size: Any, default: Any) -> bool:
    """Return whether the default of a field is replaced. Features that are off (None or 0) stay off unless required."""
    if isinstance(default, bool):
        return isinstance(size, bool)
    return name in REQUIRED or (default is not None and default != 0 and not isinstance(default, (list, dict)))


def one_of_each_kind(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the lists with one entry per layer, cut to the first layer of each kind, and the number of layers."""
    depth = getattr(default, "num_hidden_layers", None) or 0
    lists = {n: v for n, v in default.to_dict().items() if isinstance(v, list) and len(v) == depth and depth > 1}
    lists = {name: value for name, value in lists.items() if len(set(map(str, value))) < depth}
    if not lists:
        return {}
    first_layers: dict[str, int] = {}
    for layer, kind in enumerate(zip(*lists.values())):
        first_layers.setdefault(str(kind), layer)
    kept = sorted(first_layers.values())[:MAX_LAYERS]
    kept = kept if len(kept) > 1 else [0, 1]
    cut = {name: [SIZES.get(name, v[layer]) for layer in kept] for name, v in lists.items()}
    return {**cut, "num_hidden_layers": len(kept)}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model in evaluation mode with attention far from uniform. Raise ModelError if it is not tiny."""
    config = tiny_config(family)
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if count > MAX_PARAMETERS:
            raise ModelError(
                "the tiny model is not small", where=family, got=f"{count:,} parameters", expected=MAX_PARAMETERS
            )
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return sharpen(model)


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Set random weights of unit gain, larger for queries and keys, so that attention is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # a computed table, such as the sines of the rotation
                continue
            if parameter.ndim > 1 and parameter.is_floating_point():
                gain = 1.8 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query", "key")) else 1.0
                parameter.normal_(0, gain * parameter.shape[-1] ** -0.5, generator=generator)
            elif parameter.is_floating_point():
                scale = 1.0 if name.endswith("sinks") else 0.1
                parameter.add_(torch.empty_like(parameter).normal_(0, scale, generator=generator))
    model.eval().requires_grad_(False)
    return model
