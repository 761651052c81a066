"""Sweeps: what is finished is kept and believed only as long as it is true; failures stay with their cell."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import posleak as pl
from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.edits import parse_edits
from posleak.errors import InputError
from posleak.files import sole_writer
from posleak.leakage import Jackknife
from posleak.models import load
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.sweeps.cells import Cell
from posleak.sweeps.local import rounds
from posleak.sweeps.manifest import Manifest, manifest
from posleak.sweeps.state import (
    ERROR_FILE,
    FAILED,
    CellStatus,
    Outcome,
    State,
    SweepProgress,
    Tracker,
    status_of,
    statuses,
)
from posleak.sweeps.storage import CELLS_FOLDER, Storage
from posleak.sweeps.sweep import Sweep, sweep
from posleak.sweeps.work import Worker
from support.errors import raises
from support.sweep_tiny import SMALL, Here, tiny_models


def swept(said: dict[str, Any], root: Path | str, **more: Any) -> Sweep:
    return sweep(said, out=root, engine=Here(retry_failed=more.get("retry_failed", False)), **more)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_models(tmp_path_factory.mktemp("models"), "first", "second")


@pytest.fixture(scope="module")
def grid(models: list[str]) -> dict[str, Any]:
    return {"models": models, "edits": ["none", "window=9"], "seed": [0, 1], **SMALL}


@pytest.fixture(scope="module")
def whole(grid: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "sweep"
    assert swept(grid, root).complete
    return root


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "sweep")
    return tmp_path / "sweep"


# -- cells are runs --------------------------------------------------------------------------------------------------


def test_a_cell_is_the_run_that_measure_gives(grid: dict[str, Any], whole: Path) -> None:
    for cell in manifest(grid).cells[:3]:
        ours = Run.load(whole / CELLS_FOLDER / cell.folder)
        asked: dict[str, Any] = {
            "edits": cell.spec.edit_texts,
            "length": cell.spec.length,
            "prompts": cell.spec.prompts,
        }
        alone = pl.measure(load(cell.model), seed=cell.spec.seed, **asked)
        assert ours.record.digest == alone.record.digest
        for name in ours.data:
            assert np.array_equal(ours.data[name].values, alone.data[name].values, equal_nan=True), name


def test_its_table_says_what_its_run_says(grid: dict[str, Any], whole: Path) -> None:
    cell = manifest(grid).cells[0]
    run = Run.load(whole / CELLS_FOLDER / cell.folder)
    table = pq.read_table(whole / CELLS_FOLDER / cell.folder / "numbers.parquet").to_pandas()
    powers = table[table.quantity == "power"].set_index(["norm", "component"])
    row, layer = powers[powers.layer.isna() & (powers.queries == "all")], powers[powers.layer == 1]
    layer = layer[layer.queries == "early"]
    for norm, numbers in run.summary.model["all"].norms.items():
        total = numbers.power["total"]
        found = row.loc[(norm, "total"), ["value", "low", "high", "n"]]
        assert tuple(found) == (total.value, total.low, total.high, total.n)
        mask = run.summary.layers["early"].norms[norm].power["mask"].value[1]
        assert layer.loc[(norm, "mask"), "value"] == mask
    without = set(table[table.norm.isna()].quantity)
    assert without == {"attention", "slope"}


def test_losses_are_numbers_of_a_cell(models: list[str], tmp_path: Path) -> None:
    found = swept({"models": models[:1], "loss": True, "edits": ["none", "window=9"], **SMALL}, tmp_path / "sweep")
    plain = swept({"models": models[:1], "edits": ["none"], **SMALL}, tmp_path / "plain")
    assert plain.cells[0].cell.id not in {known.cell.id for known in found.cells}, "another cell, another measurement"
    for known_cell in found.cells:
        folder = tmp_path / "sweep" / CELLS_FOLDER / known_cell.cell.folder
        loss, run = pq.read_table(folder / "numbers.parquet").to_pandas().query("quantity == 'loss'"), Run.load(folder)
        assert run.loss is not None
        assert dict(zip(loss.component, loss.value)) == {k: float(v.value) for k, v in run.loss.numbers.items()}
        assert set(loss.unit) == {"nats per token"}


def test_a_trace_is_a_cell_with_sources(models: list[str], tmp_path: Path) -> None:
    said = {"models": models[:1], "kind": "trace", **SMALL}
    found = swept(said, tmp_path)
    assert found.complete
    (record,) = found.finished
    folder = tmp_path / CELLS_FOLDER / record.cell.folder
    trace = pl.trace(load(models[0]), length=48, prompts=4)
    table = pq.read_table(folder / "numbers.parquet").to_pandas()
    whole = table[table.layer.isna() & (table.queries == "all")].set_index(["norm", "quantity", "component"])
    for norm, numbers in trace.model["all"].norms.items():
        for name in SOURCES:
            assert whole.loc[(norm, "power", name), "value"] == numbers.power[name].value
            np.testing.assert_equal(whole.loc[(norm, "share", name), "value"], numbers.share[name].value)
        np.testing.assert_equal(whole.loc[(norm, "order", "earlier"), "value"], numbers.ratios["order"].value)
    with np.load(folder / "products.npz") as products:
        stored = products["even/all/origin"]
    assert Jackknife(4).inner(stored).value == trace.model["all"].norms["even"].power["origin"].value
    assert any("conditions" in name for name in record.files), "the borrowed pass is part of the cell"


def test_edits_of_the_residual_stream_are_cells_and_so_are_traces_under_them(models: list[str], tmp_path: Path) -> None:
    """The directions are fitted by the worker, as in `pl.trace` and `pl.measure`."""
    edited = {"models": models[:1], "edits": ["position=erase:1"], **SMALL}
    assert swept({**edited, "grids": [{"kind": "measure"}, {"kind": "trace"}]}, tmp_path).complete
    measured, traced = manifest({**edited, "grids": [{"kind": "measure"}, {"kind": "trace"}]}).cells
    asked: dict[str, Any] = {"length": 48, "prompts": 4, "edits": "position=erase:1"}
    run, trace = pl.measure(load(models[0]), **asked), pl.trace(load(models[0]), **asked)
    folders = [tmp_path / CELLS_FOLDER / cell.folder for cell in (measured, traced)]
    assert Run.load(folders[0]).record.digest == run.record.digest
    found = Trace.load(folders[1])
    assert found is not None
    assert found.as_dict()["edits"] == ["position=erase:1"]
    assert found.model["all"].power["earlier"].value == trace.model["all"].power["earlier"].value


def test_a_trace_with_a_long_donor_is_a_cell_of_its_own(models: list[str], tmp_path: Path) -> None:
    found = swept({"models": models[:1], "kind": "trace", "donor": ["plain", "long"], **SMALL}, tmp_path)
    assert found.complete
    plain, long = found.finished
    assert plain.cell.label != long.cell.label
    folder = tmp_path / CELLS_FOLDER / long.cell.folder
    trace = pl.trace(load(models[0]), length=48, prompts=4, donor="long")
    table = pq.read_table(folder / "numbers.parquet").to_pandas().query("layer.isna() and queries == 'all'")
    power = table[(table.quantity == "power") & (table.component == "here") & (table.norm == "attention")]
    assert power.value.tolist() == [trace.model["all"].power["here"].value]
    assert [run.record.spec.edit_texts for run in map(Run.load, folder.glob("conditions/*"))] == [
        ("context=branches:long",)
    ]


def test_a_trace_that_lost_a_record_is_made_whole(models: list[str], tmp_path: Path) -> None:
    said = {"models": models[:1], "kind": "trace", **SMALL}
    (record,) = swept(said, tmp_path).finished
    (second,) = (tmp_path / CELLS_FOLDER / record.cell.folder).glob("conditions/*/run.json")
    second.unlink()
    assert swept(said, tmp_path).computed == (record.id,)


# -- finished is finished, as long as it is true ---------------------------------------------------------------------


def test_nothing_finished_is_measured_again(grid: dict[str, Any], copied: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
    found = swept(grid, copied)
    assert found.complete
    assert found.computed == ()
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()} == before


def test_a_larger_manifest_measures_only_what_is_new(grid: dict[str, Any], copied: Path) -> None:
    found = swept({**grid, "seed": [0, 1, 2]}, copied)
    assert found.complete
    assert len(found.cells) == 12
    assert len(found.computed) == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["results.nc", "heads.parquet", "numbers.parquet", "products.npz", "run.json", "cell.json"]
)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_cell_is_measured_again_and_no_other(
    grid: dict[str, Any], whole: Path, copied: Path, name: str, damage: Any
) -> None:
    first = manifest(grid).cells[0]
    damage(copied / CELLS_FOLDER / first.folder / name)
    seen = status_of(Storage(str(copied)), first)
    assert seen.state is State.open, "the state that is shown is true"
    if name != "cell.json" or damage is not Path.unlink:
        assert "finished" in seen.why
    found = swept(grid, copied)
    assert found.complete
    assert found.computed == (first.id,)
    for kind in ("results.nc", "heads.parquet", "numbers.parquet"):
        original = (whole / CELLS_FOLDER / first.folder / kind).read_bytes()
        assert (copied / CELLS_FOLDER / first.folder / kind).read_bytes() == original


def test_damage_that_looks_like_nothing_is_found_with_verify(grid: dict[str, Any], copied: Path) -> None:
    first = manifest(grid).cells[0]
    path = copied / CELLS_FOLDER / first.folder / "results.nc"
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sweep(grid, out=copied, engine=Here(verify=True), verify=True).computed == (first.id,)


def test_a_changed_model_is_measured_again(tmp_path: Path) -> None:
    (model,) = tiny_models(tmp_path, "mine")
    said = {"models": [model], **SMALL}
    root = tmp_path / "sweep"
    before = swept(said, root).finished[0].model.weights_sha256
    for path in Path(model).iterdir():  # copied there and back: the same content at other times
        path.write_bytes(path.read_bytes())
    assert swept(said, root).computed == ()
    tiny_models(tmp_path, "other", "mine")  # other weights under the same name
    seen = statuses(Storage(str(root)), manifest(said).cells)[0]
    assert seen.state is State.open
    assert "files have changed" in seen.why
    found = swept(said, root)
    assert len(found.computed) == 1
    assert found.finished[0].model.weights_sha256 != before


def test_a_model_that_is_gone_does_not_undo_what_was_measured(tmp_path: Path) -> None:
    (model,) = tiny_models(tmp_path, "mine")
    said = {"models": [model], **SMALL}
    assert swept(said, tmp_path / "sweep").complete
    cells = manifest(said).cells
    shutil.rmtree(model)
    assert statuses(Storage(str(tmp_path / "sweep")), cells)[0].state is State.finished


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder that is no model."""
    place = tmp_path / "broken"
    place.mkdir()
    (place / "config.json").write_text("{")
    return place


