"""docs/forms.md: every cell is run again; one command per form in `make test`, all of them in `make nightly`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.forms import COMMANDS, FORMS, Form, read_outcomes, run_form
from tools.markdown import read_part

PAGE = Path(__file__).parents[2] / "docs" / "forms.md"
ROUNDING = 1e-4
"""Of log-attention in nats: forms of the same function sum in another order."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def titled(form: Form) -> str:
    return form.title


def check(form: Form, *commands: str) -> None:
    listed = read_outcomes(read_part(PAGE.read_text(), "forms"))[form.title]
    row = run_form(form, commands)
    assert row.outcomes == {name: listed[name] for name in commands}
    works = form.same is not None and row.outcomes.get("measure") == "works"
    assert (row.difference is not None and row.difference <= ROUNDING) if works else row.difference is None


def test_the_page_has_every_form() -> None:
    assert list(read_outcomes(read_part(PAGE.read_text(), "forms"))) == [form.title for form in FORMS]


@pytest.mark.parametrize("form", FORMS, ids=titled)
def test_measure_of_every_form_is_as_the_page_says(form: Form) -> None:
    check(form, "measure")


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS, ids=titled)
def test_every_command_of_every_form_is_as_the_page_says(form: Form) -> None:
    check(form, *COMMANDS)
