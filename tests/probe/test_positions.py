"""What kind of positions a model has is seen at run time, kept in the record, and said in the header."""

from __future__ import annotations

import io
from functools import cache

import pytest

import posleak as pl
from posleak.models import Subject
from posleak.reports.terminal.model import doctor_tables
from posleak.reports.terminal.run import heading
from posleak.reports.view import run_facts
from posleak.runs.run import Run
from posleak.show.lines import PlainConsole
from support.families import tiny


@cache
def run(family: str, edit: str = "") -> Run:
    subject = Subject.of(tiny(family), name=f"tiny-{family}")
    return pl.measure(subject, length=64, prompts=4, edits=[edit] if edit else ())


KINDS = {
    "llama": "rotary",
    "bloom": "ALiBi",
    "gpt2": "table of positions",
    "smollm3": "rotary, no rotation in layer 1",
}


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
@pytest.mark.parametrize("family", KINDS)
def test_the_kind_of_positions_is_seen_kept_and_said(family: str) -> None:
    result = run(family)
    assert result.record.positions.text == KINDS[family]
    assert result.as_dict()["positions"]["text"] == KINDS[family]
    stream = io.StringIO()
    PlainConsole(file=stream, width=120).print(heading(result))
    assert f"positions: {KINDS[family]}" in stream.getvalue()
    assert f"positions: {KINDS[family]}" in run_facts(result), "on the page, too"


def test_a_mixture_is_said_by_layer() -> None:
    assert run("smollm3").record.positions.layers == ("rotary", "none", "rotary")


def test_an_edit_that_takes_the_rotation_away_is_seen() -> None:
    assert run("llama", "rope=none").record.positions.text == "none"


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
def test_the_doctor_says_it_too() -> None:
    diagnosis = pl.doctor(Subject.of(tiny("llama")), length=48, prompts=3, short=True)
    assert diagnosis.as_dict()["positions"] == "rotary"
    stream = io.StringIO()
    PlainConsole(file=stream, width=120).print(*doctor_tables(diagnosis), sep="\n")
    assert "3 prompts of 48 tokens; positions: rotary" in stream.getvalue()
