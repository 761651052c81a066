"""What a recipe's models read: batches for each step of training, and prompts that are held out.

Both follow from (seed, step) alone, whatever the variant: all variants of a seed read the same tokens in the same
order, and a training that was interrupted goes on with the batch that came next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from posleak.inputs.backcopy import CHAIN_TOKENS, BackcopyBody
from posleak.inputs.randomness import SEED_LIMIT, draw

from .corpus import ALPHABET, CorpusPart, CorpusText, read_text
from .entropy import entropies
from .recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_PROMPTS = 64
"""Prompts on which the held-out loss is computed."""

_APART = SEED_LIMIT - 1
"""Where held-out prompts are counted from, downwards: no training comes so far."""


@dataclass(frozen=True)
class DataFacts:
    """What a record says about what was read.

    sha256        of the text;  parts: where it came from, with versions;  path: of a text that was named
    tokens        there are to train on; None: as many as one likes
    unigram_nats  loss of a model that knows how often each token occurs, and nothing else
    """

    data: str
    sha256: str | None
    parts: tuple[CorpusPart, ...]
    tokens: int | None
    unigram_nats: float
    path: str | None = None


class Tokens(Protocol):
    """Where batches come from. Place 0 is an ordinary token; who wants a BOS writes it there."""

    @property
    def facts(self) -> DataFacts: ...

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        """int64 [count, length]"""
        ...

    def held_out(self, length: int) -> np.ndarray:
        """int64 [HELD_PROMPTS, length]; always the same."""
        ...


@dataclass(frozen=True, eq=False)
class TextTokens:
    """Crops from random places of a text."""

    text: CorpusText
    path: str | None = None

    @cached_property
    def facts(self) -> DataFacts:
        text = self.text
        return DataFacts("text", text.sha256, text.parts, len(text.train), text.unigram_nats, self.path)

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        return _crops(self.text.train, seed, step, count, length)

    def held_out(self, length: int) -> np.ndarray:
        return _crops(self.text.held_out, 0, _APART, HELD_PROMPTS, length)


def _crops(text: np.ndarray, seed: int, step: int, count: int, length: int) -> np.ndarray:
    starts = draw(seed, step, count, below=len(text) - length)
    return text[starts[:, None] + np.arange(length)].astype(np.int64)


@dataclass(frozen=True, eq=False)
class BackcopyTokens:
    """Walks of the chain."""

    body: BackcopyBody

    @cached_property
    def facts(self) -> DataFacts:
        return DataFacts("backcopy", None, (), None, entropies().unigram)

    def batch(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        return self.body.rows(seed, [step * count + row for row in range(count)], length)

    def held_out(self, length: int) -> np.ndarray:
        return self.body.rows(0, [_APART - row for row in range(HELD_PROMPTS)], length)


def tokens_for(recipe: Recipe, text: str | None = None) -> Tokens:
    """The tokens of a recipe; `text`: a path, instead of the documentation on this machine."""
    if recipe.data == "text":
        return TextTokens(read_text(text), text)
    return BackcopyTokens(BackcopyBody(np.arange(CHAIN_TOKENS)))


def byte_tokenizer(*, bos: bool) -> PreTrainedTokenizerBase:
    """A tokenizer of single characters, ids as in `ALPHABET`; what is not in it becomes a question mark."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({character: id for id, character in enumerate(ALPHABET)}, unk_token="?"))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.Replace("\t", "    "), normalizers.Replace(Regex("[^\n -~]"), "?")]
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if bos:
        made.add_special_tokens(["<bos>"])
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", len(ALPHABET))]
        )
        settings["bos_token"] = "<bos>"
    found: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=made, **settings)
    return found
