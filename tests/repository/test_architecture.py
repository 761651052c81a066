"""The package reads like its pipeline: a stage imports only the stages before it. And what has one home stays there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import posleak

ROOT = Path(posleak.__file__).parent
STAGES = [
    "models", "inputs", "probe", "edits", "leakage", "metrics", "show", "runs", "trace", "origin", "doctor", "claims",
    "sweep", "studies", "advice", "zoo", "report", "bench", "cli", "tools",
]  # fmt: skip


def imported_stages(path: Path) -> set[str]:
    """Stages named in the imports of one file; a parent-relative import does not occur (ruff TID252)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("posleak.")}
    return found & set(STAGES)


def later_imports(root: Path) -> Iterator[str]:
    """Every import of a later stage, in words."""
    for stage in STAGES:
        for path in sorted((root / stage).rglob("*.py")):
            for other in sorted(imported_stages(path)):
                if STAGES.index(other) > STAGES.index(stage):
                    yield f"{stage}/{path.name} imports {other}"
    for path in sorted(root.glob("*.py")):
        if path.name != "__init__.py" and (found := imported_stages(path)):
            yield f"{path.name} imports {', '.join(sorted(found))}"


def test_every_folder_is_a_stage_and_every_stage_a_folder() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(STAGES)


def test_a_stage_imports_only_earlier_ones() -> None:
    assert list(later_imports(ROOT)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from posleak.analyses.claims import Lab",
        "import posleak.analyses.claims.lab",
        "from posleak import claims",
        "if TYPE_CHECKING:\n    from posleak.analyses.claims import Lab",
        "def late():\n    from posleak.analyses.claims.lab import Lab",
    ],
)
def test_the_test_above_can_fail(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "loop.py").write_text(f"from posleak.models import Subject\n{line}\n")
    assert list(later_imports(tmp_path)) == ["runs/loop.py imports claims"]


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


ONE_HOME = {
    r"\brecord\[": set[str](),
    r"\bRecord\(\n": {"runs/measure.py"},
    r"#[0-9a-f]{6}\b": {"show/colours.py", "report/assets.py"},
    r"torch\.bfloat16: [\d.e-]+": set[str](),
    r"\.observe\(call": {"probe/attachment.py"},
    r"\bprobe\.forward\(torch\.from_numpy\(batch": {"runs/loop.py"},
}
"""What may stand in these files only: records are typed and built once, colours and tolerances are in one table, one
loop goes from prompts to chunks."""


@pytest.mark.parametrize("pattern", ONE_HOME)
def test_one_thing_has_one_home(pattern: str) -> None:
    assert {name for name, text in sources() if re.search(pattern, text)} <= ONE_HOME[pattern]


@pytest.mark.parametrize("package", ["models", "probe", "runs", "studies"])
def test_a_name_that_is_imported_late_is_the_same_whatever_was_imported_before(package: str) -> None:
    """A module hides a function of its own name as soon as it is imported: then it must be that function, too."""
    found = importlib.import_module(f"posleak.{package}")
    hidden = {path.stem for path in (ROOT / package).glob("*.py")} & set(found.__all__)
    for name in hidden:
        assert callable(importlib.import_module(f"posleak.{package}.{name}")), name
    for name in found.__all__:
        assert callable(getattr(found, name)) or name.isupper() or name == "AnyModel", name


def test_names_mean_one_thing() -> None:
    """Classes of one name would be two things that are called alike."""
    names = ("Source", "Origin", "Record", "Bench", "Claim", "Fingerprint", "Plan", "Run")
    for name in names:
        homes = [path for path, text in sources() if re.search(rf"^class {name}\b", text, flags=re.M)]
        assert len(homes) <= 1, (name, homes)
    constants = [path for path, text in sources() if re.search(r"^PARTS\b", text, flags=re.M)]
    assert constants == ["axes.py"]
