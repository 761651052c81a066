"""Detect whether a model's files have changed, without loading it and mostly without reading them.

A stamp is cheap: sizes and times of the files, or the commit of a hub id. If it is unchanged, so is the model. If it
has changed, `content_sha256` reads the files and distinguishes a copy from a change.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from posleak.models import builtin, cache as caching, hashing, shipped
from posleak.models.sources import snapshot_folder, split_revision

MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken", ".bin", ".py", ".gguf")


def file_stamp(name: str) -> str | None:
    """Return a text that stays the same while the model's files do; None if that would need a network."""
    text, revision = split_revision(name)
    if text in builtin.BUILTIN_MODELS:
        return f"sha256 {builtin.BUILTIN_MODELS[text].gguf_sha256}"
    if text in shipped.names():
        return shipped.SOURCE
    paths = _model_files(text, revision)
    if paths is None:
        return _hub_commit(text, revision)
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return f"files {hashlib.sha256(json.dumps(facts).encode()).hexdigest()}"


def content_sha256(name: str) -> str | None:
    """Return a hash of the content of the model's files; None for built-in models, shipped models and hub ids."""
    text, revision = split_revision(name)
    if text in builtin.BUILTIN_MODELS or text in shipped.names():
        return None
    paths, cache = _model_files(text, revision), caching.cache_folder()
    return None if paths is None else hashing.joined_sha256({p.name: hashing.file_sha256(p, cache) for p in paths})


def _model_files(text: str, revision: str | None) -> list[Path] | None:
    """Return the file itself, or the files of the folder (in a hub cache, of the snapshot); None without either."""
    path = Path(text).expanduser()
    if path.is_dir():
        folder = snapshot_folder(path, revision)
        return sorted(file for file in folder.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
    return [path] if path.is_file() else None


def _hub_commit(text: str, revision: str | None) -> str | None:
    """Return the commit of a revision in the hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(text, "config.json", revision=revision) if text.count("/") <= 1 else None
    return f"commit {Path(path).parent.name}" if isinstance(path, str) else None
