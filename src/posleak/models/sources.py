"""A name -> a folder. Built-in name, folder, GGUF file, else hub id: in this order, and never by guessing.

A folder whose name is also a built-in name is reached as `./name`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, PosleakError, did_you_mean
from posleak.files import open_regular, read_regular, stays_in_folder
from posleak.models import builtin, cache as caching, manifest, refusals, shipped
from posleak.models.library_errors import escape_surrogates, translate_errors
from posleak.models.manifest import ConversionManifest
from posleak.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from posleak.models.convert import Say

FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README.md"]
NOT_FILES = ["*/*", "consolidated*"]
"""Subfolders and Mistral's second copy of the weights."""

_FRONT = re.compile(r"\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", re.S | re.M)
_STATED = r"""["']?([^\s"'#*&\[{|>!][^"'#\n]{0,99}?)["']?[ \t]*(?:#.*)?$"""
_LICENCE = re.compile(r"^(license|license_name):[ \t]*(?:\n[ \t]*-[ \t]+)?" + _STATED, re.M)
"""A line at the top level of the front matter; a list gives its first item."""


CARD_BYTES = 1 << 18
"""How much of a model card is read: its front matter is at its start."""


_STEP = re.compile(r"\D*?(\d+)\D*")
"""One number in the name, which is the step."""


@dataclass(frozen=True)
class Located:
    """A folder in Hugging Face's layout, and what is known about where it came from; `record` if posleak made it."""

    folder: Path
    source: str
    revision: str | None = None
    quantisation: str | None = None
    licence: str | None = None
    record: ConversionManifest | None = None


@dataclass(frozen=True)
class Wish:
    """What the caller allows while a name is resolved; `fits` is called before a download, and raises if too large."""

    cache: Path
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    verify: bool
    fits: Callable[[PreTrainedConfig], None]
    progress: Say
    notice: Say


def at_hand(name: str, cache: Path) -> Located | None:
    """A shipped model, or a converted one in the cache, of this name, found without asking anybody; else None."""
    if name in shipped.names():
        return Located(shipped.folder(name), shipped.SOURCE, licence=shipped.LICENCE)
    if name not in builtin.BUILTIN_MODELS:
        return None
    folder = builtin.cached_folder(name, cache)
    return None if folder is None else _converted(folder)


def require_path(name: str) -> None:
    """Refuse what looks like a path and leads nowhere."""
    if name in builtin.BUILTIN_MODELS or not looks_like_a_path(name):
        return
    with translate_errors("no model can be found under this name", name, _nearest(name)):
        path = Path(name).expanduser()
        there = path.exists()
    if not there:
        raise ModelError("no such file or folder", where=name, remedy="check the path; " + _nearest(path.name))


def no_revisions(where: str, revision: str, what: str) -> ModelError:
    return ModelError(
        f"{what} has no revisions: only hub ids and folders of a hub cache have", where=where, got=revision,
        remedy="leave the revision out",
    )  # fmt: skip


def resolve(name: str, wish: Wish) -> Located:
    """Where the model `name` is."""
    if name in builtin.BUILTIN_MODELS:
        return _converted(builtin.fetch(name, wish.cache, progress=wish.progress, notice=wish.notice))
    with translate_errors("no model can be found under this name", name, _nearest(name)):
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        return _folder(path, wish.revision)
    if path.suffix.lower() == ".gguf" and is_file:
        from posleak.models import convert

        return _converted(convert.user_gguf(path.resolve(), wish.cache, wish.progress, verify=wish.verify))
    if looks_like_a_path(name):
        raise ModelError(
            "this file is no model", where=name, expected="a folder or a .gguf file",
            remedy="name the folder that holds the model's config.json; " + _nearest(path.name),
        )  # fmt: skip
    return _hub(name, wish)


def _nearest(name: str) -> str:
    return "for a built-in model, " + did_you_mean(name[:200], known_names())


def known_names() -> list[str]:
    """Names of models that need no hub: built-in ones, and those that are shipped."""
    return [*builtin.BUILTIN_MODELS, *shipped.names()]


def _converted(folder: Path) -> Located:
    record = manifest.read(folder)
    if record is None:
        raise ModelError(
            f"the folder's {manifest.FILE} is damaged, or was written by another version of posleak",
            where=str(folder / manifest.FILE),
            remedy="load the model by its name or from its .gguf file; it is then converted again",
        )
    return Located(folder, record.source, quantisation=record.quantisation, licence=record.licence, record=record)


