"""A run folder survives interruption, kill -9 and a full disk with the same bits, and says which file is damaged."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.errors import PosleakWarning, RunError, StorageError
from posleak.files import remove
from posleak.models import Subject
from posleak.runs import folder as folder_module
from posleak.runs.run import Run
from support.families import tiny
from support.inputs_subject import byte_tokenizer
from support.models_tiny import edit_config
from support.runs_tiny import BATCHES, SPEC, assert_same_bits, counted_passes, files, full_batches, sealed, subject


@pytest.fixture(scope="module")
def llama() -> Subject:
    return subject()


@pytest.fixture(scope="module")
def whole(llama: Subject, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run."""
    return pl.measure(llama, out=tmp_path_factory.mktemp("runs") / "whole", **SPEC)


@pytest.fixture
def finished(llama: Subject, tmp_path: Path) -> Path:
    return pl.measure(llama, out=tmp_path / "run", **SPEC).path or tmp_path


@pytest.fixture
def interrupted(llama: Subject, tmp_path: Path) -> Path:
    """A run that stopped when four prompts of seven were done."""

    def stop(done: int, of: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pl.measure(llama, out=tmp_path / "run", progress=stop, **SPEC)
    return tmp_path / "run"


def test_an_interrupted_run_keeps_what_is_finished(interrupted: Path) -> None:
    assert files(interrupted) == ["batches/000000-000001.npz", "batches/000002-000003.npz", "run.json"]
    assert json.loads((interrupted / "run.json").read_text())["status"] == "running"
    with pytest.raises(RunError) as error:
        Run.load(interrupted)
    assert "the run is not finished" in str(error.value)
    assert "run the same `posleak measure` again to resume it" in str(error.value)


def test_it_resumes_at_the_first_unfinished_prompt_with_the_same_bits(
    interrupted: Path, whole: Run, llama: Subject
) -> None:
    created, done = json.loads((interrupted / "run.json").read_text())["created"], []
    with counted_passes(llama.model) as passes:
        resumed = pl.measure(llama, out=interrupted, progress=lambda *at: done.append(at), **SPEC)
    assert passes[-2:] == [2, 1], "the two batches that were missing"
    assert full_batches(passes) == 1, "and no other"
    assert done == [(2, 7), (4, 7), (6, 7), (7, 7)]
    assert_same_bits(resumed, whole)
    assert files(interrupted) == ["heads.parquet", "results.nc", "run.json"]
    assert resumed.record.created == created
    assert resumed.record.digest == whole.record.digest


def test_kill_nine_in_the_middle_then_start_again(tmp_path: Path) -> None:
    """Three processes: one is killed, one resumes, one was never disturbed; the last two agree to the last bit."""
    model, out = tmp_path / "model", tmp_path / "run"
    tiny("llama").save_pretrained(str(model))
    environment = {**os.environ, "POSLEAK_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def start(folder: Path, seconds: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-m", "support.killed_run", "measure"]
        return subprocess.Popen(
            [*command, str(model), str(folder), seconds], stdout=subprocess.PIPE, text=True, env=environment
        )

    undisturbed, victim = start(tmp_path / "whole", "0"), start(out, "600")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "2 7\n"
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    victim.stdout.close()
    assert files(out) == [".lock", "batches/000000-000001.npz", "run.json"]
    (out / ".results.nc.0123abcd.tmp").write_bytes(b"what a process that died while writing leaves")
    part = (out / "batches" / "000000-000001.npz").stat().st_mtime_ns

    survivor = start(out, "0.2")
    assert survivor.stdout is not None
    assert survivor.stdout.readline() == "2 7\n"
    assert (out / "batches" / "000000-000001.npz").stat().st_mtime_ns == part, "a finished batch is not made again"
    assert survivor.communicate()[0].splitlines() == ["4 7", "6 7", "7 7", "finished"]
    assert undisturbed.communicate()[0].splitlines()[-1] == "finished"
    assert (survivor.returncode, undisturbed.returncode) == (0, 0)
    assert files(out) == ["heads.parquet", "results.nc", "run.json"]
    assert_same_bits(Run.load(out), Run.load(tmp_path / "whole"))
    assert (out / "results.nc").read_bytes() == (tmp_path / "whole" / "results.nc").read_bytes()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["results.nc", "heads.parquet"])
