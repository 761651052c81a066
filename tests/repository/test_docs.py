"""The documentation agrees with the program: generated pages are current, and every JSON key is documented."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import posleak as pl
from benchmarks import bench
from posleak.analyses.origin.origin import origin
from posleak.cli.commands import app
from posleak.cli.progress import TimeProfile
from posleak.errors import PosleakWarning
from posleak.models import builtin
from posleak.reports.collected import gather_sweep
from posleak.runs.spec import MeasureSpec
from posleak.sweeps.cells import Cell, Guess
from posleak.sweeps.state import CellStatus, State
from posleak.sweeps.sweep import Sweep, sweep
from posleak.typed import plain
from support.circuit_tiny import LENGTH, counting
from support.documented import FREE, documented, expanded, produced
from support.families import subject, tiny
from support.runs_tiny import SPEC
from support.sweep_tiny import SMALL, Here
from tools import cli_docs, edit_docs
from tools.api_docs import parse_docstring

ROOT = Path(__file__).parents[2]
SECTIONS = ("measure", "trace", "doctor", "models", "claims", "advise", "origin", "sweep", "collect", "bench")


@pytest.mark.parametrize(("module", "page"), [(cli_docs, "cli.md"), (edit_docs, "edits.md")])
def test_pages_that_are_made_are_current(module: Any, page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == module.page(), f"run `python -m {module.__name__} > docs/{page}`"


API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^::: (\S+)$", API, flags=re.M)
"""Paths that docs/api.md shows."""


def resolve(path: str) -> Any:
    """Return the object at a path; of a decorated function, the function itself."""
    module, _, name = path.rpartition(".")
    return inspect.unwrap(getattr(import_module(module), name))


FUNCTIONS, CLASSES = (
    [path for path in SHOWN if is_kind(resolve(path))] for is_kind in (inspect.isfunction, inspect.isclass)
)


def test_the_page_about_python_has_every_public_name_and_a_line_for_each() -> None:
    assert {f"posleak.{name}" for name in dir(pl)} <= set(SHOWN)
    assert re.findall(r"^\| `(posleak[\w.]+)` \| \S.* \|$", API, flags=re.M) == SHOWN, "in the same order"


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_option_of_a_function_has_its_line_and_its_type(path: str) -> None:
    function = resolve(path)
    sentences, options = parse_docstring(function.__doc__)
    assert re.match(r"[A-Z].*[^.]*[.]", sentences), "a first sentence"
    parameters = inspect.signature(function).parameters
    assert list(options) == list(parameters), "in the order of the signature"
    assert all(each.annotation is not each.empty for each in parameters.values())


@pytest.mark.parametrize("path", CLASSES)
def test_every_public_member_of_a_class_says_what_it_is(path: str) -> None:
    for name, function in members(resolve(path)).items():
        sentence = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
        assert re.search(r"[.?)](\s|$)", sentence), f"{path}.{name} has no sentence"
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty, f"{path}.{name} has no type"
        own = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
        assert all(each.annotation is not each.empty for each in own), f"{path}.{name} has no types"


def members(kind: type) -> dict[str, Any]:
    """Return the functions behind the public properties and methods that the class itself defines."""
    called = {
        name: getattr(each, "fget", None) or getattr(each, "func", None) or getattr(each, "__func__", each)
        for name, each in vars(kind).items()
        if not name.startswith("_")
    }
    return {name: inspect.unwrap(each) for name, each in called.items() if inspect.isroutine(each)}


def test_aligned_lines_of_a_docstring() -> None:
    text = """A sentence.

    one   is this, and
          goes on;  two: is that
    three, four   are others
    """
    assert parse_docstring(text) == (
        "A sentence.",
        {"one": "is this, and goes on", "two": "is that", "three, four": "are others"},
    )


def outputs() -> dict[str, Any]:
    """Return the JSON of every command, by section of docs/json.md."""
    llama = subject()
    return {
        "measure": measure_output(),
        "trace": pl.trace(llama, length=48, prompts=4).as_dict(),
        "circuit": pl.circuit(counting(), length=LENGTH, prompts=16).as_dict(),
        "doctor": plain(pl.doctor(llama, length=48, prompts=4)),
        "models": {"models": plain([asdict(entry) for entry in builtin.list_models()])},
        "claims": pl.claims(llama, length=48, prompts=4).as_dict(),
        "advise": pl.advise(llama, "random", groups=["rope"], edits=["dtype=float32"], length=48, prompts=4).as_dict(),
        "origin": plain(origin(llama, length=48, prompts=3, tokens=16)),
        **sweep_outputs(),
        "bench": bench(llama, lengths=(48,), names=("posleak",), repeats=1).as_dict(),
    }


def measure_output() -> dict[str, Any]:
    """Return the output of `posleak measure --profile`."""
    no_text = pytest.warns(PosleakWarning, match="natural text")  # it has no tokenizer
    with TimeProfile() as spent, spent.measuring(llama := subject()), no_text:
        run = pl.measure(llama, metrics="all", loss=True, **SPEC)
    return {**run.as_dict(), "profile": spent.as_dict(run.record.memory.total)}


def sweep_outputs() -> dict[str, Any]:
    """Return the output of `sweep` with finished, failed and estimated cells, and the output of `collect`."""
    with tempfile.TemporaryDirectory() as folder:
        place, root = Path(folder), Path(folder) / "sweep"
        tiny("llama").save_pretrained(place / "mine")
        (place / "broken").mkdir()
        grid = {**SMALL, "models": [str(place / "mine"), str(place / "broken")], "edits": ["none", "window=off"]}
        swept = sweep({"question": "?", **grid}, out=root, engine=Here())
        (root / "cells" / "unfinished").mkdir()
        cell = Cell(str(place / "mine"), MeasureSpec(seed=5))
        cells = [*swept.cells, CellStatus(cell, State.open)]
        guessed = Sweep("more", str(root), cells, guesses={cell.id: Guess(10, 1.0, False)}).as_dict()
        collected = gather_sweep(str(root))
        return {
            "sweep": plain({**guessed, "balance": swept.balance}),
            "collect": plain({**collected.as_dict(), "balance": collected.collected.balance}),
        }


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(json.dumps(outputs(), allow_nan=False))
    return parsed


@pytest.mark.parametrize("command", SECTIONS)
def test_every_key_of_the_json_is_documented_and_every_documented_key_is_there(
    command: str, printed: dict[str, Any]
) -> None:
    assert set(produced(printed[command], FREE.get(command, set()))) == documented(command)


def test_the_expansion_of_braces() -> None:
    assert list(expanded("{a,b}.c.{d,e}")) == ["a.c.d", "a.c.e", "b.c.d", "b.c.e"]
    assert list(expanded("plain")) == ["plain"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "CHANGELOG.md", "LOG.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    """Links in the repository; test_site checks the links of the site."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_readme_names_every_command_and_contributing_every_stage() -> None:
    """README.md names no other command."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {str(command.name) for command in app.registered_commands if not command.hidden}
    assert set(re.findall(r"^\| `posleak (\w+)", readme, flags=re.M)) == commands
    folders = {path.parent.name for path in (ROOT / "src" / "posleak").glob("*/__init__.py")}
    layout = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Layout")[2].partition("\n## ")[0]
    assert folders <= set(re.findall(r"^  (\w+)", layout, flags=re.M))


def test_tests_named_in_the_documentation_exist() -> None:
    text = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)::(test_\w+)`", text))
    assert named
    for module, test in named:
        (path,) = (ROOT / "tests").rglob(f"{module}.py")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), (module, test)


def test_the_readme_states_the_number_of_families_that_the_census_found() -> None:
    census, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/families.md", "README.md"))
    supported = re.search(r"^\*\*(\d+) families supported\*\*", census, flags=re.M)
    of = re.search(r"has (\d+) causal-LM families", census)
    assert supported is not None
    assert of is not None
    limits = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert f"{supported[1]} of the {of[1]} causal-LM families" in readme
    assert f"{supported[1]} of the {of[1]} causal-LM families" in limits
    left = re.search(r"(\d+) refused, (\d+) cannot be built here", census)
    assert left is not None
    assert f"{left[2]} could not be\n  built here, and {left[1]} are refused by name" in limits
