"""Manifests: what they expand into, what they refuse, and what makes two cells the same."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posleak.edits import parse_edits
from posleak.errors import InputError, ModelError
from posleak.runs.software import DEFINITIONS_VERSION
from posleak.runs.spec import MeasureSpec
from posleak.sweeps.cells import Cell, Resources
from posleak.sweeps.manifest import manifest, named_manifests, read_manifest
from posleak.typed import from_json, plain
from support.errors import raises
from support.sweep_tiny import tiny_models, written


def test_every_list_is_an_axis() -> None:
    found = manifest(
        {"models": ["a/b", "c/d"], "edits": ["none", "window=9", ["window=9", "bos=zero"]], "seed": [0, 1]}
    )
    assert len(found.cells) == 2 * 3 * 2
    assert [cell.spec.edit_texts for cell in found.cells[:6:2]] == [(), ("window=9",), ("bos=zero", "window=9")]
    assert {cell.model for cell in found.cells} == {"a/b", "c/d"}
    assert len({cell.id for cell in found.cells}) == 12


def test_grids_take_the_keys_above_them_and_their_own() -> None:
    found = manifest({"models": "a/b", "prompts": 8, "grids": [{"length": 64}, {"kind": "trace", "prompts": 6}]})
    assert [(cell.kind, cell.spec.length, cell.spec.prompts) for cell in found.cells] == [
        ("measure", 64, 8),
        ("trace", 256, 6),
    ]


def test_a_cell_that_two_grids_have_is_one() -> None:
    found = manifest({"models": "a/b", "grids": [{"seed": [0, 1]}, {"seed": [1, 2]}]})
    assert [cell.spec.seed for cell in found.cells] == [0, 1, 2]


def test_the_id_changes_with_what_decides_numbers_and_with_nothing_else(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one two three " * 50)
    cell = Cell("a/b", MeasureSpec(f"text:{text}"))
    assert replace(cell, title="other", series="s", step=3, resources=Resources(2, 1, 10**9)).id == cell.id
    loaded: list[Any] = [{"dtype": "bfloat16"}, {"model": "a/c"}, {"kind": "trace"}]
    traced = replace(cell, kind="trace")
    assert replace(traced, donor="long").id != traced.id
    measured: list[Any] = [{"seed": 1}, {"length": 64}, {"edits": ("window=9",)}]
    for change in (*loaded, *({"spec": replace(cell.spec, **each)} for each in measured)):
        assert replace(cell, **change).id != cell.id, change
    before = cell.id
    text.write_text("other words " * 50)
    from posleak.sweeps.cells import text_hash

    text_hash.cache_clear()
    assert replace(cell).id != before


def test_ids_and_records_of_earlier_versions_stay_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash worked out before cells had a spec, and the flat JSON of that time."""
    monkeypatch.setattr("posleak.sweeps.cells.versions", lambda: {"posleak": "1", "torch": "2", "transformers": "3"})
    cell = Cell("a/b", MeasureSpec(edits=parse_edits("window=9"), length=64), dtype="bfloat16", resources=Resources(1))
    asked = {
        "model": "a/b", "edits": ["window=9"], "length": 64, "prompts": 16, "seed": 0, "inputs": "random",
        "bos": "auto", "dtype": "bfloat16", "kind": "measure", "origin": 4, "density": 1, "batch": 0, "metrics": [],
        "device": None, "device_map": None,
    }  # fmt: skip
    software = {"posleak": "1", "torch": "2", "transformers": "3"}
    text = json.dumps([DEFINITIONS_VERSION, asked, software, None], sort_keys=True)
    assert cell.id == hashlib.sha256(text.encode()).hexdigest()
    shown = {
        "title": None,
        "series": None,
        "step": None,
        "donor": "plain",
        "resources": {"cpus": 1, "gpus": 0, "memory": None},
    }
    assert plain(cell) == {**asked, **shown, "loss": False}
    assert from_json(Cell, json.dumps(plain(cell))) == cell
    older = {name: value for name, value in plain(cell).items() if name != "donor"}
    assert from_json(Cell, json.dumps(older)) == cell


