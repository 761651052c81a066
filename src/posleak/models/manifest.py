"""`posleak.json`: the record beside a converted model. Without a valid one, a converted folder is not used.

It lists every file with its size and sha256, and is sealed itself. All of them are compared at each load: the small
files before they are read, the weights while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from posleak.errors import ModelError, PosleakError
from posleak.files import Sealed
from posleak.models import hashing

FILE = "posleak.json"
CONVERTER = 2
"""Increased when conversion changes what it writes; folders with another number are converted again."""


@dataclass(frozen=True)
class Content:
    """What is in a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ConversionManifest:
    """What was converted, from what, and every file that it became."""

    name: str
    source: str
    packages: tuple[str, ...]
    gguf_sha256: str
    quantisation: str
    licence: str | None
    weights_sha256: str
    files: dict[str, Content]


MODEL = Sealed("posleak model", CONVERTER, ConversionManifest, "delete its folder and load the model again")
"""posleak.json"""


def contents(folder: Path) -> dict[str, Content]:
    """Every file of the folder but the manifest itself."""
    return {
        name: Content((folder / name).stat().st_size, hashing.file_sha256(folder / name)) for name in _names(folder)
    }


def write(folder: Path, manifest: ConversionManifest) -> None:
    """Write the manifest; it is the last file that a conversion writes."""
    MODEL.write(folder / FILE, manifest)


def read(folder: Path) -> ConversionManifest | None:
    """The manifest of a folder that this converter wrote; None for anything less, which must be converted again."""
    try:
        return MODEL.read(folder / FILE) if (folder / FILE).is_file() else None
    except (PosleakError, OSError):
        return None


def find(folder: Path, gguf_sha256: str) -> ConversionManifest | None:
    """The manifest, if it is valid and the model was converted from this very file."""
    found = read(folder)
    return found if found is not None and found.gguf_sha256 == gguf_sha256 else None


def present(folder: Path, manifest: ConversionManifest) -> bool:
    """Are all files there, with their sizes? Quick, and enough for a list of what is in the cache."""
    return not _odd(folder, manifest)


def require_small(folder: Path, manifest: ConversionManifest, weights: list[str]) -> None:
    """Refuse a folder with a file too many, or one that is missing, or of another size or, but for weights, content."""
    for name, wrong in _odd(folder, manifest).items():
        raise _changed(folder, name, wrong, "what conversion wrote")
    small = [name for name in manifest.files if name not in weights]
    require_same(folder, manifest, {name: hashing.file_sha256(folder / name) for name in small})


def require_same(folder: Path, manifest: ConversionManifest, hashes: Mapping[str, str]) -> None:
    """Refuse a file whose hash is not the one in the manifest."""
    for name, found in hashes.items():
        if found != manifest.files[name].sha256:
            raise _changed(folder, name, f"sha256 {found}", f"sha256 {manifest.files[name].sha256}")


def _odd(folder: Path, manifest: ConversionManifest) -> dict[str, str]:
    """What is wrong with files, by their names, as far as their sizes tell."""
    found = {name: (folder / name).stat().st_size for name in _names(folder)}
    wrong = {name: "a file that conversion did not write" for name in found if name not in manifest.files}
    for name, content in manifest.files.items():
        if found.get(name) != content.bytes:
            wrong[name] = f"{found[name]} bytes instead of {content.bytes}" if name in found else "no such file"
    return wrong


def _names(folder: Path) -> Iterator[str]:
    """Every file but the manifest, by its relative path; hidden files belong to file managers."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != FILE and not path.name.startswith("."):
            yield name


def _changed(folder: Path, name: str, got: str, expected: str) -> ModelError:
    return ModelError(
        "a file of a converted model is not what conversion wrote, so the model is not used",
        where=str(folder / name),
        got=got,
        expected=expected,
        remedy=f"delete the folder {folder} and load the model again; the disk or another program has changed it",
    )
