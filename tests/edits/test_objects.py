"""Edits that are passed as objects and stored by import path and fields: nothing is imported until `load`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import posleak as pl
from posleak.edits.objects import StoredEdit, UnnamedEdit
from posleak.errors import InputError, RunError
from posleak.models import Subject
from posleak.probe import Call, Edit
from posleak.runs.folder import RECORD_FILE
from posleak.runs.run import Run
from support.errors import raises
from support.runs_tiny import assert_same_bits, sealed

MODULE = "posleak_test_softer"
SOURCE = """
from dataclasses import dataclass, replace
from posleak.probe import Call, Edit

@dataclass(frozen=True)
class Softer(Edit):
    factor: float
    layers: tuple[int, ...] = ()

    def edit(self, call: Call) -> Call:
        return replace(call, scaling=call.scaling / self.factor) if call.layer in self.layers else call
"""
SMALL: dict[str, Any] = {"length": 48, "prompts": 5, "batch": 2, "seed": 3}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / f"{MODULE}.py"
    sys.modules.pop(MODULE, None)


def softer(*arguments: Any) -> Edit:
    """Return an edit of the module, imported anew."""
    sys.modules.pop(MODULE, None)
    importlib.invalidate_caches()
    made: Edit = importlib.import_module(MODULE).Softer(*arguments)
    return made


class Stopped(Exception):
    pass


def test_a_run_under_an_object_is_resumed_loaded_and_compared(llama: Subject, source: Path, tmp_path: Path) -> None:
    folder, edit = tmp_path / "run", softer(2.0, (0, 1))
    whole = pl.measure(llama, **SMALL, edits=edit)

    def stop(done: int, of: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        pl.measure(llama, **SMALL, edits=edit, out=folder, progress=stop)
    done = list[int]()
    pl.measure(llama, **SMALL, edits=softer(2.0, (0, 1)), out=folder, progress=lambda count, of: done.append(count))
    assert done == [2, 4, 5]
    stored = json.loads((folder / RECORD_FILE).read_text())["spec"]["edits"]
    assert stored[0].pop("sha256") == StoredEdit.of(softer(2.0, (0, 1))).sha256  # type: ignore[union-attr]
    assert stored == [{
        "class": f"{MODULE}:Softer", "fields": {"factor": 2.0, "layers": [0, 1]},
        "text": "Softer(factor=2.0, layers=(0, 1))",
    }]  # fmt: skip
    sys.modules.pop(MODULE)
    loaded = Run.load(folder)
    assert MODULE not in sys.modules, "reading a record imports nothing"
    assert_same_bits(loaded, whole)
    assert loaded.record.digest == whole.record.digest
    assert loaded.as_dict()["edits"] == ["Softer(factor=2.0, layers=(0, 1))"]
    assert pl.compare([loaded, whole]).rows[-1].cells["total"].value == 0
    (again,) = loaded.record.spec.edits
    assert isinstance(again, StoredEdit)
    assert repr(again.load()) == repr(edit)
    assert vars(again.load()) == {"factor": 2.0, "layers": (0, 1)}, "fields have the types of the dataclass"
    with raises(InputError, where="Softer", got=MODULE, remedy="edit.load()"):
        pl.measure(llama, **SMALL, edits=again)


def test_other_fields_or_another_class_are_another_measurement(llama: Subject, source: Path, tmp_path: Path) -> None:
    pl.measure(llama, **SMALL, edits=softer(2.0, (0,)), out=tmp_path / "run")
    with raises(RunError, where=tmp_path / "run", got=("factor", "2.0", "3.0"), remedy="--out"):
        pl.measure(llama, **SMALL, edits=softer(3.0, (0,)), out=tmp_path / "run")
    (stored,) = Run.load(tmp_path / "run").record.spec.edits
    assert isinstance(stored, StoredEdit)
    source.write_text(SOURCE.replace("/ self.factor", "* self.factor"))
    with raises(RunError, where=tmp_path / "run", got="sha256", remedy="--out"):
        pl.measure(llama, **SMALL, edits=softer(2.0, (0,)), out=tmp_path / "run")
    with raises(InputError, where=f"{MODULE}:Softer", got="changed", remedy="measure again"):
        stored.load()
    source.unlink()
    sys.modules.pop(MODULE)
    importlib.invalidate_caches()
    with raises(InputError, where=f"{MODULE}:Softer", got="ModuleNotFoundError", remedy="PYTHONPATH"):
        stored.load()


def test_an_object_without_a_folder_of_its_own_gets_the_same_one(llama: Subject, source: Path, tmp_path: Path) -> None:
    first = pl.measure(llama, **SMALL, edits=softer(2.0, (0,)), root=tmp_path)
    assert pl.measure(llama, **SMALL, edits=softer(2.0, (0,)), root=tmp_path).path == first.path


@pytest.mark.parametrize("path", ["os:system", "subprocess:Popen", "posleak.text:visible", "this:nothing"])
def test_a_record_that_names_anything_else_imports_nothing_and_is_not_loaded(
    llama: Subject, source: Path, tmp_path: Path, path: str
) -> None:
    run = pl.measure(llama, **SMALL, edits=softer(2.0, (0,)), out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / RECORD_FILE).read_text())
    for spec in ("asked", "spec"):
        record[spec]["edits"][0]["class"] = path
    (tmp_path / "run" / RECORD_FILE).write_text(sealed(record))
    sys.modules.pop("this", None)
    loaded = Run.load(tmp_path / "run")
    assert_same_bits(loaded, run)
    assert "this" not in sys.modules
    (stored,) = loaded.record.spec.edits
    assert isinstance(stored, StoredEdit)
    with raises(InputError, where=path, got="derived from posleak.probe.Edit"):
        stored.load()


@pytest.mark.parametrize("edit", [{"class": "a:b"}, {"class": 1, "fields": {}, "sha256": "", "text": ""}, 3])
def test_a_malformed_edit_in_a_record_is_refused(llama: Subject, source: Path, tmp_path: Path, edit: Any) -> None:
    pl.measure(llama, **SMALL, edits=softer(2.0, (0,)), out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / RECORD_FILE).read_text())
    record["spec"]["edits"] = [edit]
    (tmp_path / "run" / RECORD_FILE).write_text(sealed(record))
    with raises(RunError, where=tmp_path / "run", remedy="--fresh"):
        Run.load(tmp_path / "run")


class Plain(Edit):
    def edit(self, call: Call) -> Call:
        return replace(call, scaling=call.scaling / 2)


class WithState(Plain):
    def __init__(self) -> None:
        self.factor = 2


class WithSlots(Plain):
    __slots__ = ("factor",)


@dataclass
class Holder(Plain):
    value: Any = None
    seen: list[int] = field(default_factory=list)

    class Nested(Plain):
        pass


def test_what_can_be_stored() -> None:
    for edit in (Plain(), Holder(), Holder({"a": [1, 2.5, "b", True, None]}), Holder.Nested()):
        stored = StoredEdit.of(edit)
        assert stored is not None
        assert StoredEdit.read(json.loads(json.dumps(stored.stored))) == stored
        assert vars(stored.load()) == vars(edit)
        assert type(stored.load()) is type(edit)
    assert StoredEdit.of(Plain()).fields == {}  # type: ignore[union-attr]


def test_what_cannot_be_stored(llama: Subject, tmp_path: Path) -> None:
    class Local(Plain):
        pass

    main = make_dataclass("Main", [], bases=(Plain,))
    main.__module__ = "__main__"
    hidden = Holder()
    hidden.more = 1  # type: ignore[attr-defined]
    values = (lambda: 1, float("nan"), object(), {1: 2}, Path())
    for edit in (Local(), main(), WithState(), WithSlots(), hidden, *map(Holder, values)):
        assert StoredEdit.of(edit) is None
        with raises(RunError, where=tmp_path / "run", got=UnnamedEdit(edit).text, remedy="module of its own"):
            pl.measure(llama, **SMALL, edits=edit, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_stored_does_not_change_with_the_object() -> None:
    edit = Holder(seen=[1])
    named = UnnamedEdit(edit)
    before = named.stored
    edit.seen.append(2)
    assert named.stored is before
    assert isinstance(before, dict)
    assert before["fields"]["seen"] == [1]


def test_a_class_of_a_script_is_refused_with_the_remedy(tmp_path: Path) -> None:
    script = SOURCE + (
        "from posleak.edits.objects import StoredEdit\n"
        "from posleak.edits import parse_edits, require_storable\n"
        "assert StoredEdit.of(Softer(2.0)) is None\n"
        "require_storable(parse_edits(Softer(2.0)), 'run')\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "RunError" in done.stderr
    assert "module of its own" in done.stderr
