"""A result belongs to the model that was measured, and measuring leaves the model as it was."""

from __future__ import annotations

import dataclasses
import functools
import json
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import posleak as pl
from posleak.errors import CheckError, ModelError, PosleakWarning, RunError, UnsupportedError
from posleak.models import hashing
from posleak.probe.fingerprint import fingerprint_difference, identified
from posleak.rounding import PARITY
from posleak.runs.conditions import Conditions
from posleak.runs.record import read_record
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from support.errors import assert_fields, mentions, raises
from support.models_tiny import save, small_model
from support.runs_tiny import assert_same_bits

SHORT: dict[str, Any] = {"length": 32, "prompts": 4}
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def total(run: Run) -> float:
    return float(run.summary.model["all"].power["total"].value)


# Weights that change in memory


def scaled(model: torch.nn.Module) -> None:
    """Change weights without their version counters."""
    for parameter in model.parameters():
        parameter.data.mul_(1.3)


def stepped(model: torch.nn.Module) -> None:
    """Take one step of training."""
    model.requires_grad_(True)
    optimiser = torch.optim.SGD(model.parameters(), lr=5.0)
    ids = torch.arange(3, 30)[None]
    model(ids, labels=ids).loss.backward()
    optimiser.step()


def written(model: torch.nn.Module) -> None:
    """Write into memory that numpy shares, which torch cannot know."""
    model.get_parameter("model.layers.0.self_attn.q_proj.weight").detach().numpy()[:] *= 1.3


def rotated(model: torch.nn.Module) -> None:
    """Change a buffer that is not part of the state dict."""
    model.get_buffer("model.rotary_emb.inv_freq").mul_(0.5)


CHANGES = [scaled, stepped, written, rotated]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_does_not_get_the_old_result(change: Callable[[torch.nn.Module], None], tmp_path: Path) -> None:
    subject = pl.load("zoo-text-rope")
    before = pl.measure(subject, **SHORT, out=tmp_path / "run")
    change(subject.model)
    with raises(RunError, where=tmp_path / "run", got="weights_sha256", remedy="--fresh") as caught:
        pl.measure(subject, **SHORT, out=tmp_path / "run")
    after = pl.measure(subject, **SHORT)
    old, new = before.record.identity, after.record.identity
    assert_fields(caught.value, got=(old.weights_sha256, new.weights_sha256))
    assert new.weights_sha256 == hashing.model_sha256(subject.model) != old.weights_sha256
    assert (old.source, new.source) == ("shipped with posleak", "shipped with posleak, then changed in memory")
    assert abs(total(after) / total(before) - 1) > 1e-3


def test_a_model_that_is_changed_back_is_the_same_again(tmp_path: Path) -> None:
    subject = pl.load("zoo-text-rope")
    weight = subject.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    before, kept = pl.measure(subject, **SHORT, out=tmp_path / "run"), weight.detach().clone()
    weight.data.mul_(2)
    assert identified(subject).identity.weights_sha256 != before.record.identity.weights_sha256
    weight.data.copy_(kept)
    assert pl.measure(subject, **SHORT, out=tmp_path / "run").record == before.record


def test_an_object_in_memory_is_identified_at_every_measurement(tmp_path: Path) -> None:
    subject = pl.Subject.of(small_model())
    first = pl.measure(subject, **SHORT, out=tmp_path / "run")
    scaled(subject.model)
    with raises(RunError, got="weights_sha256"):
        pl.measure(subject, **SHORT, out=tmp_path / "run")
    assert pl.measure(subject, **SHORT, out=tmp_path / "run", fresh=True).record.digest != first.record.digest
    assert pl.trace(subject, **SHORT).ordinary.record.identity.weights_sha256 == hashing.model_sha256(subject.model)
    assert pl.origin(subject, **SHORT, tokens=8).identity.weights_sha256 == hashing.model_sha256(subject.model)


def test_a_changed_config_is_another_model_and_is_checked_again() -> None:
    subject = pl.Subject.of(small_model("Mistral", sliding_window=64))
    subject.model.config.sliding_window = 8
    with pytest.warns(PosleakWarning, match=mentions("length 136", "extrapolation")) as caught:
        run = pl.measure(subject, length=136, prompts=4)
    assert run.record.identity.windows == (8, 8, 8)
    assert not any("window" in str(each.message) for each in caught)


