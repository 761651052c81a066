"""Files that are not what they seem: swapped batches, NaN, devices, pipes, links, resealed garbage, and leftovers."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr

import posleak as pl
from posleak import files
from posleak.errors import CheckError, ModelError, PosleakError, RunError, StorageError
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.dataset import Chunk
from posleak.models import Subject, load
from posleak.reports.compare import compare
from posleak.runs import loop
from posleak.runs.folder import batch_path, read_batch, write_batch
from posleak.runs.record import read_record
from posleak.runs.run import Run
from posleak.sweeps.cells import shape_of
from posleak.sweeps.collect import collected
from posleak.sweeps.manifest import trained_steps
from posleak.sweeps.state import CELL_FILE, FINISHED
from posleak.sweeps.storage import CELLS_FOLDER
from posleak.sweeps.sweep import sweep
from posleak.typed import from_json
from support.errors import raises
from support.families import tiny
from support.runs_tiny import SPEC, assert_same_bits, files as listed
from support.sweep_tiny import SMALL, Here, tiny_models

FIRST, SECOND = range(2), range(2, 4)
NOBODY = 65534

as_root = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root makes devices and becomes nobody")


@pytest.fixture
def finished(run: Run, tmp_path: Path) -> Path:
    assert run.path is not None
    return Path(shutil.copytree(run.path, tmp_path / "finished"))


@pytest.fixture
def interrupted(llama: Subject, tmp_path: Path) -> Path:
    """A run that stopped when four prompts of seven were done."""

    def stop(done: int, of: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pl.measure(llama, out=tmp_path / "run", progress=stop, **SPEC)
    return tmp_path / "run"


HANGS = 600.0
"""Seconds of the clock after which work counts as hanging: far more than a busy machine needs."""


def without_hanging(work: Callable[[], object]) -> object:
    """Return what the work returns or raises; fail if it hangs."""
    results = list[object]()

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANGS)
    assert results, "it hangs"
    return results[0]


def readers(folder: Path, llama: Subject) -> list[Callable[[], Run]]:
    """Ways to read a run, finished or not."""
    return [lambda: pl.measure(llama, out=folder, **SPEC), lambda: Run.load_partial(folder)]


def pipe_at(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def reseal(folder: Path, content: bytes, name: str = "results.nc") -> Path:
    """Put other content into a file of a run, and its hash into run.json."""
    (folder / name).write_bytes(content)
    record = read_record(folder)
    replace(record, files={**record.files, name: files.sha256_of(folder / name)}).write(folder)
    return folder


# -- batches of a run that goes on -----------------------------------------------------------------------------------


def copy_of_another(folder: Path, chunk: Chunk, digest: str) -> None:
    shutil.copy(batch_path(folder, FIRST), batch_path(folder, SECOND))


def of_another_run(folder: Path, chunk: Chunk, digest: str) -> None:
    write_batch(folder, SECOND, chunk, "0" * 64)


def with_other_numbers(folder: Path, chunk: Chunk, digest: str) -> None:
    with np.load(batch_path(folder, SECOND)) as arrays:
        changed = {name: arrays[name] for name in arrays.files}
    np.savez(batch_path(folder, SECOND), allow_pickle=True, **{**changed, "mask": changed["mask"] + 1.0})


def without_seal(folder: Path, chunk: Chunk, digest: str) -> None:
    np.savez(batch_path(folder, SECOND), allow_pickle=True, **chunk)


@pytest.mark.parametrize(
    ("damage", "got", "expected"),
    [
        (copy_of_another, "prompts 0 to 1", "prompts 2 to 3"),
        (of_another_run, "0" * 64, "run"),
        (with_other_numbers, "sha256", "sha256"),
        (without_seal, "without a seal", "one"),
    ],
)
def test_a_batch_that_does_not_belong_there_is_refused_and_can_be_dropped(
    interrupted: Path, run: Run, llama: Subject, damage: Callable[..., None], got: str, expected: str
) -> None:
    digest, place = read_record(interrupted).digest, batch_path(interrupted, SECOND)
    chunk = read_batch(interrupted, SECOND, digest)
    assert chunk is not None
    damage(interrupted, chunk, digest)
    for read in readers(interrupted, llama):
        with pytest.raises(RunError) as error:
            read()
        assert error.value.where == str(place)
        assert got in str(error.value.got)
        assert expected in str(error.value.expected)
        assert "delete" in str(error.value.remedy)
    place.unlink()
    assert_same_bits(pl.measure(llama, out=interrupted, **SPEC), run)


@pytest.mark.parametrize("name", ["mask", "drift", "logit", "profile", "remainder"])
def test_a_batch_with_nan_is_refused(interrupted: Path, llama: Subject, name: str) -> None:
    """Even one whose seal fits."""
    digest = read_record(interrupted).digest
    chunk = read_batch(interrupted, SECOND, digest)
    assert chunk is not None
    numbers = np.array(chunk[name])
    numbers[np.unravel_index(np.flatnonzero(np.isfinite(numbers))[-1], numbers.shape)] = np.nan
    write_batch(interrupted, SECOND, chunk | {name: numbers}, digest)
    for read in readers(interrupted, llama):
        with pytest.raises(CheckError) as error:
            read()
        assert error.value.exit_status == 1
        assert error.value.where == str(batch_path(interrupted, SECOND))
        assert f"1 in {name}" in str(error.value.got)


@pytest.mark.parametrize("name", ["sink", "drift", "loss"])
def test_numbers_that_a_model_gives_as_nan_are_refused_before_they_are_written(
    llama: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real: Any = loop.Passes.measure

    def broken(*args: Any, **more: Any) -> Iterator[Chunk]:
        for chunk in real(*args, **more):
            chunk[name][0] = np.nan
            yield chunk

    monkeypatch.setattr(loop.Passes, "measure", broken)
    with pytest.raises(CheckError) as error:
        pl.measure(llama, out=tmp_path / "run", loss=True, **SPEC)
    assert "prompts 0 to 1" in str(error.value.where)
    assert error.value.remedy
    assert listed(tmp_path / "run") == ["run.json"]


def test_a_remainder_that_is_nan_in_one_layer_is_not_passed_over(run: Run) -> None:
    chunk: Chunk = {str(name): array.values for name, array in run.data.data_vars.items()}
    plan = run.record.plan
    both = [{**chunk, "remainder": np.array(x)} for x in (0.0, np.nan)]
    assert np.isnan(pl.leakage.assemble(both, plan).attrs["remainder"])


@pytest.mark.parametrize("name", ["remainder", "mask"])
def test_a_finished_run_with_nan_is_refused(finished: Path, name: str) -> None:
    data = Run.load(finished).data
    if name == "remainder":
        data.attrs["remainder"] = np.nan
    else:
        data[name][0, 0, 0, 0] = np.nan
    reseal(finished, bytes(data.to_netcdf(engine="h5netcdf")))
    with raises(CheckError, where=finished / "results.nc", got=f"1 in {name}"):
        Run.load(finished)


# -- writing ---------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    files.write_atomically(path, lambda temporary: temporary.write_text(text))


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "deep" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("before")
    link.symlink_to(Path("deep") / "target")
    write(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert listed(tmp_path) == ["deep/target", "link"]


def test_links_that_lead_to_each_other_are_an_error_and_stay(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(StorageError) as error:
        write(one, "text")
    assert error.value.where == str(one)
    assert error.value.remedy
    assert one.is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    assert without_hanging(lambda: write(pipe, "page" * 100_000)) is None
    reader.join(20)
    assert got == ["page" * 100_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@as_root
def test_a_device_is_written_to_and_not_replaced(finished: Path, tmp_path: Path) -> None:
    device, link = tmp_path / "null", tmp_path / "link"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError:
        pytest.skip("no devices can be made here")
    link.symlink_to(device)
    for place in (device, link):
        assert pl.report(finished, place) == place
        assert stat.S_ISCHR(device.lstat().st_mode)
    assert link.is_symlink()


def test_a_page_on_standard_output_is_the_page_alone(finished: Path, tmp_path: Path) -> None:
    """Through a link as /dev/stdout is one: code that replaces links must not get at the machine's own."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    command = [sys.executable, "-m", "posleak", "report", str(finished), "--out", str(link)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.rstrip().endswith("</html>")
    assert link.is_symlink()


