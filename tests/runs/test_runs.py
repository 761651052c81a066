"""A run describes itself, reads back as it was, and gives numbers that do not depend on how the work was cut."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import xarray as xr

import posleak as pl
from posleak.axes import COMPONENTS
from posleak.errors import CheckError, InputError, PosleakWarning
from posleak.models import Subject
from posleak.probe import default_plan
from posleak.probe.fingerprint import identified
from posleak.runs.notes import result_notes
from posleak.runs.run import Run
from posleak.typed import plain
from support.errors import mentions, raises
from support.families import subject
from support.inputs_subject import byte_tokenizer
from support.runs_tiny import BATCHES, SPEC, assert_same_bits, counted_passes, files


def test_a_run_is_a_record_a_dataset_and_a_table(run: Run) -> None:
    assert run.path is not None
    assert files(run.path) == ["heads.parquet", "results.nc", "run.json"]
    with xr.open_dataset(run.path / "results.nc", engine="h5netcdf") as data:
        assert data["drift"].dims == ("prompt", "layer", "head", "query", "offset")
        assert data["drift"].shape[:3] == (7, 3, 3)
        assert data["drift"].attrs["units"] == "nats"
        assert data["pairs"].dtype == bool
    table = pq.read_table(run.path / "heads.parquet")
    columns = [
        "layer", "call", "head", "queries", "norm", "quantity", "component", "value", "low", "high", "unit", "n",
    ]  # fmt: skip
    assert table.column_names == columns
    powers = table.filter((pq_column(table, "quantity") == "power") & (pq_column(table, "queries") == "all"))
    assert len(powers) == 2 * 3 * 3 * len(COMPONENTS), "in both norms"
    assert set(powers["norm"].to_pylist()) == {"attention", "even"}


def pq_column(table: Any, name: str) -> Any:
    return np.asarray(table[name].to_pylist())


def test_the_record_says_what_was_asked_of_what_with_what_and_how_it_ended(run: Run, llama: Subject) -> None:
    assert run.path is not None
    record = json.loads((run.path / "run.json").read_text())
    assert list(record)[:2] == ["format", "format_version"]
    assert (record.pop("format"), record.pop("format_version"), len(record.pop("sha256"))) == ("posleak run", 5, 64)
    assert record == plain(run.record)
    assert record["status"] == "finished"
    assert record["asked"] == {
        "inputs": "random",
        "bos": "auto",
        **SPEC,
        "density": 1,
        "origin": 4,
        "edits": [],
        "metrics": [],
        "loss": False,
    }
    assert record["spec"] == record["asked"]
    assert record["plan"] == plain(default_plan(64))
    assert record["identity"] == plain(identified(llama).identity)
    assert record["inputs"]["seed"] == 3
    assert record["inputs"]["first_token"] == "token 1 in every prompt, by BOS policy 'auto'"
    assert record["versions"] == {n: version(n) for n in ("posleak", "torch", "transformers", "numpy", "xarray")}
    assert record["calibration"]["ok"]
    assert record["calibration"]["layers"] == 3
    assert record["motion"]["layers"] == ["rotation"] * 3
    assert record["motion"]["why"] is None
    assert record["motion"]["gap"] < record["motion"]["bound"]
    assert record["definitions_version"] == 3
    assert set(record["machine"]) == {"platform", "python", "device", "threads", "offloaded", "processes"}
    assert record["warnings"] == []
    assert record["created"] <= record["finished"]
    assert all(re.fullmatch("[0-9a-f]{64}", record["files"][name]) for name in ("results.nc", "heads.parquet"))


def test_defaults_are_filled_in_and_what_was_asked_is_kept(llama: Subject) -> None:
    record = pl.measure(llama, prompts=4, length=32).record
    assert (record.asked.batch, record.spec.batch) == (0, 4)
    assert record.spec.seed == 0


def test_a_run_reads_back_as_it_was(run: Run) -> None:
    assert run.path is not None
    loaded = Run.load(run.path)
    assert_same_bits(loaded, run)
    assert loaded.record == run.record
    assert json.dumps(loaded.as_dict()) == json.dumps(run.as_dict())


def test_the_same_measurement_is_read_back_and_not_made_again(run: Run, llama: Subject) -> None:
    with counted_passes(llama.model) as passes:
        again = pl.measure(llama, out=run.path, **SPEC)
    assert passes == []
    assert_same_bits(again, run)


def test_split_is_labelled_and_adds_up(run: Run) -> None:
    parts = pl.split(run)
    assert parts.dims == ("component", "layer", "head", "query", "offset")
    assert list(parts["component"].values) == list(COMPONENTS)
    assert list(parts["query"].values) == list(default_plan(64).queries)
    assert list(parts["offset"].values) == list(default_plan(64).offsets)
    total = parts.sel(component=["mask", "drift", "sink"]).sum("component", skipna=False)
    assert float(np.abs(total - parts.sel(component="total")).max()) < 1e-9
    residual = parts.sel(component=["drift", "sink"]).sum("component", skipna=False)
    assert float(np.abs(residual - parts.sel(component="residual")).max()) < 1e-12
    # query 5 sees one body key besides itself: offsets 0 and 1 exist, offset 2 would be the origin
    assert np.isfinite(parts.sel(query=5, offset=1)).all()
    assert np.isnan(parts.sel(query=5, offset=2)).all()


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(llama: Subject, run: Run) -> None:
    again = pl.measure(llama, **SPEC)
    assert_same_bits(again, run)
    assert json.dumps(numbers(again)) == json.dumps(numbers(run))
    other = pl.measure(llama, **{**SPEC, "seed": 4})
    assert numbers(other)["layers"] != numbers(run)["layers"]


def numbers(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.as_dict().items() if key in ("layers", "early", "all", "remainder")}


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_numbers_do_not_depend_on_the_batch(llama: Subject, run: Run, batch: int) -> None:
    """Relative to the total power: a component that is 0 has rounding of its own size only."""
    other = pl.measure(llama, **{**SPEC, "batch": batch})
    for one, two in zip(run.as_dict()["layers"], other.as_dict()["layers"], strict=True):
        for name in COMPONENTS:
            assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-5 * one["total"]), (one["layer"], name)


def test_the_first_prompts_do_not_depend_on_how_many_follow(llama: Subject, run: Run) -> None:
    few = pl.measure(llama, **{**SPEC, "prompts": 4})
    for name in few.data.data_vars:
        whole = run.data[name]
        first = whole.isel(prompt=slice(4)) if "prompt" in whole.dims else whole
        assert few.data[name].values.tobytes() == np.ascontiguousarray(first.values).tobytes(), name


def test_each_prompt_goes_through_once(llama: Subject) -> None:
    with counted_passes(llama.model) as passes:
        pl.measure(llama, **SPEC)
    assert passes[-BATCHES:] == [2, 2, 2, 1]
    alone = 3 * (1 + len(default_plan(64).rows) + 6 + 6)  # checks, and powers of two below 64
    assert set(passes[:-BATCHES]) == {1, alone}, "calibration, and tokens that each stand alone at a place"


def test_ids_can_be_given(llama: Subject) -> None:
    table = np.random.default_rng(0).integers(3, 101, (4, 40))
    with pytest.warns(PosleakWarning, match="given"):
        found = pl.measure(llama, table)
    assert (found.record.spec.inputs, found.record.spec.prompts) == ("given", 4)
    assert found.record.inputs.source == "ids"
    with pytest.warns(PosleakWarning, match="given"):
        assert_same_bits(found, pl.measure(llama, table.tolist()))
    with raises(InputError, where="inputs", got="shape (40,)", expected="[B, T]", remedy="[ids]"):
        pl.measure(llama, np.arange(40))


def test_one_prompt_has_no_numbers_and_says_why(llama: Subject) -> None:
    with pytest.warns(PosleakWarning, match=mentions("prompts", 1, "prompts=4")):
        found = pl.measure(llama, length=32, prompts=1)
    contract = found.as_dict()
    assert contract["warnings"] == list(found.record.warnings)
    assert "--prompts 4" in contract["warnings"][0]
    layer = contract["layers"][0]
    assert layer["total"] is None
    assert layer["ci"]["total"] == [None, None]
    assert layer["sink_attention"] is not None, "a mean needs no second prompt"
    assert layer["ci"]["sink_attention"] == [None, None], "but its interval does"
    assert contract["all"]["share"]["mask"]["value"] is None
    assert contract["remainder"] < 1e-9
    json.dumps(contract, allow_nan=False)


def test_beyond_the_context_a_rotary_model_warns(tmp_path: Path) -> None:
    short = subject(max_position_embeddings=48)
    with pytest.warns(PosleakWarning, match=mentions("length 64", "48 positions", "extrapolation")):
        found = pl.measure(short, length=64, prompts=4)
    assert "extrapolation" in found.as_dict()["warnings"][0]


def test_beyond_the_context_learned_positions_are_refused() -> None:
    short = subject("gpt2", n_embd=30, n_layer=2, n_head=3, n_inner=41, max_position_embeddings=48)
    with (
        counted_passes(short.model) as passes,
        raises(InputError, where="tiny-gpt2", what=("length 64", "48 positions"), remedy="--length 48"),
    ):
        pl.measure(short, length=64, prompts=4)
    assert passes == []


def test_a_window_longer_than_the_text_warns() -> None:
    windowed = subject("mistral", sliding_window=64)
    with pytest.warns(PosleakWarning, match=mentions("window of 64", "length=128")):
        pl.measure(windowed, length=64, prompts=4)


def test_more_memory_than_there_is_is_refused_before_any_work(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posleak.runs.memory.available_bytes", lambda device: 1_000_000)
    with (
        counted_passes(llama.model) as passes,
        raises(
            InputError,
            what="the machine",
            got="2 prompts of 2048 tokens",
            expected="1.0 MB",
            remedy=("--batch", "--prompts", "--length"),
        ),
    ):
        pl.measure(llama, length=2048, prompts=64)
    assert passes == []


def test_weights_that_are_no_numbers_name_layer_and_head() -> None:
    broken = subject()
    weight = broken.model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    weight[20:30] = torch.nan  # rows of head 2: a head has 10
    with raises(CheckError, where="layer 1", what="logits", got=("heads [2]", "prompts [0]"), remedy="--dtype float32"):
        pl.measure(broken, length=64, prompts=4)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"length": 31}, {"where": "length", "got": 31, "expected": 32, "remedy": "--length 32"}),
        ({"prompts": 0}, {"what": "prompts", "got": 0, "expected": 1, "remedy": "--prompts 1"}),
        ({"batch": -1}, {"what": "batch", "got": -1, "expected": 0, "remedy": "--batch 0"}),
        ({"density": 0}, {"what": "density", "got": 0, "expected": 1, "remedy": "--density 1"}),
        ({"bos": "<s>"}, {"where": "bos", "what": "tokenizer", "got": "'<s>'", "remedy": "--bos 1"}),
        ({"bos": "101"}, {"what": "BOS", "got": 101, "expected": "0 to 100"}),
        ({"inputs": "text:stdlib"}, {"what": "tokenizer", "got": "text:stdlib", "remedy": "--inputs random"}),
        ({"inputs": "constant:1000"}, {"what": "constant", "got": 1000, "expected": "0 to 100"}),
    ],
)
def test_a_wrong_call_is_refused_before_any_work(llama: Subject, options: Any, fields: dict[str, Any]) -> None:
    with counted_passes(llama.model) as passes, raises(InputError, **fields):
        pl.measure(llama, **options)
    assert passes == []


def test_unknown_options_raise(llama: Subject) -> None:
    misspelt: dict[str, Any] = {"lenght": 64}
    with pytest.raises(TypeError, match="lenght"):
        pl.measure(llama, **misspelt)


def test_text_is_measured_and_its_hash_kept(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = subject(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0).model
    (tmp_path / "book.txt").write_text(" ".join(f"The position of word {n} is not its place." for n in range(900)))
    found = pl.measure(Subject.of(model, tokenizer), f"text:{tmp_path / 'book.txt'}", length=48, prompts=4)
    assert re.fullmatch("[0-9a-f]{64}", found.record.inputs.text_sha256 or "")
    assert found.data.attrs["remainder"] < 1e-9


def test_the_width_of_the_origin_is_asked_for_recorded_and_another_measurement(llama: Subject, run: Run) -> None:
    narrow = pl.measure(llama, **SPEC, origin=1)
    assert (narrow.record.spec.origin, narrow.record.plan.origin, narrow.as_dict()["origin"]) == (1, 1, 1)
    assert (run.as_dict()["origin"], run.as_dict()["definitions"]) == (4, 3)
    assert narrow.record.digest != run.record.digest
    common = {"query": [16, 47], "offset": [0, 8]}
    one, four = (pl.split(found).sel(common) for found in (narrow, run))
    assert np.allclose(one.sel(component="total"), four.sel(component="total"), atol=1e-5)
    assert not np.allclose(one.sel(component="sink"), four.sel(component="sink"), atol=1e-2)
    for origin in (0, 17):
        with raises(InputError, where="--origin", got=origin, expected="1 to 16"):
            pl.measure(llama, **SPEC, origin=origin)


def test_an_origin_that_is_too_narrow_is_named_with_one_that_would_do(run: Run) -> None:
    """Late queries look at positions up to 6, in layer 1, as if they were a sink."""
    assert list(result_notes(run)) == []
    data = run.data.copy(deep=True)
    data["profile"][:, 1, :, 4:7] = 0.8
    (note,) = result_notes(Run(run.record, data))
    assert note.startswith("the origin of 4 tokens is narrower than the sink in layer 1:")
    assert "--origin 7" in note


def test_where_the_origin_cannot_be_moved_is_said() -> None:
    learned = subject("gpt2", n_embd=30, n_layer=3, n_head=3, n_inner=41, n_positions=256)
    with pytest.warns(PosleakWarning, match=mentions("origin", "moved")):
        found = pl.measure(learned, length=64, prompts=4)
    assert found.record.motion.layers == ("stays",) * 3
    assert any("origin" in note for note in found.as_dict()["warnings"])


def test_the_sink_profile_is_in_every_run(run: Run) -> None:
    layer = run.as_dict()["layers"][0]
    assert len(layer["profile"]["value"]) == 20
    assert layer["profile"]["value"][0] == layer["sink_attention"]
    assert len(layer["sink_width"]) == 3
    assert run.data["profile"].dims == ("prompt", "layer", "head", "position")
    shares = run.data["profile"].sum("position")
    assert float(shares.max()) <= 1 + 1e-9
