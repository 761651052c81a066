"""`posleak.json`: the manifest of a converted model. A converted folder without a valid one is not used.

It lists every file with its size and sha256, and is sealed itself. All files are compared at each load: the small ones
before they are read, the weights while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from posleak.errors import ModelError, PosleakError
from posleak.files import Sealed
from posleak.models import hashing

MANIFEST_FILE = "posleak.json"
CONVERTER_VERSION = 2
"""Increased when conversion changes what it writes; folders with another number are converted again."""


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


FORMAT = Sealed("posleak model", CONVERTER_VERSION, ConversionManifest, "delete its folder and load the model again")


def file_contents(folder: Path) -> dict[str, FileContent]:
    """Return size and hash of every file of the folder except the manifest."""
    sizes = _sizes(folder)
    return {name: FileContent(sizes[name], hashing.file_sha256(folder / name)) for name in sizes}


def write(folder: Path, manifest: ConversionManifest) -> None:
    """Write the manifest, which is the last file that a conversion writes."""
    FORMAT.write(folder / MANIFEST_FILE, manifest)


def read(folder: Path) -> ConversionManifest | None:
    """Return the manifest of a folder that this converter wrote; None if there is no valid one."""
    try:
        return FORMAT.read(folder / MANIFEST_FILE) if (folder / MANIFEST_FILE).is_file() else None
    except (PosleakError, OSError):
        return None


def find(folder: Path, gguf_sha256: str) -> ConversionManifest | None:
    """Return the manifest if it is valid and the model was converted from the file with this hash."""
    manifest = read(folder)
    return manifest if manifest is not None and manifest.gguf_sha256 == gguf_sha256 else None


def wrong_sizes(folder: Path, manifest: ConversionManifest) -> dict[str, str]:
    """Return what is wrong with the files, by name, judging from names and sizes only."""
    sizes = _sizes(folder)
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


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of all files by relative path, except the manifest and hidden files, which file managers add."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    kept = {name: path for name, path in paths.items() if name != MANIFEST_FILE and not path.name.startswith(".")}
    return {name: path.stat().st_size for name, path in kept.items()}


def _changed(folder: Path, name: str, got: str, expected: str) -> ModelError:
    return ModelError(
        "a file of a converted model is not what conversion wrote, so the model is not used", where=str(folder / name),
        got=got, expected=expected,
        remedy=f"delete the folder {folder} and load the model again; the disk or another program has changed it",
    )  # fmt: skip
