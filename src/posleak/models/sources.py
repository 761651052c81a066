"""Resolve a name to a folder: a built-in or shipped name, a folder, a GGUF file, else a hub id, in this order.

A folder whose name is also a built-in name is loaded as `./name`. `file_stamp` detects whether a model's files have
changed: it is cheap (sizes and times of files, or the commit of a hub id). If the stamp is unchanged, so is the model.
If it has changed, `content_sha256` reads the files and distinguishes a copy from a change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, PosleakError, did_you_mean, translate_errors
from posleak.files import open_regular, read_regular, stays_in_folder
from posleak.models import adapters, builtin, cache as caching, configs, hashing
from posleak.models.builtin import OnStatus, known_names
from posleak.text import escape_surrogates, one_line

if TYPE_CHECKING:
    from posleak.models.memory import Target

HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README.md"]
TOKENIZER_PATTERNS = [pattern for pattern in HUB_PATTERNS if pattern != "*.safetensors"]
IGNORED_PATTERNS = ["*/*", "consolidated*"]
"""Subfolders, and Mistral's second copy of the weights."""

CARD_BYTES = 1 << 18
"""How much of a model card is read: its front matter is at its start."""
_FRONT_MATTER = re.compile(r"\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", re.S | re.M)
_VALUE = r"""["']?([^\s"'#*&\[{|>!][^"'#\n]{0,99}?)["']?[ \t]*(?:#.*)?$"""
_LICENCE = re.compile(r"^(license|license_name):[ \t]*(?:\n[ \t]*-[ \t]+)?" + _VALUE, re.M)
"""A line at the top level of the front matter; for a list, its first item."""
FILE_KINDS = {
    ".safetensors": "weights without a config",
    ".bin": "weights without a config, in a pickle file",
    ".pt": "weights without a config, in a pickle file",
    ".pth": "weights without a config, in a pickle file",
    ".json": "a JSON file",
}
"""Files that belong to a model, by their suffix."""
MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken", ".bin", ".py", ".gguf")
_STEP = re.compile(r"\D*?(\d+)\D*")
"""A folder name with one number, which is the training step."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load`, resolved: the cache, the revision, what the caller allows, and the callbacks."""

    cache: Path
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    verify: bool
    progress: OnStatus
    notice: OnStatus


