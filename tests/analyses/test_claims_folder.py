"""A claims folder: its conditions are ordinary runs, and what is there is never measured again."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import posleak as pl
from posleak.analyses.claims.examination import FINDINGS, claims
from posleak.analyses.claims.lab import Lab
from posleak.analyses.origin.origin import read_origin
from posleak.errors import RunError, StorageError
from posleak.models import Subject
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.typed import plain
from support.errors import raises
from support.families import tiny
from support.runs_tiny import assert_same_bits, counted_passes, sealed


@pytest.fixture(scope="module")
def folder(llama: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("claims") / "run"
    claims(llama, out=place, length=48, prompts=4)
    return place


def test_conditions_are_ordinary_runs(folder: Path, llama: Subject) -> None:
    found = {path.name: Run.load(path) for path in (folder / "conditions").iterdir()}
    assert {"bos-zero", "sink-cut", "rope-ntk-4", "window-12", "window-12-sink"} <= set(found)
    cut = found["sink-cut"]
    assert cut.record.spec.edit_texts == ("sink=cut",)
    assert_same_bits(cut, pl.measure(llama, edits=["sink=cut"], length=48, prompts=4))
    compared = pl.compare([folder, folder / "conditions" / "sink-cut"])
    assert {row.paired for row in compared.rows if row.minus is not None} == {True}


def test_findings_go_through_json_as_they_are(folder: Path) -> None:
    found = FINDINGS.read(folder / "claims.json")
    stored = json.loads((folder / "claims.json").read_text())
    assert plain(found) == {name: stored[name] for name in ("digest", "claims")}
    edited = {result.edited.edit for result in found.claims if result.edited is not None}
    assert {"bos=mean", "sink=cut", "rope=ntk:4", "context=branches", "bos=noise"} <= edited


def test_a_finished_folder_is_read_back(folder: Path, llama: Subject) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with counted_passes(llama.model) as passes:
        claims(llama, out=folder, length=48, prompts=4)
    assert passes == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_fresh_tests_again_and_takes_only_what_is_its_own(llama: Subject, tmp_path: Path) -> None:
    place = tmp_path / "run"
    first = claims(llama, out=place, length=48, prompts=4)
    theirs = place / "conditions" / "notes.txt"
    theirs.write_text("mine")
    with counted_passes(llama.model) as passes:
        again = claims(llama, out=place, fresh=True, length=48, prompts=4)
    assert passes
    assert plain(again.results) == plain(first.results)
    assert theirs.read_text() == "mine"


def test_position_0_is_kept_even_if_all_claims_are_found_already(folder: Path, llama: Subject) -> None:
    for name in ("origin.json", "origin.nc"):
        (folder / name).unlink()
    claims(llama, out=folder, length=48, prompts=4)
    stored = read_origin(folder)
    assert stored is not None
    assert stored.record.model == "tiny-llama"


@pytest.mark.parametrize("name", ["origin.json", "origin.nc"])
def test_a_damaged_position_0_is_made_again(folder: Path, llama: Subject, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    claims(llama, out=folder, length=48, prompts=4)
    assert (folder / name).read_bytes() == whole


def test_position_0_of_another_measurement_is_made_again(folder: Path, llama: Subject) -> None:
    """A `--fresh` with other prompts that was killed before its end has left it."""
    whole = (folder / "origin.json").read_bytes()
    (folder / "origin.json").write_text(sealed(json.loads(whole) | {"digest": "0" * 64}))
    claims(llama, out=folder, length=48, prompts=4)
    assert (folder / "origin.json").read_bytes() == whole


def test_changed_findings_are_refused(folder: Path, llama: Subject, tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "run"))
    text = (place / "claims.json").read_text()
    (place / "claims.json").write_text(text.replace('"n": 4', '"n": 400'))
    with raises(RunError, where=place / "claims.json", got="sha256", expected="sha256", remedy="`posleak claims`"):
        claims(llama, out=place, length=48, prompts=4)


@pytest.mark.parametrize("fresh", [False, True])
def test_files_of_somebody_else_are_in_the_way(llama: Subject, tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "claims.json").write_text('{"claims": "of my insurance"}')
    with raises(RunError, where=tmp_path, what="no run.json", got="claims.json", remedy="--out"):
        claims(llama, out=tmp_path, length=48, prompts=4, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["claims.json"]


def test_fresh_does_not_remove_findings_that_posleak_did_not_write(
    folder: Path, llama: Subject, tmp_path: Path
) -> None:  # fmt: skip
    place = Path(shutil.copytree(folder, tmp_path / "run"))
    (place / "claims.json").write_text('{"claims": "of my insurance"}')
    with raises(StorageError, where=place / "claims.json", what="did not write", remedy="move"):
        claims(llama, out=place, length=48, prompts=4, fresh=True)
    assert Run.load(place).record.finished is not None, "nothing was removed"


def test_leftovers_of_a_killed_process_are_removed(folder: Path, llama: Subject, tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "run"))
    left = [place / f".{name}.0123abcd.tmp" for name in ("claims.json", "origin.json", "origin.nc", "run.json")]
    theirs = place / ".theirs.0123abcd.tmp"
    for path in (*left, theirs):
        path.write_text("half")
    claims(llama, out=place, length=48, prompts=4)
    assert not any(path.exists() for path in left)
    assert theirs.exists()


@pytest.mark.nightly
def test_killed_in_the_middle_nothing_finished_is_measured_again(tmp_path: Path) -> None:
    """Three processes: one is killed inside its third condition, one goes on, one was never disturbed."""
    model, out, whole = tmp_path / "model", tmp_path / "run", tmp_path / "whole"
    tiny("llama").save_pretrained(str(model))
    environment = {**os.environ, "POSLEAK_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def start(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-m", "support.killed_run", "claims", str(model), str(folder), "0"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    undisturbed, victim = start(whole), start(out)
    assert victim.stdout is not None
    measured = list[str]()
    for line in victim.stdout:
        if re.search(r": prompts? .* of \d+, layer \d+ of \d+$", line):
            measured.append(line.split(":")[0])
        if len(set(measured)) == 4:  # the baseline, and three conditions
            break
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    victim.stdout.close()
    done = {path: path.stat().st_mtime_ns for path in out.rglob("results.nc")}
    assert len(done) >= 3

    said = start(out).communicate()[0].splitlines()
    undisturbed.communicate()
    assert said[-1] == "finished"
    assert {path: path.stat().st_mtime_ns for path in done} == done, "a finished condition is not written again"
    again = {line.split(":")[0] for line in said if re.search(r": prompts? .* of \d+, layer \d+ of \d+$", line)}
    assert not again & {", ".join(Run.load(path.parent).record.spec.edit_texts) or "baseline" for path in done}
    assert (out / "claims.json").read_text() == (whole / "claims.json").read_text()
    assert (out / "origin.json").read_text() == (whole / "origin.json").read_text()
    runs = [path.parent.relative_to(whole) for path in whole.rglob("run.json")]
    assert sorted(runs) == sorted(path.parent.relative_to(out) for path in out.rglob("run.json"))
    for run in runs:
        assert_same_bits(Run.load(out / run), Run.load(whole / run))


def test_one_calibration_and_one_preparation_serve_all_conditions(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = importlib.import_module("posleak.runs.prepared")

    counts = {"prepare": 0, "calibrate": 0}
    for name in counts:
        real = getattr(measuring, name)

        def counted(*args: object, _name: str = name, _real: object = real, **more: object) -> object:
            counts[_name] += 1
            assert callable(_real)
            return _real(*args, **more)

        monkeypatch.setattr(measuring, name, counted)
    lab = Lab(llama, MeasureSpec(length=48, prompts=4))
    for edit in ("bos=zero", "sink=cut", "window=9"):
        lab.run(edit)
    assert counts == {"prepare": 1, "calibrate": 1}
