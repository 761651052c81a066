"""Helpers for the tests of runs: a small measurement, a counter of forward passes, and comparison to the last bit."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from posleak.probe import backbone
from posleak.probe.fingerprint import FINGERPRINT_TOKENS
from posleak.probe.interface import WATCHED_TOKENS
from posleak.runs.run import Run

SPEC: dict[str, Any] = {"length": 64, "prompts": 7, "batch": 2, "seed": 3}
BATCHES = 4
"""Number of batches of SPEC: they have 2, 2, 2 and 1 prompts."""


@contextmanager
def counted_passes(model: torch.nn.Module) -> Iterator[list[int]]:
    """Collect the batch size of every forward pass of the model's body, except those of fingerprints and watching.

    The method of the class is replaced: a hook would be part of the model's identity.
    """
    passes: list[int] = []
    inner = backbone(model)  # type: ignore[arg-type]
    forward = type(inner).forward

    @functools.wraps(forward)
    def counted(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is inner and kwargs["input_ids"].shape[1] not in (FINGERPRINT_TOKENS, WATCHED_TOKENS):
            passes.append(len(kwargs["input_ids"]))
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(inner), "forward", counted)
        yield passes


def full_batches(passes: list[int]) -> int:
    """Count the passes with full batches; checks before the measurement pass one prompt at a time."""
    return passes.count(SPEC["batch"])


def bits(array: NDArray[Any]) -> bytes:
    """Return the bytes of the array, so that NaN equals NaN and 0 does not equal −0."""
    return np.ascontiguousarray(array).tobytes()


def assert_same_bits(one: Run, other: Run) -> None:
    """Assert that arrays, labels and attributes of two runs are identical, and their tables if both are on disk."""
    assert list(one.data.variables) == list(other.data.variables)
    for name, variable in one.data.variables.items():
        assert variable.dims == other.data[name].dims
        assert bits(variable.values) == bits(other.data[name].values), name
    assert one.data.attrs == other.data.attrs
    if one.path is not None and other.path is not None:
        tables = [pq.read_table(run.path / "heads.parquet") for run in (one, other) if run.path is not None]
        assert tables[0].schema == tables[1].schema
        for column in tables[0].column_names:
            pair = [table[column].to_numpy() for table in tables]
            assert np.array_equal(pair[0], pair[1], equal_nan=pair[0].dtype.kind == "f"), column


def sealed(fields: dict[str, Any]) -> str:
    """Return the text of a JSON file with a valid checksum, as a forger would write it."""
    content = {name: value for name, value in fields.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=2)


def files(folder: Path) -> list[str]:
    """Return the relative paths of all files below the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
