"""Studies: cells are measured once, kept, reused and paired; their table says what the runs say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from posleak.errors import InputError
from posleak.sweeps.cells import Cell
from posleak.sweeps.studies.cells import STUDIES, Study, study_named
from posleak.sweeps.studies.run import run_study
from support.families import tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two tiny models of different shape, as folders."""
    root = tmp_path_factory.mktemp("models")
    tiny("llama", num_hidden_layers=2).save_pretrained(root / "small")
    tiny("gemma3_text").save_pretrained(root / "mixed")
    return {name: str(root / name) for name in ("small", "mixed")}


def cells(models: dict[str, str]) -> Study:
    small, mixed = models["small"], models["mixed"]
    chosen = (Cell(small), Cell(small, ("window=9",)), Cell(small, ("rope=ntk:1",)), Cell(mixed))
    return Study("tiny", "Does it work?", chosen).at(length=64, prompts=4)


def test_cells_are_measured_once_and_reused(models: dict[str, str], tmp_path: Path) -> None:
    first = run_study(cells(models), tmp_path).rows
    said: list[str] = []
    again = run_study(cells(models), tmp_path, said.append).rows
    assert not any("prompts" in line for line in said)
    assert [row.run.path for row in first] == [row.run.path for row in again]
    stored = json.loads((tmp_path / "study-tiny" / "study.json").read_text())
    assert [row["label"] for row in stored["rows"]] == [row.cell.label for row in first]


def test_the_table_is_paired_and_true(models: dict[str, str], tmp_path: Path) -> None:
    base, window, null, mixed = run_study(cells(models), tmp_path).rows
    assert base.removed == {}
    assert mixed.removed == {}
    removed = null.removed["mask, all"]
    assert float(removed.value) == pytest.approx(0, abs=1e-9)
    powers = [row.balance.numbers["all"].power["mask"].value for row in (window, base)]
    assert float(window.removed["mask, all"].value) == pytest.approx(1 - powers[0] / powers[1])
    shares = base.balance.numbers["all"].share
    total = sum(float(shares[part].value) for part in ("mask", "drift", "sink"))
    assert total == pytest.approx(1.0) or np.isnan(total)


def test_sliding_and_global_layers_have_slopes_of_their_own(models: dict[str, str], tmp_path: Path) -> None:
    *_, mixed = run_study(cells(models), tmp_path).rows
    assert set(mixed.balance.slopes) == {"all", "sliding"}, "one global layer has no slope"


def test_an_unknown_study_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'architectures'"):
        study_named("architecture")


def test_studies_are_well_formed() -> None:
    for name, chosen in STUDIES.items():
        assert chosen.name == name
        assert len({cell.label + str(cell.length) for cell in chosen.cells}) == len(chosen.cells)
    other = study_named("architectures").at(models=["a", "b", "c"], length=64)
    assert [(cell.model, cell.length) for cell in other.cells] == [("a", 64), ("b", 64), ("c", 64)]


def test_the_markdown_table_has_a_line_for_early_and_for_all_queries(models: dict[str, str], tmp_path: Path) -> None:
    from posleak.cli.study import study_markdown

    found = run_study(cells(models), tmp_path)
    lines = study_markdown(found).splitlines()
    assert len(lines) == 2 + 2 * len(found.rows)
    assert len({line.count("|") for line in lines}) == 1
