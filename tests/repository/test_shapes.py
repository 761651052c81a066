"""Shapes in signatures are checked with one flag, and cost nothing without it.

pytest --jaxtyping-packages=posleak.probe,posleak.leakage,posleak.metrics,posleak.analyses.origin,beartype.beartype
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

from posleak.analyses.origin.portrait import mean_cosine
from posleak.leakage.power import products
from posleak.probe.rows import gather_offsets

WRONG: dict[Callable[..., Any], tuple[Any, ...]] = {
    gather_offsets: (
        torch.zeros(1, 2, 3, 8),
        torch.tensor([5]),
        torch.tensor([0, 1]),
        4,
    ),  # one position for three rows
    products: (np.ones((4, 2, 5)), np.ones((4, 1, 5))),  # the cells of x and y differ
    mean_cosine: (torch.ones(2, 3, 4),),  # not the rows of one matrix
}
"""Arguments of wrong shape, for which each function returns a number if shapes are not checked."""

each = pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a second copy of its module, loaded with the import hook that the flag installs."""
    name = function.__module__
    hook = install_import_hook(["posleak.probe", "posleak.leakage", "posleak.analyses.origin"], "beartype.beartype")
    with hook:
        spec = hook.hook.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)
        spec.loader.exec_module(copy := module_from_spec(spec))
    checked_function: Callable[..., Any] = getattr(copy, function.__name__)
    return checked_function


@each
def test_a_wrong_shape_is_refused_where_shapes_are_checked(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeCheckError):
        checked(function)(*WRONG[function])


@each
def test_nothing_is_checked_without_the_flag(function: Callable[..., Any], pytestconfig: pytest.Config) -> None:
    flag = bool(pytestconfig.getoption("jaxtyping_packages"))
    assert hasattr(function, "__wrapped__") == flag, "functions are not wrapped without the flag"
    if not flag:
        function(*WRONG[function])
