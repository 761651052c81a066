"""Every edit says what it changed, and one that changes nothing is an error: a typo must not become "no effect"."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import posleak as pl
from posleak.edits import parse_edits
from posleak.errors import InputError, NoEffectError, PosleakError, UnsupportedError
from posleak.models import Subject
from posleak.probe import Call, Edit
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from support.runs_tiny import subject
from tools.shrink import tiny_model

SPEC: dict[str, Any] = {"length": 64, "prompts": 4}


@pytest.fixture(scope="module")
def llama() -> Subject:
    """Three layers of three heads."""
    return subject()


@pytest.mark.parametrize(
    ("edit", "layers", "heads", "beside"),
    [
        ("sink=cut", (0, 1, 2), 9, ()),
        ("sink=cut@1", (1,), 3, ()),
        ("sink=freeze@0-1,2.1", (0, 1, 2), 7, ()),
        ("window=16", (0, 1, 2), 9, ()),
        ("rope=ntk:4", (0, 1, 2), 9, ()),
        ("shift=512", (0, 1, 2), 9, ()),
        ("patch0=5", (0, 1, 2), 9, ()),
        ("bos=zero", (), 0, ("the embedding at position 0",)),
        ("bos=none", (), 0, ("the tokens",)),
        ("dtype=bfloat16", (), 0, ("parameters",)),
        ("context=borrowed@1", (1,), 3, ("the tokens",)),
    ],
)
def test_an_edit_says_what_it_changed(
    llama: Subject, edit: str, layers: tuple[int, ...], heads: int, beside: tuple[str, ...]
) -> None:
    run = pl.measure(llama, **SPEC, edits=[edit])
    (found,) = run.record.touched
    assert (found.edit, found.layers, found.heads, found.beside) == (edit, layers, heads, beside)
    assert run.as_dict()["touched"][0]["heads"] == heads
    assert any(found.words in fact for fact in run.record.facts), "the header says it"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("sink=cut@99", "layer 99"),
        ("sink=cut@1-99", "layers 1 to 99"),
        ("sink=cut@2.9", "head 9 of layer 2"),
        ("sink=cut@5-2", "'5-2'"),
        ("sink=cut@", "cannot be read"),
        ("context=borrowed@7", "layer 7"),
        ("window=64", "hides nothing"),
        ("window=off", "has no effect on this model"),
        ("dtype=float32", "has no effect on this model"),
        ("patch0=1", "has no effect on this model"),
    ],
)
def test_one_that_changes_nothing_is_an_error(llama: Subject, edit: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        pl.measure(llama, **SPEC, edits=[edit])


def test_what_can_be_refused_without_a_model_is() -> None:
    for edit in ("window=64", "sink=cut@", "sink=cut@5-2"):
        with pytest.raises(InputError):
            MeasureSpec(**SPEC, edits=parse_edits(edit)).require_effect()


@pytest.mark.parametrize(
    ("family", "edit", "error"),
    [
        ("gpt2", "rope=ntk:4", UnsupportedError),  # no rotation
        ("zamba", "shift=100", NoEffectError),  # takes position ids, and does nothing with them
        ("bart", "shift=100", UnsupportedError),  # takes none
        ("gpt2", "shift=4000", InputError),  # no such positions
        ("gpt2", "shift=-1", InputError),
        ("zamba", "sink=cut@0", InputError),  # no attention in layer 0
        ("mistral", "window=60", NoEffectError),  # its own window is narrower
    ],
)
def test_families_in_which_an_edit_finds_nothing(family: str, edit: str, error: type[PosleakError]) -> None:
    with pytest.raises(error):
        pl.measure(Subject.of(tiny_model(family), name=family), **SPEC, edits=[edit])


def test_layers_without_a_rotation_are_not_touched_by_one() -> None:
    (found,) = pl.measure(subject("smollm3"), **SPEC, edits=["rope=ntk:4"]).record.touched
    assert found.layers == (0, 2)


def test_an_edit_of_ones_own_may_have_fields_of_any_name(llama: Subject) -> None:
    """What posleak asks of an edit must not be hidden by the names that users choose for theirs."""

    @dataclass
    class Louder(Edit):
        heads: int
        layers: int = 0

        def edit(self, call: Call) -> Call:
            return replace(call, query=2 * call.query)

    (found,) = pl.measure(llama, **SPEC, edits=[Louder(3)]).record.touched
    assert (found.layers, found.heads) == ((0, 1, 2), 9)


def test_a_control_is_kept_and_says_so(llama: Subject) -> None:
    run = pl.measure(llama, **SPEC, edits=["shift=0"])
    assert run.record.touched[0].nothing
    assert "a control" in run.record.facts[-1]


def test_a_resumed_run_keeps_what_its_edits_touched(llama: Subject, tmp_path: Path) -> None:
    """Stopped after the first of two batches, and again after all of them."""

    def stop(done: float, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    spec = {**SPEC, "batch": 2, "edits": ["sink=cut@1"]}
    with pytest.raises(KeyboardInterrupt):
        pl.measure(llama, **spec, out=tmp_path / "run", progress=stop)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["touched"][0]["heads"] == 3
    run = pl.measure(llama, **spec, out=tmp_path / "run")
    assert run.record.touched == pl.measure(llama, **spec).record.touched == Run.load(tmp_path / "run").record.touched
