"""BOS policies: which token is at position 0. The choice is made once per run and written into the result.

Position 0 attends only to itself, so its token determines the states that sink-reading heads read later. Runs with
different tokens there are not comparable, and tokenizers of one family disagree about adding a BOS.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from posleak.errors import InputError, did_you_mean
from posleak.inputs.vocabulary import Vocabulary, id_list

POLICIES = ("auto", "tokenizer", "none")
AS_GIVEN = "as given"
_EXPECTED = " | ".join(POLICIES) + " | a token id | a token as the tokenizer spells it"
_SAMPLE_TEXT = "the position of a word"


@dataclass(frozen=True)
class FirstToken:
    """A BOS policy, and the token that it puts at position 0.

    policy   `auto`, `tokenizer`, `none`, the requested token, or `as given`
    id       the token at position 0 of every prompt; None: the prompt's own first token stays there
    token    the same token as the tokenizer spells it
    """

    policy: str
    id: int | None
    token: str | None


def resolve_first_token(bos: str | int, configs: list[Any], vocabulary: Vocabulary) -> FirstToken:
    """Return the token at position 0 under policy `bos`.

    `auto`: the BOS that the config names (the first id of the first config that names one), else none
    `tokenizer`: the token that the tokenizer prepends by default, or none
    `none`: no BOS
    any other value: one token, by its id (an int, or digits) or by its spelling. A token that is spelled like a policy
    or a number must be given by its id.
    """
    token = _resolve(bos, configs, vocabulary)
    if token is None:
        return FirstToken(str(bos), None, None)
    what = "the BOS token in the model's config" if bos == "auto" else f"the BOS token (policy {str(bos)!r})"
    vocabulary.check(token, what, "use --bos none, or a token of the vocabulary: --bos TOKEN")
    return FirstToken(str(bos), token, vocabulary.spell(token))


def named_bos(configs: list[Any]) -> int | None:
    """Return the BOS id of the first config that has one, even if it is outside the vocabulary."""
    ids = [token for config in configs for token in id_list(getattr(config, "bos_token_id", None))]
    return ids[0] if ids else None


def _resolve(bos: str | int, configs: list[Any], vocabulary: Vocabulary) -> int | None:
    if bos == "none":
        return None
    if bos == "auto":
        return named_bos(configs)
    if bos == "tokenizer":
        return _prepended(vocabulary.tokenizer)
    if isinstance(bos, Integral) and not isinstance(bos, bool):
        return int(bos)
    if isinstance(bos, str) and bos.removeprefix("-").isascii() and bos.removeprefix("-").isdigit():
        return int(bos)
    return _spelled(bos, vocabulary.tokenizer)


def _prepended(tokenizer: Any) -> int | None:
    """Return the token that the tokenizer puts before a text when it adds special tokens; None if it adds none."""
    if tokenizer is None:
        raise _no_tokenizer("tokenizer")
    plain = list(tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False))
    whole = list(tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=True))
    starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    if not plain or not starts or starts[0] > 1:
        raise InputError(
            "the tokenizer prepends more than one token, or changes the text", where="bos 'tokenizer'",
            got=f"{_SAMPLE_TEXT!r} becomes {plain} without and {whole} with special tokens",
            expected="at most one token before those of the text",
            remedy="choose the first token: --bos TOKEN, --bos auto or --bos none",
        )  # fmt: skip
    return int(whole[0]) if starts[0] == 1 else None


def _spelled(bos: object, tokenizer: Any) -> int:
    if not isinstance(bos, str) or bos == "":
        raise InputError("not a BOS policy", where="bos", got=repr(bos), expected=_EXPECTED)
    if tokenizer is None:
        raise _no_tokenizer(bos)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if bos in vocabulary:
        return int(tokenizer.convert_tokens_to_ids(bos))
    raise InputError(
        "neither a BOS policy nor a token of this model", where="bos", got=repr(bos), expected=_EXPECTED,
        remedy=did_you_mean(bos, _candidates(bos, vocabulary, tokenizer)),
    )  # fmt: skip


def _candidates(bos: str, vocabulary: dict[str, int], tokenizer: Any) -> list[str]:
    """Return suggestions: policies, some special tokens, and tokens that differ from `bos` in case or a space mark."""
    plain = bos.strip().casefold()
    similar = (token for token in vocabulary if token.lstrip("Ġ▁ ").casefold() == plain)
    return [*POLICIES, *sorted(similar)[:5], *tokenizer.all_special_tokens[:20]]


def _no_tokenizer(bos: str) -> InputError:
    return InputError(
        "this BOS policy needs a tokenizer, and the model has none", where="bos", got=repr(bos),
        expected="auto | none | a token id",
        remedy="give the token by its id, such as --bos 1, or use --bos auto or --bos none",
    )  # fmt: skip
