"""Loading from folders and from a hub cache, and every refusal by the content of its message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posleak.errors import ModelError, PosleakWarning, TooLargeError
from posleak.models import Subject, load, memory, pretrained
from support.errors import raises
from support.inputs_subject import word_tokenizer
from support.models_tiny import edit_config, logits, save, small_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(small_model(), tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def change_weights(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a saved model, or drop those that are None."""
    path = folder / "model.safetensors"
    merged = {**load_file(path), **change}
    kept = {name: tensor for name, tensor in merged.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def test_folder_without_tokenizer_gives_the_same_model(folder: Path, cache: Path) -> None:
    subject = load(folder, cache=cache)
    assert subject.tokenizer is None
    assert torch.equal(logits(subject.model), logits(small_model()))
    assert not subject.model.training
    assert not any(parameter.requires_grad for parameter in subject.model.parameters())
    assert (subject.identity.source, subject.vocab_size, subject.context) == ("folder", 97, 128)
    assert subject.device == torch.device("cpu")


def test_float64_keeps_rotary_frequencies(folder: Path, cache: Path) -> None:
    subject = load(folder, dtype="float64", cache=cache)
    assert subject.identity.dtype == "float64"
    assert torch.allclose(logits(subject.model).float(), logits(small_model()), atol=1e-5)


def test_identity_does_not_depend_on_dtype(folder: Path, cache: Path) -> None:
    hashes = {load(folder, dtype=dtype, cache=cache).identity.weights_sha256 for dtype in ("float32", "bfloat16")}
    assert len(hashes) == 1


def test_tied_weights_are_not_missing(tmp_path: Path, cache: Path) -> None:
    saved = save(small_model(tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    assert load(saved, cache=cache).identity.layers == 3


def test_missing_weights_are_an_error_not_random_numbers(folder: Path, cache: Path) -> None:
    change_weights(folder, {"model.layers.1.mlp.up_proj.weight": None})
    with raises(ModelError, where=folder, got="1 missing: model.layers.1.mlp.up_proj.weight"):
        load(folder, cache=cache)


def test_weights_of_another_shape_are_an_error(folder: Path, cache: Path) -> None:
    change_weights(folder, {"model.norm.weight": torch.ones(23)})
    with raises(ModelError, where=folder, got="model.norm.weight (23,) for (24,)"):
        load(folder, cache=cache)


def test_weights_that_are_not_used_are_said(folder: Path, cache: Path) -> None:
    change_weights(folder, {"model.layers.0.self_attn.q_proj.bias": torch.ones(24)})
    with pytest.warns(PosleakWarning, match=r"q_proj\.bias"):
        load(folder, cache=cache)


def test_half_a_weight_file_is_named(folder: Path, cache: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with raises(ModelError, where=folder / "model.safetensors", what="safetensors", remedy="again"):
        load(folder, cache=cache)
    weights.write_bytes(weights.read_bytes()[:50])
    with raises(ModelError, where=folder / "model.safetensors", what="safetensors"):
        load(folder, cache=cache)


def test_pickles_are_refused_unless_allowed(folder: Path, cache: Path) -> None:
    torch.save(small_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with raises(
        ModelError,
        where=folder,
        what="pickle",
        got="pytorch_model.bin",
        expected="*.safetensors",
        remedy="--allow-pickle",
    ):
        load(folder, cache=cache)
    assert torch.equal(logits(load(folder, allow_pickle=True, cache=cache).model), logits(small_model()))


def test_folder_without_weights_or_config(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    with raises(ModelError, where=folder, got="config.json", expected="model.safetensors.index.json"):
        load(folder, cache=cache)
    (folder / "config.json").unlink()
    with raises(ModelError, where=folder, got="no config.json"):
        load(folder, cache=cache)


def test_code_from_strangers_is_not_run(folder: Path, cache: Path) -> None:
    (folder / "modeling.py").write_text("raise SystemExit('the code was run')\n")
    files = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    edit_config(folder, model_type="weird", auto_map=files)
    with raises(ModelError, got=("'weird'", "modeling.M"), remedy="--trust-remote-code"):
        load(folder, cache=cache)


def test_native_class_is_used_although_the_repository_has_code(folder: Path, cache: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.M"})
    assert load(folder, cache=cache).identity.model_class == "LlamaForCausalLM"


def test_unknown_architecture(folder: Path, cache: Path) -> None:
    edit_config(folder, model_type="lama")
    with raises(ModelError, got="'lama'", expected="'llama'", remedy="transformers"):
        load(folder, cache=cache)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.BertConfig(), "an encoder"),
        (transformers.BartConfig(), "an encoder-decoder"),
        (transformers.T5Config(), "t5 is an encoder-decoder"),
        (transformers.DistilBertConfig(), "distilbert is an encoder"),
        (transformers.ViTConfig(), "vit has no causal language model"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (transformers.XLMConfig(), "xlm has causal=False"),
    ],
)
def test_models_without_a_causal_mask(
    config: transformers.PreTrainedConfig, reason: str, tmp_path: Path, cache: Path
) -> None:
    config.save_pretrained(str(tmp_path / "m"))
    with raises(ModelError, where=tmp_path / "m", what=("causal", reason), remedy="causal"):
        load(tmp_path / "m", cache=cache)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("README.md", "not a model"),
        ("weights.safetensors", "weights"),
        ("PYTORCH_MODEL.BIN", "pickle"),
        ("config.json", "JSON"),
        ("smollm", "not a model"),
    ],
)
def test_a_file_is_not_sought_on_the_hub(
    name: str, what: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a relative name, which could also be a hub id."""
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / name).write_bytes(b"{}")
    monkeypatch.chdir(tmp_path)
    with raises(ModelError, where=f"org/{name}", what=what, remedy="folder") as caught:
        load(f"org/{name}", cache=cache)
    with raises(ModelError, where=name, what=what, remedy="folder"):
        load(tmp_path / "org" / name, cache=cache)
    if name.endswith(".safetensors"):
        assert "pass the folder that contains it with config.json" in str(caught.value)


def test_the_folder_of_a_file_is_named(folder: Path, cache: Path) -> None:
    with raises(ModelError, what="weights", remedy=folder):
        load(folder / "model.safetensors", cache=cache)


SMALL_T5: dict[str, Any] = {"vocab_size": 97, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 3}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
}


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("T5ForConditionalGeneration", SMALL_T5, "t5 is an encoder-decoder"),
        ("T5EncoderModel", SMALL_T5, "t5 is the encoder"),
        ("BertModel", SMALL, "bert is an encoder (is_decoder"),
        ("BertForMaskedLM", SMALL, "bert is an encoder (is_decoder"),
        ("DebertaV2Model", SMALL, "deberta-v2 is an encoder"),
        ("ViTModel", {**SMALL, "vocab_size": None}, "vit reads pixel_values"),
    ],
)
def test_objects_without_a_causal_mask(kind: str, sizes: dict[str, Any], reason: str) -> None:
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**{name: size for name, size in sizes.items() if size is not None}))
    with raises(ModelError, where=kind, what=("causal", reason), remedy="causal"):
        Subject.of(model)


def test_decoders_of_such_families_are_accepted() -> None:
    assert Subject.of(transformers.BertLMHeadModel(transformers.BertConfig(**SMALL, is_decoder=True))).vocab_size == 97
    assert Subject.of(transformers.LlamaModel(transformers.LlamaConfig(**SMALL))).vocab_size == 97


def test_broken_tokenizer_is_not_taken_for_none(folder: Path, cache: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with raises(ModelError, where=folder, what="tokenizer", remedy="remove"):
        load(folder, cache=cache)


def test_wrong_arguments(folder: Path, cache: Path) -> None:
    with raises(ModelError, where="dtype", got="float8", expected="bfloat16"):
        load(folder, dtype="float8", cache=cache)
    with raises(ModelError, where="device", got="toaster", expected="cuda:1"):
        load(folder, device="toaster", cache=cache)
    with raises(ModelError, what="device_map", got="cpu and auto"):
        load(folder, device="cpu", device_map="auto", cache=cache)
    with raises(ModelError, where="./nowhere", what="no such", remedy="path"):
        load("./nowhere", cache=cache)


def test_device_map_passes_through(folder: Path, cache: Path) -> None:
    subject = load(folder, device_map={"": "cpu"}, dtype="float32", cache=cache)
    assert torch.equal(logits(subject.model), logits(small_model()))


def hub_layout(root: Path) -> Path:
    """What a hub download leaves behind: models--org--name with a ref and a snapshot."""
    repo = root / "models--some-org--tiny-llama"
    save(small_model(), repo / "snapshots" / COMMIT)
    (repo / "snapshots" / COMMIT / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return repo


def test_hub_cache_loads_as_a_folder(tmp_path: Path, cache: Path) -> None:
    repo = hub_layout(tmp_path / "hub")
    for path in (repo, repo / "snapshots" / COMMIT):
        identity = load(path, cache=cache).identity
        assert (identity.source, identity.revision, identity.licence) == ("folder", COMMIT, "mit")
    with raises(ModelError, where=repo, got="v9", expected=COMMIT):
        load(repo, revision="v9", cache=cache)


def run_offline(call: str, hub: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Load with these arguments, as code, in another process: huggingface_hub reads its environment when imported."""
    code = (
        "import json, posleak.models as m; from posleak.typed import plain\n"
        f"print(json.dumps(plain(m.load({call}).identity)))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "POSLEAK_CACHE": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_hub_id_loads_offline_from_the_hub_cache(tmp_path: Path, cache: Path) -> None:
    hub_layout(tmp_path / "hub")
    assert run_offline("'some-org/tiny-llama@other'", tmp_path / "hub", cache).returncode != 0
    done = run_offline("'some-org/tiny-llama@main'", tmp_path / "hub", cache)
    assert done.returncode == 0, done.stderr
    identity = json.loads(done.stdout)
    assert (identity["source"], identity["revision"], identity["licence"]) == ("hub", COMMIT, "mit")
    assert done.stderr == ""  # no bars, no tables


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft, when it saves the adapter
def test_adapters_and_tokenizers_load_by_hub_id(tmp_path: Path, cache: Path) -> None:
    """The adapter has a revision of its own; its base model is a hub id too."""
    hub = tmp_path / "hub"
    model = hub_layout(hub) / "snapshots" / COMMIT
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: Any = peft.get_peft_model(small_model(), config)
    adapted.peft_config["default"].base_model_name_or_path = "some-org/tiny-llama"
    commit = COMMIT[::-1]
    adapted.save_pretrained(str(hub / "models--some-org--french" / "snapshots" / commit))
    (hub / "models--some-org--french" / "refs").mkdir()
    (hub / "models--some-org--french" / "refs" / "main").write_text(commit)
    word_tokenizer().save_pretrained(model)
    for call in (
        "'some-org/french'",
        "'some-org/tiny-llama@main', adapter='some-org/french', tokenizer='some-org/tiny-llama'",
    ):
        done = run_offline(call, hub, cache)
        assert done.returncode == 0, done.stderr
        identity = json.loads(done.stdout)
        assert identity["name"] in (
            "some-org/tiny-llama + some-org/french",
            "some-org/tiny-llama@main + some-org/french",
        )
        assert identity["adapters"][0].startswith("some-org_french, sha256 ")
        assert (identity["revision"], identity["bos"]["tokenizer_id"] is None) == (COMMIT, False)


def test_unknown_name_suggests_the_nearest(tmp_path: Path, cache: Path) -> None:
    done = run_offline("'smolm2-135m'", tmp_path / "hub", cache)
    assert done.returncode != 0
    assert "did you mean 'smollm2-135m'" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


def test_listing_is_light() -> None:
    code = "import sys, posleak.models as m; m.list_models(); m.BUILTIN_MODELS; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_model_larger_than_memory_is_refused_before_it_is_read(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(parameter.numel() for parameter in small_model().parameters())
    assert pretrained.read_headers(folder).bytes_as(torch.bfloat16) == 2 * parameters
    need = memory.memory_need(small_model().config)
    assert need.parameters == parameters
    assert 0 < need.buffer_bytes < 1000
    assert need.bytes_as(torch.float64) == 8 * parameters + need.buffer_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 3 * parameters)
    with raises(TooLargeError, where=folder, got="kB", expected="kB", remedy="bfloat16"):
        load(folder, cache=cache)
    assert load(folder, dtype="bfloat16", cache=cache).identity.dtype == "bfloat16"


def test_available_memory_is_within_the_container(tmp_path: Path) -> None:
    assert 0 < memory.available_bytes("cpu") < 1 << 50
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert memory._cgroup_bytes(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_bytes(tmp_path) > 1 << 50
