"""Loading from folders and from a hub cache, and every refusal by the content of its message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posleak.errors import ModelError, PosleakWarning
from posleak.models import load, memory, pretrained
from support.models_tiny import edit_config, logits, save, tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny(), tmp_path / "model")


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
    assert torch.equal(logits(subject.model), logits(tiny()))
    assert not subject.model.training
    assert not any(parameter.requires_grad for parameter in subject.model.parameters())
    assert (subject.identity.source, subject.vocab_size, subject.context) == ("folder", 97, 128)
    assert subject.device == torch.device("cpu")


def test_float64_keeps_rotary_frequencies(folder: Path, cache: Path) -> None:
    subject = load(folder, dtype="float64", cache=cache)
    assert subject.identity.dtype == "float64"
    assert torch.allclose(logits(subject.model).float(), logits(tiny()), atol=1e-5)


def test_identity_does_not_depend_on_dtype(folder: Path, cache: Path) -> None:
    hashes = {load(folder, dtype=dtype, cache=cache).identity.weights_sha256 for dtype in ("float32", "bfloat16")}
    assert len(hashes) == 1


def test_tied_weights_are_not_missing(tmp_path: Path, cache: Path) -> None:
    saved = save(tiny(tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    assert load(saved, cache=cache).identity.layers == 3


def test_missing_weights_are_an_error_not_random_numbers(folder: Path, cache: Path) -> None:
    change_weights(folder, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"at random") as caught:
        load(folder, cache=cache)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 missing" in str(caught.value)


def test_weights_of_another_shape_are_an_error(folder: Path, cache: Path) -> None:
    change_weights(folder, {"model.norm.weight": torch.ones(23)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight \(23,\) for \(24,\)"):
        load(folder, cache=cache)


def test_weights_that_are_not_used_are_said(folder: Path, cache: Path) -> None:
    change_weights(folder, {"model.layers.0.self_attn.q_proj.bias": torch.ones(24)})
    with pytest.warns(PosleakWarning, match=r"does not use.*q_proj\.bias"):
        load(folder, cache=cache)


def test_half_a_weight_file_is_named(folder: Path, cache: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*not a complete[\s\S]*download the file again"):
        load(folder, cache=cache)
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*not a complete safetensors file"):
        load(folder, cache=cache)


def test_pickles_are_refused_unless_allowed(folder: Path, cache: Path) -> None:
    torch.save(tiny().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pickles[\s\S]*pytorch_model\.bin[\s\S]*--allow-pickle"):
        load(folder, cache=cache)
    assert torch.equal(logits(load(folder, allow_pickle=True, cache=cache).model), logits(tiny()))


def test_folder_without_weights_or_config(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="a config but no weights"):
        load(folder, cache=cache)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(folder, cache=cache)


def test_code_from_strangers_is_not_run(folder: Path, cache: Path) -> None:
    (folder / "modeling.py").write_text("raise SystemExit('the code was run')\n")
    files = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    edit_config(folder, model_type="weird", auto_map=files)
    with pytest.raises(ModelError, match=r"'weird'[\s\S]*--trust-remote-code"):
        load(folder, cache=cache)


def test_native_class_is_used_although_the_repository_has_code(folder: Path, cache: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.M"})
    assert load(folder, cache=cache).identity.model_class == "LlamaForCausalLM"


def test_unknown_architecture(folder: Path, cache: Path) -> None:
    edit_config(folder, model_type="lama")
    with pytest.raises(ModelError, match=r"unknown to the installed transformers[\s\S]*'llama'"):
        load(folder, cache=cache)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BertConfig(), "an encoder"),
        (transformers.BartConfig(), "an encoder-decoder"),
        (transformers.T5Config(), "no causal language model"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (transformers.XLMConfig(), "xlm with causal=False"),
    ],
)
def test_models_without_a_causal_mask(
    config: transformers.PreTrainedConfig, message: str, tmp_path: Path, cache: Path
) -> None:
    config.save_pretrained(str(tmp_path / "m"))
    with pytest.raises(ModelError, match=rf"causal masks[\s\S]*{message}"):
        load(tmp_path / "m", cache=cache)


def test_broken_tokenizer_is_not_taken_for_none(folder: Path, cache: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer files that cannot be read"):
        load(folder, cache=cache)


def test_wrong_arguments(folder: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="unknown dtype"):
        load(folder, dtype="float8", cache=cache)
    with pytest.raises(ModelError, match="unknown device"):
        load(folder, device="toaster", cache=cache)
    with pytest.raises(ModelError, match="exclude each other"):
        load(folder, device="cpu", device_map="auto", cache=cache)
    with pytest.raises(ModelError, match="no such file or folder"):
        load("./nowhere", cache=cache)


def test_device_map_passes_through(folder: Path, cache: Path) -> None:
    subject = load(folder, device_map={"": "cpu"}, dtype="float32", cache=cache)
    assert torch.equal(logits(subject.model), logits(tiny()))


def hub_layout(root: Path) -> Path:
    """What a hub download leaves behind: models--org--name with a ref and a snapshot."""
    repo = root / "models--some-org--tiny-llama"
    save(tiny(), repo / "snapshots" / COMMIT)
    (repo / "snapshots" / COMMIT / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return repo


def test_hub_cache_loads_as_a_folder(tmp_path: Path, cache: Path) -> None:
    repo = hub_layout(tmp_path / "hub")
    for path in (repo, repo / "snapshots" / COMMIT):
        identity = load(path, cache=cache).identity
        assert (identity.source, identity.revision, identity.licence) == ("folder", COMMIT, "mit")
    with pytest.raises(ModelError, match="no such revision"):
        load(repo, revision="v9", cache=cache)


def run_offline(name: str, hub: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Load by hub id in a process of its own: huggingface_hub reads its environment when it is imported."""
    code = (
        "import json, posleak.models as m; from posleak.typed import plain\n"
        f"print(json.dumps(plain(m.load({name!r}).identity)))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "POSLEAK_CACHE": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_hub_id_loads_offline_from_the_hub_cache(tmp_path: Path, cache: Path) -> None:
    hub_layout(tmp_path / "hub")
    assert run_offline("some-org/tiny-llama@other", tmp_path / "hub", cache).returncode != 0
    done = run_offline("some-org/tiny-llama@main", tmp_path / "hub", cache)
    assert done.returncode == 0, done.stderr
    identity = json.loads(done.stdout)
    assert (identity["source"], identity["revision"], identity["licence"]) == ("hub", COMMIT, "mit")
    assert done.stderr == ""  # no bars, no tables


def test_unknown_name_suggests_the_nearest(tmp_path: Path, cache: Path) -> None:
    done = run_offline("smolm2-135m", tmp_path / "hub", cache)
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
    parameters = sum(parameter.numel() for parameter in tiny().parameters())
    assert pretrained.read_headers(folder).bytes_as(torch.bfloat16) == 2 * parameters
    need = memory.memory_need(tiny().config)
    assert need.parameters == parameters
    assert 0 < need.buffer_bytes < 1000
    assert need.bytes_as(torch.float64) == 8 * parameters + need.buffer_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 3 * parameters)
    with pytest.raises(ModelError, match=r"do not fit[\s\S]*bfloat16"):
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
