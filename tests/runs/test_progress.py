"""How far a run is: by batch for anyone who asks, by layer on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import posleak as pl
from posleak.cli.progress import prompt_progress
from posleak.runs.conditions import Conditions
from posleak.runs.folder import batch_path
from posleak.runs.prepared import PreparedRun
from posleak.runs.progress import Progress
from posleak.runs.spec import MeasureSpec
from posleak.show.lines import PlainConsole
from support.families import subject
from support.runs_tiny import SPEC, assert_same_bits


def watched(folder: Path | None = None) -> list[Progress]:
    seen = list[Progress]()
    PreparedRun.of(subject(), MeasureSpec(**SPEC)).run(folder, on_progress=seen.append)
    return seen


def test_a_watcher_hears_of_every_layer_of_every_batch() -> None:
    seen = watched()
    assert [(each.prompts, each.layer) for each in seen] == [
        (batch, layer) for batch in (range(2), range(2, 4), range(4, 6), range(6, 7)) for layer in (1, 2, 3)
    ]
    done = [each.done for each in seen]
    assert done == sorted(done)
    assert done[0] == 2 / 3, "before the first batch is done"
    assert done[-1] == 7
    assert seen[1].text == "prompts 0–1 of 7, layer 2 of 3"
    assert seen[-1].text == "prompt 6 of 7, layer 3 of 3"


def test_of_a_run_that_is_resumed_it_hears_what_is_left(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(reached: Progress) -> None:
        if reached.prompts.start == 4:
            raise Stopped

    ready = PreparedRun.of(subject(), MeasureSpec(**SPEC))
    with pytest.raises(Stopped):
        ready.run(tmp_path / "run", on_progress=stop)
    assert batch_path(tmp_path / "run", range(2, 4)).exists()
    seen = watched(tmp_path / "run")
    assert {each.prompts for each in seen} == {range(4, 6), range(6, 7)}
    assert seen[0].done > 4


def test_the_progress_of_a_call_from_python_is_in_whole_prompts_and_nothing_depends_on_it() -> None:
    told = list[tuple[int, int]]()
    run = pl.measure(subject(), progress=lambda done, of: told.append((done, of)), **SPEC)
    assert told == [(2, 7), (4, 7), (6, 7), (7, 7)]
    assert_same_bits(run, PreparedRun.of(subject(), MeasureSpec(**SPEC)).run(on_progress=lambda reached: None))


def test_conditions_say_which_layer_they_are_at() -> None:
    said = list[str]()
    Conditions(subject(), MeasureSpec(**SPEC), progress=said.append).run("window=9")
    assert "window=9: prompts 0–1 of 7, layer 1 of 3" in said


def test_a_terminal_shows_a_bar_that_moves_within_a_batch() -> None:
    stream = io.StringIO()
    console = PlainConsole(file=stream, force_terminal=True, width=100)
    with prompt_progress(console) as watch:
        assert watch is not None
        watch(Progress(range(8), 16, 12, 30))
    assert "prompts 0–7 of 16, layer 12 of 30" in stream.getvalue()
    with prompt_progress(PlainConsole(file=io.StringIO())) as nobody:
        assert nobody is None, "nothing is drawn where there is no terminal"