def test_the_id_changes_with_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("a/b")
    before = cell.id
    monkeypatch.setattr("posleak.sweeps.cells.versions", lambda: {"posleak": "9", "torch": "9", "transformers": "9"})
    assert replace(cell).id != before


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ({"model": ["a/b"]}, {"got": "model", "remedy": "'models'"}),
        ({"models": ["a/b"], "lenght": 64}, {"got": "lenght", "remedy": "'length'"}),
        ({"models": ["a/b"], "grids": [{"sed": 1}]}, {"where": "grid 1", "got": "sed", "remedy": "'seed'"}),
        ({"models": [{"modle": "a/b"}]}, {"where": "models, 1", "got": "modle", "remedy": "'model'"}),
        ({"models": ["a/b"], "resources": {"cpu": 1}}, {"where": "resources", "got": "cpu", "remedy": "'cpus'"}),
        ({"models": ["a/b"], "kind": "mesure"}, {"where": "kind", "got": "mesure", "remedy": "'measure'"}),
        ({"models": ["a/b"], "edits": ["windw=9"]}, {"got": "windw", "remedy": "'window'"}),
        ({"models": ["a/b"], "length": "long"}, {"where": "length", "got": "long", "expected": "integer"}),
        ({"models": ["a/b"], "length": True}, {"where": "length", "got": True, "expected": "integer"}),
        ({"models": ["a/b"], "length": 3}, {"where": "length", "got": 3, "expected": 32}),
        ({"models": ["a/b"], "bos": False}, {"where": "bos", "got": False, "remedy": "quotes"}),
        ({"models": ["a/b"], "seed": []}, {"where": "seed", "got": "[]"}),
        ({"models": ["a/b"], "resources": {"memory": "lots"}}, {"where": "memory", "got": "lots", "expected": "8GB"}),
        ({"models": ["a/b"], "resources": {"gpus": -1}}, {"where": "gpus", "got": -1, "expected": 0}),
        (
            {"models": [{"model": "a/b", "checkpoints": "c"}]},
            {"where": "models, 1", "what": ("`model`", "`checkpoints`")},
        ),
        (
            {"models": [{"model": "a/b@main", "revisions": ["x"]}]},
            {"where": "models, 1", "got": "a/b@main", "remedy": "`revisions`"},
        ),
        ({"models": ["a/b"], "kind": "trace", "edits": ["window=9"]}, {"got": "window=9", "remedy": "separate"}),
        ({"models": ["a/b"], "kind": "trace", "donor": "lon"}, {"where": "donor", "got": "lon", "remedy": "'long'"}),
        ({"models": ["a/b"], "donor": "long"}, {"where": "donor", "got": "long", "remedy": "kind: trace"}),
        ({"models": []}, {"what": "no cells", "remedy": "`models`"}),
        ({"seed": 1}, {"what": "no models", "remedy": "`models`"}),
        ([1], {"got": "[1]", "expected": "models, edits"}),
        ({"models": ["a/b"] * 3, "seed": list(range(40_000))}, {"what": "too many cells"}),
    ],
)
def test_invalid_manifests_are_refused_with_a_remedy(said: Any, fields: dict[str, object]) -> None:
    with raises(InputError, **fields):
        manifest(said)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"k{level}: &k{level} [{','.join(['*' + ('a' if not level else f'k{level - 1}')] * 9)}]\n" for level in range(9)
)
"""Nine times nine times nine … of the same: a file of one kilobyte that would be a billion values."""


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("models: [a/b]\nseed: 1\nseed: 2\n", {"what": "YAML", "got": ("'seed'", "line 3")}),
        ("models: [a/b\n", {"what": "YAML", "got": "line 1"}),
        ("models: !!python/object/apply:os.system ['true']\n", {"what": "YAML", "got": "os.system"}),
        (LAUGHS, {"got": "a", "expected": "models, edits"}),
        ("models: " + "[" * 500 + "]" * 500, {"what": "YAML", "got": "recursion"}),
        ("models: [" + "a/b," * 400_000 + "]", {"what": "too large", "expected": "1,000,000 bytes"}),
        ("\x00", {"what": "YAML", "got": "#x0000"}),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(tmp_path: Path, text: str, fields: dict[str, object]) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with raises(InputError, where=path, **fields):
        read_manifest(path)


def test_anchors_and_merged_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("prompts: 4\ngrids:\n  - &first {models: [a/b], length: 64}\n  - {<<: *first, length: 96}\n")
    assert [cell.spec.length for cell in read_manifest(path).cells] == [64, 96]


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    with raises(InputError, where=tmp_path / "none.yaml", got="No such file", remedy="architectures"):
        read_manifest(tmp_path / "none.yaml")


def test_checkpoints_are_cells_with_steps(tmp_path: Path) -> None:
    tiny_models(tmp_path / "training", "checkpoint-200", "checkpoint-0", "checkpoint-32")
    last = tiny_models(tmp_path, "training")[0]
    (Path(last) / "trainer_state.json").write_text(json.dumps({"global_step": 300}))
    found = manifest({"models": [{"checkpoints": last}]}).cells
    assert [cell.step for cell in found] == [0, 32, 200, 300]
    assert {cell.series for cell in found} == {"training"}
    assert found[3].model == last
    some = manifest({"models": [{"checkpoints": last, "steps": [32], "title": "mine"}]}).cells
    assert [(cell.step, cell.name) for cell in some] == [(32, "mine, step 32")]
    with raises(InputError, where="steps", got=33, expected="0, 32, 200, 300"):
        manifest({"models": [{"checkpoints": last, "steps": [33]}]})
    with raises(ModelError, where=tmp_path / "none", expected="checkpoint-100"):
        manifest({"models": [{"checkpoints": str(tmp_path / "none")}]})


