"""Forms of a model that are the same function give the same numbers; forms that a probe cannot observe are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import posleak as pl
from posleak.errors import InputError, ModelError, RunError, TooLargeError, UnsupportedError
from posleak.models import checkpoints
from posleak.models.adapters import CONFIG_FILE, PICKLE
from posleak.models.parallel import Ranks
from posleak.models.sources import content_sha256, file_stamp
from posleak.probe import attach
from posleak.runs.folder import chosen_folder
from support.errors import raises
from support.inputs_subject import word_tokenizer
from support.models_tiny import save, small_model
from support.runs_tiny import assert_same_bits

SHORT: dict[str, Any] = {"length": 32, "prompts": 4}
ROUNDING = 1e-5
"""Of nats: a merged matrix rounds in another order than a matrix and its update."""


def lora(base: Path, folder: Path, seed: int = 0, **more: Any) -> Path:
    """Save an adapter with random weights for the model in `base`."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM", **more
    )  # fmt: skip
    wrapped = peft.get_peft_model(pl.load(base).model, config)
    wrapped.save_pretrained(str(folder))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(small_model(), tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return lora(base, tmp_path / "french.v1")


def totals(subject: Any, **more: Any) -> np.ndarray[Any, Any]:
    data = pl.measure(subject, **SHORT, **more).data
    return np.concatenate([data[name].values.ravel() for name in ("mask", "drift", "sink")])


# Adapters


def test_an_adapter_folder_loads_with_its_base_model(base: Path, adapter: Path) -> None:
    alone, named, applied = pl.load(adapter), pl.load(adapter, base=str(base)), pl.load(base, adapter=adapter)
    for subject in (alone, named, applied):
        assert subject.identity.name == f"{base} + {adapter.name}"
        (text,) = subject.identity.adapters
        assert text.startswith("french_v1, sha256 ")
    assert alone.identity == named.identity == applied.identity
    assert alone.identity.weights_sha256 == pl.load(base).identity.weights_sha256  # that of the base model
    np.testing.assert_array_equal(totals(alone), totals(applied))
    assert not np.allclose(totals(alone), totals(base), atol=100 * ROUNDING, equal_nan=True)


def test_merged_unmerged_and_wrapped_adapters_agree(base: Path, adapter: Path, tmp_path: Path) -> None:
    unmerged = totals(adapter)
    wrapped = peft.PeftModel.from_pretrained(pl.load(base).model, str(adapter))
    np.testing.assert_array_equal(totals(wrapped), unmerged)
    merged = save(wrapped.merge_and_unload(), tmp_path / "merged")
    np.testing.assert_allclose(totals(merged), unmerged, atol=ROUNDING)


def test_several_adapters_are_all_applied(base: Path, adapter: Path, tmp_path: Path) -> None:
    second = lora(base, tmp_path / "second", seed=1)
    both = pl.load(base, adapter=[adapter, second])
    assert [text.split(",")[0] for text in both.identity.adapters] == ["french_v1", "second"]
    one = peft.PeftModel.from_pretrained(pl.load(base).model, str(adapter)).merge_and_unload()
    merged = peft.PeftModel.from_pretrained(one, str(second)).merge_and_unload()
    np.testing.assert_allclose(totals(both), totals(merged), atol=ROUNDING)


def test_adapters_of_one_name_have_hashes_of_their_own(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    second = lora(base, tmp_path / "other" / adapter.name, seed=1)
    both, one = pl.load(base, adapter=[adapter, second]).identity.adapters, pl.load(adapter).identity.adapters
    assert [text.split(",")[0] for text in both] == ["french_v1", "french_v1-1"]
    assert both[0] == one[0]
    assert both[1].endswith(pl.load(second).identity.adapters[0].split(" ")[-1])


def test_an_adapter_whose_base_is_elsewhere_names_the_option(adapter: Path, base: Path) -> None:
    base.rename(base.parent / "moved")
    with raises(ModelError, where=(str(adapter), str(base)), remedy="--base"):
        pl.load(adapter)
    assert pl.load(adapter, base=str(base.parent / "moved")).identity.adapters


def test_the_hash_of_an_adapter_follows_its_files(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = lora(base, tmp_path / "french_v1", seed=1)
    hashes = [pl.load(path).identity.adapters[0] for path in (adapter, other)]
    assert hashes[0] != hashes[1]
    stamps = file_stamp(str(adapter)), content_sha256(str(adapter))
    save(small_model(seed=9), base)
    assert all(a != b for a, b in zip(stamps, (file_stamp(str(adapter)), content_sha256(str(adapter)))))


def test_adapters_are_checkpoints(base: Path, tmp_path: Path) -> None:
    paths = [lora(base, tmp_path / "train" / f"checkpoint-{step}", seed=step) for step in (20, 3)]
    assert checkpoints(tmp_path / "train") == paths[::-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, ("virtual tokens", "PREFIX_TUNING")),
        ({"peft_type": "XLORA"}, ("wrapper", "XLORA")),
        ({"alora_invocation_tokens": [5]}, ("certain tokens",)),
        ({"base_model_name_or_path": None}, ("base model", "with base")),
    ],
    ids=["prompt", "wrapper", "invoked", "no base"],
)
def test_an_adapter_that_cannot_be_measured_is_refused(
    adapter: Path, change: dict[str, Any], message: tuple[str, ...]
) -> None:
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ModelError, UnsupportedError)) as caught:
        pl.load(adapter)
    assert all(part in str(caught.value) for part in message)


