"""The package reads like its pipeline: a package imports only those before it, and every idea has one home."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import posleak

ROOT = Path(posleak.__file__).parent
REPOSITORY = Path(__file__).parents[2]
ORDER = [
    "models", "inputs", "probe", "edits", "show", "leakage", "metrics", "runs", "analyses.trace", "analyses.origin",
    "analyses.circuit", "analyses.doctor", "analyses.claims", "analyses.advise", "sweeps", "reports", "cli",
]  # fmt: skip


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the absolute names that one file imports; parent-relative imports do not occur (ruff TID252)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(path: Path) -> set[str]:
    """Return the packages of ORDER that one file imports."""
    modules = [name.removeprefix("posleak.") + "." for name in imported_modules(path) if name.startswith("posleak.")]
    public = {"claims.": "analyses.claims.", "trace.": "analyses.trace."}  # functions of the top level
    modules = [public.get(name, name) for name in modules]
    return {package for package in ORDER if any(name.startswith(f"{package}.") for name in modules)}


def later_imports(root: Path) -> Iterator[str]:
    """Describe every import of a later package."""
    for place, package in enumerate(ORDER):
        for path in sorted((root / package.replace(".", "/")).rglob("*.py")):
            for other in sorted(imported_packages(path)):
                if ORDER.index(other) > place:
                    yield f"{package}/{path.name} imports {other}"
    for path in sorted(root.glob("*.py")):
        if path.name not in ("__init__.py", "__main__.py") and (packages := imported_packages(path)):
            yield f"{path.name} imports {', '.join(sorted(packages))}"


def test_the_order_names_every_package() -> None:
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("__init__.py")} - {".", "analyses"}
    top = {package for package in packages if "/" not in package or re.fullmatch(r"analyses/\w+", package)}
    assert {package.replace("/", ".") for package in top} == set(ORDER)


def test_a_package_imports_only_earlier_ones() -> None:
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
    assert list(later_imports(tmp_path)) == ["runs/loop.py imports analyses.claims"]


def test_nothing_in_the_wheel_imports_what_is_outside() -> None:
    outside = {"tools", "zoo", "benchmarks", "support"}
    for path in ROOT.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported_modules(path)} & outside, path


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


ONE_HOME = {
    r"\brecord\[": set[str](),
    r"#[0-9a-f]{6}\b": {"show/colours.py", "reports/assets.py"},
    r"torch\.bfloat16: [\d.e-]+": set[str](),
    r"\.observe\(call": {"probe/attachment.py"},
}
"""Patterns and the only files that may match them: records are typed, colours and tolerances are in one table."""


@pytest.mark.parametrize("pattern", ONE_HOME)
def test_one_thing_has_one_home(pattern: str) -> None:
    assert {name for name, text in sources() if re.search(pattern, text)} <= ONE_HOME[pattern]


def test_no_package_exports_a_name_that_one_of_its_modules_has() -> None:
    """An imported module would hide the exported name."""
    for init in ROOT.rglob("__init__.py"):
        name = ".".join(["posleak", *init.parent.relative_to(ROOT).parts])
        exports = set(getattr(import_module(name), "__all__", ()))
        modules = {path.stem for path in init.parent.glob("*.py")} | {
            path.parent.name for path in init.parent.glob("*/__init__.py")
        }
        assert not exports & modules, name
        for export in exports:
            assert getattr(import_module(name), export) is not None


def test_every_class_name_has_one_home() -> None:
    homes = defaultdict(list)
    folders = (ROOT, *(REPOSITORY / name for name in ("tools", "zoo", "benchmarks")))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(REPOSITORY).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_test_module_imports_another() -> None:
    for path in (REPOSITORY / "tests").rglob("*.py"):
        assert not [name for name in imported_modules(path) if name.startswith("test_")], path