def test_a_run_that_has_no_fingerprint_is_not_believed(tmp_path: Path) -> None:
    subject = pl.Subject.of(small_model())
    run = pl.measure(subject, **SHORT, out=tmp_path / "run")
    earlier = dataclasses.replace(run.record, identity=dataclasses.replace(run.record.identity, fingerprint=None))
    earlier.write(tmp_path / "run")
    with raises(RunError, got="fingerprint missing"):
        pl.measure(subject, **SHORT, out=tmp_path / "run")


# Behaviour outside the weights


def doubled(module: torch.nn.Module, args: Any, out: Any) -> Any:
    return out * 2


def hooked(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    model.get_submodule("model.layers.1.mlp").register_forward_hook(doubled)


def replaced(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    mlp = model.get_submodule("model.layers.1.mlp")
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 2


def patched(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Replace a method of the class, which leaves no trace in the object."""
    kind = type(model.get_submodule("model.layers.1.mlp"))
    forward = kind.forward
    patch.setattr(kind, "forward", lambda self, x: forward(self, x) * 2)


@pytest.mark.parametrize(
    ("change", "part"), [(hooked, "doubled"), (replaced, "replaced.<locals>.<lambda>"), (patched, "fingerprint")]
)
def test_code_around_the_weights_is_part_of_the_identity(
    change: Callable[[torch.nn.Module, pytest.MonkeyPatch], None], part: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    subject = pl.Subject.of(small_model())
    before = pl.measure(subject, **SHORT, out=tmp_path / "run")
    change(subject.model, monkeypatch)
    with raises(RunError, where=tmp_path / "run", got=part) as caught:
        pl.measure(subject, **SHORT, out=tmp_path / "run")
    after = pl.measure(subject, **SHORT)
    assert after.record.identity.weights_sha256 == before.record.identity.weights_sha256
    old, new = before.record.identity.fingerprint, after.record.identity.fingerprint
    assert old is not None
    assert new is not None
    worst = max(range(len(old)), key=lambda i: abs(old[i] - new[i]))
    assert_fields(caught.value, got=("fingerprint", f"{old[worst]:.6g}", f"{new[worst]:.6g}"))
    assert total(after) != total(before)


def only_long(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward method that differs on long prompts only, where no fingerprint sees it."""

    @functools.wraps(forward)
    def patched(x: torch.Tensor) -> Any:
        return forward(x) * (2 if x.shape[1] > 16 else 1)

    return patched


@pytest.mark.parametrize("offloaded", ["", "before", "after"])
def test_a_replaced_method_is_listed_although_it_looks_like_the_models_own(offloaded: str, tmp_path: Path) -> None:
    """`functools.wraps` copies the name of the module, and accelerate replaces methods itself."""
    model = small_model()
    if offloaded == "before":
        accelerate.cpu_offload(model, execution_device="cpu")
    before = pl.measure(model, **SHORT, out=tmp_path / "run")
    assert before.record.identity.hooks == ()
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    layer.forward = only_long(layer.forward)
    if offloaded == "after":
        accelerate.cpu_offload(model, execution_device="cpu")
    with raises(RunError, got=("hooks []", "['model.layers.1.mlp.up_proj: ")):
        pl.measure(model, **SHORT, out=tmp_path / "run")


class Masking(torch.nn.Module):
    """Hides a part of the vocabulary, as models for images and texts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.arange(x.shape[-1]) > 80, torch.finfo(x.dtype).min)


def test_hidden_tokens_do_not_blind_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    model.lm_head = torch.nn.Sequential(model.lm_head, Masking())
    before = pl.measure(model, **SHORT, out=tmp_path / "run")
    assert pl.measure(model, **SHORT, out=tmp_path / "run").record == before.record
    patched(model, monkeypatch)
    with raises(RunError, got="fingerprint"):
        pl.measure(model, **SHORT, out=tmp_path / "run")


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaForQuestionAnswering", "LlamaModel"])
def test_models_without_logits_at_each_position_have_a_fingerprint_of_states(head: str) -> None:
    model = getattr(transformers, head)(small_model().config)
    found = pl.measure(model, **SHORT).record.identity.fingerprint
    assert found is not None
    assert len(found) == 17


def test_a_resized_vocabulary_is_that_of_the_model_as_it_is() -> None:
    subject = pl.Subject.of(small_model())
    subject.model.resize_token_embeddings(50)
    assert pl.measure(subject, **SHORT).record.identity.vocab == 50


def test_settings_of_outputs_are_no_part_of_the_identity(tmp_path: Path) -> None:
    subject = pl.Subject.of(small_model())
    before = pl.measure(subject, **SHORT, out=tmp_path / "run")
    subject.model.config.use_cache = False  # as before training
    assert pl.measure(subject, **SHORT, out=tmp_path / "run").record == before.record


def test_a_long_pass_of_a_dynamic_rotation_is_no_change(tmp_path: Path) -> None:
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    subject = pl.Subject.of(small_model(rope_parameters=rotation, max_position_embeddings=48))
    before = pl.measure(subject, **SHORT, out=tmp_path / "run")
    subject.model(torch.arange(3, 93)[None])
    assert pl.measure(subject, **SHORT, out=tmp_path / "run").record == before.record


def test_an_adapter_that_is_switched_off_is_another_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = small_model()
    plain = total(pl.measure(model, **SHORT))
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.eval()
    adapted = pl.measure(model, **SHORT, out=tmp_path / "run")
    model.disable_adapters()
    with raises(RunError, got=("adapters ['default, sha256 ", "[]", "fingerprint")):
        pl.measure(model, **SHORT, out=tmp_path / "run")
    off = pl.measure(model, **SHORT)
    (text,) = adapted.record.identity.adapters
    assert text.startswith("default, sha256 ")
    assert off.record.identity.adapters == ()
    assert total(off) == plain != total(adapted)
    model.enable_adapters()
    assert pl.measure(model, **SHORT, out=tmp_path / "run").record == adapted.record


def test_fingerprints_agree_up_to_rounding_and_no_further(tmp_path: Path) -> None:
    """A hook that changes nothing but the last bits changes the identity by its name only."""
    subject = identified(pl.Subject.of(small_model()))
    tolerance = PARITY.of(torch.float32)
    for factor, agrees in ((1 + tolerance / 20, True), (1 + 20 * tolerance, False)):
        handle = subject.model.lm_head.register_forward_hook(lambda module, args, out, f=factor: out * f)
        now = identified(subject)
        handle.remove()
        assert (fingerprint_difference(subject.identity, now.identity) == []) is agrees


# A model that changes while it is measured


def test_a_model_that_changes_while_it_is_measured_is_marked(tmp_path: Path) -> None:
    model = small_model()
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")

    class Spoiler:
        def observe(self, call: Any, out: Any) -> None:
            weight.data.mul_(1.01)

    with pytest.warns(PosleakWarning, match="changed"):
        run = pl.measure(model, **SHORT, observers=Spoiler(), out=tmp_path / "run")
    assert "weights_sha256" in str(run.record.changed)
    assert run.record.changed in run.record.warnings
    assert read_record(tmp_path / "run").changed == run.record.changed == run.as_dict()["changed"]
    assert pl.measure(model, **SHORT).record.changed is None


class Growing(torch.nn.Module):
    """Multiplies by more in each pass: a state that is not a tensor."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step, self.factor = step, [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor[0] += self.step
        return torch.nn.functional.silu(x) * self.factor[0]


@pytest.mark.parametrize("step", [0.0, 0.002])
def test_a_model_whose_modules_have_a_state_is_marked_if_the_state_changes_its_output(step: float) -> None:
    model = small_model()
    model.get_submodule("model.layers.1.mlp").act_fn = Growing(step)
    passes = list[int]()
    model.lm_head.register_forward_hook(lambda module, args, out: passes.append(len(out)))
    if step:
        with pytest.warns(PosleakWarning, match=mentions("changed", "fingerprint")):
            run = pl.measure(model, **SHORT)
    else:
        run = pl.measure(model, **SHORT)
    assert (run.record.changed is not None) is bool(step)
    assert len(passes) == 1 + bool(step)  # the head is run for fingerprints only


def test_a_model_whose_output_is_random_is_refused() -> None:
    model = small_model()
    model.get_submodule("model.layers.1.mlp").register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, 0.5, training=True)
    )
    with raises(UnsupportedError, what="random", got="differences", remedy="dropout"):
        pl.measure(model, **SHORT)


@pytest.mark.parametrize("change", ["config", "global hook", "tensor"])
def test_changes_of_config_hooks_and_plain_tensors_during_a_measurement_are_marked(change: str) -> None:
    model = small_model("Mistral", sliding_window=4)
    scale = torch.ones(())
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.scale = scale
    mlp.register_forward_hook(lambda module, args, out: out * module.scale)
    handles = list[Any]()

    def act(done: int, of: int) -> None:
        if change == "config":
            model.config.sliding_window = 64
        elif change == "global hook":
            handles.append(torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None))
        else:
            scale.mul_(9)

    with pytest.warns(PosleakWarning, match="changed"):
        pl.measure(model, **SHORT, progress=act)
    for handle in handles:
        handle.remove()


