"""Fixtures of all tests: a fixed seed, one thread, and the models and the run that many files read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from posleak.models import Subject
    from posleak.runs.run import Run

torch.set_num_threads(1)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)  # processes that tests start import `support`
os.environ.pop("COLUMNS", None)  # pytest-xdist passes the width of the terminal to its workers


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Fail the test that leaves a process group, not the next one of this worker that creates its own."""
    yield
    assert not (torch.distributed.is_available() and torch.distributed.is_initialized())


@pytest.fixture(scope="session")
def llama() -> Iterator[Subject]:
    """A tiny Llama with three layers of three heads, shared by all tests: none of them may change it."""
    from posleak.probe.fingerprint import changed, identified
    from support.families import subject

    shared = identified(subject())  # hashes weights and config, and lists hooks
    yield shared
    assert changed(shared) is None, "a test changed the shared model"
    assert not shared.model.training


@pytest.fixture(scope="session")
def run(llama: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The measurement SPEC of `llama` in a folder, shared by all tests: none of them may write to the folder."""
    import posleak as pl
    from support.runs_tiny import SPEC

    folder = tmp_path_factory.mktemp("shared") / "run"
    measured = pl.measure(llama, out=folder, **SPEC)
    files, arrays = contents(folder), measured.data.copy(deep=True)
    yield measured
    assert contents(folder) == files, "a test changed the shared folder"
    assert measured.data.identical(arrays), "a test changed the shared run's arrays"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="session")
def smollm() -> Subject:
    """A real model, downloaded once, for tests that are marked `real`."""
    import posleak as pl

    return pl.load("smollm2-135m")


@pytest.fixture(scope="session")
def gemma() -> Subject:
    """A real model with sliding windows, downloaded once, for tests that are marked `real`."""
    import posleak as pl

    return pl.load("gemma3-270m")
