"""`posleak.json`: the record beside a converted model. Without a valid one, a converted folder is not used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from posleak.typed import from_json

FILE = "posleak.json"
CONVERTER = 1
"""Increased when conversion changes what it writes; folders with another number are converted again."""


@dataclass(frozen=True)
class Manifest:
    """What was converted, from what, and how large each file is (so that a cut or missing file is seen at once)."""

    name: str
    source: str
    packages: tuple[str, ...]
    gguf_sha256: str
    quantisation: str
    licence: str | None
    weights_sha256: str
    files: dict[str, int]
    converter: int = CONVERTER


def sizes(folder: Path) -> dict[str, int]:
    """Every file of the folder but the manifest itself, with its size."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != FILE}


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; it is the last file that a conversion writes."""
    (folder / FILE).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest | None:
    """The manifest of a whole folder of this converter; None for anything less, which must be converted again."""
    path = folder / FILE
    try:
        found = from_json(Manifest, path.read_bytes()) if path.is_file() else None
    except ValueError:
        return None
    whole = found is not None and found.converter == CONVERTER and _present(folder, found.files)
    return found if whole else None


def _present(folder: Path, files: dict[str, int]) -> bool:
    found = sizes(folder)
    return all(found.get(name) == size for name, size in files.items())
