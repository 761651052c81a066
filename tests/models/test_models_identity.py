"""What an identity says about a model, on real tiny models of several families."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
import transformers

from posleak.errors import ModelError
from posleak.models import Identity, Subject, hashing, load
from posleak.typed import from_json, plain
from support.errors import raises
from support.models_tiny import save, small_model


def test_llama_has_every_axis_right() -> None:
    model = small_model(rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    identity = Subject.of(model, name="me").identity
    assert (identity.name, identity.architecture, identity.model_class) == ("me", "llama", "LlamaForCausalLM")
    assert (identity.layers, identity.heads, identity.kv_heads, identity.head_dim) == (3, 4, 2, 6)
    assert (identity.width, identity.vocab, identity.context) == (24, 97, 128)
    assert identity.rotary == {"rope_type": "default", "rope_theta": 12345.0}
    assert identity.windows == (None, None, None)
    assert (identity.source, identity.dtype, identity.device) == ("object", "float32", "cpu")
    assert identity.bos == {"config_id": 1, "tokenizer_id": None, "tokenizer_prepends": None}


def test_mistral_has_its_window_in_every_layer() -> None:
    assert Subject.of(small_model("Mistral", sliding_window=7)).identity.windows == (7, 7, 7)


def test_gemma3_has_windows_and_bases_per_layer_type() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    identity = Subject.of(small_model("Gemma3", sliding_window=7, layer_types=types)).identity
    assert identity.windows == (7, None, 7)
    assert identity.layer_types == tuple(types)
    assert set(identity.rotary) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize(("used", "windows"), [(False, (None, None, None)), (True, (None, 7, 7))])
def test_qwen2_window_counts_only_where_it_is_used(used: bool, windows: tuple[int | None, ...]) -> None:
    model = small_model("Qwen2", sliding_window=7, use_sliding_window=used, max_window_layers=1)
    assert Subject.of(model).identity.windows == windows


def test_hybrid_marks_layers_that_are_not_attention() -> None:
    config = transformers.Lfm2Config(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
    )
    identity = Subject.of(transformers.Lfm2ForCausalLM(config)).identity
    assert identity.layer_types == ("conv", "full_attention", "conv")


def test_learned_positions_have_no_rotary() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, n_embd=24, n_layer=3, n_head=4))
    identity = Subject.of(model).identity
    assert (identity.rotary, identity.head_dim, identity.kv_heads, identity.layers) == ({}, 6, 4, 3)


def test_a_context_that_is_not_positive_is_unknown() -> None:
    """XLNet's config says −1."""
    config = transformers.XLNetConfig(vocab_size=97, d_model=24, n_layer=2, n_head=4, d_inner=40)
    assert config.max_position_embeddings == -1
    assert Subject.of(transformers.XLNetLMHeadModel(config)).context is None
    assert Subject.of(small_model()).context == 128


def test_identity_is_json_and_one_line() -> None:
    identity = Subject.of(small_model("Mistral", sliding_window=7), name="me").identity
    assert from_json(Identity, json.dumps(plain(identity))) == identity
    assert set(plain(identity)) == {field.name for field in dataclasses.fields(identity)}
    assert identity.short().startswith("me: mistral, 3 layers × 4 heads, window 7")
    assert "\n" not in repr(Subject.of(small_model()))


def test_hash_of_an_object_sees_one_changed_weight_and_every_dtype() -> None:
    model = small_model()
    before = hashing.model_sha256(model)
    assert hashing.model_sha256(small_model()) == before
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight")[0, 0] += 1e-6
    assert hashing.model_sha256(model) != before
    assert len(hashing.model_sha256(torch.nn.Linear(3, 2, dtype=torch.bfloat16))) == 64


def test_hash_refuses_weights_that_are_elsewhere() -> None:
    with torch.device("meta"):
        model = small_model()
    with raises(ModelError, where="model.embed_tokens.weight", got="meta"):
        Subject.of(model)


def test_hash_of_a_file_is_remembered_until_it_changes(tmp_path: Path) -> None:
    weights, cache = save(small_model(), tmp_path / "m") / "model.safetensors", tmp_path / "cache"
    first = hashing.file_sha256(weights, cache)
    (record,) = (cache / "hashes").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": "0" * 64}))
    assert hashing.file_sha256(weights, cache) == "0" * 64  # the memory is what is read
    assert hashing.file_sha256(weights) == first
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert hashing.file_sha256(weights, cache) == hashing.file_sha256(weights) != first


def test_hash_of_an_ordinary_folder_is_what_it_always_was(tmp_path: Path) -> None:
    folder = save(small_model(), tmp_path / "m")
    inner = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    expected = hashlib.sha256(f"model.safetensors\0{inner}\n".encode()).hexdigest()
    assert load(folder, cache=tmp_path / "cache").identity.weights_sha256 == expected


def test_tokenizer_is_asked_what_it_prepends(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.processors import TemplateProcessing

    words = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    words.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
    folder = save(small_model(), tmp_path / "m")
    tokenizer.save_pretrained(str(folder))
    bos = load(folder, cache=tmp_path / "cache").identity.bos
    assert bos == {"config_id": 1, "tokenizer_id": 1, "tokenizer_prepends": [1]}