def test_a_failed_cell_keeps_its_error_and_stops_nothing(models: list[str], broken: Path, tmp_path: Path) -> None:
    said = {"models": [str(broken), models[0]], **SMALL}
    root = tmp_path / "sweep"
    found = swept(said, root)
    assert [each.state for each in found.cells] == [State.failed, State.finished]
    assert not found.complete
    failed = found.cells[0]
    kept = FAILED.read(root / CELLS_FOLDER / failed.cell.folder / ERROR_FILE)
    assert kept.message
    assert kept.what in failed.why
    assert swept(said, root).computed == (), "what failed is not tried again unasked"
    shutil.rmtree(broken)
    shutil.copytree(models[1], broken)
    mended = swept(said, root, retry_failed=True)
    assert mended.complete
    assert mended.computed == (failed.cell.id,)
    assert not (root / CELLS_FOLDER / failed.cell.folder / ERROR_FILE).exists()


def test_a_damaged_error_is_tried_again(models: list[str], tmp_path: Path) -> None:
    said = {"models": models[:1], "edits": "window=off", **SMALL}
    cell = swept(said, tmp_path).cells[0].cell
    cut(tmp_path / CELLS_FOLDER / cell.folder / ERROR_FILE)
    seen = status_of(Storage(str(tmp_path)), cell)
    assert seen.state is State.open
    assert seen.why.startswith("it failed, but")
    assert swept(said, tmp_path).cells[0].state is State.left_out