def _folder(path: Path, revision: str | None) -> Located:
    """A folder of the user's: a plain one, a snapshot in a hub cache, or the `models--org--name` above snapshots."""
    with translate_errors("the folder cannot be read", path, "make it readable for you, or name another"):
        folder = snapshot_folder(path, revision)
        if escape_surrogates(str(folder)) != str(folder):
            raise ModelError(
                "the folder's name is no UTF-8, and safetensors opens no such file", where=escape_surrogates(str(folder)),
                remedy="rename the folder, or load it through a link with another name",
            )  # fmt: skip
        if (folder / manifest.FILE).exists():
            return _converted(folder)
        commit = folder.name if folder.parent.name == "snapshots" else None
        return Located(folder, "folder", revision=commit, licence=_licence(folder))


def snapshot_folder(path: Path, revision: str | None) -> Path:
    """Return the folder itself or, of a hub cache, the snapshot of a revision, which must be in its snapshots/."""
    if (path / "config.json").is_file() or not (path / "snapshots").is_dir():
        if revision is not None:
            raise no_revisions(str(path), revision, "this folder")
        return path.resolve()
    asked, snapshots = revision or "main", path / "snapshots"
    reference = path / "refs" / asked
    commit = read_regular(reference).decode().strip() if stays_in_folder(asked) and reference.is_file() else asked
    snapshot = snapshots / commit
    if not stays_in_folder(commit) or not snapshot.is_dir() or snapshot.resolve().parent != snapshots.resolve():
        known = sorted(child.name for child in snapshots.iterdir())
        raise ModelError(
            "no such revision in this hub cache", where=str(path),
            got=asked if commit == asked else f"{asked}, which refers to {commit[:200]!r}", expected=known,
            remedy="name a folder of its snapshots/, or fetch the model again",
        )  # fmt: skip
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
    from huggingface_hub import constants, snapshot_download

    try:
        with caching.writing(Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE"):
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=NOT_FILES))
    except PosleakError:
        raise
    except Exception as error:
        raise ModelError(
            "no built-in model, folder or file of this name, and the hub did not give one",
            where=name if revision is None else f"{name} at {revision}",
            got=one_line(error),
            expected=f"a built-in name ({', '.join(builtin.BUILTIN_MODELS)}), a folder, a .gguf file or a hub id",
            remedy=f"check the spelling ({did_you_mean(name[:200], known_names())}), the connection to the hub, "
            "HF_HUB_OFFLINE and HF_HUB_CACHE, and the access token (HF_TOKEN) of a gated model",
        ) from error


def _licence(folder: Path) -> str | None:
    """The licence that the model card states in its front matter; read by lines, since YAML can be made to explode."""
    try:
        with open_regular(folder / "README.md") as card:
            start = card.read(CARD_BYTES).decode(errors="replace").replace("\r\n", "\n")
    except OSError:
        return None
    front = _FRONT.match(start)
    stated = dict(_LICENCE.findall(front[1])) if front is not None else {}
    return stated.get("license_name") or stated.get("license")


def looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or name.count("/") > 1


def split_revision(name: str) -> tuple[str, str | None]:
    """`name@revision` as its two parts; a file or folder that is called so is a name, with no revision."""
    at = [place for place, character in enumerate(name) if character == "@"]
    for place in (len(name), *reversed(at)):  # a path may have such signs of its own
        with suppress(OSError, ValueError, RuntimeError):
            if Path(name[:place]).expanduser().exists():
                return name[:place], name[place + 1 :] or None
    before, _, revision = name.partition("@")
    return (before, revision) if before and revision else (name, None)


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The model folders inside `folder` that are named by a training step, in the order of their steps."""
    found: dict[int, Path] = {}
    with translate_errors("the folder cannot be read", str(folder), "name the folder above the checkpoints"):
        place = Path(folder).expanduser()
        models = (
            [path for path in sorted(place.iterdir()) if (path / "config.json").is_file()] if place.is_dir() else []
        )
    for path in models:
        match = _STEP.fullmatch(path.name)
        if match is None:
            continue
        step = int(match[1])
        if step in found:
            raise ModelError(
                "two checkpoints have the same step", where=str(folder), got=f"{found[step].name} and {path.name}",
                remedy="load them one by one, or move one away",
            )  # fmt: skip
        found[step] = path
    if not found:
        raise ModelError(
            "the folder holds no checkpoints", where=str(folder),
            expected="subfolders such as checkpoint-100 and checkpoint-200, each with config.json and *.safetensors",
            remedy="name the folder above the checkpoints, or load one model folder by itself",
        )  # fmt: skip
    return [found[step] for step in sorted(found)]
