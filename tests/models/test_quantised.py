"""Models with quantised weights: what they are called, the bytes that they take, and what their kernels do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import posleak as pl
from posleak.analyses.doctor.laws import Check
from posleak.errors import ModelError, PosleakWarning, UnsupportedError
from posleak.models import read_weights
from posleak.models.gguf_file import GGUFHeader, GGUFTensor
from posleak.models.quantisation import quantisation, require_packages, stored_tensors
from posleak.probe.kernels import kernel_effects
from posleak.rounding import PARITY
from posleak.runs.memory import ModelSizes, weight_bytes
from support.errors import raises
from support.models_tiny import save, small_model

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.1}
SHORT: dict[str, Any] = {"length": 32, "prompts": 4}
TORCHAO = Path(sys.prefix) / "torchao"
LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
"""Weights of all linear layers but the head."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small_model(**WIDE), tmp_path_factory.mktemp("plain"))


def bitsandbytes(plain: Path, **settings: Any) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**settings)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        str(plain), quantization_config=config, dtype=torch.float32
    )
    model.eval()
    return model


FORMS: dict[str, tuple[dict[str, Any], tuple[str, ...], float]] = {
    "int8": ({"load_in_8bit": True}, ("int8", "one scale per row", "outliers of 6"), 1),
    "nf4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        ("nf4", "4 bits", "blocks of 64", "double quantisation"), 0.5,
    ),
    "fp4": ({"load_in_4bit": True}, ("fp4", "4 bits", "blocks of 64"), 0.5),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_bitsandbytes_are_named_and_counted_as_they_are_packed(plain: Path, form: str) -> None:
    settings, words, per_weight = FORMS[form]
    model = bitsandbytes(plain, **settings)
    subject = pl.Subject.of(model)
    assert all(word in str(subject.identity.quantisation) for word in ("bitsandbytes", *words))
    assert pl.measure(subject, **SHORT).record.changed is None
    dense = pl.Subject.of(small_model(**WIDE))
    saved = weight_bytes(dense) - weight_bytes(subject)
    assert (4 - per_weight) * LINEAR * 0.9 < saved < (4 - per_weight) * LINEAR
    assert ModelSizes.of(subject).unpacked == 64 * 128
    read_weights(model)


def test_scales_of_8_bit_weights_are_part_of_the_identity(plain: Path) -> None:
    subject = pl.Subject.of(model := bitsandbytes(plain, load_in_8bit=True))
    state: Any = model.get_submodule("model.layers.0.self_attn.q_proj").state
    state.SCB.mul_(2)
    assert subject.current().identity.weights_sha256 != subject.identity.weights_sha256


def failed(diagnosis: Any) -> dict[str, Check]:
    return {check.id: check for check in diagnosis.checks if not check.ok}


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
def test_doctor_names_kernels_that_mix_tokens(plain: Path) -> None:
    """With a low threshold, every token of LLM.int8 has outliers, whose columns are taken out of all tokens."""
    model = bitsandbytes(plain, load_in_8bit=True, llm_int8_threshold=2.0)
    checks = failed(pl.doctor(model, **SHORT, short=True))
    assert {"L7 closure", "L8 batch"} <= set(checks)
    for check in checks.values():
        assert "other tokens of its batch" in str(check.cause), check


def test_no_kernel_is_blamed_for_more_than_it_does() -> None:
    model = small_model(**WIDE)
    effects = kernel_effects(model, torch.arange(12)[None])
    assert (effects.cause, effects.explain(1e-3, PARITY)) == (None, None)
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    forward = layer.forward
    layer.forward = lambda x: forward(x.bfloat16().float())
    effects = kernel_effects(model, torch.arange(12)[None])
    assert effects.rounds
    assert not effects.mixes
    assert effects.explain(0.9 * PARITY.bfloat16, PARITY)
    assert effects.explain(0.9, PARITY) is None


def test_heads_are_not_ranked_by_gradients_that_a_kernel_cuts_off(plain: Path) -> None:
    model = small_model(**WIDE)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    layer = model.get_submodule("model.layers.1.self_attn.q_proj")
    forward = layer.forward
    layer.forward = lambda x: forward(x.detach())
    with (
        raises(UnsupportedError, where="layers.1.self_attn.q_proj", what="gradient", remedy="--rank intervene"),
        pytest.warns(PosleakWarning),
    ):
        pl.circuit(model, length=32, prompts=4)


