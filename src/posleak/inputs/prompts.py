"""`prepare` checks everything about the input before any model runs; `Prompts` is the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posleak.errors import InputError
from posleak.inputs.bodies import FIRST_DONOR, Body, ConstantBody, DonorGivenBody, GivenBody, given_body
from posleak.inputs.bos import AS_GIVEN, FirstToken, named_bos, resolve_first_token
from posleak.inputs.given import GivenPrompts, ReadableSubject, check_length
from posleak.inputs.randomness import SAMPLING_METHOD, SEED_LIMIT, check_seed
from posleak.inputs.source import Source, parse
from posleak.inputs.vocabulary import Vocabulary, read_vocabulary, text_configs

DONOR_MARGIN = 64
"""A donor is so much longer than its prompt: its first tokens, the sinks among them, are never lent."""


@dataclass(frozen=True)
class InputFacts:
    """What a result must say about its input; None where a fact does not apply.

    bos, bos_id, bos_token   the policy, and the token that it put at position 0
    first_token              the same as a sentence
    vocabulary_…             how many tokens it has, how many of them are special, and a hash of the ordinary ids
    method                   how random numbers become tokens
    ids_sha256               hash of prompts that were given as ids
    context                  tokens of another document before each prompt
    text_…                   of the text that crops are taken from: hash, size, and the Python version of `text:stdlib`
    other                    what a user-defined source says about itself
    """

    source: str
    length: int
    seed: int
    bos: str
    bos_id: int | None
    bos_token: str | None
    first_token: str
    vocabulary_size: int
    vocabulary_excluded: int
    vocabulary_sha256: str
    method: str | None
    constant_id: int | None = None
    constant_token: str | None = None
    text_sha256: str | None = None
    text_documents: int | None = None
    text_characters: int | None = None
    text_python: str | None = None
    ids_sha256: str | None = None
    context: int = 0
    other: dict[str, Any] = field(default_factory=dict)

    def same_tokens(self, other: InputFacts) -> bool:
        """Are the prompts the same, apart from position 0 and from what stands before them?"""
        return replace(self, **NO_BOS) == replace(other, **NO_BOS)


NO_BOS: dict[str, Any] = {"bos": "", "bos_id": None, "bos_token": None, "first_token": "", "vocabulary_size": 0,
                          "vocabulary_excluded": 0, "context": 0}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Prompts:
    """As many prompts as one asks for; prompt b depends on (seed, b) alone, not on how many are made or in what order.

    A longer random prompt begins with the shorter one, and another BOS policy changes place 0 only.
    """

    source: str
    first: FirstToken
    vocabulary: Vocabulary
    body: Body
    length: int
    """T, the first token included."""
    seed: int
    donor: Body | None = None
    """What the documents before the prompts are made of; None: nothing stands before them."""

    def ids(self, index: int) -> np.ndarray:
        """int64 [T]"""
        if not 0 <= index < SEED_LIMIT:
            raise InputError("prompts are numbered from 0 to 2**32 - 1", where="inputs", got=index)
        ids = self.body.ids(self.seed, index, self.length)
        if self.first.id is not None:
            ids[0] = self.first.id
        return ids

    def batch(self, indices: Iterable[int]) -> np.ndarray:
        """int64 [B, context + T]"""
        rows = [np.concatenate([self._before(index), self.ids(index)]) for index in indices]
        return np.stack(rows) if rows else np.empty((0, self.context + self.length), dtype=np.int64)

    @property
    def context(self) -> int:
        """How many tokens of another document stand before each prompt."""
        return 0 if self.donor is None else self.length + DONOR_MARGIN

    def after_donors(self) -> Prompts:
        """The same prompts, each after a document of the same kind with a first token of its own."""
        body: Body
        if isinstance(self.body, GivenBody):
            body = DonorGivenBody(self.body.table)
        else:
            body = parse(self.source).body(self.length + DONOR_MARGIN, self.seed, self.vocabulary)
        return replace(self, donor=body)

    def _before(self, index: int) -> np.ndarray:
        if self.donor is None:
            return np.empty(0, dtype=np.int64)
        ids = self.donor.ids(self.seed, FIRST_DONOR + index, self.context)
        if self.first.id is not None:
            ids[0] = self.first.id
        return ids

    @property
    def available(self) -> int | None:
        """How many prompts there are; None: as many as one asks for."""
        return len(self.body.table) if isinstance(self.body, GivenBody) else None

    @property
    def policy(self) -> str | int:
        """The BOS policy under which other prompts begin as these do."""
        if self.first.policy != AS_GIVEN or not isinstance(self.body, GivenBody):
            return self.first.policy
        starts = np.unique(self.body.table[:, 0])
        return int(starts[0]) if len(starts) == 1 else "none"

    @property
    def caution(self) -> str | None:
        """What is to be known of numbers from prompts that were given; None for others, which are stationary."""
        if not isinstance(self.body, GivenBody):
            return None
        B, T = self.body.table.shape
        alike = int((self.body.table[:, 1:] == self.body.table[:1, 1:]).all(0).sum()) if B > 1 else 0
        same = f" (the same token in every prompt at {alike} of {T - 1} places after the first)" if alike else ""
        return (
            "the prompts were given: what their texts have at fixed places, such as a template or the start of a "
            f"document{same}, counts as leakage of position; inputs='random' and crops (text:PATH) have no such places"
        )

    def describe(self) -> InputFacts:
        """What a result must say about its input."""
        said = self.body.describe()
        known = {name: said[name] for name in InputFacts.__dataclass_fields__ if name in said}
        return InputFacts(
            source=self.source, length=self.length, seed=self.seed, bos=self.first.policy, bos_id=self.first.id,
            bos_token=self.first.token, first_token=self._first_token(), vocabulary_size=self.vocabulary.size,
            vocabulary_excluded=self.vocabulary.excluded, vocabulary_sha256=self.vocabulary.sha256,
            method=None if isinstance(self.body, GivenBody) else SAMPLING_METHOD, context=self.context, **known,
            other={name: value for name, value in said.items() if name not in known},
        )  # fmt: skip

    def _first_token(self) -> str:
        """A sentence: which token stood at position 0."""
        if self.first.id is not None:
            return f"{self._name(self.first.id)} in every prompt, by BOS policy {self.first.policy!r}"
        if isinstance(self.body, ConstantBody):
            return f"{self._name(self.body.token)} in every prompt, like every other place; no BOS"
        if isinstance(self.body, GivenBody):
            starts = np.unique(self.body.table[:, 0])
            which = self._name(int(starts[0])) + " in every prompt" if len(starts) == 1 else f"{len(starts)} tokens"
            return f"{which}, as given"
        return "an ordinary token, another in each prompt; no BOS"

    def _name(self, token: int) -> str:
        spelled = self.vocabulary.spell(token)
        return f"token {token}" if spelled is None else f"token {token} {spelled!r}"


def prepare(
    subject: ReadableSubject,
    inputs: str | Source | GivenPrompts | np.ndarray = "random",
    *,
    bos: str | int = "auto",
    length: int,
    seed: int,
) -> Prompts:
    """Prompts of `length` tokens, BOS included, or an InputError that says what to change.

    `inputs` is what `parse` reads, its result, or prompts that were given: a table of ids [B, T] is used as it stands.
    """
    length, seed = check_length(length), check_seed(seed)
    configs = text_configs(subject.model.config)
    vocabulary = read_vocabulary(configs, subject.tokenizer)
    source = parse(inputs) if isinstance(inputs, str) else inputs
    if not isinstance(source, np.ndarray | GivenPrompts) and hasattr(source, "body"):
        first = resolve_first_token(bos, configs, vocabulary)
        return Prompts(source.text, first, vocabulary, source.body(length, seed, vocabulary), length, seed)
    given = source if isinstance(source, GivenPrompts) else GivenPrompts.of_ids(source, bos)
    return Prompts(given.kind, given.first, vocabulary, given_body(given.table, length, vocabulary), length, seed)


def bos_outside_vocabulary(subject: ReadableSubject) -> str | None:
    """What is wrong with the BOS that the config names, where the model cannot embed it; else None."""
    configs = text_configs(subject.model.config)
    vocabulary, token = read_vocabulary(configs, subject.tokenizer), named_bos(configs)
    if token is None or vocabulary.has(token):
        return None
    return f"the config names BOS {token}, and the vocabulary has {vocabulary.rows} tokens"
