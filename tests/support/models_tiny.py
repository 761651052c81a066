"""Small models with default initialisation for the tests of loading, and GGUF files. All axes differ in size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

WORDS = ["h", "e", "t", "he", "the", *(f"w{number}" for number in range(92))]
"""A vocabulary for `write_gguf`."""


def small_model(kind: str = "Llama", **changes: Any) -> PreTrainedModel:
    """Return a random model with seed 0; `kind` is the prefix of its classes in transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")(**{**SIZES, **changes})
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save the model in the layout of Hugging Face, without a tokenizer."""
    model.save_pretrained(str(folder))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Overwrite keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of one fixed prompt; the 2-D mask is always passed."""
    ids = torch.arange(1, 30).unsqueeze(0)
    with torch.no_grad():
        out: torch.Tensor = model(ids, attention_mask=torch.ones_like(ids)).logits
    return out


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows: llama.cpp stores rotary pairs interleaved; transformers stores them as halves."""
    paired = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(model: PreTrainedModel, path: Path, words: list[str] | None = None, **metadata: Any) -> Path:
    """Write a Llama as llama.cpp does, in F32; `words` is its vocabulary, `metadata` adds keys below `llama.`."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in metadata.items():
        dotted = f"llama.{key.replace('__', '.')}"
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(dotted, value)
    if words is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(words)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
        writer.add_token_merges(["h e", "t he"])
    _write_tensors(writer, model)
    return path


def _write_tensors(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        for part, count in heads.items():
            weight = _permute(weight, count) if part in name else weight
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