@dataclass(frozen=True)
class LocatedModel:
    """A folder in Hugging Face's layout, and where it came from; `record` if posleak converted it."""

    folder: Path
    source: str
    revision: str | None = None
    quantisation: str | None = None
    licence: str | None = None
    record: caching.ConversionManifest | None = None


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `name@revision`. An existing file or folder with an @ in its name has no revision."""
    ends = [place for place, character in enumerate(name) if character == "@"]
    for end in (len(name), *reversed(ends)):
        with suppress(OSError, ValueError, RuntimeError):
            if Path(name[:end]).expanduser().exists():
                return name[:end], name[end + 1 :] or None
    before, _, revision = name.partition("@")
    return (before, revision) if before and revision else (name, None)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or name.count("/") > 1


def _suggestion(name: str) -> str:
    return "for a built-in model, " + did_you_mean(name[:200], known_names())


def existing_path(name: str) -> Path | None:
    """Return the file or folder of this name, if there is one. Reject a name that looks like a path to nothing."""
    if name in known_names():
        return None
    with translate_errors("no model can be found under this name", name, _suggestion(name)):
        path = Path(name).expanduser()
        exists = path.exists()
    if not exists and _looks_like_a_path(name):
        raise ModelError("no such file or folder", where=name, remedy="check the path; " + _suggestion(path.name))
    return path if exists else None


def no_revisions_error(where: str, revision: str, what: str) -> ModelError:
    return ModelError(
        f"{what} has no revisions: only hub ids and folders of a hub cache have", where=where, got=revision,
        remedy="omit the revision",
    )  # fmt: skip


def locate_offline(name: str, cache: Path) -> LocatedModel | None:
    """Return a shipped model, or a converted one in the cache; None if there is none of this name."""
    if name in builtin.shipped_names():
        return LocatedModel(builtin.shipped_folder(name), builtin.SHIPPED_SOURCE, licence=builtin.SHIPPED_LICENCE)
    folder = builtin.cached_folder(name, cache) if name in builtin.BUILTIN_MODELS else None
    return None if folder is None else _converted(folder)


def resolve(name: str, options: LoadOptions, target: Target) -> LocatedModel:
    """Return the folder of a model. Download or convert it if needed; reject a download that does not fit `target`."""
    if name in builtin.BUILTIN_MODELS:
        return _converted(builtin.fetch(name, options.cache, progress=options.progress, notice=options.notice))
    path = existing_path(name)
    if path is not None and path.is_dir():
        return _folder(path, options.revision)
    if path is not None and path.is_file() and path.suffix.lower() == ".gguf":
        from posleak.models.convert import convert_file

        return _converted(convert_file(path.resolve(), options.cache, options.progress, verify=options.verify))
    if path is not None:
        raise _not_a_model(name, path)
    return _hub(name, options, target)


def _not_a_model(name: str, path: Path) -> ModelError:
    """Return the error for an existing file, which is not sought on the hub."""
    part = FILE_KINDS.get(path.suffix.lower())
    folder = path.parent if (path.parent / "config.json").is_file() else None
    remedy = f"pass its folder, {folder}" if folder else "pass the folder that contains it with config.json"
    return ModelError(
        "this file is not a model" if part is None else f"this file is only a part of a model: {part}", where=name,
        expected="a folder with config.json, a .gguf file, or a name that is not that of a file",
        remedy=remedy if part or folder else "pass the folder with the model's config.json; " + _suggestion(path.name),
    )  # fmt: skip


def _converted(folder: Path) -> LocatedModel:
    record = caching.read_manifest(folder)
    if record is None:
        raise ModelError(
            f"{caching.MANIFEST_FILE} is damaged, or was written by another version of posleak",
            where=str(folder / caching.MANIFEST_FILE),
            remedy="load the model by its name or from its .gguf file; it is then converted again",
        )  # fmt: skip
    return LocatedModel(folder, record.source, quantisation=record.quantisation, licence=record.licence, record=record)


def _folder(path: Path, revision: str | None) -> LocatedModel:
    """Return a folder of the user: a plain one, a snapshot in a hub cache, or the `models--org--name` above it."""
    with translate_errors("the folder cannot be read", path, "grant yourself read permission, or pass another folder"):
        folder = snapshot_folder(path, revision)
        if (escaped := escape_surrogates(str(folder))) != str(folder):
            raise ModelError(
                "the folder's name is not UTF-8, and safetensors cannot open files in it", where=escaped,
                remedy="rename the folder, or load it through a link with another name",
            )  # fmt: skip
        if (folder / caching.MANIFEST_FILE).exists():
            return _converted(folder)
        commit = folder.name if folder.parent.name == "snapshots" else None
        return LocatedModel(folder, "folder", revision=commit, licence=_licence(folder))


def snapshot_folder(path: Path, revision: str | None) -> Path:
    """Return the folder itself or, for a hub cache, the snapshot of a revision, which must be in its snapshots/."""
    if (path / "config.json").is_file() or not (path / "snapshots").is_dir():
        if revision is not None:
            raise no_revisions_error(str(path), revision, "this folder")
        return path.resolve()
    name, snapshots = revision or "main", path / "snapshots"
    reference = path / "refs" / name
    commit = read_regular(reference).decode().strip() if stays_in_folder(name) and reference.is_file() else name
    snapshot = snapshots / commit
    if not stays_in_folder(commit) or not snapshot.is_dir() or snapshot.resolve().parent != snapshots.resolve():
        raise ModelError(
            "no such revision in this hub cache", where=str(path),
            got=name if commit == name else f"{name}, which refers to {commit[:200]!r}",
            expected=sorted(child.name for child in snapshots.iterdir()),
            remedy="pass a folder of its snapshots/, or download the model again",
        )  # fmt: skip
    return snapshot


def _hub(name: str, options: LoadOptions, target: Target) -> LocatedModel:
    """Download a hub id; its config first, so that a model can be rejected before its weights are downloaded."""
    trusted = options.trust_remote_code
    code = ["*.py"] if trusted else []
    first = _download(name, options.revision, ["config.json", adapters.CONFIG_FILE, *code])
    if not (first / "config.json").is_file() and (first / adapters.CONFIG_FILE).is_file():
        return LocatedModel(locate_adapter(name, options, options.revision), "hub", revision=first.name)
    target.require_fit(configs.read_config(first, trust_remote_code=trusted), name, trusted)
    pickles = ["*.bin"] if options.allow_pickle else []
    folder = _download(name, options.revision, [*HUB_PATTERNS, *pickles, *code])
    return LocatedModel(folder, "hub", revision=folder.name, licence=_licence(folder))


def locate_adapter(name: str, options: LoadOptions, revision: str | None = None) -> Path:
    """Return the folder of an adapter: a folder, or a hub id, optionally with its revision, which is downloaded."""
    if (path := existing_path(name)) is not None:
        return path
    text, pinned = split_revision(name)
    pickles = [adapters.PICKLE] if options.allow_pickle else []
    return _download(text, pinned or revision, [adapters.CONFIG_FILE, adapters.SAFETENSORS, *pickles])


def locate_tokenizer(name: str, options: LoadOptions) -> Path:
    """Return the folder of a tokenizer: of a built-in model, a folder, or a hub id, of which no weights are loaded."""
    if (located := locate_offline(name, options.cache)) is not None:
        return located.folder
    if (path := existing_path(name)) is not None:
        return snapshot_folder(path, None)
    return _download(*split_revision(name), TOKENIZER_PATTERNS)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        with caching.translate_write_errors(Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE"):
            return Path(
                snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED_PATTERNS)
            )
    except PosleakError:
        raise
    except Exception as error:
        raise ModelError(
            "no built-in model, folder or file of this name, and no answer from the hub",
            where=name if revision is None else f"{name} at {revision}", got=one_line(error),
            expected=f"a built-in name ({', '.join(builtin.BUILTIN_MODELS)}), a folder, a .gguf file or a hub id",
            remedy=f"check the spelling ({did_you_mean(name[:200], known_names())}), the connection to the hub, "
            "HF_HUB_OFFLINE and HF_HUB_CACHE, and the access token (HF_TOKEN) of a gated model",
        ) from error  # fmt: skip


def _licence(folder: Path) -> str | None:
    """Return the licence in the front matter of the model card. No YAML parser is used: aliases can exhaust memory."""
    try:
        with open_regular(folder / "README.md") as card:
            start = card.read(CARD_BYTES).decode(errors="replace").replace("\r\n", "\n")
    except OSError:
        return None
    front_matter = _FRONT_MATTER.match(start)
    stated = dict(_LICENCE.findall(front_matter[1])) if front_matter is not None else {}
    return stated.get("license_name") or stated.get("license")


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the model folders inside `folder` that are named by a training step, in the order of their steps.

    Names such as `checkpoint-100`, `step2000` or `iter_3` have one number. Checkpoints of a hub id are its revisions:
    `load(name, revision=...)`.
    """
    steps: dict[int, Path] = {}
    with translate_errors("the folder cannot be read", str(folder), "pass the folder above the checkpoints"):
        place = Path(folder).expanduser()
        children = sorted(place.iterdir()) if place.is_dir() else []
        models = [
            path for path in children if any((path / name).is_file() for name in ("config.json", adapters.CONFIG_FILE))
        ]
    for step, path in [(int(match[1]), path) for path in models if (match := _STEP.fullmatch(path.name))]:
        if step in steps:
            raise ModelError(
                "two checkpoints have the same step", where=str(folder), got=f"{steps[step].name} and {path.name}",
                remedy="load them one by one, or move one to another folder",
            )  # fmt: skip
        steps[step] = path
    if not steps:
        raise ModelError(
            "the folder holds no checkpoints", where=str(folder),
            expected="subfolders such as checkpoint-100 and checkpoint-200, each with a model or an adapter",
            remedy="pass the folder above the checkpoints, or load a single model folder",
        )  # fmt: skip
    return [steps[step] for step in sorted(steps)]