def test_batches_of_a_model_that_changed_before_an_error_are_not_resumed(tmp_path: Path) -> None:
    model = small_model()
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    expected, kept = total(pl.measure(model, **SHORT, batch=1)), weight.detach().clone()

    def act(done: int, of: int) -> None:
        weight.data.mul_(30)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pl.measure(model, **SHORT, batch=1, out=tmp_path / "run", progress=act)
    weight.data.copy_(kept)
    assert total(pl.measure(model, **SHORT, batch=1, out=tmp_path / "run")) == expected


def test_a_buffer_that_counts_passes_does_not_keep_a_model_from_being_traced() -> None:
    model = small_model()
    passes = torch.zeros(())
    model.register_buffer("passes", passes)

    def count(module: torch.nn.Module, args: Any) -> None:
        passes.add_(1)

    model.model.register_forward_pre_hook(count)
    with pytest.warns(PosleakWarning, match="changed"):
        assert pl.trace(model, **SHORT).remainder < 1e-4


def test_conditions_of_a_model_that_has_changed_are_not_compared(tmp_path: Path) -> None:
    subject = pl.Subject.of(small_model())
    conditions = Conditions(subject, MeasureSpec(**SHORT))
    conditions.run()
    scaled(subject.model)
    with raises(CheckError, where="window=9", what="baseline", got="fingerprint"):
        conditions.run("window=9")


