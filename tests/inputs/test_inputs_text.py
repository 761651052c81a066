"""Crops: from inside the text, never its start, the same everywhere, and refused with reasons."""

from __future__ import annotations

import ast
import hashlib
import platform
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from posleak.errors import InputError
from posleak.inputs import prepare
from posleak.inputs.corpus import DROPPED_TOKENS, docstrings, library_files, standard_library_text
from support import inputs_subject as stubs
from support.errors import raises

WORDS = stubs.stub_subject(stubs.word_tokenizer())
BYTES = stubs.stub_subject(stubs.byte_tokenizer())
W0 = 9
"""Id of `w0`; `w1`, `w2`, … follow."""
SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
"""Each one token of the byte-level tokenizer, which merges small letters only."""


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """w0 w1 … w399: the ids tell where a crop came from."""
    file = tmp_path / "book.txt"
    file.write_text(" ".join(stubs.WORDS), encoding="utf-8")
    return file


def test_crops_are_consecutive_and_never_the_start(book: Path) -> None:
    ids = prepare(WORDS, f"text:{book}", bos="none", length=40, seed=0).batch(range(300)) - W0
    assert (np.diff(ids, axis=1) == 1).all()
    assert ids[:, 0].min() >= DROPPED_TOKENS
    assert ids.max() < 400
    assert ids[:, 0].min() < 30  # every place is reached, up to the margin at the end
    assert ids[:, -1].max() > 370


def test_the_bos_stands_before_the_crop(book: Path) -> None:
    with_bos = prepare(WORDS, f"text:{book}", length=20, seed=1).ids(2)
    without = prepare(WORDS, f"text:{book}", bos="none", length=20, seed=1).ids(2)
    assert with_bos[0] == 1
    assert np.array_equal(with_bos[1:], without[1:])


def test_the_same_text_gives_the_same_crops(book: Path) -> None:
    one = prepare(WORDS, f"text:{book}", length=20, seed=5)
    two = prepare(WORDS, f"text:{book}", length=20, seed=5)
    assert np.array_equal(one.batch(range(4)), two.batch([0, 1, 2, 3]))
    assert np.array_equal(one.batch([3])[0], two.batch(range(9))[3])
    assert len(np.unique(one.batch(range(20)), axis=0)) > 10


def test_golden_crop(book: Path) -> None:
    prompts = prepare(WORDS, f"text:{book}", bos="none", length=8, seed=0)
    text = book.read_text(encoding="utf-8")
    reach = prompts.body.reach[-1]  # type: ignore[attr-defined]
    start = 1 + (0xA30FEBCFD9C2825F * reach >> 64)  # the first raw word of stream (0, 0)
    words = text[start:].split(" ")[DROPPED_TOKENS : DROPPED_TOKENS + 8]
    assert prompts.ids(0).tolist() == [W0 + int(word[1:]) for word in words]


def test_byte_level_crops_are_pieces_of_the_text(tmp_path: Path) -> None:
    text = " ".join(f"{number} is the position of word {number * number}." for number in range(400))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    prompts = prepare(BYTES, f"text:{tmp_path / 'a.txt'}", bos="none", length=64, seed=0)
    for ids in prompts.batch(range(20)):
        piece = BYTES.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert piece in text
        assert not text.startswith(piece)


def test_the_first_character_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(SIGNS, encoding="utf-8")
    prompts = prepare(BYTES, f"text:{tmp_path / 'a.txt'}", bos="none", length=4, seed=0)
    starts = {SIGNS.index(BYTES.tokenizer.decode(ids)) for ids in prompts.batch(range(300))}
    assert min(starts) == 1 + DROPPED_TOKENS  # from character 1 on, not 0; one token per character here
    assert starts == set(range(1 + DROPPED_TOKENS, 1 + max(starts)))


def test_line_ends_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "unix.txt").write_bytes(" \n".join(stubs.WORDS).encode())
    (tmp_path / "dos.txt").write_bytes(" \r\n".join(stubs.WORDS).encode())
    one, two = (prepare(WORDS, f"text:{tmp_path / name}.txt", length=20, seed=0) for name in ("unix", "dos"))
    assert np.array_equal(one.batch(range(5)), two.batch(range(5)))
    assert one.describe().text_sha256 == two.describe().text_sha256


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(2, 50))
def test_special_tokens_spelled_out_are_left_out(
    seed: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "tags.txt").write_text("w1 <s> w2 </s> unknown <pad> " * 60, encoding="utf-8")
    ids = prepare(WORDS, f"text:{folder / 'tags.txt'}", bos="none", length=length, seed=seed).ids(0)
    assert set(ids.tolist()) <= {W0 + 1, W0 + 2}