def file_stamp(name: str) -> str | None:
    """Return a text that stays the same while the model's files do; None if that would need a network."""
    text, revision = split_revision(name)
    if text in builtin.BUILTIN_MODELS:
        return f"sha256 {builtin.BUILTIN_MODELS[text].gguf_sha256}"
    if text in builtin.shipped_names():
        return builtin.SHIPPED_SOURCE
    paths = _model_files(text, revision)
    if paths is None:  # the commit of the revision in the hub's cache on this machine
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(text, "config.json", revision=revision) if text.count("/") <= 1 else None
        return f"commit {Path(path).parent.name}" if isinstance(path, str) else None
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return f"files {hashlib.sha256(json.dumps(facts).encode()).hexdigest()}"


def content_sha256(name: str) -> str | None:
    """Return a hash of the content of the model's files; None for built-in models, shipped models and hub ids."""
    text, revision = split_revision(name)
    if text in builtin.BUILTIN_MODELS or text in builtin.shipped_names():
        return None
    paths, cache = _model_files(text, revision), caching.cache_folder()
    if paths is None:
        return None
    own = paths[0].parent if paths else None  # files of an adapter's base model may have the same names
    names = {p.name if p.parent == own else f"base/{p.name}": p for p in paths}
    return hashing.joined_sha256({name: hashing.file_sha256(p, cache) for name, p in names.items()})


def _model_files(text: str, revision: str | None) -> list[Path] | None:
    """Return the file itself, or the files of the folder (in a hub cache: of the snapshot); None if neither exists.

    The files of an adapter are followed by those of its base model, if this is a folder or a file too.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        folder = snapshot_folder(path, revision)
        files = sorted(file for file in folder.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
        if adapters.is_adapter(folder) and (base := adapters.Adapter.read(folder, allow_pickle=True).base) is not None:
            files += _model_files(*split_revision(base)) or []
        return files
    return [path] if path.is_file() else None
