"""Training batches and held-out prompts of a recipe.

Batches depend only on (seed, step): all variants of a seed read the same tokens in the same order, and an interrupted
training resumes with the next batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from posleak.inputs.backcopy import CHAIN_TOKENS, BackcopyBody
from posleak.inputs.bodies import SEED_LIMIT, draw

from .corpus import ALPHABET, CorpusPart, CorpusText, read_text
from .entropy import entropies
from .recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_PROMPTS = 64
"""Number of prompts for the held-out loss."""

_HELD_OUT_INDEX = SEED_LIMIT - 1
"""Index of the first held-out prompt; the others have lower indices, which training does not reach."""


@dataclass(frozen=True)
class DataFacts:
    """Description of the training data in a record.

    sha256        digest of the text;  parts: its sources with versions;  path: of a user's text
    tokens        number of training tokens; None: unlimited
    unigram_nats  loss of a model that knows only the frequencies of tokens
    """

    data: str
    sha256: str | None
    parts: tuple[CorpusPart, ...]
    tokens: int | None
    unigram_nats: float
    path: str | None = None


class Tokens(Protocol):
    """Source of batches. Position 0 has an ordinary token, which a BOS may replace."""

    @property
    def facts(self) -> DataFacts: ...

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        """Return ids [count, length], int64."""
        ...

    def held_out(self, length: int) -> np.ndarray:
        """Return the held-out ids [HELD_PROMPTS, length], int64."""
        ...


@dataclass(frozen=True, eq=False)
class TextTokens:
    """Crops of a text at random positions."""

    text: CorpusText
    path: str | None = None

    @cached_property
    def facts(self) -> DataFacts:
        text = self.text
        return DataFacts("text", text.sha256, text.parts, len(text.train), text.unigram_nats, self.path)

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        return _crops(self.text.train, seed, step, count, length)

    def held_out(self, length: int) -> np.ndarray:
        return _crops(self.text.held_out, 0, _HELD_OUT_INDEX, HELD_PROMPTS, length)


def _crops(text: np.ndarray, seed: int, step: int, count: int, length: int) -> np.ndarray:
    starts = draw(seed, step, count, below=len(text) - length)
    return text[starts[:, None] + np.arange(length)].astype(np.int64)


@dataclass(frozen=True, eq=False)
class BackcopyTokens:
    """Samples of the Bigram-Backcopy chain."""

    body: BackcopyBody

    @cached_property
    def facts(self) -> DataFacts:
        return DataFacts("backcopy", None, (), None, entropies().unigram)

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        return self.body.rows(seed, [step * count + row for row in range(count)], length)

    def held_out(self, length: int) -> np.ndarray:
        return self.body.rows(0, [_HELD_OUT_INDEX - row for row in range(HELD_PROMPTS)], length)


def tokens_for(recipe: Recipe, text: str | None = None) -> Tokens:
    """Return the tokens of a recipe; `text` is a path that replaces the documentation on this machine."""
    if recipe.data == "text":
        return TextTokens(read_text(text), text)
    return BackcopyTokens(BackcopyBody(np.arange(CHAIN_TOKENS)))


def character_tokenizer(*, bos: bool) -> PreTrainedTokenizerBase:
    """Return a tokenizer of characters with the ids of `ALPHABET`; other characters become question marks."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({character: id for id, character in enumerate(ALPHABET)}, unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.Replace("\t", "    "), normalizers.Replace(Regex("[^\n -~]"), "?")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if bos:
        tokenizer.add_special_tokens(["<bos>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", len(ALPHABET))]
        )
        settings["bos_token"] = "<bos>"
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    return fast