# -- folders that cannot be used -------------------------------------------------------------------------------------


@contextmanager
def nobody() -> Iterator[None]:
    """As a user who may not enter pytest's folders."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@as_root
@pytest.mark.parametrize("work", ["sole_writer", "measure", "trace", "claims"])
def test_a_folder_that_may_not_be_searched_is_an_error_with_a_remedy(llama: Subject, tmp_path: Path, work: str) -> None:
    place = tmp_path / "closed" / "run"

    def enter() -> None:
        with files.sole_writer(place):
            raise AssertionError("not here")

    place.parent.mkdir(mode=0o700)
    todo: dict[str, Callable[[], object]] = {
        "sole_writer": enter,
        "measure": lambda: pl.measure(llama, out=place, **SPEC),
        "trace": lambda: pl.trace(llama, out=place, length=64, prompts=4),
        "claims": lambda: pl.claims(llama, out=place, length=64, prompts=4),
    }
    tmp_path.chmod(0o755)
    with nobody(), pytest.raises(StorageError) as error:
        todo[work]()
    assert str(place) in str(error.value.where)
    assert "--out" in str(error.value.remedy)


def test_a_folder_below_links_without_an_end_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError) as error, files.sole_writer(tmp_path / "loop" / "run"):
        pass
    assert error.value.remedy


# -- resealed garbage ------------------------------------------------------------------------------------------------


def netcdf(**arrays: Any) -> bytes:
    return bytes(xr.Dataset(arrays).to_netcdf(engine="h5netcdf"))


GARBAGE = {
    "noise": b"\x89HDF\r\n\x1a\n" + bytes(range(256)) * 20,
    "text": b"not netCDF at all",
    "nothing": b"",
    "other arrays": netcdf(mask=("x", np.zeros(3))),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_resealed_results_file_is_named(finished: Path, llama: Subject, run: Run, kind: str) -> None:
    reseal(finished, GARBAGE[kind])
    for read in readers(finished, llama):
        with pytest.raises(RunError) as error:
            read()
        assert error.value.where == str(finished / "results.nc")
        assert "--fresh" in str(error.value.remedy)
    assert run.path is not None
    with raises(RunError, what=2, got=("results.nc", finished), remedy="`posleak measure`"):
        compare([run.path, finished])
    assert_same_bits(pl.measure(llama, out=finished, fresh=True, **SPEC), run)


def test_a_run_with_fewer_prompts_than_its_record_is_refused(finished: Path) -> None:
    data = Run.load(finished).data.isel(prompt=slice(0, 3))
    reseal(finished, bytes(data.to_netcdf(engine="h5netcdf")))
    with raises(RunError, where=finished / "results.nc", got="'prompt': 3", remedy="--fresh"):
        Run.load(finished)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three cells: one model, as it is and under two edits."""
    place = tmp_path_factory.mktemp("sweep")
    said = {"models": tiny_models(place, "mine"), "edits": ["none", "window=9", "bos=zero"], **SMALL}
    assert sweep(said, out=place / "sweep", engine=Here()).complete
    return place / "sweep"


