"""The tokenizer, if there is one. Random-token measurements need none, so that its absence is no error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError
from posleak.models import bounds, pretrained, refusals, trust
from posleak.models.library_errors import translate_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "tekken.json")
"""Any of these means that the folder is meant to have a tokenizer."""
BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
"""What transformers reads besides, if it is there."""
SETTINGS, WORDS = "tokenizer_config.json", "tokenizer.json"
SAMPLE = "The cat sat."
REMEDY = "repair them, install the package that the message names, or remove them to measure without text"


def files(folder: Path) -> list[str]:
    """The files that a folder's tokenizer is made of, by their relative paths."""
    found = {path for pattern in (*PATTERNS, *BESIDE) for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def read(folder: Path, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None if it has none; an error if it has one that cannot be read."""
    if not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        return None
    from transformers import AutoTokenizer

    with translate_errors("the folder has tokenizer files that cannot be read", lambda: _damaged(folder), REMEDY):
        _require_harmless(folder, config, trust_remote_code)
        with pretrained.offline_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), config=config, trust_remote_code=trust_remote_code, local_files_only=True
            )
        prepended(tokenizer)
    return tokenizer


def _require_harmless(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Refuse huge files, and settings that name a class that is no tokenizer's, or code in another repository."""
    for name in files(folder):
        bounds.require_size(folder / name, bounds.MOST_WORDS)
    path = folder / SETTINGS
    settings = refusals.raw_json(path) if path.is_file() else {}
    trust.require_tokenizer_class(path, settings.get("tokenizer_class"))
    trust.require_tokenizer_class(folder / "config.json", getattr(config, "tokenizer_class", None))
    if trust_remote_code:
        trust.require_own_code(path, settings)


def _damaged(folder: Path) -> Path:
    """The first file that is no JSON, or no tokenizer, by itself; the folder if it is none of them."""
    from tokenizers import Tokenizer

    for path in (folder / name for name in files(folder) if name.endswith(".json")):
        try:
            with translate_errors("", path, ""):
                json.loads(path.read_bytes())
                if path.name == WORDS:
                    Tokenizer.from_file(str(path))
        except ModelError:
            return path
    return folder


def prepended(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text by itself, found by encoding one with and without specials."""
    with pretrained.silence_transformers():
        full = list(tokenizer(SAMPLE, add_special_tokens=True)["input_ids"])
        bare = list(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
