"""What every test stands on: one seed, and no more threads than the machine can spare."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.pop("COLUMNS", None)  # the width of whoever started the tests, which workers of pytest-xdist are told


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