@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink])
def test_damaged_results_are_named(finished: Path, llama: Subject, name: str, damage: object) -> None:
    assert callable(damage)
    damage(finished / name)
    for read in (lambda: Run.load(finished), lambda: pl.measure(llama, out=finished, **SPEC)):
        with pytest.raises(RunError) as error:
            read()
        assert str(error.value).startswith(f"{finished / name}: a file of the run is ")
        assert "measure again with --fresh" in str(error.value)
    assert_same_bits(pl.measure(llama, out=finished, fresh=True, **SPEC), Run.load(finished))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"format": "posleak run", "status": "fini', "run.json is corrupt"),
        ('{"format": "posleak run", "a": NaN}', "NaN is not JSON"),
        ('{"format": "posleak run", "a": ' + "[" * 100_000, "run.json is corrupt"),
        ('{"format": "posleak run", "format_version": 5}', "changed or damaged after it was written"),
        (sealed({"format": "posleak run", "format_version": 5}), "digest: Field required"),
        ('{"format": "posleak run", "format_version": 2}', "format version 2"),
        ('{"format": "posleak run", "format_version": 3, "definitions_version": 1}', "version 1 of the definitions"),
        ('{"format": "posleak run", "format_version": 99}', "format version 99"),
    ],
    ids=["cut", "NaN", "deep", "no seal", "no fields", "format 2", "definitions 1", "format 99"],
)
def test_a_damaged_record_is_named(finished: Path, llama: Subject, content: str, what: str) -> None:
    (finished / "run.json").write_text(content)
    for read in (lambda: Run.load(finished), lambda: pl.measure(llama, out=finished, **SPEC)):
        with pytest.raises(RunError, match="remedy: ") as error:
            read()
        assert str(error.value).startswith(str(finished / "run.json"))
        assert what in str(error.value)
    assert pl.measure(llama, out=finished, fresh=True, **SPEC).record.finished is not None


@pytest.mark.parametrize("content", ["", "[]", '{"format": "a diary"}', '{"seed": 3}'])
def test_a_record_that_is_not_ours_is_named_and_stays(finished: Path, llama: Subject, content: str) -> None:
    """`--fresh` removes nothing beside a run.json that posleak did not write."""
    (finished / "run.json").write_text(content)
    with pytest.raises(RunError, match=r"run\.json (is corrupt|was not written by posleak)"):
        Run.load(finished)
    before = {name: (finished / name).read_bytes() for name in files(finished)}
    with pytest.raises(StorageError, match="a file that posleak did not write would be overwritten"):
        pl.measure(llama, out=finished, fresh=True, **SPEC)
    assert {name: (finished / name).read_bytes() for name in files(finished)} == before


@pytest.mark.parametrize(("field", "value"), [("seed", 9), ("prompts", 70), ("finished", "2001-01-01")])
def test_a_changed_record_does_not_load(finished: Path, llama: Subject, field: str, value: object) -> None:
    record = json.loads((finished / "run.json").read_text())
    where = record if field in record else record["spec"]
    assert where[field] != value
    where[field] = value
    (finished / "run.json").write_text(json.dumps(record))
    for read in (lambda: Run.load(finished), lambda: pl.measure(llama, out=finished, **SPEC)):
        with pytest.raises(RunError, match="the file was changed or damaged after it was written") as error:
            read()
        assert str(error.value).startswith(str(finished / "run.json"))


def test_fresh_leaves_what_is_not_its_own(interrupted: Path, llama: Subject) -> None:
    """Beside a run of posleak's there may be other people's files, in its own subfolder too."""
    theirs = [interrupted / "notes.txt", interrupted / "batches" / "engine.step", interrupted / "batches" / "mine.npz"]
    for path in theirs:
        path.write_text("theirs")
    pl.measure(llama, out=interrupted, fresh=True, **SPEC)
    assert [path.read_text() for path in theirs] == ["theirs"] * 3
    assert files(interrupted) == [
        "batches/engine.step", "batches/mine.npz", "heads.parquet", "notes.txt", "results.nc", "run.json"
    ]  # fmt: skip


