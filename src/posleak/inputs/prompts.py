"""Prompts of a run. `prepare` checks all input settings before the model runs, and returns `Prompts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from posleak.errors import InputError

from .bodies import FIRST_DONOR, SAMPLING_METHOD, SEED_LIMIT, Body, ConstantBody, DonorGivenBody, GivenBody, check_seed
from .corpus import CropBody
from .given import GivenPrompts, check_length
from .source import Source, parse
from .vocabulary import AS_GIVEN, FirstToken, Vocabulary, read_vocabulary, resolve_first_token

if TYPE_CHECKING:
    from posleak.models import Subject

DONOR_MARGIN = 64
"""Number of tokens by which a donor is longer than its prompt. No prompt sees the first ones, which may be sinks."""

CHECKED_PROMPTS = 1000
"""Maximum number of prompts that are compared."""

OVERLAP_THRESHOLD = 0.25
"""Share of the tokens that occur in several prompts above which a warning is issued."""


@dataclass(frozen=True)
class InputFacts:
    """Facts about the inputs that results record; None if a fact does not apply.

    bos, bos_id, bos_token   the BOS policy, and the token that it put at position 0
    first_token              a sentence about the token at position 0
    vocabulary_…             number of tokens, number of special tokens, hash of the ordinary ids
    method                   how random words are converted to tokens
    ids_sha256               hash of prompts that were given as ids
    context                  number of donor tokens before each prompt
    text_…                   hash and size of the text of crops, and the Python version of `text:stdlib`
    other                    facts that a user-defined source reports
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
        """Return whether the prompts are equal except for position 0 and for donors before them."""
        ignored = ("bos", "bos_id", "bos_token", "first_token", "vocabulary_size", "vocabulary_excluded", "context")
        same: dict[str, Any] = {name: getattr(self, name) for name in ignored}
        return replace(other, **same) == self


@dataclass(frozen=True, eq=False)
class Prompts:
    """An unlimited sequence of prompts. Prompt b depends only on (seed, b).

    A longer random prompt begins with the shorter one. Another BOS policy changes only position 0.

    length   T, including the first token
    donor    generator of the documents before the prompts; None: no donors;  donor_tokens: their length
    """

    source: str
    first: FirstToken
    vocabulary: Vocabulary
    body: Body
    length: int
    seed: int
    donor: Body | None = None
    donor_tokens: int = 0

    def ids(self, index: int) -> np.ndarray:
        """Return one prompt, int64 [T]."""
        if not 0 <= index < SEED_LIMIT:
            raise InputError("prompt index out of range", where="inputs", got=index, expected="0 to 2**32 - 1")
        return self._with_first(self.body.ids(self.seed, index, self.length))

    def batch(self, indices: Iterable[int]) -> np.ndarray:
        """Return several prompts, each after its donor, int64 [B, context + T]."""
        rows = np.empty((len(indices := list(indices)), self.context + self.length), dtype=np.int64)
        for row, index in zip(rows, indices):
            row[self.context :] = self.ids(index)
            if self.donor is not None:
                row[: self.context] = self._with_first(self.donor.ids(self.seed, FIRST_DONOR + index, self.context))
        return rows

    @property
    def context(self) -> int:
        """The number of donor tokens before each prompt."""
        return 0 if self.donor is None else self.donor_tokens

    def after_donors(self, tokens: int) -> Prompts:
        """Return the same prompts, each after a donor of this many tokens from the same source.

        The BOS policy applies to donors too.
        """
        body: Body
        if isinstance(self.body, GivenBody):
            body = DonorGivenBody(self.body.table)
        else:
            body = parse(self.source).body(tokens, self.seed, self.vocabulary)
        return replace(self, donor=body, donor_tokens=tokens)

    def _with_first(self, ids: np.ndarray) -> np.ndarray:
        if self.first.id is not None:
            ids[0] = self.first.id
        return ids

    @property
    def available(self) -> int | None:
        """The number of given prompts; None: unlimited."""
        return len(self.body.table) if isinstance(self.body, GivenBody) else None

    @property
    def policy(self) -> str | int:
        """The BOS policy under which other prompts begin with the same token as these."""
        if self.first.policy != AS_GIVEN or not isinstance(self.body, GivenBody):
            return self.first.policy
        starts = np.unique(self.body.table[:, 0])
        return int(starts[0]) if len(starts) == 1 else "none"

    @property
    def caution(self) -> str | None:
        """A warning about given prompts, which need not be stationary; None for prompts from a source."""
        if not isinstance(self.body, GivenBody):
            return None
        B, T = self.body.table.shape
        alike = int((self.body.table[:, 1:] == self.body.table[:1, 1:]).all(0).sum()) if B > 1 else 0
        same = f" ({alike} of the {T - 1} positions after the first have equal tokens in all prompts)" if alike else ""
        return (
            "the prompts were given and may not be stationary: content at fixed positions, such as a template or the "
            f"start of a document{same}, counts as leakage of position; inputs='random' and crops (text:PATH) are "
            "stationary"
        )

    def describe(self) -> InputFacts:
        """Return the facts about these prompts that results record."""
        facts = self.body.describe()
        known = {name: facts[name] for name in InputFacts.__dataclass_fields__ if name in facts}
        return InputFacts(
            source=self.source, length=self.length, seed=self.seed, bos=self.first.policy, bos_id=self.first.id,
            bos_token=self.first.token, first_token=self._first_token(), vocabulary_size=self.vocabulary.size,
            vocabulary_excluded=self.vocabulary.excluded, vocabulary_sha256=self.vocabulary.sha256,
            method=None if isinstance(self.body, GivenBody) else SAMPLING_METHOD, context=self.context, **known,
            other={name: value for name, value in facts.items() if name not in known},
        )  # fmt: skip

    def _first_token(self) -> str:
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
    subject: Subject,
    inputs: str | Source | GivenPrompts | np.ndarray = "random",
    *,
    bos: str | int = "auto",
    length: int,
    seed: int,
) -> Prompts:
    """Return prompts of `length` tokens, including the BOS. Raise InputError for invalid settings.

    inputs: the name of a source, a source, given prompts, or a table of ids [B, T], which is used unchanged
    bos: BOS policy (`resolve_first_token`)
    seed: random seed for the prompts
    """
    length, seed = check_length(length), check_seed(seed)
    vocabulary = read_vocabulary(subject)
    if isinstance(inputs, np.ndarray):
        inputs = GivenPrompts.of_ids(inputs, bos)
    if isinstance(inputs, GivenPrompts):
        return Prompts(inputs.kind, inputs.first, vocabulary, inputs.body(length, vocabulary), length, seed)
    source = parse(inputs) if isinstance(inputs, str) else inputs
    first = resolve_first_token(bos, vocabulary)
    return Prompts(source.text, first, vocabulary, source.body(length, seed, vocabulary), length, seed)


