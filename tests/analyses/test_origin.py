"""The whole of `posleak origin`: on tiny models of many kinds, as JSON, as a page, and on a trained model."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from posleak.analyses.doctor.doctor import doctor
from posleak.analyses.origin.origin import Origin, origin
from posleak.analyses.origin.states import Closure
from posleak.errors import InputError, PosleakWarning
from posleak.models import Subject
from posleak.typed import from_json, plain
from support.errors import raises
from support.families import tiny
from tools.shrink import tiny_model

PARTS = ("closure", "trajectory", "portrait", "reading", "fingerprint", "position_probe")


def found(family: str, **options: object) -> Origin:
    return origin(Subject.of(tiny(family), name=family), **{"length": 48, "prompts": 4, "tokens": 40, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "gpt_oss", "diffllama", "bitnet", "smollm3"])
def test_every_kind_of_model(family: str) -> None:
    result = found(family)
    text = json.dumps(result.as_dict(), allow_nan=False)
    assert set(PARTS) < set(json.loads(text))
    assert result.closure.ok
    assert result.closure.n == 8, "both versions of each prompt"
    assert result.trajectory.token == 1
    assert len(result.portrait.tokens) == 40
    assert 1 not in result.portrait.tokens
    assert result.reading.space == ("value" if family in ("diffllama", "bitnet") else "output")
    assert result.fingerprint.carried.value[0] == 0, "before the first attention nothing has moved"
    assert result.position_probe is not None
    assert result.position_probe.rank[0] == 0
    assert len(result.position_probe.rank) == 4
    console = Console(width=80, record=True, file=io.StringIO())
    for item in _page(result):
        console.print(item)
    assert max(map(len, console.export_text().splitlines())) <= 80


def _page(result: Origin):  # type: ignore[no-untyped-def]
    from posleak.reports.terminal.model import origin_tables

    return origin_tables(result)


@pytest.mark.parametrize("family", ["hy_v4", "qwen4_exp_text"])
def test_streams_that_are_mixed_at_the_end(family: str) -> None:
    result = origin(Subject.of(tiny_model(family), name=family), length=48, prompts=3, tokens=16)
    assert result.closure.ok
    json.dumps(result.as_dict(), allow_nan=False)


def test_results_do_not_depend_on_batches() -> None:
    one, two = found("llama", batch=4), found("llama", batch=3)
    assert np.allclose(one.reading.attention, two.reading.attention, atol=1e-6)
    assert np.allclose(one.fingerprint.carried.value, two.fingerprint.carried.value, atol=1e-5)
    assert one.position_probe is not None
    assert two.position_probe is not None
    assert np.allclose(one.position_probe.plain.error.value, two.position_probe.plain.error.value, atol=1e-2)


def test_without_a_bos_the_second_version_shares_its_first_token() -> None:
    result = found("llama", bos="none")
    assert not result.reference.is_bos
    own, other = np.array(result.fingerprint.changed).T
    assert len(set(own.tolist())) > 1
    assert len(set(other.tolist())) == 1
    assert result.fingerprint.same.n == 4
    assert (result.fingerprint.same.worst or 0) < 1e-6


def test_with_a_bos_the_second_versions_differ() -> None:
    own, other = np.array(found("llama").fingerprint.changed).T
    assert set(own.tolist()) == {1}
    assert len(set(other.tolist())) == 4


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"prompts": 2}, {"what": "prompts", "got": 2, "expected": 3, "remedy": "--prompts 3"}),
        ({"tokens": 1}, {"what": "tokens", "got": 1, "expected": 2, "remedy": "--tokens 2"}),
    ],
)
def test_too_little_is_refused_with_the_remedy(options: dict[str, int], fields: dict[str, object]) -> None:
    with raises(InputError, **fields):
        found("llama", **options)


def test_the_command_has_an_example() -> None:
    from posleak.cli.commands import app

    result = CliRunner().invoke(app, ["origin", "--help"])
    assert result.exit_code == 0
    assert "posleak origin smollm2-135m" in result.output


def test_sparklines() -> None:
    from posleak.show.numbers import size
    from posleak.show.terminal import spark

    assert spark(np.array([0.0, 0.5, np.nan, 1.0])) == "▁▅·█"
    assert spark(np.array([2.0, 2.0])) == "▁▁"
    assert [size(x) for x in (3.31, 98.72, 810.5, 25101.9)] == ["3.3", "98.7", "810", "25.1k"]


@pytest.mark.real
def test_a_trained_model() -> None:
    from posleak.models import load

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = load("smollm2-135m", device="cpu", dtype="float32")
        result = origin(model, length=64, prompts=4, tokens=64, probe=False)
    finally:
        torch.set_num_threads(threads)
    assert result.closure.worst <= 1e-5
    assert result.reading.space == "output"
    assert result.reading.readers.low > 10
    assert (result.fingerprint.same.worst or 0) < 1e-6
    assert result.trajectory.norm.max() > 100 * result.trajectory.norm[0]
    assert result.portrait.among.value.max() > 0.95


def test_more_positions_than_the_model_has_are_refused_and_more_than_it_knows_are_said() -> None:
    """A table of positions would end in torch's IndexError."""
    short = Subject.of(tiny("gpt2", max_position_embeddings=64), name="short")
    for look in (origin, doctor):
        with raises(InputError, where="short", what=("length 96", "64 positions"), remedy="--length 64"):
            look(short, length=96, prompts=4)
    rotary = Subject.of(tiny("llama", max_position_embeddings=64), name="rotary")
    with pytest.warns(PosleakWarning, match="extrapolation"):
        origin(rotary, length=96, prompts=4, tokens=8, probe=False)
    assert "extrapolation" in doctor(rotary, length=96, prompts=4, short=True).notes[0]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_json_is_read_back_into_the_same_classes(family: str) -> None:
    result = found(family)
    text = json.dumps(result.as_dict())
    again = from_json(Origin, text)
    assert json.dumps(again.as_dict()) == text
    assert type(again.reading.heads) is tuple
    assert np.array_equal(again.reading.is_reader, result.reading.is_reader)
    assert again.portrait.picture.size == again.reading.attention.size == again.fingerprint.matrices.size == 0


def test_gaps_that_are_not_numbers_are_read_back() -> None:
    closure = Closure((0.0, np.inf), 1e-5, 2)
    again = from_json(Closure, json.dumps(plain(closure)))
    assert not again.ok
    assert plain(again) == plain(closure)