def test_killed_while_it_removes_a_run_it_can_be_started_again(
    finished: Path, llama: Subject, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file that `--fresh` removes."""
    real = remove
    for name in ("results.nc", "heads.parquet", "run.json"):

        def stop(path: Path, name: str = name) -> None:
            if path.name == name:
                raise KeyboardInterrupt
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr(folder_module, "remove", stop)
            with pytest.raises(KeyboardInterrupt):
                pl.measure(llama, out=finished, fresh=True, **SPEC)
        assert_same_bits(pl.measure(llama, out=finished, **SPEC), whole)


def test_batches_beside_a_finished_run_are_removed(finished: Path, llama: Subject, whole: Run) -> None:
    """A process killed between its last two steps leaves them."""
    (finished / "batches").mkdir()
    (finished / "batches" / "000000-000001.npz").write_bytes(b"")
    (finished / ".heads.parquet.0123abcd.tmp").write_bytes(b"")
    assert_same_bits(pl.measure(llama, out=finished, **SPEC), whole)
    assert files(finished) == ["heads.parquet", "results.nc", "run.json"]


def test_a_run_of_a_plugin_that_is_not_there_says_so(finished: Path) -> None:
    record = json.loads((finished / "run.json").read_text())
    record["spec"]["edits"] = ["temperature=2"]
    (finished / "run.json").write_text(sealed(record))
    with pytest.raises(RunError, match="does not know") as error:
        Run.load(finished)
    assert "temperature" in str(error.value)
    assert "POSLEAK_PLUGINS" in str(error.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run\.json"):
        Run.load(tmp_path)


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_a_damaged_part_is_named_and_can_be_dropped(
    interrupted: Path, whole: Run, llama: Subject, damage: object
) -> None:
    assert callable(damage)
    part = interrupted / "batches" / "000002-000003.npz"
    damage(part)
    with pytest.raises(RunError) as error:
        pl.measure(llama, out=interrupted, **SPEC)
    assert str(error.value).startswith(f"{part}: {part.name} is corrupt")
    assert "delete this file and run the command again" in str(error.value)
    part.unlink()
    with counted_passes(llama.model) as passes:
        assert_same_bits(pl.measure(llama, out=interrupted, **SPEC), whole)
    assert passes[-3:] == [2, 2, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 96}, "length 64 there, 96"),
        ({"prompts": 8}, "prompts 7 there, 8"),
        ({"seed": 4}, "seed 3 there, 4"),
        ({"batch": 3}, "batch 2 there, 3"),
        ({"inputs": "constant"}, "inputs 'random' there, 'constant'"),
    ],
)
@pytest.mark.filterwarnings("ignore:all 7 prompts are the same")
def test_a_folder_with_another_measurement_is_refused(
    finished: Path, llama: Subject, change: dict[str, Any], said: str
) -> None:
    before = {name: (finished / name).read_bytes() for name in files(finished)}
    with pytest.raises(RunError) as error:
        pl.measure(llama, out=finished, **{**SPEC, **change})
    assert str(error.value).startswith(f"{finished}: the folder holds another measurement")
    assert said in str(error.value)
    assert "choose another --out, or --fresh to measure again and overwrite it" in str(error.value)
    assert {name: (finished / name).read_bytes() for name in files(finished)} == before


def test_fresh_overwrites_another_measurement(finished: Path, llama: Subject) -> None:
    with counted_passes(llama.model) as passes:
        run = pl.measure(llama, out=finished, fresh=True, **{**SPEC, "length": 96})
    assert full_batches(passes) == BATCHES - 1
    assert Run.load(finished).record.spec.length == run.record.spec.length == 96


def test_fresh_does_not_take_over_the_parts_of_an_unfinished_run(interrupted: Path, llama: Subject) -> None:
    with counted_passes(llama.model) as passes:
        pl.measure(llama, out=interrupted, fresh=True, **SPEC)
    assert full_batches(passes) == BATCHES - 1


def test_another_model_is_another_measurement(finished: Path) -> None:
    with pytest.raises(RunError, match="weights_sha256"):
        pl.measure(subject(seed=1), out=finished, **SPEC)


def test_the_same_weights_under_another_config_are_another_measurement(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny("granite").save_pretrained(str(model))
    pl.measure(pl.load(model, cache=tmp_path / "cache"), out=tmp_path / "run", **SPEC)
    edit_config(model, attention_multiplier=0.1)
    with pytest.raises(RunError, match="config_sha256"):
        pl.measure(pl.load(model, cache=tmp_path / "cache"), out=tmp_path / "run", **SPEC)


def test_other_ids_are_another_measurement(tmp_path: Path, llama: Subject) -> None:
    table = np.random.default_rng(0).integers(3, 101, (4, 40))
    with pytest.warns(PosleakWarning, match="the prompts were given"):
        pl.measure(llama, table, out=tmp_path / "run")
    with pytest.raises(RunError, match="ids_sha256"), pytest.warns(PosleakWarning):
        pl.measure(llama, table[::-1], out=tmp_path / "run")


def test_a_text_that_was_changed_is_another_measurement(tmp_path: Path) -> None:
    tokenizer, book = byte_tokenizer(), tmp_path / "book.txt"
    reader = Subject.of(tiny("llama", vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0), tokenizer)
    asked: dict[str, Any] = {"inputs": f"text:{book}", "out": tmp_path / "run", "length": 40, "prompts": 4}
    book.write_text(" ".join(f"The position of word {n} in the text of the library." for n in range(600)))
    pl.measure(reader, **asked)
    book.write_text(" ".join(f"The position of book {n} in the text of the library." for n in range(600)))
    with pytest.raises(RunError, match="text_sha256"):
        pl.measure(reader, **asked)


@pytest.mark.parametrize("fresh", [False, True])
def test_files_that_are_not_of_a_run_are_left_alone(tmp_path: Path, llama: Subject, fresh: bool) -> None:
    """Somebody's own folder as --out, by mistake."""
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "engine.step").write_text("theirs")
    (tmp_path / "results.nc").write_text("theirs")
    with counted_passes(llama.model) as passes, pytest.raises(RunError) as error:
        pl.measure(llama, out=tmp_path, fresh=fresh, **SPEC)
    assert "no run.json" in str(error.value)
    assert "results.nc, batches" in str(error.value)
    assert files(tmp_path) == ["batches/engine.step", "results.nc"]
    assert passes == []


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path, llama: Subject) -> None:
    (tmp_path / "run").write_text("theirs")
    with pytest.raises(StorageError, match="the file cannot be written") as error:
        pl.measure(llama, out=tmp_path / "run", **SPEC)
    assert f"move or rename the file {tmp_path / 'run'}, where a folder is needed, or" in str(error.value)
    assert "free some disk space" not in str(error.value)
    assert (tmp_path / "run").read_text() == "theirs"