def bos_outside_vocabulary(subject: Subject) -> str | None:
    """Return a sentence if the BOS id in the config is outside the vocabulary; None otherwise."""
    vocabulary = read_vocabulary(subject)
    if vocabulary.bos is None or vocabulary.has(vocabulary.bos):
        return None
    return f"the BOS id in the config is {vocabulary.bos}, but the vocabulary has {vocabulary.rows} tokens"


def repeat_notes(prompts: Prompts, count: int) -> Iterator[str]:
    """Yield warnings about the first `count` prompts: some are equal, or crops overlap."""
    checked = min(count, CHECKED_PROMPTS)
    ids = prompts.batch(range(checked))[:, -prompts.length :]
    different = len(np.unique(ids, axis=0))
    if different < checked:
        same = f"all {checked} prompts are the same"
        which = same if different == 1 else f"only {different} of {checked} prompts differ"
        remedies: dict[type, str] = {
            ConstantBody: "this is expected of a constant token; use --inputs random or text:PATH for valid intervals",
            GivenBody: "remove the copies",
            CropBody: "use a longer or more varied text",
        }
        remedy = remedies.get(type(prompts.body), "use inputs with more variety")
        yield f"{which}: intervals over prompts are too narrow, since they assume independence; {remedy}"
    if isinstance(prompts.body, CropBody) and different > 1:
        length = prompts.length
        spans, tokens = prompts.body.spans(prompts.seed, checked, length)
        shared, repeated = overlap(spans)
        if shared > OVERLAP_THRESHOLD:
            yield (
                f"prompts overlap, so that intervals are too narrow: the text has about {tokens:,} tokens, {checked} "
                f"prompts of {length} use {checked * length:,}, and {shared:.0%} of these occur in another prompt too "
                f"({repeated:.0%} of the text is used more than once); use a longer text, fewer --prompts or a shorter "
                "--length"
            )


def overlap(spans: np.ndarray) -> tuple[float, float]:
    """Return the share of spans [B, 2] that another span covers too, and the share of the text [0, 1] that is."""
    edges = np.concatenate([spans[:, 0], spans[:, 1]])
    steps = np.repeat([1, -1], len(spans))
    order = np.argsort(edges, kind="stable")
    depth, width = np.cumsum(steps[order])[:-1], np.diff(edges[order])
    read = float((depth * width).sum())
    return float((depth * width)[depth > 1].sum()) / read, float(width[depth > 1].sum())
