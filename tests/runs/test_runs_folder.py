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
from support.errors import raises
from support.families import subject, tiny
from support.inputs_subject import byte_tokenizer
from support.models_tiny import edit_config
from support.runs_tiny import BATCHES, SPEC, assert_same_bits, counted_passes, files, full_batches, sealed


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
    with raises(RunError, where=interrupted, got="4 of 7 prompts", remedy="`posleak measure`"):
        Run.load(interrupted)


def test_it_resumes_at_the_first_unfinished_prompt_with_the_same_bits(
    interrupted: Path, run: Run, llama: Subject
) -> None:
    created, done = json.loads((interrupted / "run.json").read_text())["created"], []
    with counted_passes(llama.model) as passes:
        resumed = pl.measure(llama, out=interrupted, progress=lambda *at: done.append(at), **SPEC)
    assert passes[-2:] == [2, 1], "the two batches that were missing"
    assert full_batches(passes) == 1, "and no other"
    assert done == [(2, 7), (4, 7), (6, 7), (7, 7)]
    assert_same_bits(resumed, run)
    assert files(interrupted) == ["heads.parquet", "results.nc", "run.json"]
    assert resumed.record.created == created
    assert resumed.record.digest == run.record.digest


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
        with raises(RunError, where=finished / name, remedy="--fresh"):
            read()
    assert_same_bits(pl.measure(llama, out=finished, fresh=True, **SPEC), Run.load(finished))


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ('{"format": "posleak run", "status": "fini', {"what": "corrupt"}),
        ('{"format": "posleak run", "a": NaN}', {"what": "corrupt", "got": "NaN"}),
        ('{"format": "posleak run", "a": ' + "[" * 100_000, {"what": "corrupt", "got": "recursion"}),
        ('{"format": "posleak run", "format_version": 5}', {"got": "sha256 None", "expected": "sha256"}),
        (sealed({"format": "posleak run", "format_version": 5}), {"what": "corrupt", "got": "digest"}),
        ('{"format": "posleak run", "format_version": 2}', {"got": "version 2", "expected": "version 5"}),
        (
            '{"format": "posleak run", "format_version": 3, "definitions_version": 1}',
            {"what": ("version 1", "version 3")},
        ),
        ('{"format": "posleak run", "format_version": 99}', {"got": "version 99", "expected": "version 5"}),
    ],
    ids=["cut", "NaN", "deep", "no seal", "no fields", "format 2", "definitions 1", "format 99"],
)
def test_a_damaged_record_is_named(finished: Path, llama: Subject, content: str, fields: dict[str, Any]) -> None:
    (finished / "run.json").write_text(content)
    for read in (lambda: Run.load(finished), lambda: pl.measure(llama, out=finished, **SPEC)):
        with raises(RunError, where=finished / "run.json", remedy="--fresh", **fields):
            read()
    assert pl.measure(llama, out=finished, fresh=True, **SPEC).record.finished is not None


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ("", "move"),
        ("[]", "`posleak measure`"),
        ('{"format": "a diary"}', "`posleak measure`"),
        ('{"seed": 3}', "`posleak measure`"),
    ],
)
def test_a_record_that_is_not_ours_is_named_and_stays(
    finished: Path, llama: Subject, content: str, remedy: str
) -> None:
    """`--fresh` removes nothing beside a run.json that posleak did not write."""
    (finished / "run.json").write_text(content)
    with raises(RunError, where=finished / "run.json", what="run.json", remedy=remedy):
        Run.load(finished)
    before = {name: (finished / name).read_bytes() for name in files(finished)}
    with raises(StorageError, where=finished / "run.json", what="did not write", remedy=("move", "--out")):
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
        with raises(RunError, where=finished / "run.json", got="sha256", expected="sha256", remedy="--fresh"):
            read()


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
    finished: Path, llama: Subject, run: Run, monkeypatch: pytest.MonkeyPatch
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
        assert_same_bits(pl.measure(llama, out=finished, **SPEC), run)


