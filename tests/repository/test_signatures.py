"""Wrong arguments of public functions raise an error with the nearest name; correct calls are unchanged."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from typing import Any

import pytest

import posleak as pl
from posleak.errors import InputError
from posleak.signatures import ArgumentError, checked
from support.errors import raises
from support.families import subject
from support.runs_tiny import SPEC

MISSPELT = {
    "measure": ("lenght", "length"),
    "load": ("devise", "device"),
    "trace": ("by_layers", "by_layer"),
    "claims": ("promts", "prompts"),
    "doctor": ("sede", "seed"),
    "compare": ("run", "runs"),
    "report": ("asset", "assets"),
    "split": ("runs", "run"),
    "origin": ("token", "tokens"),
    "sweep": ("model", "models"),
}
PLAIN: Any = pydoc.plaintext  # type: ignore[attr-defined]
PACKAGES = ("trace", "claims", "doctor", "origin", "report")


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_argument_gets_the_nearest(name: str) -> None:
    wrong, right = MISSPELT[name]
    with raises(ArgumentError, where=name, got=wrong, remedy=f"'{right}'") as raised:
        getattr(pl, name)("x", **{wrong: 1})
    assert isinstance(raised.value, InputError)
    assert isinstance(raised.value, TypeError)


FRESH = """\
import posleak as pl
from posleak.signatures import ArgumentError
for name in {names}:
    try:
        getattr(pl, name)("x", nonsense=1)
    except ArgumentError:
        assert getattr(pl, name) is getattr(pl, name)
        print(getattr(pl, name).__name__)
"""


@pytest.mark.parametrize(
    "before", ["", "import posleak.analyses.trace.trace, posleak.analyses.doctor.doctor, posleak.reports.page\n"]
)
def test_it_does_not_matter_whether_a_package_was_imported_before(before: str) -> None:
    program = before + FRESH.format(names=PACKAGES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(PACKAGES)


def test_a_missing_or_unnamed_argument_is_said_with_the_signature() -> None:
    measure: Any = pl.measure
    with raises(ArgumentError, where="measure", what="'subject'", expected="measure(subject, inputs, *, "):
        measure()
    with raises(ArgumentError, where="measure", what="positional", expected="measure(subject, inputs, *, "):
        measure("x", "random", 512)


def test_functions_look_as_they_are() -> None:
    from posleak.runs.measure import measure

    assert inspect.signature(pl.measure) == inspect.signature(measure)
    assert pl.measure.__doc__ == measure.__doc__
    assert pl.measure is measure
    assert pl.measure is pl.measure
    assert pickle.loads(pickle.dumps(pl.measure)) is pl.measure
    assert inspect.isclass(pl.Run)


@pytest.mark.parametrize("name", MISSPELT)
def test_help_shows_every_option_with_its_type_before_anything_else(name: str) -> None:
    shown = pydoc.render_doc(getattr(pl, name), renderer=PLAIN).partition("PACKAGE CONTENTS")[0]
    function = inspect.unwrap(getattr(pl, name))
    for each in inspect.signature(function).parameters.values():
        assert re.search(rf"\b{each.name}: '?{re.escape(str(each.annotation))}", shown), each.name
        assert re.search(rf"^\s+{each.name}  ", shown, flags=re.M), each.name
    assert inspect.cleandoc(function.__doc__ or "").splitlines()[0] in shown


def test_a_right_call_is_passed_on_and_its_own_type_errors_are_left_alone() -> None:
    assert pl.measure(subject(), **SPEC).prompts == SPEC["prompts"]

    def add(a: int, b: int = 1) -> int:
        return a + b

    loose: Any = checked(add)
    assert loose(1, b=2) == 3
    with pytest.raises(TypeError) as raised:
        loose("a")
    assert not isinstance(raised.value, ArgumentError)
