"""Whatever a user brings: position on purpose is named, a new family needs no code, checkpoints are followed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from posleak.analyses.doctor.doctor import Diagnosis, doctor
from posleak.analyses.doctor.laws import Check
from posleak.analyses.doctor.passes import RECURRENT, TABLE, first_entrance
from posleak.errors import ModelError, PosleakWarning, UnsupportedError
from posleak.leakage import LeakageObserver, assemble, component, components
from posleak.models import Subject, checkpoints, load
from posleak.probe import Call, Edit, attach, calibrate, default_plan, read_placements
from posleak.probe.visibility import read_mask
from posleak.runs.loop import Passes
from posleak.runs.measure import measure
from support.families import VOCAB, tiny
from support.made_up import made_up
from support.models_tiny import save, tiny as small
from tools.shrink import tiny_model

N, B = 64, 5
BETA, STEP = 0.2, 8
SCALED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": BETA,
        "original_max_position_embeddings": STEP,
    }
}


def tokens(batch: int = B) -> NDArray[np.int64]:
    return np.random.default_rng(7).integers(3, 101, (batch, N))


def check(diagnosis: Diagnosis, start: str) -> Check:
    return next(c for c in diagnosis.checks if c.id.startswith(start))


# Queries scaled by position: a fourth part


def test_llama4_scales_only_the_layers_without_rotation() -> None:
    layers: dict[str, Any] = {
        "no_rope_layers": [1, 0], "num_hidden_layers": 2, "floor_scale": STEP, "attn_scale": BETA, "hidden_size": 32,
        "intermediate_size": 48, "intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16,
    }  # fmt: skip
    placements = read_placements(tiny("llama4_text", **layers), torch.from_numpy(tokens()), default_plan(N))
    assert [(place.moves, place.temperature is not None) for place in placements] == [
        ("rotation", False), ("no rotation", True),
    ]  # fmt: skip


def test_four_parts_add_up_and_have_shares() -> None:
    run = measure(Subject.of(tiny("ministral3", **SCALED), name="m"), length=N, prompts=B, seed=1)
    assert components(run.data)[-1] == "scaling"
    assert run.data.attrs["remainder"] < 1e-9
    total = sum(component(run.data, name) for name in ("mask", "drift", "sink", "scaling"))
    assert np.nanmax(np.abs(total - component(run.data, "total"))) < 1e-12
    shares = run.summary.model["all"].share
    assert float(shares["mask"].value + shares["residual"].value + shares["scaling"].value) == pytest.approx(1)
    assert {"scaling"} < set(run.as_dict()["layers"][0])
    assert list(run.parts()["component"].values)[-1] == "scaling"


def test_without_scaling_there_are_three_parts() -> None:
    plan = default_plan(N)
    data = assemble(list(Passes(tiny("llama"), plan).measure([tokens()])), plan)
    assert "scaling" not in data
    assert "scaling" not in components(data)


def test_the_other_three_parts_are_those_of_the_model_without_its_scaling() -> None:
    """Same weights with β = 0, every query at the references' mean temperature: the first layer must agree."""
    plan = default_plan(N)
    scaled = tiny("ministral3", **SCALED)
    even = tiny("ministral3", rope_parameters={**SCALED["rope_parameters"], "llama_4_scaling_beta": 0.0})
    common = float(np.mean([1 + BETA * math.log(1 + r // STEP) for r in plan.references]))

    class Warmer(Edit):
        def edit(self, call: Call) -> Call:
            return replace(call, scaling=call.scaling * common)

    places = read_placements(even, torch.from_numpy(tokens()), plan)
    assert {place.temperature for place in places} == {None}
    with attach(even, [look := LeakageObserver(plan, placements=places)], [Warmer()]) as probe:
        probe.forward(torch.from_numpy(tokens()))
    parts = next(iter(Passes(scaled, plan).measure([tokens()])))
    for name in ("mask", "drift", "sink"):
        assert np.allclose(parts[name][:, 0], getattr(look.layers[0], name), atol=1e-4, equal_nan=True), name
    assert np.nanmax(np.abs(parts["scaling"][:, 0])) > 0.1


def test_doctor_names_scaled_queries() -> None:
    """With the scaling set apart a constant token leaks through the mask alone; a shift still shows it."""
    diagnosis = doctor(Subject.of(tiny("ministral3", **SCALED), name="m"), short=True)
    assert check(diagnosis, "L2").ok
    assert not check(diagnosis, "L5").ok
    assert "3 layers scale their queries by absolute position" in check(diagnosis, "L5").why


def test_a_weighted_norm_after_the_rotation_is_named() -> None:
    """HunYuan: the weights do not commute with the rotation, so that logits depend on more than offsets."""
    model = tiny("hunyuan_v1_dense")
    with torch.no_grad():
        assert doctor(Subject.of(model, name="even"), short=True).ok
        for name, parameter in model.named_parameters():
            if name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
                parameter.uniform_(0.5, 1.5)
    shift = check(doctor(Subject.of(model, name="uneven"), short=True), "L5")
    assert not shift.ok
    assert "rotation" in str(shift.cause)


# Controls: position on purpose


def test_learned_positions_break_law_three_and_are_named() -> None:
    options: dict[str, Any] = {"n_embd": 30, "n_layer": 3, "n_head": 3, "n_positions": 2048, "n_inner": 41}
    model = tiny("gpt2", **options)
    with torch.no_grad():
        model.get_submodule("transformer.wpe").weight.mul_(4)  # type: ignore[operator]
    diagnosis = doctor(Subject.of(model, name="gpt2"), prompts=24)
    for law in ("L2", "L3", "L5"):
        assert not check(diagnosis, law).ok, law
        cause = str(check(diagnosis, law).cause)
        assert "table of absolute positions (transformer.wpe)" in cause, law
        assert check(diagnosis, law).why.endswith(cause)
    for id in ("parity", "partition", "L1", "L4", "L7", "L8 batch", "L9"):
        assert check(diagnosis, id).ok, id
    assert "layers the origin" in check(diagnosis, "L10").why
    with pytest.warns(PosleakWarning, match="origin keys cannot be moved in every layer"):
        run = measure(Subject.of(model, name="gpt2"), length=N, prompts=24)
    residual = run.summary.layers["all"].power["residual"]
    assert residual.low[0] > 0, "positions are in the residual stream before the first layer"


def test_sources_are_found_by_watching() -> None:
    assert first_entrance(tiny("llama"), 5) is None
    assert first_entrance(tiny("smollm3"), 5) is None
    table = first_entrance(tiny("opt", ffn_dim=41, word_embed_proj_dim=30), 5)
    assert table is not None
    assert (table.kind, table.module) == (TABLE, "model.decoder.embed_positions")
    conv = first_entrance(tiny("lfm2", layer_types=["conv", "full_attention", "conv"]), 5)
    assert conv is not None
    assert conv.kind == RECURRENT
    assert conv.module.startswith("model.layers.0.conv")


def test_a_family_that_does_not_run_in_a_dtype_is_still_diagnosed() -> None:
    floor = check(doctor(Subject.of(tiny_model("minimax"), name="minimax"), length=48, prompts=4), "floor bfloat16")
    assert math.isinf(floor.value)
    assert "does not run in bfloat16" in floor.why


# A new family needs no code


@pytest.mark.parametrize("alibi", [False, True])
def test_a_made_up_family_is_measured(alibi: bool) -> None:
    subject = Subject.of(made_up(alibi=alibi), name="made up")
    diagnosis = doctor(subject)
    assert diagnosis.ok, [c for c in diagnosis.checks if not c.ok]
    assert diagnosis.calibration.layers == 3
    run = measure(subject, length=N, prompts=4)
    assert run.data.sizes["head"] == 6
    assert run.data.attrs["remainder"] < 1e-9
    assert run.record.identity.architecture == "made_up"


def test_a_bias_that_is_dropped_breaks_parity() -> None:
    class Break(Edit):
        def edit(self, call: Call) -> Call:
            assert call.bias is not None
            return replace(call, bias=None)

    model, ids = made_up(alibi=True), torch.from_numpy(tokens())
    expected = model(ids)[0]
    with attach(model, edits=[Break()]) as probe:
        assert not torch.allclose(probe.forward(ids)[0], expected, rtol=1e-2)


def test_a_mask_that_the_model_computed_is_read() -> None:
    seen = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min
    dense = torch.zeros(2, 3, N, N).masked_fill(~seen, lowest)
    for mask, added in ((seen, False), (dense, False), (dense + 0.5 * seen, True)):
        read = read_mask(mask)
        assert read is not None
        assert torch.equal(read[0].dense(), seen)
        assert (read[1] is not None) == added
    dense[:, 1] = lowest
    assert read_mask(dense) is None, "heads that see different keys"


def test_keys_selected_by_content_are_refused_with_the_remedy() -> None:
    model = tiny_model("deepseek_v32")
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.__dict__["index_topk"] = 40
    with pytest.raises(UnsupportedError, match=r"selected by content[\s\S]*40 of 64[\s\S]*--length 40"):
        calibrate(model, torch.from_numpy(tokens(1)) % 100)


def test_a_measurement_that_is_broken_off_leaves_the_model_alone() -> None:
    """Also while the exception, and with it every frame, is still alive."""
    subject = Subject.of(tiny("llama"), name="llama")

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        measure(subject, length=N, prompts=4, batch=2, progress=stop)
    assert kept.value is not None
    assert subject.model.config._attn_implementation == "sdpa"


# Checkpoints


def test_checkpoints_come_in_the_order_of_training(tmp_path: Path) -> None:
    for step in (900, 1000, 50):
        save(small(), tmp_path / f"checkpoint-{step}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "run-7").mkdir()  # no model in it
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-50", "checkpoint-900", "checkpoint-1000"]
    assert load(checkpoints(tmp_path)[1], cache=tmp_path / "cache").identity.layers == 3


def test_a_folder_without_checkpoints_says_what_was_expected(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=r"no checkpoints[\s\S]*checkpoint-100"):
            checkpoints(place)
    save(small(), tmp_path / "step-3")
    save(small(), tmp_path / "checkpoint-3")
    with pytest.raises(ModelError, match=r"same step[\s\S]*checkpoint-3 and step-3"):
        checkpoints(tmp_path)


def test_revisions_of_a_hub_cache_are_different_models(tmp_path: Path) -> None:
    repo, commits = tmp_path / "models--some-org--tiny", {"main": "a" * 40, "step100": "b" * 40}
    (repo / "refs").mkdir(parents=True)
    for layers, (name, commit) in enumerate(commits.items(), start=1):
        save(small(num_hidden_layers=layers), repo / "snapshots" / commit)
        (repo / "refs" / name).write_text(commit)
    for layers, (name, commit) in enumerate(commits.items(), start=1):
        for revision in (name, commit):
            identity = load(repo, revision=revision, cache=tmp_path / "cache").identity
            assert (identity.revision, identity.layers) == (commit, layers)
            named = load(f"{repo}@{revision}", cache=tmp_path / "cache").identity
            assert replace(named, name=identity.name) == identity
            assert named.name == f"{repo}@{revision}"
    assert load(repo, cache=tmp_path / "cache").identity.revision == commits["main"]


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    folder = save(small(num_hidden_layers=2), tmp_path / "my@model")
    assert load(folder, cache=tmp_path / "cache").identity.layers == 2, "a sign in a path is part of the path"
    for name, options in ((f"{folder}@v1", {}), (str(folder), {"revision": "v1"}), ("zoo-text-rope@v1", {})):
        with pytest.raises(ModelError, match="has no revisions"):
            load(name, cache=tmp_path / "cache", **options)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="two revisions"):
        load("org/name@one", revision="two")


def test_decoders_that_do_not_say_so_are_not_taken_for_encoders(tmp_path: Path) -> None:
    """GPT-NeoX (Pythia) leaves `is_decoder` false in its config, and has always been a decoder."""
    folder = save(tiny("gpt_neox"), tmp_path / "neox")
    assert load(folder, cache=tmp_path / "cache").identity.architecture == "gpt_neox"


def test_layers_that_accelerate_moves_between_devices_measure_the_same() -> None:
    """What `device_map` does to a model that is spread over devices, as far as a CPU can show it.

    Every layer is wrapped in accelerate's hooks, which move whatever it is given, its mask too.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model: Any = tiny("mistral")
    ids, plan = np.random.default_rng(0).integers(3, VOCAB, (2, 64)), default_plan(64)
    (plain,) = Passes(model, plan).measure([ids])
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    (hooked,) = Passes(model, plan).measure([ids])
    assert all(np.array_equal(plain[name], hooked[name], equal_nan=True) for name in plain)