def test_the_obstacle_is_named_and_not_what_lies_behind_it(tmp_path: Path, llama: Subject) -> None:
    (tmp_path / "theirs").write_text("theirs")
    with pytest.raises(StorageError) as error:
        pl.measure(llama, out=tmp_path / "theirs" / "deep" / "run", **SPEC)
    assert f"move or rename the file {tmp_path / 'theirs'}, where a folder is needed" in str(error.value)
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"run\.json: a folder that posleak did not write would be overwritten"):
        pl.measure(llama, out=tmp_path / "run", **SPEC)


def test_a_folder_that_cannot_be_written(tmp_path: Path, llama: Subject, whole: Run) -> None:
    """Reading back a finished run needs no writing; all else says what stands against it."""
    with disk_of(8192, tmp_path / "disk") as disk:
        pl.measure(llama, out=disk / "run", **SPEC)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert_same_bits(pl.measure(llama, out=disk / "run", **SPEC), whole)
        for more in ({"out": disk / "run", "fresh": True}, {"out": disk / "new"}):
            with pytest.raises(StorageError, match="Read-only file system") as error:
                pl.measure(llama, **more, **SPEC)
            assert "--out" in str(error.value)
            assert "free some disk space" not in str(error.value)


@contextmanager
def disk_of(kilobytes: int, place: Path) -> Iterator[Path]:
    """A real file system of this size."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "posleak-test", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(("share", "kept"), [(0.4, 1), (1.2, BATCHES)], ids=["at a part", "at the results"])
def test_a_full_disk_stops_the_run_and_more_space_lets_it_finish(
    tmp_path: Path, llama: Subject, whole: Run, share: float, kept: int
) -> None:
    """`share` of what all parts need together: too little for the second, or enough for all but not for the results."""
    parts = sum(variable.nbytes for variable in whole.data.data_vars.values()) // 1024
    with disk_of(int(share * parts), tmp_path / "disk") as disk:
        with pytest.raises(StorageError) as error:
            pl.measure(llama, out=disk / "run", **SPEC)
        assert "the file cannot be written" in str(error.value)
        assert "got: No space left on device" in str(error.value)
        assert "free some disk space, or choose another folder with --out" in str(error.value)
        left = files(disk / "run")
        assert "run.json" in left
        assert [name for name in left if name.startswith("batches/")] == left[:kept]
        assert len(left) == 1 + kept, "nothing half-written"
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        with counted_passes(llama.model) as passes:
            assert_same_bits(pl.measure(llama, out=disk / "run", **SPEC), whole)
        assert full_batches(passes) == max(0, BATCHES - 1 - kept)


def test_no_file_may_grow(tmp_path: Path, llama: Subject, whole: Run) -> None:
    """The same without root: the system refuses to let any file pass 20 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            pl.measure(llama, out=tmp_path / "run", **SPEC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path / "run") == ["run.json"]
    assert_same_bits(pl.measure(llama, out=tmp_path / "run", **SPEC), whole)