def test_revisions_are_cells_with_steps() -> None:
    names = ["step0", "step1000-tokens4B", "main"]
    found = manifest({"models": [{"model": "org/name", "revisions": names}]}).cells
    assert [cell.step for cell in found] == [0, 1000, None]
    assert [cell.model for cell in found] == [f"org/name@{name}" for name in names]
    assert {cell.series for cell in found} == {"org/name"}


def test_models_that_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    tiny_models(tmp_path / "one", "model")
    tiny_models(tmp_path / "two", "model")
    alone = manifest({"models": [str(tmp_path / "one/model")]}).cells[0]
    both = manifest({"models": [str(tmp_path / "one/model"), str(tmp_path / "two/model")]}).cells
    assert both[0].name != both[1].name
    assert alone.name == "model"
    assert both[0].folder == alone.folder, "what it is called does not move it"


def test_series_that_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    for data in ("text", "backcopy"):
        tiny_models(tmp_path / data / "rope-0", "checkpoint-0", "checkpoint-8")
    entries = [{"checkpoints": str(tmp_path / data / "rope-0")} for data in ("text", "backcopy")]
    found = manifest({"models": entries}).cells
    assert {cell.series for cell in found} == {"text/rope-0", "backcopy/rope-0"}
    assert found[1].name == "text/rope-0, step 8"


def test_texts_are_named_by_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 100)
    found = manifest({"models": ["a/b"], "inputs": ["text:a.txt", "text:stdlib"]}).cells
    assert [cell.spec.inputs for cell in found] == [f"text:{tmp_path / 'a.txt'}", "text:stdlib"]


def test_a_relative_path_means_the_same_for_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models(tmp_path, "mine")
    monkeypatch.chdir(tmp_path)
    assert manifest({"models": ["mine"]}).cells[0].model == str(tmp_path / "mine")
    assert manifest({"models": ["mine@main"]}).cells[0].model == f"{tmp_path / 'mine'}@main"
    assert manifest({"models": ["~nobody-here/x"]}).cells[0].model == "~nobody-here/x"


def test_a_thousand_cells_need_no_torch(tmp_path: Path) -> None:
    """Importing torch alone would take seconds."""
    path = written(
        tmp_path / "m.yaml", models=["zoo-text-rope", "zoo-backcopy-rope"], length=[64, 96], seed=list(range(250))
    )
    said = (
        "import sys\nfrom posleak.cli.commands import app\n"
        f"app({['sweep', str(path), '--dry-run', '--json', '--out', str(tmp_path / 'out')]!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    output = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout
    found = json.loads(output)
    assert found["counts"]["open"] == 1000
    assert all(cell["guess"]["memory"] > 0 and cell["guess"]["seconds"] > 0 for cell in found["cells"])


# -- named manifests -------------------------------------------------------------------------------------------------


def test_named_manifests_are_well_formed() -> None:
    assert set(named_manifests()) == {"architectures", "knobs", "lengths", "first-token", "dtypes", "robustness"}
    for name in named_manifests():
        named = read_manifest(name)
        assert named.name == name
        assert bool(named.question) == (name != "robustness"), "a balance table says nothing about sources"
        assert len({cell.details for cell in named.cells}) == len(named.cells)


def test_robustness_changes_one_setting_at_a_time() -> None:
    cells = read_manifest("robustness").cells
    main = [cell for cell in cells if cell.model == "smollm2-135m"]
    usual = {"inputs": "random", "length": 256, "origin": 4, "donor": "plain"}
    settings = [{name: cell.as_dict()[name] for name in usual} for cell in main]
    changed = [{name for name in usual if setting[name] != usual[name]} for setting in settings]
    assert {frozenset(names) for names in changed if len(names) > 1} == {frozenset({"length", "donor"})}
    assert {setting["length"] for setting in settings} == {128, 256, 512, 1024}
    assert {setting["origin"] for setting in settings} == {1, 4, 8}
    assert {setting["inputs"] for setting in settings} == {"random", "text:stdlib"}
    assert {cell.spec.seed for cell in main} == {0, 1, 2}
    assert len(main) == 3 * 9
    assert {(cell.model, cell.spec.length, cell.spec.prompts) for cell in cells if cell not in main} == {
        ("gemma3-270m", 256, 16), ("gemma3-270m", 768, 16), ("qwen2.5-coder-1.5b", 256, 8),
    }  # fmt: skip
