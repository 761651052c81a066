"""`posleak.json`: the record beside a converted model. A folder without a true one is not a model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

FILE = "posleak.json"
CONVERTER = 1
"""Raised when conversion changes what it writes; folders of another number are converted again."""


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
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(Manifest)}:
        return None
    whole = record["converter"] == CONVERTER and _present(folder, record["files"])
    return Manifest(**{**record, "packages": tuple(record["packages"])}) if whole else None


def _present(folder: Path, files: dict[str, int]) -> bool:
    found = sizes(folder)
    return all(found.get(name) == size for name, size in files.items())
