"""What every test stands on: one seed, and no more threads than the machine can spare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from posleak.models import Subject

torch.set_num_threads(1)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)  # processes that tests start import `support`
os.environ.pop("COLUMNS", None)  # the width of whoever started the tests, which workers of pytest-xdist are told


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm() -> Subject:
    """A real model, fetched once; for tests that are marked `real`."""
    import posleak as pl

    return pl.load("smollm2-135m")


@pytest.fixture(scope="session")
def gemma() -> Subject:
    """Another one, with sliding windows."""
    import posleak as pl

    return pl.load("gemma3-270m")