def test_batches_beside_a_finished_run_are_removed(finished: Path, llama: Subject, run: Run) -> None:
    """A process killed between its last two steps leaves them."""
    (finished / "batches").mkdir()
    (finished / "batches" / "000000-000001.npz").write_bytes(b"")
    (finished / ".heads.parquet.0123abcd.tmp").write_bytes(b"")
    assert_same_bits(pl.measure(llama, out=finished, **SPEC), run)
    assert files(finished) == ["heads.parquet", "results.nc", "run.json"]


def test_a_run_of_a_plugin_that_is_not_there_says_so(finished: Path) -> None:
    record = json.loads((finished / "run.json").read_text())
    record["spec"]["edits"] = ["temperature=2"]
    (finished / "run.json").write_text(sealed(record))
    with raises(RunError, where=finished / "run.json", got="temperature", remedy="POSLEAK_PLUGINS"):
        Run.load(finished)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with raises(RunError, where=tmp_path, what="run.json", remedy="`measure`"):
        Run.load(tmp_path)


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_a_damaged_part_is_named_and_can_be_dropped(
    interrupted: Path, run: Run, llama: Subject, damage: object
) -> None:
    assert callable(damage)
    part = interrupted / "batches" / "000002-000003.npz"
    damage(part)
    with raises(RunError, where=part, what="corrupt", remedy="delete"):
        pl.measure(llama, out=interrupted, **SPEC)
    part.unlink()
    with counted_passes(llama.model) as passes:
        assert_same_bits(pl.measure(llama, out=interrupted, **SPEC), run)
    assert passes[-3:] == [2, 2, 1]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"length": 96}, ("length", 64, 96)),
        ({"prompts": 8}, ("prompts", 7, 8)),
        ({"seed": 4}, ("seed", 3, 4)),
        ({"batch": 3}, ("batch", 2, 3)),
        ({"inputs": "constant"}, ("inputs", "'random'", "'constant'")),
    ],
)
@pytest.mark.filterwarnings("ignore:all 7 prompts are the same")
def test_a_folder_with_another_measurement_is_refused(
    finished: Path, llama: Subject, change: dict[str, Any], changed: tuple[object, ...]
) -> None:
    before = {name: (finished / name).read_bytes() for name in files(finished)}
    with raises(RunError, where=finished, got=changed, remedy=("--out", "--fresh")):
        pl.measure(llama, out=finished, **{**SPEC, **change})
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
    with raises(RunError, got="weights_sha256"):
        pl.measure(subject(seed=1), out=finished, **SPEC)


