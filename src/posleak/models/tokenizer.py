"""The tokenizer, if there is one. Random-token measurements need none, so that its absence is no error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "tekken.json")
"""Any of these means that the folder is meant to have a tokenizer."""
SAMPLE = "The cat sat."


def read(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None if it has none; an error if it has one that cannot be read."""
    if not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            "the folder has tokenizer files that cannot be read",
            where=str(folder),
            got=str(error).strip().splitlines()[0],
            remedy="repair them, install the package that the message names, or remove them to measure without text",
        ) from error
    return tokenizer


def prepended(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text by itself, found by encoding one with and without specials."""
    full = list(tokenizer(SAMPLE, add_special_tokens=True)["input_ids"])
    bare = list(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
