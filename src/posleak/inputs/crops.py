"""Crops from the inside of texts.

The start of a document has its own statistics (titles, imports, capital letters), from which a model can recognise it;
content would then be mistaken for position. A crop therefore begins at a uniformly drawn character other than the
first, and its first few tokens are dropped: they may be fragments of a word, on which no tokenizer was trained.
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
"""Number of crops from which the mean number of characters per token is estimated."""

DROPPED_TOKENS = 4
"""Tokens that are dropped at either end of a slice of text, where a word may be cut."""


@dataclass(frozen=True, eq=False)
class CropBody:
    """Crops of a corpus. All starts that leave room for a crop are equally likely, so long documents have more crops.

    reach: [documents + 1], starting with 0: cumulative number of characters at which a crop may begin
    """

    corpus: Corpus
    vocabulary: Vocabulary
    reach: tuple[int, ...]

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        document, start = self._place(seed, index)
        return self._crop(self.corpus.documents[document], start, length)

    def _place(self, seed: int, index: int) -> tuple[int, int]:
        """Return the index of the document of a crop, and the character at which the crop begins."""
        place = int(draw(seed, index, 1, below=self.reach[-1])[0])
        document = bisect_right(self.reach, place) - 1
        return document, 1 + place - self.reach[document]

    def spans(self, seed: int, count: int, length: int) -> tuple[np.ndarray, int]:
        """Estimate the spans of the first crops as fractions of the corpus, [count, 2], and its number of tokens.

        The number of characters per token is estimated from a few crops.
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
        """Return `length` ordinary tokens from `start` on, from a slice that is doubled until it contains them.

        If the document ends too early (a slice may be tokenized differently from the whole), the crop begins earlier.
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


def crop_body(path: str, length: int, vocabulary: Vocabulary, max_characters: int | None = None) -> CropBody:
    """Return crops of `length` tokens from the texts at `path`. Raise InputError if no document is long enough.

    max_characters: read only about this much of the standard library.
    """
    if vocabulary.tokenizer is None:
        raise InputError(
            "text inputs need a tokenizer, and the model has none", where="inputs", got=f"text:{path}",
            expected="a model with a tokenizer", remedy="use --inputs random, which needs no tokenizer",
        )  # fmt: skip
    corpus = read_corpus(path, max_characters)
    rooms = [_room(document, length, vocabulary) for document in corpus.documents]
    reach = tuple(accumulate((starts for starts, _ in rooms), initial=0))
    if reach[-1] == 0:
        raise _too_short(corpus, max(tokens for _, tokens in rooms), length)
    if reach[-1] >= 2**32:
        raise InputError(
            "the text is too long", where="inputs", got=f"{reach[-1]:,} characters", expected=f"fewer than {2**32:,}",
            remedy="use a smaller file or folder",
        )  # fmt: skip
    return CropBody(corpus, vocabulary, reach)


def _room(document: str, length: int, vocabulary: Vocabulary) -> tuple[int, int]:
    """Return the number of characters at which a crop may begin, and the number of tokens of the longest tail tried.

    The tail of the document is lengthened by a quarter until it has `length` inner tokens. A crop may begin where the
    tail does or earlier: at characters 1 … start. A document with too few tokens has no such character.
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
    """Return the ordinary tokens of `text` without DROPPED_TOKENS at either end, int64."""
    # verbose=False: no warning about slices that are longer than the model's context
    ids = vocabulary.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return vocabulary.keep_ordinary(np.asarray(ids[DROPPED_TOKENS:-DROPPED_TOKENS], dtype=np.int64))


def _too_short(corpus: Corpus, tokens: int, length: int) -> InputError:
    documents = len(corpus.documents)
    remedies = ("use a longer text", shorter_prompts(tokens), "join the files into one" if documents > 1 else None)
    return InputError(
        "all documents are too short for a prompt" if documents > 1 else "the text is too short for a prompt",
        where="inputs", got=f"{tokens} tokens" + (f" in the longest of {documents} documents" if documents > 1 else ""),
        expected=f"at least {length} tokens, not counting {DROPPED_TOKENS} at either end",
        remedy=", or ".join(remedy for remedy in remedies if remedy),
    )  # fmt: skip