def test_an_error_that_nobody_foresaw_keeps_its_traceback(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("posleak.sweeps.work.Worker._results", crash)
    found = swept({"models": models[:1], **SMALL}, tmp_path)
    error = found.cells[0].error
    assert error is not None
    assert "of all things" in error.what
    assert "ZeroDivisionError" in (error.traceback or "")


def test_an_edit_that_changes_nothing_is_left_out_with_the_reason(models: list[str], tmp_path: Path) -> None:
    found = swept({"models": models[:1], "edits": ["none", "window=off"], **SMALL}, tmp_path)
    assert [each.state for each in found.cells] == [State.finished, State.left_out]
    assert "has no effect" in found.cells[1].why
    assert found.complete, "there is nothing to be done about it"


def test_a_cell_that_somebody_else_is_at_is_left_to_them(models: list[str], tmp_path: Path) -> None:
    import threading

    cell = manifest({"models": models[:1], **SMALL}).cells[0]
    storage = Storage(str(tmp_path))
    found = list[Any]()
    with sole_writer(tmp_path / CELLS_FOLDER / cell.folder):
        other = threading.Thread(
            target=lambda: found.extend([Worker().run(storage, cell), status_of(storage, cell).state])
        )
        other.start()
        other.join()
    outcome, state = found
    assert outcome.state is State.running
    assert state is State.running
    assert status_of(storage, cell).state is State.open


def test_cells_of_another_sweep_come_in_a_later_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two cells is locked until a round finds nothing else to do; a busy cell stays open."""
    first, second = cells = manifest({"models": ["a/b"], "seed": [0, 1]}).cells
    locked = {first.path}
    monkeypatch.setattr("posleak.sweeps.storage.Storage.is_locked", lambda storage, folder: folder in locked)
    monkeypatch.setattr("posleak.sweeps.local.PAUSE", 0.0)
    tracker, seen = Tracker([CellStatus(cell, State.open) for cell in cells]), list[Any]()
    for free in rounds(Storage(str(tmp_path)), tracker):
        seen.append((free, tracker.elsewhere))
        for cell in free:
            tracker.attempt(cell)
            busy = len(seen) == 1
            tracker.ended(Outcome(cell.id, State.running if busy else State.finished))
            assert tracker.attempts[cell.id] == (0 if busy else 1), "an attempt at a busy cell does not count"
        if not free:
            locked.clear()
    assert seen == [([second], 1), ([second], 1), ([], 1), ([first], 0)]


def test_a_worker_with_other_software_is_refused(models: list[str], tmp_path: Path) -> None:
    cell = manifest({"models": models[:1], **SMALL}).cells[0]
    outcome = Worker().run(Storage(str(tmp_path)), cell, expected="0" * 64)
    assert outcome.state is State.failed
    assert "software" in outcome.why
    assert outcome.id == "0" * 64, "the cell is the driver's"
    (error,) = tmp_path.glob(f"{CELLS_FOLDER}/*/{ERROR_FILE}")
    assert error.parent.name.endswith("-" + "0" * 12), "where the driver looks for it"


def test_a_cell_that_was_sent_to_another_process_computes_its_id_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker with other software would not be noticed: Ray pickles cells."""
    cell = Cell("a/b")
    sent = pickle.dumps((cell.id, cell))
    monkeypatch.setattr("posleak.sweeps.cells.versions", lambda: {"posleak": "9", "torch": "9", "transformers": "9"})
    expected, arrived = pickle.loads(sent)
    assert arrived == cell
    assert arrived.id != expected


def test_revisions_and_device_maps_are_cells(tmp_path: Path) -> None:
    """A hub's cache of one model at two commits, spread by transformers over the devices that there are: one CPU."""
    repo, commits = tmp_path / "models--org--tiny", {"main": "a" * 40, "step100": "b" * 40}
    for folder, (name, commit) in zip(tiny_models(tmp_path, "one", "two"), commits.items(), strict=True):
        shutil.copytree(folder, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / name).write_text(commit)
    entry = {"model": str(repo), "revisions": list(commits), "title": "tiny", "device_map": "auto"}
    found = swept({**SMALL, "models": [entry]}, tmp_path / "sweep")
    assert found.complete
    assert [record.model.revision for record in found.finished] == list(commits.values())
    assert [record.cell.step for record in found.finished] == [None, 100]
    assert [record.cell.name for record in found.finished] == ["tiny@main", "tiny@step100"]
    assert len({record.model.weights_sha256 for record in found.finished}) == 2
    (repo / "refs" / "main").write_text(commits["step100"])  # the branch has moved on
    assert (
        statuses(Storage(str(tmp_path / "sweep")), manifest({**SMALL, "models": [entry]}).cells)[0].state is State.open
    )


# -- other places than a disk ----------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    """A store that is no disk: fsspec's own, in memory."""
    import fsspec

    yield "memory://bucket/sweep"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_results_can_be_kept_in_an_object_store(grid: dict[str, Any], whole: Path, memory: str) -> None:
    from posleak.sweeps.collect import collected

    found = swept(grid, memory)
    assert found.complete
    assert len(found.computed) == 8
    assert swept(grid, memory).computed == ()
    there, here = collected(memory).table, collected(str(whole)).table
    columns = [name for name in here if name != "run"]
    assert there[columns].equals(here[columns])
    assert all(there["run"].str.startswith(memory))


def test_a_damaged_object_is_measured_again(grid: dict[str, Any], memory: str) -> None:
    import fsspec

    said = {**grid, "seed": 0, "edits": "none"}
    first = swept(said, memory).finished[0]
    store = fsspec.filesystem("memory")
    path = f"/bucket/sweep/{CELLS_FOLDER}/{first.cell.folder}/{first.place}results.nc"
    store.pipe_file(path, store.cat_file(path)[:-3])
    found = swept(said, memory)
    assert found.computed == (first.id,)
    assert found.finished[0].place != first.place, "two workers never share the names of their files"


def test_a_store_without_its_package_says_what_to_install(
    grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with raises(InputError, where="gs://bucket/sweep", got="gcsfs", remedy="gcsfs for gs://"):
        swept(grid, "gs://bucket/sweep")


# -- the handle ------------------------------------------------------------------------------------------------------


def test_without_ray_everything_else_works_and_the_engine_says_what_to_install(
    grid: dict[str, Any], whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(InputError, where="--engine ray", remedy=('pip install "posleak[ray]"', "--engine local")):
        sweep(grid, out=whole, engine="ray")
    assert sweep(grid, out=whole, engine="local").complete


def test_engines_and_options_are_checked_first(grid: dict[str, Any], tmp_path: Path) -> None:
    with raises(InputError, where="--engine", got="locl", remedy="'local'"):
        sweep(grid, out=tmp_path, engine="locl")
    with raises(InputError, where="--engine local", what=("--address", "--workers"), remedy="--engine ray"):
        sweep(grid, out=tmp_path, workers=2)
    with raises(InputError, where="sweep", got=3, expected="YAML", remedy="models=[model]"):
        sweep(3, out=tmp_path)  # type: ignore[arg-type]


def test_progress_is_told_and_adds_up(models: list[str], broken: Path, tmp_path: Path) -> None:
    seen = list[SweepProgress]()
    said = {"models": [models[0], str(broken)], "edits": ["none", "window=off"], **SMALL}
    swept(said, tmp_path / "sweep", progress=seen.append)
    assert seen[0].done == 0
    last = seen[-1]
    assert (last.finished, last.failed, last.left_out, last.done, last.total) == (1, 2, 1, 4, 4)
    assert last.text == "1 of 4 cells finished, 2 failed, 1 left out"
    assert last.elsewhere == 0
    assert all(one.done <= other.done for one, other in itertools.pairwise(seen))


def test_the_json_of_a_sweep_and_of_its_dry_run(grid: dict[str, Any], whole: Path) -> None:
    from posleak.sweeps.sweep import status

    found = status(Manifest("grid", manifest(grid).cells), Storage(str(whole))).as_dict()
    assert found["counts"]["finished"] == 8
    assert found["complete"] is True
    assert {cell["state"] for cell in found["cells"]} == {State.finished}
    assert json.dumps(found["cells"][0]["label"])


def test_guesses_are_near_what_is_planned() -> None:
    """Memory without loading the model, against the plan that is made once it is loaded."""
    from posleak.models.memory import LIBRARY_BYTES
    from posleak.runs.memory import memory_plan, weight_bytes
    from posleak.sweeps.cells import memory_of

    specs: list[Any] = [{"length": 128}, {"length": 192, "prompts": 64}, {"length": 64, "edits": ("window=9",)}]
    specs.append({"length": 64, "edits": ("position=leace:2",)})
    for name in ("zoo-text-rope", "zoo-backcopy-rope"):
        subject = load(name)
        for cell in [Cell(name, MeasureSpec(**each)) for each in specs]:
            planned = memory_plan(subject, cell.spec.resolved()).total + weight_bytes(subject) + LIBRARY_BYTES
            guessed = memory_of(cell)
            assert guessed is not None
            assert 0.5 < guessed / planned < 2, (cell, guessed, planned)
        for donor in ("plain", "long"):
            edit = parse_edits("position=erase:1")
            traced = Cell(name, MeasureSpec(length=64, prompts=8, edits=edit), kind="trace", donor=donor)
            branches = parse_edits("context=branches" + ":long" * (donor == "long"))
            spec = MeasureSpec(length=64, prompts=8, edits=(*edit, *branches))
            planned = memory_plan(subject, spec.resolved()).total + weight_bytes(subject) + LIBRARY_BYTES
            guessed = memory_of(traced)
            assert guessed is not None
            assert 0.5 < guessed / planned < 2, (traced, guessed, planned)