def test_bits_per_weight_of_a_gguf_file_are_the_mean_of_its_tensors() -> None:
    q8_0, f32 = 8, 0
    tensors = (GGUFTensor("a", (32, 9), q8_0, 0), GGUFTensor("b", (32, 8), q8_0, 0), GGUFTensor("c", (32,), f32, 0))
    header = GGUFHeader(Path("model.gguf"), {}, tensors)
    assert header.quantisation == "GGUF Q8_0: 9.8 bits per weight (dequantised to float32)"  # (17 · 8.5 + 32) / 18


def described(**settings: Any) -> str | None:
    model = small_model(num_hidden_layers=1)
    model.config.quantization_config = settings
    return quantisation(model)


def test_methods_are_named_by_what_their_config_states() -> None:
    group = {"weights": {"num_bits": 4, "type": "int", "group_size": 64}, "input_activations": None}
    row = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "input_activations": {"num_bits": 8}}
    for settings, expected in (
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ 4 bits, groups of 128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, "AWQ 4 bits, one scale per row"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "fp8 8 bits, blocks of 128 × 64"),
        (
            {"quant_method": "hqq", "quant_config": {"weight": {"nbits": 3, "group_size": 64}}},
            "hqq 3 bits, groups of 64",
        ),
        ({"quant_method": "mxfp4"}, "mxfp4 4 bits, groups of 32"),
        ({"quant_method": "quanto", "weights": "int4"}, "quanto int4"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": group, "b": row}},
            "compressed-tensors int4 weight-only, groups of 64; int8 with quantised activations, one scale per row",
        ),
    ):
        assert described(**settings) == expected
    assert quantisation(small_model(num_hidden_layers=1)) is None


def test_a_missing_package_is_named_with_its_remedy() -> None:
    config = small_model(num_hidden_layers=1).config
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    with raises(ModelError, where="here", what="AWQ", got="gptqmodel", remedy=("pip install", "unquantised")):
        require_packages(config, "here")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_dynamic_quantisation_of_torch_is_named() -> None:
    model = torch.ao.quantization.quantize_dynamic(small_model(**WIDE), {torch.nn.Linear}, dtype=torch.qint8)
    assert quantisation(model) == "torch.ao int8 weights, dynamic activations, one scale"
    sizes = [tensor.numel() * tensor.element_size() for tensor in stored_tensors(model)]
    assert LINEAR < sum(sizes) < 2 * LINEAR


USE_TORCHAO = """
import json, sys
sys.path.append(sys.argv[1])
import torch, posleak as pl
from posleak.errors import UnsupportedError
from support.models_tiny import small_model
from torchao import quantization as q
from posleak.runs.memory import weight_bytes
from posleak.models import read_weights
WIDE = json.loads(sys.argv[2])
forms = {
    "int8": q.Int8WeightOnlyConfig(), "int8 dynamic": q.Int8DynamicActivationInt8WeightConfig(),
    "int4": q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32)),
    "float8": q.Float8WeightOnlyConfig(),
}
out = {}
for name, form in forms.items():
    model = small_model(**WIDE)
    q.quantize_(model, form)
    subject = pl.Subject.of(model)
    read_weights(model)
    failed = [[check.id, check.cause] for check in pl.doctor(subject, length=32, short=True).checks if not check.ok]
    try:
        pl.measure(subject, length=32, prompts=4, edits="dtype=bfloat16")
        edited = "works"
    except UnsupportedError as error:
        edited = str(error)
    out[name] = [subject.identity.quantisation, weight_bytes(subject), failed, edited]
print(json.dumps(out))
"""


def test_weights_of_torchao_are_named_and_diagnosed() -> None:
    if not TORCHAO.exists():
        pytest.skip("torchao is not installed (`make venv` does)")
    done = subprocess.run(
        [sys.executable, "-c", USE_TORCHAO, str(TORCHAO), json.dumps(WIDE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: row[0] for name, row in found.items()} == {
        "int8": "torchao int8 weight-only, one scale per row",
        "int8 dynamic": "torchao int8 with quantised activations, one scale per row",
        "int4": "torchao int4 weight-only, groups of 32",
        "float8": "torchao float8_e4m3fn weight-only, one scale per row",
    }
    assert all(LINEAR < row[1] < 2 * LINEAR for row in found.values())
    failed = {name: row[2] for name, row in found.items() if row[2]}
    assert set(failed) == {"int8 dynamic"}
    assert all("round activations" in cause for _, cause in failed["int8 dynamic"])
    assert found["int8"][3] == "works"
    assert all(word in found["float8"][3] for word in ("dtype=bfloat16", "float8_e4m3fn", "unquantised"))
