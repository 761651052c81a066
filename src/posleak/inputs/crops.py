"""Crops from the inside of texts.

A document's start has its own statistics (titles, imports, capital letters), and a model reads "start" from them: that
would be content posing as position. So a crop begins at a uniformly drawn character, never the first, and its first
few tokens are thrown away: they may be half a word, which no tokenizer was trained on.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from posleak.errors import InputError, shorter_prompts
from posleak.inputs.corpus import Corpus, read_corpus
from posleak.inputs.randomness import draw
from posleak.inputs.vocabulary import Vocabulary

SAMPLED_CROPS = 8
"""Crops from which the length of a token is read."""

DROPPED_TOKENS = 4
"""Tokens thrown away at the start of a slice, and again at its end, where a word may be cut."""


@dataclass(frozen=True, eq=False)
class CropBody:
    """Every place that leaves room for `length` tokens is equally likely, so long documents are read more often."""

    corpus: Corpus
    vocabulary: Vocabulary
    reach: tuple[int, ...]
    """[documents + 1], from 0: cumulative number of characters at which a crop may begin."""

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        which, start = self._place(seed, index)
        return self._crop(self.corpus.documents[which], start, length)

    def _place(self, seed: int, index: int) -> tuple[int, int]:
        """The document of a crop, and the character at which it begins."""
        place = int(draw(seed, index, 1, below=self.reach[-1])[0])
        which = bisect_right(self.reach, place) - 1
        return which, 1 + place - self.reach[which]

    def spans(self, seed: int, count: int, length: int) -> tuple[np.ndarray, int]:
        """Where the first crops lie in the text, as parts of it [count, 2], and how many tokens the text has.

        Both are estimates: how many characters a token has is read off a few crops.
        """
        before = list(accumulate(map(len, self.corpus.documents), initial=0))
        places = [self._place(seed, index) for index in range(count)]
        pieces = [self.corpus.documents[which][start : start + 6 * length] for which, start in places[:SAMPLED_CROPS]]
        tokens = sum(len(inner_tokens(piece, self.vocabulary)) + 2 * DROPPED_TOKENS for piece in pieces)
        wide = sum(map(len, pieces)) / tokens
        starts = np.array([before[which] + start for which, start in places], dtype=float)
        ends = np.minimum(starts + wide * (length + DROPPED_TOKENS), [before[which + 1] for which, _ in places])
        return np.stack([starts, ends], axis=1) / self.corpus.characters, round(self.corpus.characters / wide)

    def describe(self) -> dict[str, Any]:
        return {
            "text_sha256": self.corpus.sha256,
            "text_documents": len(self.corpus.documents),
            "text_characters": self.corpus.characters,
            "text_python": self.corpus.python,
        }

    def _crop(self, document: str, start: int, length: int) -> np.ndarray:
        """`length` ordinary tokens from `start` on; the slice grows until it holds them.

        Where the document ends too early after all (tokens merge differently from here), the crop begins earlier.
        """
        width = 6 * (length + 2 * DROPPED_TOKENS)
        while True:
            ids = inner_tokens(document[start : start + width], self.vocabulary)
            if len(ids) >= length:
                return ids[:length]
            if start + width < len(document):
                width *= 2
            elif start > 1:
                start = max(1, start - 8 * (length - len(ids)))
            else:
                raise _too_short(self.corpus, len(ids), length)


def crop_body(path: str, length: int, vocabulary: Vocabulary, most: int | None = None) -> CropBody:
    """Finds the places at which a crop of `length` tokens can begin, and refuses a text that has none.

    most: of the standard library, only about so many characters.
    """
    if vocabulary.tokenizer is None:
        raise InputError(
            "text needs a tokenizer, and the model has none",
            where="inputs",
            got=f"text:{path}",
            expected="a model with a tokenizer",
            remedy="--inputs random works without one",
        )
    corpus = read_corpus(path, most)
    rooms = [_room(document, length, vocabulary) for document in corpus.documents]
    reach = tuple(accumulate((places for places, _ in rooms), initial=0))
    if reach[-1] == 0:
        raise _too_short(corpus, max(tokens for _, tokens in rooms), length)
    if reach[-1] >= 2**32:
        raise InputError("the text is too long", where="inputs", got=f"{reach[-1]} characters", expected="below 2**32")
    return CropBody(corpus, vocabulary, reach)


def _room(document: str, length: int, vocabulary: Vocabulary) -> tuple[int, int]:
    """(number of characters at which a crop may begin, tokens in the longest tail tried).

    The document's tail is lengthened by a quarter until it holds `length` inner tokens. A crop may begin where the tail
    does, or earlier: at the characters 1 … start, which are `start` many. A document with too few tokens has none.
    """
    width = 2 * (length + 2 * DROPPED_TOKENS)
    while True:
        start = max(1, len(document) - width)
        tokens = len(inner_tokens(document[start:], vocabulary))
        if tokens >= length:
            return start, tokens
        if start == 1:
            return 0, tokens
        width += width // 4


def inner_tokens(text: str, vocabulary: Vocabulary) -> np.ndarray:
    """int64 [*]: ordinary tokens of `text` without those at its two cut ends."""
    # verbose=False: a slice longer than the model's context is no mistake here
    ids = vocabulary.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return vocabulary.keep_ordinary(np.asarray(ids[DROPPED_TOKENS:-DROPPED_TOKENS], dtype=np.int64))


def _too_short(corpus: Corpus, tokens: int, length: int) -> InputError:
    many = len(corpus.documents) > 1
    join = "join the files into one" if many else None
    return InputError(
        "no document is long enough for one crop" if many else "the text is too short for one crop",
        where="inputs",
        got=f"{tokens} tokens inside the longest of {len(corpus.documents)} documents" if many else f"{tokens} tokens",
        expected=f"{length} tokens or more, not counting {DROPPED_TOKENS} at either end",
        remedy=", or ".join(way for way in ("use a longer text", shorter_prompts(tokens), join) if way),
    )