def test_a_pickled_adapter_needs_permission(base: Path, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    torch.save(dict(peft.utils.load_peft_weights(str(adapter))), adapter / PICKLE)
    weights.unlink()
    with raises(ModelError, got=PICKLE, remedy="allow"):
        pl.load(base, adapter=adapter)
    assert pl.load(base, adapter=adapter, allow_pickle=True).identity.adapters


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = save(small_model(hidden_size=48), tmp_path / "other")
    with raises(ModelError, where=str(adapter), remedy="base model"):
        pl.load(adapter, base=str(other))
    with raises(ModelError, got="base", remedy="omit"):
        pl.load(other, base=str(other))


# Wrappers


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compiled", "data parallel"])
def test_wrapped_models_are_unwrapped(wrap: Callable[[Any], Any]) -> None:
    model = small_model()
    np.testing.assert_array_equal(totals(wrap(model)), totals(model))


def test_layers_compiled_in_place_are_refused() -> None:
    model = small_model()
    model.model.layers[1].compile()
    with raises(UnsupportedError, what="compiled in place", got="model.layers.1"):
        pl.measure(model, **SHORT)
    model = small_model()
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    with raises(UnsupportedError, what="compiled in place", got="model.layers.0.mlp"):
        pl.measure(model, **SHORT)


def test_autocast_is_refused() -> None:
    subject = pl.Subject.of(small_model())
    with torch.autocast("cpu", dtype=torch.bfloat16), raises(UnsupportedError, what="autocast", got="bfloat16"):
        pl.measure(subject, **SHORT)


def test_packed_position_ids_are_refused() -> None:
    model = small_model()
    ids = torch.arange(3, 11)[None]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with attach(model) as probe:
        with raises(UnsupportedError, what="packed", got="0 at token 4"):
            probe.forward(ids, position_ids=packed)
        probe.forward(ids, position_ids=5 + torch.arange(8)[None])


# Weights on disk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_on_disk_give_the_same_numbers(base: Path, tmp_path: Path, dtype: str) -> None:
    stored, memory = pl.load(base, dtype=dtype, offload=tmp_path / "weights"), pl.load(base, dtype=dtype)
    assert all(parameter.is_meta for parameter in stored.model.parameters())
    assert stored.identity == memory.identity
    np.testing.assert_array_equal(totals(stored), totals(memory))
    assert not list((tmp_path / "weights").iterdir())  # the model's own files are read in place


def test_weights_that_exceed_the_limit_stay_on_disk(tmp_path: Path) -> None:
    wide = save(small_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4), tmp_path / "wide")
    weights, notices = sum(p.numel() * 4 for p in pl.load(wide).model.parameters()), list[str]()
    limit = 500 * 10**6 + weights - 1
    stored = pl.load(wide, max_memory=limit, notice=notices.append)
    assert all(parameter.is_meta for parameter in stored.model.parameters())
    assert "stay on disk" in notices[0]
    assert not any(parameter.is_meta for parameter in pl.load(wide, max_memory=limit + 10**6).model.parameters())
    mapped = pl.load(wide, max_memory=limit, device_map={"": "cpu"}, notice=notices.append)
    assert not any(parameter.is_meta for parameter in mapped.model.parameters())
    assert len(notices) == 1
    with raises(TooLargeError, what="exceed --max-memory", remedy="--offload"):
        pl.measure(mapped, **SHORT, max_memory=limit)


def test_weights_that_cannot_stay_on_disk_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    with raises(UnsupportedError, what="adapters", remedy="merge"):
        pl.load(adapter, offload=tmp_path / "weights")
    with raises(UnsupportedError, what="converted", remedy="dtype"):
        pl.measure(pl.load(base, offload=tmp_path / "weights"), **SHORT, edits="dtype=bfloat16")


# Tokenizers


def test_a_tokenizer_from_elsewhere(base: Path, tmp_path: Path) -> None:
    words = word_tokenizer()
    words.save_pretrained(tmp_path / "words")
    subject = pl.load(base, tokenizer=tmp_path / "words")
    assert subject.tokenizer is not None
    assert subject.tokenizer("w0 w1").input_ids == words("w0 w1").input_ids
    assert subject.identity.tokenizer_sha256 is not None
    with raises(ModelError, where=str(base), what="no tokenizer"):
        pl.load(base, tokenizer=base)


# Several processes (docs/forms.md has more, with their numbers)


def test_one_process_of_several_prints_and_writes(tmp_path: Path) -> None:
    command = ["measure", "zoo-text-rope", "--parallel", "data", "--length", "32", "--prompts", "4", "--batch", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "posleak",
         *command, "--out", str(tmp_path / "run"), "--json"],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["run"] == str(tmp_path / "run")
    stored = pl.Run.load(tmp_path / "run")
    assert stored.record.machine.processes == 2
    alone = pl.measure("zoo-text-rope", **SHORT, batch=1)
    assert_same_bits(stored, alone)


def test_parallel_work_needs_processes_and_a_known_kind() -> None:
    with raises(InputError, remedy="torchrun"):
        pl.load("zoo-text-rope", parallel="tensor")
    with raises(InputError, got="pipeline"):
        pl.load("zoo-text-rope", parallel="pipeline")


def test_several_processes_do_not_resume_a_run(tmp_path: Path) -> None:
    pl.measure("zoo-text-rope", **SHORT, out=tmp_path)
    shared = Ranks(0, 2)
    with raises(RunError, what="several processes", remedy="--fresh"):
        chosen_folder(tmp_path, None, str, shared)
    assert chosen_folder(tmp_path, None, str, shared, fresh=True) == tmp_path
    assert chosen_folder(tmp_path, None, str, Ranks(1, 2)) is None