def npz(**arrays: Any) -> bytes:
    import io

    made = io.BytesIO()
    np.savez(made, allow_pickle=True, **arrays)
    return made.getvalue()


def parquet(**columns: Any) -> bytes:
    made = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), made)
    return bytes(made.getvalue())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("products.npz", b"PK\x03\x04 garbage"),
        ("products.npz", b""),
        ("products.npz", npz(total=np.zeros(3))),
        ("products.npz", npz(**{"all/total": np.zeros(3)})),
        ("products.npz", npz(**{"all/total": np.array([{}])})),
        ("numbers.parquet", b"PAR1 garbage PAR1"),
        ("numbers.parquet", parquet(x=[1, 2])),
    ],
)
def test_a_resealed_cell_is_named_and_the_others_are_collected(
    cells: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    place = Path(shutil.copytree(cells, tmp_path / "sweep"))
    folder = sorted((place / CELLS_FOLDER).iterdir())[0]
    (folder / name).write_bytes(content)
    record = FINISHED.read(folder / CELL_FILE)
    facts = replace(record.files[name], sha256=files.sha256_of(folder / name))
    FINISHED.write(folder / CELL_FILE, replace(record, files={**record.files, name: facts}))
    found = collected(str(place))
    assert len(found.finished) == 2
    assert [each.label for each in found.omitted] == [folder.name]
    assert name in found.omitted[0].why


def test_a_copy_of_a_cell_is_named_and_counts_once(cells: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(cells, tmp_path / "sweep"))
    folder = sorted((place / CELLS_FOLDER).iterdir())[0]
    shutil.copytree(folder, folder.with_name(folder.name + "-copy"))
    found = collected(str(place))
    assert len(found.finished) == 3
    assert len(found.omitted) == 1


# -- pipes in the place of files, and files without an end -----------------------------------------------------------


def test_a_model_card_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(str(tmp_path))
    pipe_at(tmp_path / "README.md")
    found = without_hanging(lambda: load(str(tmp_path)))
    assert isinstance(found, Subject)
    assert found.identity.licence is None


@pytest.mark.parametrize("name", ["config.json", "trainer_state.json", "refs"])
def test_other_files_of_a_model_that_are_pipes_do_not_hang(tmp_path: Path, name: str) -> None:
    pipe_at(tmp_path / name)
    assert isinstance(without_hanging(lambda: load(str(tmp_path))), ModelError)
    assert without_hanging(lambda: shape_of(str(tmp_path))) is None
    assert without_hanging(lambda: trained_steps(tmp_path)) is None


@pytest.mark.parametrize("name", [CELL_FILE, "error.json", "products.npz", "run.json"])
def test_a_file_of_a_cell_that_is_a_pipe_does_not_hang(cells: Path, tmp_path: Path, name: str) -> None:
    place = Path(shutil.copytree(cells, tmp_path / "sweep"))
    folder = sorted((place / CELLS_FOLDER).iterdir())[0]
    if name == "error.json":
        (folder / CELL_FILE).unlink()
    pipe_at(folder / name)
    found: Any = without_hanging(lambda: collected(str(place)))
    assert len(found.finished) == (3 if name == "run.json" else 2)
    assert [each.label for each in found.omitted] == ([] if name == "run.json" else [folder.name])


@pytest.mark.parametrize("name", ["run.json", "results.nc", "batches/000000-000001.npz", ".lock"])
def test_a_file_of_a_run_that_is_a_pipe_does_not_hang(
    interrupted: Path, finished: Path, llama: Subject, name: str
) -> None:
    folder = finished if name == "results.nc" else interrupted
    pipe_at(folder / name)
    found = without_hanging(lambda: pl.measure(llama, out=folder, **SPEC))
    assert isinstance(found, Run if name == ".lock" else PosleakError)
    assert isinstance(without_hanging(lambda: files.is_posleak_file(folder / name)), bool)
    if name == "run.json":
        assert isinstance(without_hanging(lambda: pl.measure(llama, out=folder, fresh=True, **SPEC)), PosleakError)


def test_a_record_larger_than_any_is_not_read(finished: Path) -> None:
    with (finished / "run.json").open("ab") as file:
        file.truncate(1 << 40)  # a hole, which takes no space
    with pytest.raises(RunError) as error:
        Run.load(finished)
    assert error.value.where == str(finished / "run.json")
    assert "1.1 TB" in str(error.value.got)
    assert "67 MB" in str(error.value.got)


# -- leftovers -------------------------------------------------------------------------------------------------------


def test_a_lock_that_a_dead_process_left_is_removed_when_the_run_is_read_back(
    finished: Path, llama: Subject, run: Run
) -> None:
    (finished / ".lock").write_text("process 1 on a machine that is gone")
    assert_same_bits(pl.measure(llama, out=finished, **SPEC), run)
    assert listed(finished) == ["heads.parquet", "results.nc", "run.json"]


def test_a_lock_that_somebody_holds_stays_and_the_run_is_read(finished: Path, llama: Subject, run: Run) -> None:
    with files.sole_writer(finished):
        read: Any = without_hanging(lambda: pl.measure(llama, out=finished, **SPEC))
        assert_same_bits(read, run)
        assert (finished / ".lock").exists()


@as_root
def test_a_folder_that_may_not_be_written_is_read_in_spite_of_a_lock(run: Run, llama: Subject) -> None:
    assert run.path is not None
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        folder = Path(shutil.copytree(run.path, Path(open_to_all) / "run"))
        (folder / ".lock").write_text("process 1")
        with nobody():
            read = pl.measure(llama, out=folder, **SPEC)
        assert_same_bits(read, run)
        assert (folder / ".lock").exists()


def test_a_report_removes_what_a_killed_one_left(finished: Path, tmp_path: Path) -> None:
    page, assets = tmp_path / "pages" / "page.html", tmp_path / "assets"
    left = [page.with_name(".page.html.0123abcd.tmp"), assets / ".depth.png.0123abcd.tmp"]
    left.append(assets / ".heads-1-other.csv.0123abcd.tmp")
    others = [page.with_name(".other.html.0123abcd.tmp"), assets / ".mine.txt.0123abcd.tmp", assets / ".x.png.tmp"]
    for path in (*left, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    pl.report(finished, page, assets)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_a_file_that_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    def slowly(temporary: Path) -> None:
        temporary.write_text("half")
        without_hanging(lambda: files.remove_leftovers(tmp_path, "page.html".__eq__))
        temporary.write_text("whole")

    files.write_atomically(tmp_path / "page.html", slowly)
    assert (tmp_path / "page.html").read_text() == "whole"
    assert os.listdir(tmp_path) == ["page.html"]


# -- one number is a float -------------------------------------------------------------------------------------------


def ends(found: Estimate) -> list[Any]:
    return [found.value, found.low, found.high]


def test_an_estimate_of_one_cell_holds_floats(run: Run) -> None:
    total = run.summary.model["all"].power["total"]
    several = run.summary.layers["all"].power["total"]
    drawn = Jackknife(5).mean(np.random.default_rng(0).normal(size=5)).estimate
    single = {
        "model": total, "layer": several[1], "head": run.summary.heads["all"].power["mask"][0, 1], "minus": 1 - total,
        "over": total / 2, "mean": Estimate.average([total, drawn]), "difference": total.minus_independent(drawn),
        "jackknife": drawn, "few": Jackknife(2).mean(np.array([1.0, 2.0])).estimate,
        "read": from_json(Estimate, '{"value": 1.5, "low": null, "high": 2, "n": 3}'),
    }  # fmt: skip
    for name, found in single.items():
        assert all(type(end) is float for end in ends(found)), name
        assert json.loads(json.dumps(ends(found)))[0] == found.value
    assert all(isinstance(end, np.ndarray) and end.shape == (3,) for end in ends(several))
    read = from_json(Estimate, '{"value": [1, null], "low": [0, 0], "high": [2, 2], "n": 3}')
    assert isinstance(read.value, np.ndarray)


def test_a_descriptor_that_is_a_file_is_appended_to(tmp_path: Path) -> None:
    """`--out /dev/fd/1 >> log` must neither replace nor truncate the log."""
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import sys; from pathlib import Path; from posleak.files import write_atomically\n"
    code += "write_atomically(Path('/dev/fd/1'), lambda path: path.write_text('page'))\nprint('after')"
    with log.open("a") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)
    assert log.read_text() == "before\npageafter\n"
