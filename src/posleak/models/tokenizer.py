"""Read the tokenizer of a folder. It is optional: measurements on random tokens need none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError
from posleak.models import bounds, configs, pretrained
from posleak.models.library_errors import translate_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "tekken.json")
"""Any of these files means that the folder has a tokenizer."""
EXTRA_PATTERNS = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
"""Other files that transformers reads for a tokenizer."""
SETTINGS_FILE, VOCABULARY_FILE = "tokenizer_config.json", "tokenizer.json"
SAMPLE = "The cat sat."
REMEDY = "repair them, install the package that the message names, or remove them to measure without text"


def tokenizer_files(folder: Path) -> list[str]:
    """Return the relative paths of the files of a folder's tokenizer."""
    paths = {path for pattern in (*PATTERNS, *EXTRA_PATTERNS) for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def read_tokenizer(
    folder: Path, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Return the folder's tokenizer, or None if it has none. Raise if it has one that cannot be read."""
    if not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        return None
    from transformers import AutoTokenizer

    with translate_errors("the folder has tokenizer files that cannot be read", lambda: _damaged_file(folder), REMEDY):
        _require_harmless(folder, config, trust_remote_code)
        with pretrained.offline_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), config=config, trust_remote_code=trust_remote_code, local_files_only=True
            )
        prepended_ids(tokenizer)
    return tokenizer


def _require_harmless(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Reject huge files, and settings that name a class of another kind, or code in another repository."""
    for name in tokenizer_files(folder):
        bounds.require_max_size(folder / name, bounds.MAX_TOKENIZER)
    path = folder / SETTINGS_FILE
    settings = configs.read_json_object(path) if path.is_file() else {}
    configs.require_tokenizer_class(path, settings.get("tokenizer_class"))
    configs.require_tokenizer_class(folder / "config.json", getattr(config, "tokenizer_class", None))
    if trust_remote_code:
        configs.require_local_code(path, settings)


def _damaged_file(folder: Path) -> Path:
    """Return the first file that is not valid JSON, or not a valid tokenizer; the folder if there is none."""
    from tokenizers import Tokenizer

    for path in (folder / name for name in tokenizer_files(folder) if name.endswith(".json")):
        try:
            with translate_errors("", path, ""):
                json.loads(path.read_bytes())
                if path.name == VOCABULARY_FILE:
                    Tokenizer.from_file(str(path))
        except ModelError:
            return path
    return folder


def prepended_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text, found by encoding one with and without special tokens."""
    with pretrained.silence_transformers():
        full = list(tokenizer(SAMPLE, add_special_tokens=True)["input_ids"])
        bare = list(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
