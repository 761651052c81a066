"""A name -> a folder. Built-in name, folder, GGUF file, else hub id: in this order, and never by guessing.

A folder whose name is also a built-in name is reached as `./name`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, did_you_mean
from posleak.models import builtin, manifest, refusals

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from posleak.models.convert import Say

FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README.md"]
NOT_FILES = ["*/*", "consolidated*"]
"""Subfolders and Mistral's second copy of the weights."""


@dataclass(frozen=True)
class Located:
    """A folder in Hugging Face's layout, and what is known about where it came from."""

    folder: Path
    source: str
    revision: str | None = None
    quantisation: str | None = None
    licence: str | None = None
    weights_sha256: str | None = None


@dataclass(frozen=True)
class Wish:
    """What the caller allows while a name is resolved; `fits` is called before a download, and raises if too large."""

    cache: Path
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    fits: Callable[[PreTrainedConfig], None]
    progress: Say
    notice: Say


def resolve(name: str, wish: Wish) -> Located:
    """Where the model `name` is."""
    if name in builtin.BUILTIN:
        return _converted(builtin.fetch(name, wish.cache, progress=wish.progress, notice=wish.notice))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, wish.revision)
    if path.suffix.lower() == ".gguf" and path.is_file():
        from posleak.models import convert

        return _converted(convert.user_gguf(path.resolve(), wish.cache, wish.progress))
    if _looks_like_a_path(name):
        raise ModelError("no such file or folder", where=name, remedy="check the path; " + _nearest(path.name))
    return _hub(name, wish)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or name.count("/") > 1


def _nearest(name: str) -> str:
    return "for a built-in model, " + did_you_mean(name, builtin.BUILTIN)


def _converted(folder: Path) -> Located:
    record = manifest.read(folder)
    assert record is not None, f"{folder} was resolved without a manifest"
    return Located(
        folder,
        record.source,
        quantisation=record.quantisation,
        licence=record.licence,
        weights_sha256=record.weights_sha256,
    )


def _folder(path: Path, revision: str | None) -> Located:
    """A folder of the user's: a plain one, a snapshot in a hub cache, or the `models--org--name` above snapshots."""
    folder = _snapshot(path, revision)
    if manifest.read(folder) is not None:
        return _converted(folder)
    commit = folder.name if folder.parent.name == "snapshots" else None
    return Located(folder, "folder", revision=commit, licence=_licence(folder))


def _snapshot(path: Path, revision: str | None) -> Path:
    if (path / "config.json").is_file() or not (path / "snapshots").is_dir():
        return path.resolve()
    reference = path / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else (revision or "")
    snapshot = path / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        known = sorted(child.name for child in (path / "snapshots").iterdir())
        raise ModelError("no such revision in this hub cache", where=str(path), got=revision or "main", expected=known)
    return snapshot


def _hub(name: str, wish: Wish) -> Located:
    """A hub id. Its config is fetched first, so that a model can be refused before its weights are fetched."""
    extra = (["*.bin"] if wish.allow_pickle else []) + (["*.py"] if wish.trust_remote_code else [])
    code = ["*.py"] if wish.trust_remote_code else []
    first = _download(name, wish.revision, ["config.json", *code])
    wish.fits(refusals.read_config(first, trust_remote_code=wish.trust_remote_code))
    folder = _download(name, wish.revision, [*FILES, *extra])
    return Located(folder, "hub", revision=folder.name, licence=_licence(folder))


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The hub's error derives from httpx's base error; this finds that base without knowing which httpx the hub uses.
    transport = [base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)]
    failures: tuple[type[Exception], ...] = (*transport, HFValidationError, OSError, ValueError)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=NOT_FILES))
    except failures as error:
        raise ModelError(
            "no built-in model, folder or file of this name, and the hub did not give one",
            where=name if revision is None else f"{name} at {revision}",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            expected=f"a built-in name ({', '.join(builtin.BUILTIN)}), a folder, a .gguf file or a hub id",
            remedy=f"check the spelling ({did_you_mean(name, builtin.BUILTIN)}), the connection to the hub, "
            "HF_HUB_OFFLINE and HF_HUB_CACHE, and the access token (HF_TOKEN) of a gated model",
        ) from error


def _licence(folder: Path) -> str | None:
    """The licence that the model card states, if there is a card that can be read."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    import yaml
    from huggingface_hub import metadata_load

    try:
        stated = metadata_load(card) or {}
    except (ValueError, yaml.YAMLError):
        return None
    licence = stated.get("license_name") or stated.get("license")
    return None if licence is None else str(licence)
