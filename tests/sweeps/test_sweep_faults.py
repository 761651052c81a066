"""Faults of sweeps on real processes: killed workers, killed drivers, a full disk, two sweeps in one place; on both
engines where they differ. Nothing finished is lost, nothing is counted twice, and the state that is shown is true."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posleak.sweeps.manifest import read_manifest
from posleak.sweeps.state import State, statuses
from posleak.sweeps.storage import Storage
from support.sweep_tiny import SLOW, SMALL, ended, numbers, started, states, tiny_models, worker_at_work, written

ENGINES = {"local": (), "ray": ("--engine", "ray", "--workers", "2")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_models(tmp_path_factory.mktemp("models"), "first", "second")


@pytest.fixture(scope="module")
def slow(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a quick cell of each, then slow ones."""
    place = tmp_path_factory.mktemp("slow") / "slow.yaml"
    return written(place, models=models, grids=[SMALL, {**SLOW, "seed": 1}])


@pytest.fixture(scope="module")
def undisturbed(slow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The numbers of the slow sweep, on one machine and with nothing going wrong."""
    root = tmp_path_factory.mktemp("undisturbed") / "sweep"
    assert ended(started(slow, root))["complete"]
    return numbers(root)


def seen(manifest: Path, root: Path) -> list[State]:
    return [each.state for each in statuses(Storage(str(root)), read_manifest(manifest).cells)]


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.nightly)])
def test_a_killed_worker_and_a_killed_driver_cost_nothing_that_was_finished(
    slow: Path, undisturbed: dict[str, bytes], tmp_path: Path, engine: str
) -> None:
    """A worker dies in a cell, and another one goes on with it; then the driver dies, and is started again."""
    root, places = tmp_path / "sweep", [cell.folder for cell in read_manifest(slow).cells]
    process = started(slow, root, *ENGINES[engine])
    worker, folder = worker_at_work(root)
    assert worker != process.pid
    assert seen(slow, root)[places.index(folder.name)] is State.running
    os.kill(worker, signal.SIGKILL)
    gone(worker)
    done = {path.name for path in folder.glob("batches/*.npz")}
    another, same = worker_at_work(root, batches=2, not_by=worker)
    assert another != process.pid
    kept = {path.name for path in same.glob("batches/*.npz")}
    assert same != folder or done <= kept, "batches of the dead worker are kept"
    process.kill()
    process.communicate()
    before = settled(slow, root)
    assert State.open in before
    assert State.failed not in before
    finished = {path.parent: path.stat().st_mtime_ns for path in root.glob("cells/*/cell.json")}
    assert len(finished) == before.count(State.finished)
    found = ended(started(slow, root))  # after Ray, too: what one engine has begun, another goes on with
    assert found["complete"]
    assert found["computed"] == 4 - len(finished)
    assert all((place / "cell.json").stat().st_mtime_ns == at for place, at in finished.items())
    assert numbers(root) == undisturbed, "no batch is lost, and none is counted twice"


def settled(manifest: Path, root: Path) -> list[State]:
    """States once the workers of a dead driver have ended, as they do by themselves; their locks are none then."""
    deadline = time.monotonic() + 300
    while State.running in (found := seen(manifest, root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert State.running not in found, "a lock whose owner died is none"
    return found


def gone(pid: int) -> None:
    """A worker whose driver is dead ends by itself."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.1)
    raise AssertionError("the worker outlived its driver")


def test_ctrl_c_stops_cleanly(slow: Path, tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    process = started(slow, root)
    worker, _ = worker_at_work(root)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "kept" in errors
    gone(worker)
    settled(slow, root)
    assert list(root.glob("cells/*/batches/*.npz")), "finished batches are kept, and gone on with"


def test_two_sweeps_in_one_place_share_the_work(slow: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    both = [started(slow, root), started(slow, root)]
    found = [ended(each) for each in both]
    assert all(each["complete"] for each in found)
    assert sum(each["computed"] for each in found) == 4, "every cell was measured once"
    assert numbers(root) == undisturbed


def test_a_cell_that_kills_every_worker_fails_and_the_others_are_done(models: list[str], tmp_path: Path) -> None:
    manifest = written(tmp_path / "m.yaml", models=models[:1], grids=[{**SLOW, "seed": 7}, SMALL])
    root = tmp_path / "sweep"
    process = started(manifest, root, "--retries", "1")
    victims = set[int]()
    for _ in range(2):
        worker, folder = worker_at_work(root, batches=1)
        while worker in victims:
            time.sleep(0.05)
            worker, folder = worker_at_work(root, batches=1)
        victims.add(worker)
        os.kill(worker, signal.SIGKILL)
    found = ended(process, status=1)
    assert states(found) == ["failed", "finished"]
    assert "died 2 times" in found["cells"][0]["why"]
    assert (folder / "error.json").exists()
    mended = ended(started(manifest, root, "--retry-failed"))
    assert states(mended) == ["finished", "finished"]
    assert mended["computed"] == 1


# -- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few hundred kilobytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_loses_nothing_and_the_rest_is_done_when_there_is_room(
    models: list[str], small_disk: Path, tmp_path: Path
) -> None:
    manifest = written(tmp_path / "m.yaml", models=models, **{**SMALL, "seed": list(range(4))})
    root = small_disk / "sweep"
    found = ended(started(manifest, root), status=1)
    there = states(found)
    assert "finished" in there
    assert "open" in there, "the disk was too large for this test"
    assert "failed" not in there, "a full disk is no fault of the cell"
    unwritten = [cell for cell in found["cells"] if cell["state"] == "open"]
    assert all("No space left" in cell["why"] for cell in unwritten)
    kept = {path.parent: path.stat().st_mtime_ns for path in root.glob("cells/*/cell.json")}
    assert len(kept) == there.count("finished")
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    again = ended(started(manifest, root))
    assert again["complete"]
    assert again["computed"] == len(unwritten)
    assert all((place / "cell.json").stat().st_mtime_ns == at for place, at in kept.items())


# -- Ray -------------------------------------------------------------------------------------------------------------


def test_what_no_machine_has_is_refused_before_anything_starts(models: list[str], tmp_path: Path) -> None:
    asked = {**SMALL, "resources": {"cpus": 1, "gpus": 64}}
    process = started(written(tmp_path / "m.yaml", models=models[:1], **asked), tmp_path / "sweep", *ENGINES["ray"])
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "64 GPUs" in errors
    assert "cluster" in errors


def test_a_cluster_that_is_not_there_is_said_so(models: list[str], tmp_path: Path) -> None:
    process = started(
        written(tmp_path / "m.yaml", models=models[:1], **SMALL), tmp_path / "sweep", "--engine", "ray", "--address",
        "127.0.0.1:1",
    )  # fmt: skip
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "127.0.0.1:1" in errors
    assert "reached" in errors
