"""The package reads like its pipeline: a stage imports only the stages before it."""

from __future__ import annotations

import ast
from pathlib import Path

import posleak

ROOT = Path(posleak.__file__).parent
ORDER = [
    "models",
    "inputs",
    "probe",
    "edits",
    "leakage",
    "origin",
    "studies",
    "runs",
    "report",
    "sweep",
    "bench",
    "cli",
]
STAGES = [stage for stage in ORDER if (ROOT / stage).is_dir()]


def imported_stages(path: Path) -> set[str]:
    """Stages named in the imports of one file; a parent-relative import does not occur (ruff TID252)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("posleak.")}
    return found & set(STAGES)


def test_every_folder_is_a_stage() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(STAGES)


def test_a_stage_imports_only_earlier_ones() -> None:
    for stage in STAGES:
        for path in (ROOT / stage).rglob("*.py"):
            later = {other for other in imported_stages(path) if STAGES.index(other) > STAGES.index(stage)}
            assert not later, f"{path.relative_to(ROOT)} imports {later}"
