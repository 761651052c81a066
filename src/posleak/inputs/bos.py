"""Which token stands at position 0: a policy, decided once and written into the result.

Position 0 sees only itself, so its token sets the whole trajectory that sink-reading heads read later. Two runs that
differ in it differ in everything, and tokenizers of one family disagree about adding it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from posleak.errors import InputError, did_you_mean
from posleak.inputs.vocabulary import Vocabulary, id_list

POLICIES = ("auto", "tokenizer", "none")
AS_GIVEN = "as given"
_PROBE = "the position of a word"


@dataclass(frozen=True)
class FirstToken:
    """A BOS policy, and the token that it puts at position 0."""

    policy: str
    """`auto`, `tokenizer`, `none`, the token that was asked for, or `as given`."""
    id: int | None
    """The token at position 0 of every prompt; None: the prompt's own first token stands there."""
    token: str | None
    """The same, as the tokenizer writes it."""


def resolve_first_token(bos: str | int, configs: list[Any], vocabulary: Vocabulary) -> FirstToken:
    """The first token under policy `bos`.

    `auto`: what the config names as BOS (the first of `configs` that names one; of a list, its first), else none.
    `tokenizer`: what the tokenizer prepends by itself, perhaps nothing. `none`: nothing. Else one token, by its id (an
    int, or digits) or as the tokenizer writes it. A token that is spelled like a policy or a number needs its id.
    """
    token = _resolve(bos, configs, vocabulary)
    if token is None:
        return FirstToken(str(bos), None, None)
    said = "the BOS that the config names" if bos == "auto" else f"the BOS token (policy {str(bos)!r})"
    vocabulary.check(token, said, "use --bos none, or name a token of the vocabulary: --bos TOKEN")
    return FirstToken(str(bos), token, vocabulary.spell(token))


def named_bos(configs: list[Any]) -> int | None:
    """What the first config that names a BOS names, in or outside of the vocabulary."""
    named = [token for config in configs for token in id_list(getattr(config, "bos_token_id", None))]
    return named[0] if named else None


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
    """The token that appears before a text's own tokens when the tokenizer may add special ones."""
    if tokenizer is None:
        raise _no_tokenizer("tokenizer")
    plain = list(tokenizer.encode(_PROBE, add_special_tokens=False))
    whole = list(tokenizer.encode(_PROBE, add_special_tokens=True))
    starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    if not plain or not starts or starts[0] > 1:
        raise InputError(
            "the tokenizer does not prepend one token or none",
            where="inputs, BOS policy 'tokenizer'",
            got=f"{_PROBE!r} is {plain} alone and {whole} with special tokens",
            expected="at most one token before the text's own",
            remedy="name the first token: --bos TOKEN, --bos auto or --bos none",
        )
    return int(whole[0]) if starts[0] == 1 else None


def _spelled(bos: object, tokenizer: Any) -> int:
    if not isinstance(bos, str) or bos == "":
        raise InputError(
            "not a BOS policy", where="inputs", got=repr(bos), expected=" | ".join(POLICIES) + " | an id | a token"
        )
    if tokenizer is None:
        raise _no_tokenizer(bos)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if bos in vocabulary:
        return int(tokenizer.convert_tokens_to_ids(bos))
    raise InputError(
        "neither a BOS policy nor a token of this model",
        where="inputs",
        got=repr(bos),
        expected=" | ".join(POLICIES) + " | an id | a token as the tokenizer writes it",
        remedy=did_you_mean(bos, _candidates(bos, vocabulary, tokenizer)),
    )


def _candidates(bos: str, vocabulary: dict[str, int], tokenizer: Any) -> list[str]:
    """Names worth proposing: all policies, some special tokens, and spellings of `bos` with a space mark or case."""
    plain = bos.strip().casefold()
    alike = (token for token in vocabulary if token.lstrip("Ġ▁ ").casefold() == plain)
    return [*POLICIES, *sorted(alike)[:5], *tokenizer.all_special_tokens[:20]]


def _no_tokenizer(bos: str) -> InputError:
    return InputError(
        "this BOS policy needs a tokenizer, and the model has none",
        where="inputs",
        got=repr(bos),
        expected="auto | none | an id",
        remedy="give the token by its id, as in --bos 1, or use --bos auto or --bos none",
    )
