"""Random, constant and given tokens: the same numbers everywhere, uniform, and never special."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedConfig

from posleak.errors import InputError
from posleak.inputs import ConstantToken, InputFacts, RandomTokens, Source, TextCrops, parse, prepare
from posleak.inputs.bodies import draw
from posleak.typed import from_json, plain
from support import inputs_subject as stubs
from support.errors import raises

WORDS_0_0 = [0xA30FEBCFD9C2825F, 0x4510BDF882D9D721, 0x0A7D3DA94ECDE8B8, 0x043B27B61342F01D, 0xD0327A782CDE513B]
"""The first raw words of PCG64(SeedSequence([0, 0])): numpy promises that these never change."""

PLAIN = stubs.stub_subject()
"""32 rows, no tokenizer, BOS 1 and EOS 2: 30 allowed ids, 0, 3, 4, …, 31."""
SPELLED = stubs.stub_subject(stubs.word_tokenizer())


def test_golden_draws_by_the_documented_formula() -> None:
    by_hand = [word * 30 >> 64 for word in WORDS_0_0]
    assert by_hand == [19, 8, 1, 0, 24]
    assert draw(0, 0, 5, below=30).tolist() == by_hand
    wide = 2**32 - 1  # the two halves of the product carry into each other
    assert draw(0, 0, 5, below=wide).tolist() == [word * wide >> 64 for word in WORDS_0_0]


def test_golden_prompts() -> None:
    prompts = prepare(PLAIN, "random", bos="none", length=5, seed=0)
    assert prompts.ids(0).tolist() == [21, 10, 3, 0, 26]  # the draws 19, 8, 1, 0, 24 in the list 0, 3, 4, …
    assert prepare(PLAIN, "random", length=5, seed=0).ids(0).tolist() == [1, 10, 3, 0, 26]
    assert prompts.ids(0).dtype == np.int64


def test_a_prompt_depends_on_seed_and_index_alone() -> None:
    prompts = prepare(PLAIN, length=7, seed=3)
    alone = prompts.ids(5)
    assert np.array_equal(prompts.batch([5])[0], alone)
    assert np.array_equal(prompts.batch(range(11))[5], alone)
    assert np.array_equal(prompts.batch([9, 5, 5])[2], alone)
    assert np.array_equal(prepare(PLAIN, length=13, seed=3).ids(5)[:7], alone)
    assert not np.array_equal(prompts.ids(6), alone)
    assert not np.array_equal(prepare(PLAIN, length=7, seed=4).ids(5), alone)
    assert prompts.batch([]).shape == (0, 7)


def test_bos_policy_changes_place_0_only() -> None:
    for inputs in ("random", "constant"):
        one, other = (prepare(SPELLED, inputs, bos=bos, length=9, seed=2).ids(4) for bos in ("auto", "none"))
        assert one[0] == 1
        assert other[0] != 1
        assert np.array_equal(one[1:], other[1:])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 2**32 - 1), length=st.integers(2, 600))
def test_special_tokens_never_appear(seed: int, index: int, length: int) -> None:
    ids = prepare(SPELLED, bos="none", length=length, seed=seed).ids(index)
    assert ids.shape == (length,)
    assert ids.min() > 3
    assert ids.max() < len(SPELLED.tokenizer)


def test_what_counts_as_special() -> None:
    tokenizer = stubs.word_tokenizer()
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    tokenizer.add_tokens(["plain"])
    subject = stubs.stub_subject(tokenizer, vocab_size=len(tokenizer) + 9, eos_token_id=[2, 7], pad_token_id=8)
    vocabulary = prepare(subject, length=2, seed=0).vocabulary
    absent = sorted(set(range(vocabulary.size)) - set(vocabulary.allowed.tolist()))
    tool = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert absent == [0, 1, 2, 3, 7, 8, tool]
    assert vocabulary.size == len(tokenizer)
    assert vocabulary.rows == len(tokenizer) + 9
    assert vocabulary.excluded == 7


def test_a_smaller_embedding_than_the_tokenizer_bounds_the_ids() -> None:
    prompts = prepare(stubs.stub_subject(stubs.word_tokenizer(), vocab_size=20), bos="none", length=500, seed=0)
    assert prompts.ids(0).max() == 19


def test_random_tokens_are_uniform() -> None:
    ids = prepare(PLAIN, bos="none", length=3000, seed=0).batch(range(20))
    counts = np.bincount(ids.ravel(), minlength=32)[prepare(PLAIN, length=2, seed=0).vocabulary.allowed]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 10 < chi_square < 59  # 29 degrees of freedom: both tails below 0.001
    neighbours = np.corrcoef(ids[:, :-1].ravel(), ids[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 0.02


def test_a_constant_token_fills_every_prompt() -> None:
    prompts = prepare(PLAIN, "constant:7", length=4, seed=0)
    assert prompts.batch([0, 6]).tolist() == [[1, 7, 7, 7]] * 2
    chosen = prepare(PLAIN, "constant", bos="none", length=4, seed=0)
    assert chosen.batch([0, 6]).tolist() == [[21] * 4] * 2
    assert chosen.describe().constant_id == 21
    assert chosen.describe().first_token == "token 21 in every prompt, like every other place; no BOS"


def test_given_ids_are_used_as_they_stand() -> None:
    table = np.array([[5, 6, 7], [5, 8, 9]])
    prompts = prepare(PLAIN, table, length=3, seed=0)
    table[0, 0] = 31
    assert prompts.batch([1, 0]).tolist() == [[5, 8, 9], [5, 6, 7]]
    assert prompts.available == 2
    assert prepare(PLAIN, length=3, seed=0).available is None
    description = prompts.describe()
    assert (description.bos, description.source) == ("as given", "ids")
    assert description.first_token == "token 5 in every prompt, as given"
    with raises(InputError, where="inputs", got=2, expected="0 to 1"):
        prompts.ids(2)


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ([[5, 6, 32]], {"got": 32, "expected": "0 to 31"}),
        ([[5, -1, 3]], {"got": -1, "expected": "0 to 31"}),
        ([5, 6, 7], {"got": "shape (3,)", "expected": "[B, T]"}),
        ([[0.5, 1.0, 2.0]], {"got": "dtype float64", "expected": "[B, T]"}),
        (np.empty((0, 3), dtype=int), {"got": "shape (0, 3)", "expected": "[B, T]"}),
        ([[5, 6]], {"remedy": "length=2"}),
    ],
)
def test_given_ids_that_cannot_be_used(table: object, fields: dict[str, object]) -> None:
    with raises(InputError, where="inputs", **fields):
        prepare(PLAIN, np.asarray(table), length=3, seed=0)


def test_given_ids_refuse_a_bos_policy() -> None:
    with raises(InputError, where="bos", got="'none'", remedy="column 0"):
        prepare(PLAIN, np.array([[5, 6, 7]]), bos="none", length=3, seed=0)


def test_parse_and_text_are_inverse() -> None:
    sources: list[Source] = [RandomTokens(), ConstantToken(), ConstantToken(7), TextCrops("a:b"), TextCrops("stdlib")]
    assert [parse(source.text) for source in sources] == sources


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("randm", {"remedy": "'random'"}),
        ("random:3", {"expected": "random"}),
        ("constant:x", {"expected": "constant:ID", "remedy": "constant:42"}),
        ("constant:-1", {"expected": "constant:ID"}),
        ("text", {"expected": "text:stdlib"}),
        ("text:", {"expected": "text:PATH"}),
    ],
)
def test_invalid_sources(text: str, fields: dict[str, object]) -> None:
    with raises(InputError, where="inputs", got=repr(text), **fields):
        parse(text)


def test_a_constant_outside_the_vocabulary() -> None:
    with raises(InputError, where="inputs", what="constant", got=32, expected="0 to 31"):
        prepare(PLAIN, "constant:32", length=4, seed=0)


@pytest.mark.parametrize("length", [1, 0, -3, True, 2.0])
def test_invalid_lengths(length: int) -> None:
    with raises(InputError, where="length", got=length, expected=2):
        prepare(PLAIN, length=length, seed=0)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True])
def test_invalid_seeds(seed: int) -> None:
    with raises(InputError, where="seed", got=seed, expected="2**32 - 1"):
        prepare(PLAIN, length=4, seed=seed)


def test_a_negative_index() -> None:
    with raises(InputError, where="inputs", got=-1, expected="0 to 2**32 - 1"):
        prepare(PLAIN, length=4, seed=0).ids(-1)


def test_the_description_goes_through_json_and_has_the_same_keys_for_every_source() -> None:
    one = prepare(PLAIN, length=4, seed=9).describe()
    two = prepare(SPELLED, "constant", length=4, seed=9).describe()
    assert from_json(InputFacts, json.dumps(plain(one))) == one
    assert plain(one).keys() == plain(two).keys()
    assert (one.seed, one.length, one.source) == (9, 4, "random")
    assert (one.vocabulary_size, one.vocabulary_excluded) == (32, 2)
    allowed = np.array([0, *range(3, 32)], dtype="<i8")
    assert one.vocabulary_sha256 == hashlib.sha256(allowed.tobytes()).hexdigest()


def test_a_config_without_a_vocabulary() -> None:
    subject: Any = SimpleNamespace(model=SimpleNamespace(config=PreTrainedConfig()), tokenizer=None)
    with raises(InputError, got="vocab_size = None", expected=3):
        prepare(subject, length=4, seed=0)
