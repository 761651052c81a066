"""Whether a model's files are still the same, asked without loading it and mostly without reading them.

A stamp is cheap: sizes and times of the files, or the commit of a hub id. Where it is still the same, so is the model.
Where it is not, `content` reads the files and tells a copy from a change.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from posleak.models import builtin, cache as caching, hashing, shipped
from posleak.models.sources import snapshot_folder, split_revision

READ = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken", ".bin", ".py", ".gguf")
"""Ends of names of files that a model is made of."""


def file_stamp(name: str) -> str | None:
    """The same as long as the model's files are; None where that cannot be said without a network."""
    text, revision = split_revision(name)
    if text in builtin.BUILTIN_MODELS:
        return f"sha256 {builtin.BUILTIN_MODELS[text].gguf_sha256}"
    if text in shipped.names():
        return shipped.SOURCE
    place = _place(text, revision)
    if place is None:
        return _commit(text, revision)
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in _files(place)]
    return f"files {hashlib.sha256(json.dumps(facts).encode()).hexdigest()}"


def content_sha256(name: str) -> str | None:
    """A hash of everything in the model's files; None where there are none of one's own."""
    text, revision = split_revision(name)
    place = None if text in builtin.BUILTIN_MODELS or text in shipped.names() else _place(text, revision)
    if place is None:
        return None
    cache = caching.cache_folder()
    return hashing.joined_sha256({path.name: hashing.file_sha256(path, cache) for path in _files(place)})


def _place(text: str, revision: str | None) -> Path | None:
    """The file or folder itself; in a hub cache, the snapshot."""
    path = Path(text).expanduser()
    if path.is_dir():
        return snapshot_folder(path, revision)
    return path if path.is_file() else None


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.suffix in READ and path.is_file())


def _commit(text: str, revision: str | None) -> str | None:
    """The commit that the hub's cache on this machine has for a revision."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(text, "config.json", revision=revision) if text.count("/") <= 1 else None
    return f"commit {Path(found).parent.name}" if isinstance(found, str) else None
