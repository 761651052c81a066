"""Messages name options on the command line and parameters in Python, and every option that they name exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import posleak as pl
from posleak.cli import commands
from posleak.errors import InputError, PosleakWarning, warn
from posleak.spelling import FLAGS, FUNCTIONS as COMMANDS, OPTIONS, RENAMED, command_line, spelled
from support.errors import raises

SOURCE = Path(pl.__file__).parent
FUNCTIONS = (
    pl.load, pl.measure, pl.trace, pl.circuit, pl.origin, pl.claims, pl.advise, pl.doctor, pl.report,
    pl.compare, pl.sweep, pl.collect,
)  # fmt: skip

SPELLED = {
    "use --length 64, or less": "use length=64, or less",
    "at --length 2,048.": "at length=2048.",
    "a shorter --length or fewer --prompts": "a shorter length= or fewer prompts=",
    "--max-memory allows": "max_memory= allows",
    "a limit with --max-memory 8GB, or": "a limit with max_memory='8GB', or",
    "use --bos none, or --bos TOKEN": "use bos='none', or bos=TOKEN",
    "--edit foo: unknown edit": "edits='foo': unknown edit",
    "--edit context=borrowed@0.8,1.5: not": "edits='context=borrowed@0.8,1.5': not",
    "--edit bos=zero --edit sink=cut: no": "edits='bos=zero' edits='sink=cut': no",
    "(--dtype float32), or": "(dtype='float32'), or",
    "--inputs random or text:PATH": "inputs='random' or text:PATH",
    "it with --device-map auto, or": "it with device_map='auto', or",
    "pass --trust-remote-code": "pass trust_remote_code=True",
    "again with --fresh, or another --out": "again with fresh=True, or another out=",
    "in `posleak doctor X --json --length 5`": "in `posleak doctor X --json --length 5`",
    "use `posleak measure`; `posleak models` lists": "use `posleak.measure`; `posleak models` lists",
    "pip install --upgrade transformers": "pip install --upgrade transformers",
}


@pytest.mark.parametrize("message", SPELLED)
def test_options_are_parameters_in_python(message: str) -> None:
    assert spelled(message) == SPELLED[message]
    assert spelled(spelled(message)) == spelled(message)
    with command_line():
        assert spelled(message) == message


def test_errors_and_warnings_speak_of_parameters() -> None:
    with raises(InputError, remedy="--length 32") as caught:
        pl.measure("smollm2-135m", length=5)
    assert "length=32" in str(caught.value)
    assert "--" not in str(caught.value)
    with command_line():
        assert "--length 32" in str(caught.value)
    with pytest.warns(PosleakWarning, match="prompts=4 or more"):
        warn("use --prompts 4 or more")


def test_the_command_line_speaks_of_options(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["posleak", "measure", "smollm2-135m", "--length", "5"])
    with pytest.raises(SystemExit):
        commands.main()
    assert "--length 32" in capsys.readouterr().err
    assert spelled("--length 32") == "length=32"


def options() -> set[str]:
    group: Any = typer.main.get_command(commands.app)
    return {option for command in group.commands.values() for it in command.params for option in it.opts}


def test_every_translated_option_is_one_and_a_parameter() -> None:
    parameters = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    assert all(callable(getattr(pl, name)) for name in COMMANDS)
    names = {*FLAGS, *OPTIONS}
    assert {f"--{name}" for name in names} <= options()
    assert {RENAMED.get(name, name).replace("-", "_") for name in names} <= parameters


def messages() -> Iterator[tuple[str, str]]:
    """Yield texts outside of docstrings in modules that also run outside of the command line."""
    for path in SOURCE.rglob("*.py"):
        if "cli" in path.parts or path.name in ("builtin.py", "spelling.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield path.name, node.value


SHELL = {"--upgrade", "--head", "--json", "--nproc-per-node"}
"""Options of other programs, or of tables that only the command line shows."""


def test_every_option_in_a_message_exists() -> None:
    known = options() | SHELL
    named = {(path, it) for path, text in messages() for it in re.findall(r"(?<![\w(-])--[a-z][a-z-]*\w", text)}
    assert len(named) > 50
    assert {(path, it) for path, it in named if it not in known} == set()
    translated = {f"--{name}" for name in (*FLAGS, *OPTIONS)} | SHELL
    assert {it for _, it in named} <= translated