def test_folders_are_read_in_order_and_by_length(tmp_path: Path, book: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "short.md").write_text(" ".join(stubs.WORDS[100::-1]), encoding="utf-8")
    (tmp_path / "tiny.py").write_text("w1 w2 w3", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\xff\xd8")
    (tmp_path / ".hidden.txt").write_bytes(b"\xff\xd8")
    prompts = prepare(WORDS, f"text:{tmp_path}", bos="none", length=30, seed=0)
    assert prompts.body.corpus.names == ("book.txt", "sub/short.md", "tiny.py")  # type: ignore[attr-defined]
    steps = np.diff(prompts.batch(range(400)), axis=1)
    assert (steps == steps[:, :1]).all()
    assert set(steps[:, 0]) == {1, -1}  # the short text counts downwards
    assert 0.75 < (steps[:, 0] == 1).mean() < 0.95  # about 370 places to begin at against 60
    assert prompts.describe().text_documents == 3


def test_the_hash_is_that_of_the_file(book: Path) -> None:
    described = prepare(WORDS, f"text:{book}", length=20, seed=0).describe()
    assert described.text_sha256 == hashlib.sha256(book.read_bytes()).hexdigest()
    assert described.source == f"text:{book}"


def test_a_text_too_short_says_how_short(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(" ".join(stubs.WORDS[:45]), encoding="utf-8")
    with raises(InputError, what="short", got="37 tokens", expected="60 tokens", remedy="--length 37"):
        prepare(WORDS, f"text:{tmp_path / 'long.txt'}", length=60, seed=0)
    (tmp_path / "long.txt").unlink()
    (tmp_path / "a.txt").write_text(" ".join(stubs.WORDS[:30]), encoding="utf-8")
    usable = 30 - 2 * DROPPED_TOKENS
    with raises(InputError, what="short", got=f"{usable} tokens", expected="40 tokens", remedy="longer text") as caught:
        prepare(WORDS, f"text:{tmp_path / 'a.txt'}", length=40, seed=0)
    assert "--length" not in str(caught.value.remedy), "22 tokens could not be measured either"
    prepare(WORDS, f"text:{tmp_path / 'a.txt'}", length=usable, seed=0).batch(range(50))
    (tmp_path / "b.txt").write_text("w1 w2", encoding="utf-8")
    with raises(InputError, what="short", got=("22 tokens", "2 documents"), expected="40 tokens", remedy="join"):
        prepare(WORDS, f"text:{tmp_path}", length=40, seed=0)


def test_an_empty_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with raises(InputError, what="short", got="0 tokens", expected=4):
        prepare(WORDS, f"text:{tmp_path / 'a.txt'}", length=4, seed=0)


def test_a_crop_may_fill_a_slice_of_long_words(tmp_path: Path) -> None:
    gap = " " * 50  # fewer tokens than the first slice expects
    (tmp_path / "a.txt").write_text(gap.join(stubs.WORDS), encoding="utf-8")
    ids = prepare(WORDS, f"text:{tmp_path / 'a.txt'}", bos="none", length=60, seed=0).batch(range(20))
    assert (np.diff(ids, axis=1) == 1).all()


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with raises(InputError, where="latin.txt", got=("0xf6", 2), expected="UTF-8"):
        prepare(WORDS, f"text:{tmp_path}", length=4, seed=0)
    with raises(InputError, got=tmp_path / "missing", remedy="text:stdlib"):
        prepare(WORDS, f"text:{tmp_path / 'missing'}", length=4, seed=0)
    (tmp_path / "empty").mkdir()
    with raises(InputError, got=tmp_path / "empty", expected=".txt"):
        prepare(WORDS, f"text:{tmp_path / 'empty'}", length=4, seed=0)


def test_text_without_a_tokenizer() -> None:
    with raises(InputError, what="tokenizer", got="text:stdlib", remedy="--inputs random"):
        prepare(stubs.stub_subject(), "text:stdlib", length=4, seed=0)


def test_the_standard_library_is_the_same_twice() -> None:
    text = standard_library_text()
    assert text == standard_library_text.__wrapped__()
    assert "Pretty-print a Python object" in text
    assert len(text) > 500_000


def test_crops_of_the_standard_library() -> None:
    prompts = prepare(BYTES, "text:stdlib", length=128, seed=0)
    assert prompts.batch(range(3)).shape == (3, 128)
    described = prompts.describe()
    assert described.text_python == platform.python_version()
    assert described.source == "text:stdlib"


def test_library_files_leave_out_tests_and_installed_packages(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "site-packages/x.py", "test/y.py", "a/tests/y.py", "test.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [file.relative_to(tmp_path).as_posix() for file in library_files(tmp_path)] == ["a/z.py", "b.py", "test.py"]


def test_docstrings_come_in_source_order() -> None:
    source = '"""one"""\nclass A:\n    """two"""\n    def f(self):\n        """\n        three\n        """\n'
    source += 'try:\n    pass\nexcept E:\n    def g():\n        """four"""\nasync def h():\n    """five"""\n'
    assert list(docstrings(ast.parse(source))) == ["one", "two", "three", "four", "five"]
