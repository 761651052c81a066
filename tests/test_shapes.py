"""Shapes in signatures are checked under one flag, in each of the three packages, and cost nothing without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers.modeling_utils  # noqa: F401  (what a checked module imports first is compiled anew, for seconds)
import xarray  # noqa: F401  (likewise)
from jaxtyping import TypeCheckError

from posleak.leakage.power import gram_matrix
from posleak.origin.cosines import mean_cosine
from posleak.probe.rows import gather_offsets

FLAG = "--jaxtyping-packages=posleak.probe,posleak.leakage,posleak.origin,beartype.beartype"

WRONG: dict[Callable[..., Any], tuple[Any, ...]] = {
    gather_offsets: (torch.zeros(1, 2, 3, 8), torch.tensor([5]), torch.tensor([0, 1])),  # one position for three rows
    gram_matrix: (np.ones((4, 2, 5)), np.ones((4, 1, 5))),  # the cells of x and y differ
    mean_cosine: (torch.ones(2, 3, 4),),  # not rows of one matrix
}
"""Each is broadcast to some number if nobody looks."""


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_shape_is_seen_under_the_flag_only(function: Callable[..., Any], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("jaxtyping_packages"):
        with pytest.raises(TypeCheckError):
            function(*WRONG[function])
    else:
        function(*WRONG[function])
        assert not hasattr(function, "__wrapped__"), "without the flag nothing stands around a function"


def test_the_same_the_other_way_round(pytestconfig: pytest.Config) -> None:
    """In a process of its own: with the flag where this one is without, and without it where this one has it."""
    flag = [] if pytestconfig.getoption("jaxtyping_packages") else [FLAG]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "flag_only", *flag, __file__],
        capture_output=True, text=True, cwd=pytestconfig.rootpath, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert f"{len(WRONG)} passed" in found.stdout, found.stdout + found.stderr
