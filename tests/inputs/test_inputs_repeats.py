"""Prompts that repeat one another are noticed, and said with numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.errors import PosleakWarning
from posleak.inputs import prepare, repeat_notes
from posleak.inputs.corpus import CropBody
from posleak.inputs.prompts import overlap
from posleak.models import Subject
from support.families import subject, tiny
from support.inputs_subject import byte_tokenizer

SENTENCES = " ".join(f"Word {n} of the library is not in its place, and {n * n} others are." for n in range(4000))


@pytest.fixture(scope="module")
def reader() -> Subject:
    bytewise = byte_tokenizer()
    return Subject.of(tiny("llama", vocab_size=len(bytewise), bos_token_id=None, eos_token_id=0), bytewise)


def tokenizer(reader: Subject) -> Any:
    return reader.tokenizer


def notes(reader: Subject, inputs: str | np.ndarray, prompts: int, length: int = 40) -> list[str]:
    return list(repeat_notes(prepare(reader, inputs, length=length, seed=0), prompts))


def test_overlap_by_hand() -> None:
    """Two of three spans share a quarter of the text: half of what these two read, 0.5 of 1.1 in all."""
    shared, again = overlap(np.array([[0.0, 0.5], [0.25, 0.75], [0.9, 1.0]]))
    assert shared == pytest.approx(0.5 / 1.1)
    assert again == pytest.approx(0.25)
    assert overlap(np.array([[0.0, 0.5], [0.5, 1.0]])) == (0, 0)
    assert overlap(np.array([[0.2, 0.4]] * 3)) == pytest.approx((1, 0.2))


def test_crops_of_a_short_text_overlap_and_those_of_a_long_one_do_not(reader: Subject, tmp_path: Path) -> None:
    for name, characters in (("short", 2000), ("long", 200_000)):
        (tmp_path / name).write_text(SENTENCES[:characters])
    (said,) = notes(reader, f"text:{tmp_path / 'short'}", 16)
    body = prepare(reader, f"text:{tmp_path / 'short'}", length=40, seed=0).body
    assert isinstance(body, CropBody)
    tokens = len(tokenizer(reader)(SENTENCES[:2000], add_special_tokens=False)["input_ids"])
    _, found = body.spans(0, 16, 40)
    assert found == pytest.approx(tokens, rel=0.1)
    assert f"about {found:,} tokens" in said
    assert said.endswith("use a longer text, fewer --prompts or a shorter --length")
    assert notes(reader, f"text:{tmp_path / 'long'}", 16) == []
    assert notes(reader, f"text:{tmp_path / 'short'}", 2) == []


def test_the_spans_are_where_the_crops_are(reader: Subject, tmp_path: Path) -> None:
    (tmp_path / "book").write_text(SENTENCES[:20_000])
    prompts = prepare(reader, f"text:{tmp_path / 'book'}", bos="none", length=40, seed=3)
    spans, _ = prompts.body.spans(3, 5, 40)  # type: ignore[attr-defined]
    for index, (start, end) in enumerate(spans * 20_000):
        text = str(tokenizer(reader).decode(prompts.ids(index)))
        assert text in SENTENCES[int(start) : int(end) + 40]


def test_equal_prompts_are_counted(reader: Subject, tmp_path: Path) -> None:
    table = np.arange(4 * 40).reshape(4, 40) % 90 + 3
    assert notes(reader, table, 4) == []
    table[2] = table[0]
    (said,) = notes(reader, table, 4)
    assert said.startswith("only 3 of 4 prompts differ: ")
    assert "copies" in said
    (said,) = notes(reader, "constant", 5)
    assert said.startswith("all 5 prompts are the same: ")
    assert notes(reader, "constant", 1) == []
    assert notes(reader, "random", 64) == []
    (tmp_path / "same").write_text("a" * 5000)
    (said,) = notes(reader, f"text:{tmp_path / 'same'}", 6)
    assert said.startswith("all 6 prompts are the same: ")


@pytest.mark.filterwarnings("ignore:the prompts were given")
def test_it_is_a_warning_of_the_measurement_and_its_record_keeps_it() -> None:
    table = np.arange(4 * 64).reshape(4, 64) % 90 + 3
    table[2] = table[0]
    with pytest.warns(PosleakWarning, match="3 of 4 prompts"):
        run = pl.measure(subject(), table)
    assert any("only 3 of 4 prompts differ" in said for said in run.as_dict()["warnings"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.measure(subject(), length=64, prompts=4)
