"""The page on robustness says what the traces of its sweep say; its sentences follow from fixed rules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.leakage import Estimate
from posleak.leakage.summary import Decomposition
from posleak.show.numbers import estimate
from posleak.sweeps.sweep import sweep
from support.sweep_tiny import Here, tiny_models
from tools import robustness
from tools.robustness import TraceSetting

GRID: dict[str, Any] = {
    "kind": "trace", "prompts": 16, "seed": [0, 1], "resources": {"cpus": 1},
    "grids": [{"length": [64, 96]}, {"length": 64, "donor": "long"}, {"length": 64, "origin": 1}],
}  # fmt: skip


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the tool wrote the page of a small sweep."""
    root = tmp_path_factory.mktemp("robustness")
    assert sweep({**GRID, "models": tiny_models(root, "mine")}, out=root / "sweep", engine=Here()).complete
    robustness.main([str(root / "sweep"), str(root / "docs")])
    return root / "docs"


def test_the_tables_pool_the_seeds_of_every_setting(docs: Path) -> None:
    page = (docs / robustness.PAGE).read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| mine")]
    assert [(row[2], row[3], row[4], row[5]) for row in rows] == 2 * [
        ("64", "4", "plain", "32"), ("96", "4", "plain", "32"), ("64", "4", "long", "32"), ("64", "1", "plain", "32"),
    ]  # fmt: skip
    traces = [pl.trace(docs.parent / "mine", length=64, prompts=16, seed=seed, donor="long") for seed in (0, 1)]
    for row, norm in ((rows[2], "attention"), (rows[6], "even")):
        numbers = [trace.model["all"].norms[norm] for trace in traces]
        shares = [
            Estimate.average([each.share[name] for each in numbers]) for name in ("earlier", "here", "origin", "left")
        ]
        order = Estimate.average([each.ratios["order"] for each in numbers])
        total = Estimate.average([each.power["total"] for each in numbers])
        assert row[6:] == [estimate(total), *(estimate(each, "share") for each in (*shares, order))]


def test_the_figure_is_there(docs: Path) -> None:
    assert (docs / robustness.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"]({robustness.PICTURE})" in (docs / robustness.PAGE).read_text(encoding="utf-8")


def share(value: float, half: float = 0.05) -> Estimate:
    return Estimate(np.asarray(value), np.asarray(value - half), np.asarray(value + half), 16)


def made(earlier: float, here: float, left: float = 0.0, order: float = 0.0) -> Decomposition:
    shares = {"earlier": share(earlier), "here": share(here), "origin": share(0.1), "left": share(left)}
    return Decomposition({"total": share(1.0)}, shares, {"order": share(order)})


def test_sentences_follow_from_intervals() -> None:
    usual = TraceSetting("mine", "random", 256, 4, "plain")
    numbers = {
        usual: replace(made(0.6, 0.3), even=made(0.6, 0.3)),
        usual._replace(length=128): replace(made(0.3, 0.6, left=0.2), even=made(0.6, 0.3)),
        usual._replace(inputs="text:stdlib"): replace(made(0.46, 0.44, order=-0.3), even=made(0.46, 0.44)),
    }
    found = list(robustness.sentences(numbers))
    assert "`earlier` in 2 (its interval is above the others in 1), `here` in 1" in found[0]
    assert "`earlier` in 3 (its interval is above the others in 2)" in found[1]
    assert "1 of 3 settings (mine, N = 128)" in found[2]
    assert "left without a source in 1 of 3 settings (mine, N = 128)" in found[3]
    assert "at most 30% of the leakage, significantly in 1 of 3 settings (mine, N = 256, text:stdlib)" in found[3]
    assert "none of 3" in found[4]
    assert "`earlier` from 30% to 60%" in found[5]
    assert re.search(
        r"outside them: N = 128 \(`earlier`, `here`\); N = 256, text:stdlib \(`earlier`, `here`\)", found[5]
    )
    assert len(found) == 7
    absent = made(float("nan"), float("nan"))
    numbers[usual._replace(origin=1)] = replace(absent, even=absent)
    assert list(robustness.sentences(numbers)) == [
        "No significant leakage in 1 of 4 settings (mine, N = 256, m = 1).",
        *found,
    ]
