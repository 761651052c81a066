"""Position 0: every policy, with tokenizers that add a first token and tokenizers that do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Gemma3Config, PreTrainedConfig

from posleak.errors import InputError
from posleak.inputs import prepare
from support import inputs_subject as stubs
from support.errors import raises

ADDS = stubs.stub_subject(stubs.word_tokenizer(prepend="<s>"))
ADDS_NONE = stubs.stub_subject(stubs.word_tokenizer())
NO_TOKENIZER = stubs.stub_subject()


def configured(config: PreTrainedConfig) -> Any:
    """A subject of which only the config is asked; some configs in the wild are of no small model."""
    return SimpleNamespace(model=SimpleNamespace(config=config), tokenizer=None)


def first(subject: Any, bos: str | int) -> tuple[int | None, str | None]:
    token = prepare(subject, bos=bos, length=4, seed=0).first
    return token.id, token.token


@pytest.mark.parametrize(
    ("bos", "expected"),
    [
        ("auto", (1, "<s>")),
        ("tokenizer", (1, "<s>")),
        ("none", (None, None)),
        (2, (2, "</s>")),
        ("2", (2, "</s>")),
        ("</s>", (2, "</s>")),
        ("w0", (9, "w0")),
    ],
)
def test_policies_with_a_tokenizer_that_adds_a_bos(bos: str | int, expected: tuple[int | None, str | None]) -> None:
    assert first(ADDS, bos) == expected


def test_a_tokenizer_that_adds_nothing() -> None:
    assert first(ADDS_NONE, "tokenizer") == (None, None)
    assert first(ADDS_NONE, "auto") == (1, "<s>")


def test_without_a_tokenizer_ids_still_work() -> None:
    assert first(NO_TOKENIZER, "auto") == (1, None)
    assert first(NO_TOKENIZER, 5) == (5, None)


def test_a_config_that_names_no_bos_or_several() -> None:
    assert first(stubs.stub_subject(bos_token_id=None), "auto") == (None, None)
    assert first(configured(PreTrainedConfig.from_dict({"vocab_size": 9, "bos_token_id": [6, 7]})), "auto") == (6, None)
    assert first(configured(PreTrainedConfig.from_dict({"vocab_size": 9})), "auto") == (None, None)


def test_a_config_of_several_modalities_names_its_bos_in_either_part() -> None:
    whole = Gemma3Config.from_dict({"text_config": {"vocab_size": 50, "bos_token_id": 6}, "bos_token_id": 7})
    assert first(configured(whole), "auto") == (6, None)
    whole = Gemma3Config.from_dict({"text_config": {"vocab_size": 50, "bos_token_id": None}, "bos_token_id": 7})
    assert first(configured(whole), "auto") == (7, None)
    assert prepare(configured(whole), length=4, seed=0).vocabulary.rows == 50


def test_results_say_which_token_stood_there() -> None:
    described = prepare(ADDS, length=4, seed=0).describe()
    assert (described.bos, described.bos_id, described.bos_token) == ("auto", 1, "<s>")
    assert described.first_token == "token 1 '<s>' in every prompt, by BOS policy 'auto'"
    described = prepare(ADDS_NONE, bos="tokenizer", length=4, seed=0).describe()
    assert (described.bos, described.bos_id, described.bos_token) == ("tokenizer", None, None)
    assert described.first_token == "an ordinary token, another in each prompt; no BOS"


@pytest.mark.parametrize("bos", ["tokenizer", "<s>"])
def test_policies_that_need_a_tokenizer(bos: str) -> None:
    with raises(InputError, where="bos", what="tokenizer", got=repr(bos), remedy=("--bos 1", "--bos auto")):
        first(NO_TOKENIZER, bos)


def test_a_tokenizer_that_prepends_two_is_refused() -> None:
    subject = stubs.stub_subject(stubs.word_tokenizer(prepend="<pad> <s>"))
    with raises(InputError, where="'tokenizer'", got="[3, 1, 4", remedy="--bos TOKEN"):
        first(subject, "tokenizer")


@pytest.mark.parametrize(
    ("bos", "fields"),
    [
        ("atuo", {"where": "bos", "remedy": "'auto'"}),
        ("<S>", {"where": "bos", "remedy": "'<s>'"}),
        ("W7", {"where": "bos", "remedy": "'w7'"}),
        ("zebra", {"where": "bos", "expected": "auto | tokenizer | none"}),
        ("", {"what": "policy", "got": "''"}),
        (True, {"what": "policy", "got": "True"}),
        (409, {"what": "BOS token", "got": 409, "expected": "0 to 408"}),
        ("-1", {"what": "BOS token", "got": -1}),
    ],
)
def test_invalid_first_tokens(bos: str | int, fields: dict[str, object]) -> None:
    with raises(InputError, **fields):
        first(ADDS, bos)