# What is given back


def everything(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "attention": model.config._attn_implementation,
        "random": torch.get_rng_state().tolist(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


WORK: dict[str, Callable[[Any], Any]] = {
    "measure": lambda model: pl.measure(model, **SHORT, metrics="all", loss=True),
    "trace": lambda model: pl.trace(model, **SHORT),
    "origin": lambda model: pl.origin(model, **SHORT, tokens=8),
    "doctor": lambda model: pl.doctor(model, **SHORT),
    "claims": lambda model: pl.claims(model, length=64, prompts=4),
    "advise": lambda model: pl.advise(model, "random", **SHORT, groups="window"),
    "subject": lambda model: pl.Subject.of(model),
    "error": lambda model: failing(model),
}


def failing(model: Any) -> None:
    class Broken:
        def observe(self, call: Any, out: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pl.measure(model, **SHORT, observers=Broken())


class Drawing(torch.nn.Module):
    """Draws random numbers, and does nothing with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.rand(1)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
def test_modes_gradients_and_random_state_are_given_back(work: str) -> None:
    model = small_model(attention_dropout=0.1).train()
    model.get_submodule("model.layers.1").eval()
    model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    model.get_submodule("model.layers.0.mlp").act_fn = torch.nn.Sequential(torch.nn.SiLU(), Drawing())
    before = everything(model)
    WORK[work](model)
    assert everything(model) == before


def test_other_threads_get_each_random_number_once() -> None:
    """The random state belongs to all threads: restoring it would repeat what they draw meanwhile."""
    drawn, done, models = list[float](), threading.Event(), [small_model() for _ in range(3)]

    def draw() -> None:
        while not done.is_set():
            drawn.append(float(torch.rand(())))

    thread = threading.Thread(target=draw)
    thread.start()
    for model in models:
        pl.measure(model, **SHORT)
    done.set()
    thread.join()
    assert len(set(drawn)) > 0.99 * len(drawn)  # of 24 bits each, some agree by chance


def test_numbers_of_a_model_in_train_mode_are_those_of_its_eval_mode() -> None:
    model = small_model("Phi", hidden_size=32, head_dim=8, resid_pdrop=0.5, embd_pdrop=0.5)
    expected = total(pl.measure(model.eval(), **SHORT))
    assert total(pl.measure(model.train(), **SHORT)) == expected
    assert model.training


# Weights that are elsewhere, or packed


def test_offloaded_weights_are_read_where_they_are(tmp_path: Path) -> None:
    model = small_model(**WIDE)
    expected = pl.measure(model, **SHORT)
    places = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    layers = {f"model.layers.{layer}": place for layer, place in enumerate(["cpu", "disk", "disk"])}
    model = accelerate.dispatch_model(model, places | layers, main_device="cpu", offload_dir=str(tmp_path / "off"))
    assert next(model.lm_head.parameters()).is_meta
    run = pl.measure(model, **SHORT)
    assert total(run) == total(expected)
    assert run.record.identity == expected.record.identity
    assert pl.origin(model, **SHORT, tokens=8).identity == expected.record.identity
    with raises(UnsupportedError, where="dtype=bfloat16", what="offloaded", remedy="--dtype"):
        pl.measure(model, **SHORT, edits="dtype=bfloat16")
    stored = tmp_path / "off" / "model.layers.1.mlp.up_proj.weight.dat"
    stored.write_bytes((np.frombuffer(stored.read_bytes(), np.float32) * 1.5).astype(np.float32).tobytes())
    assert pl.measure(model, **SHORT).record.identity.weights_sha256 != expected.record.identity.weights_sha256


def test_buffers_of_every_kind_are_hashed() -> None:
    model = small_model()
    plain = hashing.model_sha256(model)
    model.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
    model.register_buffer("conjugate", torch.ones(2, dtype=torch.complex64).conj(), persistent=False)
    assert pl.measure(model, **SHORT).record.identity.weights_sha256 == hashing.model_sha256(model) != plain


def test_weights_that_are_nowhere_are_refused() -> None:
    with torch.device("meta"):
        model = small_model()
    with raises(ModelError, where="model.embed_tokens.weight", got="meta"):
        pl.Subject.of(model)


@pytest.fixture
def four_bits(tmp_path: Path) -> Any:
    """A real 4-bit model of bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    save(small_model(**WIDE), tmp_path / "m")
    packing = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "m"), quantization_config=packing, dtype=torch.float32
    )


def test_measuring_a_4_bit_model_does_not_change_it(four_bits: Any) -> None:
    runs = [pl.measure(four_bits, **SHORT) for _ in range(3)]
    assert len({total(run) for run in runs}) == 1
    assert len({run.record.identity for run in map(hashable, runs)}) == 1
    four_bits.state_dict()  # what an earlier version called, and what packs the weights anew
    assert pl.measure(four_bits, **SHORT).record.identity.weights_sha256 != runs[0].record.identity.weights_sha256


def hashable(run: Run) -> Any:
    """A run whose identity can be put into a set."""
    return type("R", (), {"record": type("I", (), {"identity": json.dumps(run.as_dict()["identity"])})})


def test_scales_of_packed_weights_are_part_of_the_identity(four_bits: Any) -> None:
    subject = pl.Subject.of(four_bits)
    four_bits.get_parameter("model.layers.0.self_attn.q_proj.weight").quant_state.absmax.mul_(2)
    assert identified(subject).identity.weights_sha256 != subject.identity.weights_sha256


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
def test_eager_quantisation_of_torch_is_served() -> None:
    model = torch.ao.quantization.quantize_dynamic(small_model(**WIDE), {torch.nn.Linear}, dtype=torch.qint8)
    run = pl.measure(model, **SHORT)
    assert run.record.changed is None
    assert pl.measure(model, **SHORT).record.identity == run.record.identity
    model.model.layers[0].mlp.up_proj.set_weight_bias(model.model.layers[1].mlp.up_proj.weight(), None)
    assert pl.measure(model, **SHORT).record.identity.weights_sha256 != run.record.identity.weights_sha256


TORCHAO = Path(sys.prefix) / "torchao"
"""`make venv` installs it there: installed as a package, it slows every import of transformers and prints to stderr."""

MEASURE_TORCHAO = """
import json, sys
sys.path.append(sys.argv[1])
import torch, posleak as pl
from support.models_tiny import small_model
from torchao.quantization import Int8WeightOnlyConfig, quantize_
model = small_model(hidden_size=64, intermediate_size=128, head_dim=16)
plain = pl.measure(model, length=32, prompts=4)
quantize_(model, Int8WeightOnlyConfig())
subject = pl.Subject.of(model)
runs = [pl.measure(subject, length=32, prompts=4) for _ in range(2)]
model.model.layers[0].mlp.up_proj.weight.scale.mul_(2)
runs.append(pl.measure(subject, length=32, prompts=4))
print(json.dumps([[r.summary.model["all"].power["total"].value, r.record.identity.weights_sha256,
                   r.record.changed] for r in [plain, *runs]]))
"""


def test_packed_weights_of_torchao_are_served() -> None:
    if not TORCHAO.exists():
        pytest.skip("torchao is not installed (`make venv` does)")
    done = subprocess.run([sys.executable, "-c", MEASURE_TORCHAO, str(TORCHAO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, first, second, scaled = json.loads(done.stdout)
    assert first == second
    assert [each[2] for each in (plain, first, second, scaled)] == [None] * 4
    assert first[0] == pytest.approx(plain[0], rel=1e-3)
    assert len({each[1] for each in (plain, first, scaled)}) == 3


def test_a_sharded_model_is_the_model_and_can_be_trained_afterwards(tmp_path: Path) -> None:
    model = small_model()
    plain = pl.measure(small_model(), **SHORT)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for _ in range(2):
            sharded = pl.measure(model, **SHORT)
            assert sharded.record.identity.weights_sha256 == plain.record.identity.weights_sha256
            assert_same_bits(sharded, plain)
            ids = torch.arange(3, 12)[None]
            model(input_ids=ids, labels=ids).loss.backward()
        with raises(UnsupportedError, what="circuit", remedy="one process"):
            pl.circuit(model, length=32, prompts=4)
    finally:
        dist.destroy_process_group()


# Files


def test_a_file_that_is_changed_through_a_memory_map_is_hashed_again(tmp_path: Path) -> None:
    """While a mapped page is dirty, further writes to it change no time stamp."""
    weights, cache = save(small_model(), tmp_path / "m") / "model.safetensors", tmp_path / "cache"
    with weights.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[-5] ^= 1
        first = hashing.file_sha256(weights, cache)
        pages[-5] ^= 1
        assert hashing.file_sha256(weights, cache) == hashing.file_sha256(weights) != first


def test_remembered_hashes_are_not_believed_of_files_that_load_as_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems change no time stamp at all when a file is written through a memory map."""
    folder, cache = save(small_model(), tmp_path / "m"), tmp_path / "cache"
    kept = hashing._record_of
    monkeypatch.setattr(hashing, "_record_of", lambda path, cache: kept(path.parent / "config.json", cache))
    first = pl.load(folder, cache=cache).identity
    assert pl.load(folder, cache=cache).identity == first
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert hashing.file_sha256(weights, cache) != hashing.file_sha256(weights)
    second = pl.load(folder, cache=cache).identity
    assert second.weights_sha256 == pl.load(folder, cache=cache, verify=True).identity.weights_sha256
    assert second.weights_sha256 != first.weights_sha256


# Logits that are not numbers


def test_a_loss_that_is_not_a_number_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    model = small_model(tie_word_embeddings=False)
    model.lm_head.weight.data[3] = float("nan")
    with raises(CheckError, what="logits", got="nan", remedy="--loss"):
        pl.measure(model, **SHORT, loss=True, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert pl.measure(model, **SHORT).record.changed is None
