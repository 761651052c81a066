"""The cache of fetched and converted models, and the manifests of the latter.

A folder under `models/` is complete, or it does not exist. Its manifest, posleak.json, lists every file with its size
and sha256, and is sealed itself. All files are compared at each load: the small ones before they are read, the weights
while they are read. A converted folder without a valid manifest is not used.

<cache>/models/<key>/       converted models, put there by a single rename
<cache>/unfinished/<key>-*/ unfinished work, which the holder of the lock of <key> may delete
<cache>/locks/<key>         one lock per key, so that two processes do not convert the same model at once
<cache>/hashes/             sha256 of files that were read (hashing.py)
<cache>/loaded/             checksums of the weights that such files load as (hashing.py)
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posleak.errors import ModelError, PosleakError, StorageError, errno_of, translate_errors
from posleak.files import Sealed, file_lock, flush, write_remedy
from posleak.models import hashing
from posleak.text import format_bytes, one_line

ENVIRONMENT = "POSLEAK_CACHE"
MANIFEST_FILE = "posleak.json"
CONVERTER_VERSION = 2
"""Increased when conversion changes what it writes; folders with another number are converted again."""


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache: the argument, else $POSLEAK_CACHE, else the platform's cache folder."""
    chosen = cache or os.environ.get(ENVIRONMENT)
    if chosen:
        with translate_errors("the cache folder cannot be used", str(chosen), f"set {ENVIRONMENT} to another folder"):
            return Path(chosen).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_cache_dir("posleak"))


def model_folder(cache: Path, key: str) -> Path:
    """Return the folder of the converted model `key`."""
    return cache / "models" / key


@contextmanager
def translate_write_errors(folder: Path, setting: str = ENVIRONMENT) -> Iterator[None]:
    """Turn errors of writing to `folder` into a ModelError with a remedy; `setting` is the variable that selects it."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StorageError) and error.__cause__ is not None else error
        code = None if isinstance(cause, PosleakError) else errno_of(cause)
        remedy = write_remedy(code, folder)
        if code == errno.ENOENT and not folder.exists():
            remedy = "create the folder"
        if remedy is None:
            raise
        raise ModelError(
            "the model cannot be written", where=str(folder), got=one_line(cause),
            remedy=f"{remedy}, or set {setting} to another folder",
        ) from error  # fmt: skip


@contextmanager
def lock(cache: Path, key: str) -> Iterator[None]:
    """Hold the lock of `key`. The kernel releases it when the process dies, so that no lock is ever stale."""
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    with file_lock(cache / "locks" / key, wait=True):
        yield


@contextmanager
def workspace(cache: Path, key: str) -> Iterator[Path]:
    """Create a folder for unfinished work on `key`, and remove it on exit.

    The caller must hold the lock of `key`: folders that earlier processes left behind are deleted.
    """
    parent = cache / "unfinished"
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{key}-*.work"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{key}-", suffix=".work", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)


def publish(finished: Path, target: Path, trash: Path) -> None:
    """Flush the folder `finished` to disk and rename it to `target`; an earlier `target` is moved to `trash`."""
    for path in sorted(finished.rglob("*")):
        flush(path)
    flush(finished)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.replace(target, trash)
    os.replace(finished, target)
    flush(target.parent)


def require_disk_space(folder: Path, need: int, what: str) -> None:
    """Reject work that would fill the disk, before the first byte is fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"not enough disk space for {what}", where=str(folder), got=f"{format_bytes(free)} free",
            expected=format_bytes(need), remedy=f"free some space, or set {ENVIRONMENT} to a folder on a larger disk",
        )  # fmt: skip


@dataclass(frozen=True)
class FileContent:
    """Size and hash of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ConversionManifest:
    """What was converted, from what, and every file that was written."""

    name: str
    source: str
    packages: tuple[str, ...]
    gguf_sha256: str
    quantisation: str
    licence: str | None
    weights_sha256: str
    files: dict[str, FileContent]


MANIFEST = Sealed("posleak model", CONVERTER_VERSION, ConversionManifest, "delete its folder and load the model again")


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of all files by relative path, except the manifest and hidden files, which file managers add."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return {name: size for name, size in sizes.items() if name != MANIFEST_FILE}


def read_manifest(folder: Path, gguf_sha256: str | None = None) -> ConversionManifest | None:
    """Return the manifest of a folder; None if it is missing, invalid, or of a GGUF file with another hash."""
    try:
        manifest = MANIFEST.read(folder / MANIFEST_FILE)
    except PosleakError:
        return None
    return manifest if gguf_sha256 in (None, manifest.gguf_sha256) else None


def wrong_sizes(folder: Path, manifest: ConversionManifest) -> dict[str, str]:
    """Return a description of what is wrong with each file, by name; only names and sizes are compared."""
    sizes = file_sizes(folder)
    wrong = {name: "a file that conversion did not write" for name in sizes if name not in manifest.files}
    for name, content in manifest.files.items():
        if sizes.get(name) != content.bytes:
            wrong[name] = f"{sizes[name]} bytes instead of {content.bytes}" if name in sizes else "no such file"
    return wrong


def require_unchanged(folder: Path, manifest: ConversionManifest, weights: list[str]) -> None:
    """Reject a folder with extra or missing files, other sizes or, except for the weights, other content."""
    for name, wrong in wrong_sizes(folder, manifest).items():
        raise _changed(folder, name, wrong, "what conversion wrote")
    small = [name for name in manifest.files if name not in weights]
    require_hashes(folder, manifest, {name: hashing.file_sha256(folder / name) for name in small})


def require_hashes(folder: Path, manifest: ConversionManifest, hashes: Mapping[str, str]) -> None:
    """Reject a file whose hash is not the one in the manifest."""
    for name, digest in hashes.items():
        if digest != manifest.files[name].sha256:
            raise _changed(folder, name, f"sha256 {digest}", f"sha256 {manifest.files[name].sha256}")


def _changed(folder: Path, name: str, got: str, expected: str) -> ModelError:
    return ModelError(
        "a file of a converted model has changed since conversion; the model is not used", where=str(folder / name),
        got=got, expected=expected,
        remedy=f"delete the folder {folder} and load the model again",
    )  # fmt: skip