def test_the_same_weights_under_another_config_are_another_measurement(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny("granite").save_pretrained(str(model))
    pl.measure(pl.load(model, cache=tmp_path / "cache"), out=tmp_path / "run", **SPEC)
    edit_config(model, attention_multiplier=0.1)
    with raises(RunError, got="config_sha256"):
        pl.measure(pl.load(model, cache=tmp_path / "cache"), out=tmp_path / "run", **SPEC)


def test_other_ids_are_another_measurement(tmp_path: Path, llama: Subject) -> None:
    table = np.random.default_rng(0).integers(3, 101, (4, 40))
    with pytest.warns(PosleakWarning, match="given"):
        pl.measure(llama, table, out=tmp_path / "run")
    with raises(RunError, got="ids_sha256"), pytest.warns(PosleakWarning):
        pl.measure(llama, table[::-1], out=tmp_path / "run")


def test_a_text_that_was_changed_is_another_measurement(tmp_path: Path) -> None:
    tokenizer, book = byte_tokenizer(), tmp_path / "book.txt"
    reader = Subject.of(tiny("llama", vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0), tokenizer)
    asked: dict[str, Any] = {"inputs": f"text:{book}", "out": tmp_path / "run", "length": 40, "prompts": 4}
    book.write_text(" ".join(f"The position of word {n} in the text of the library." for n in range(600)))
    pl.measure(reader, **asked)
    book.write_text(" ".join(f"The position of book {n} in the text of the library." for n in range(600)))
    with raises(RunError, got="text_sha256"):
        pl.measure(reader, **asked)


@pytest.mark.parametrize("fresh", [False, True])
def test_files_that_are_not_of_a_run_are_left_alone(tmp_path: Path, llama: Subject, fresh: bool) -> None:
    """Somebody's own folder as --out, by mistake."""
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "engine.step").write_text("theirs")
    (tmp_path / "results.nc").write_text("theirs")
    with (
        counted_passes(llama.model) as passes,
        raises(RunError, where=tmp_path, what="run.json", got="results.nc, batches", remedy="--out"),
    ):
        pl.measure(llama, out=tmp_path, fresh=fresh, **SPEC)
    assert files(tmp_path) == ["batches/engine.step", "results.nc"]
    assert passes == []


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path, llama: Subject) -> None:
    (tmp_path / "run").write_text("theirs")
    with raises(
        StorageError, where=tmp_path / "run", got="File exists", remedy=("move", tmp_path / "run", "--out")
    ) as error:
        pl.measure(llama, out=tmp_path / "run", **SPEC)
    assert "space" not in str(error.value.remedy)
    assert (tmp_path / "run").read_text() == "theirs"


def test_the_obstacle_is_named_and_not_what_lies_behind_it(tmp_path: Path, llama: Subject) -> None:
    (tmp_path / "theirs").write_text("theirs")
    with raises(StorageError, got="Not a directory", remedy=("move", f"{tmp_path / 'theirs'},")):
        pl.measure(llama, out=tmp_path / "theirs" / "deep" / "run", **SPEC)
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    with raises(StorageError, where=tmp_path / "run" / "run.json", what="folder", remedy="move"):
        pl.measure(llama, out=tmp_path / "run", **SPEC)


def test_a_folder_that_cannot_be_written(tmp_path: Path, llama: Subject, run: Run) -> None:
    """Reading back a finished run needs no writing; all else says what stands against it."""
    with disk_of(8192, tmp_path / "disk") as disk:
        pl.measure(llama, out=disk / "run", **SPEC)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert_same_bits(pl.measure(llama, out=disk / "run", **SPEC), run)
        for more in ({"out": disk / "run", "fresh": True}, {"out": disk / "new"}):
            with raises(StorageError, got="Read-only file system", remedy="--out") as error:
                pl.measure(llama, **more, **SPEC)
            assert "space" not in str(error.value.remedy)


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
    tmp_path: Path, llama: Subject, run: Run, share: float, kept: int
) -> None:
    """`share` of what all parts need together: too little for the second, or enough for all but not for the results."""
    parts = sum(variable.nbytes for variable in run.data.data_vars.values()) // 1024
    with disk_of(int(share * parts), tmp_path / "disk") as disk:
        with raises(StorageError, got="No space left on device", remedy=("space", "--out")):
            pl.measure(llama, out=disk / "run", **SPEC)
        left = files(disk / "run")
        assert "run.json" in left
        assert [name for name in left if name.startswith("batches/")] == left[:kept]
        assert len(left) == 1 + kept, "nothing half-written"
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        with counted_passes(llama.model) as passes:
            assert_same_bits(pl.measure(llama, out=disk / "run", **SPEC), run)
        assert full_batches(passes) == max(0, BATCHES - 1 - kept)


def test_no_file_may_grow(tmp_path: Path, llama: Subject, run: Run) -> None:
    """The same without root: the system refuses to let any file pass 20 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with raises(StorageError, where=tmp_path / "run", got="File too large", remedy="--out"):
            pl.measure(llama, out=tmp_path / "run", **SPEC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path / "run") == ["run.json"]
    assert_same_bits(pl.measure(llama, out=tmp_path / "run", **SPEC), run)
