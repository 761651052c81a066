"""The trace: two runs on the same prompts, numbers that add up, and a folder that is read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.analyses.trace.trace import CAUSES, SOURCES, Trace, rungs
from posleak.errors import RunError, UnsupportedError
from posleak.leakage import component
from posleak.leakage.power import unbiased
from posleak.leakage.summary import Products
from posleak.models import Subject
from posleak.probe import read_placements
from posleak.runs.run import Run
from support.errors import raises
from support.families import subject
from support.runs_tiny import assert_same_bits, counted_passes

ASKED: dict[str, Any] = {"length": 48, "prompts": 16, "seed": 2}


@pytest.fixture(scope="module")
def soft_llama() -> Subject:
    return subject(scale=3.0)


@pytest.fixture(scope="module")
def folder(soft_llama: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trace") / "run"
    pl.trace(soft_llama, out=place, by_layer=True, **ASKED)
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> Trace:
    loaded = Trace.load(folder)
    assert loaded is not None
    return loaded


def test_both_passes_read_the_same_prompts(found: Trace) -> None:
    one, other = found.ordinary.record, found.branches.record
    assert one.inputs.same_tokens(other.inputs)
    assert (one.inputs.context, other.inputs.context) == (0, 48 + 64)
    assert (one.spec.edit_texts, other.spec.edit_texts) == ((), ("context=branches",))


def test_sources_add_up_to_the_total_and_their_shares_to_one(found: Trace) -> None:
    assert found.remainder < 1e-9
    for numbers in (found.model["all"], found.model["early"]):
        for norm in numbers.norms.values():
            assert sum(float(norm.share[name].value) for name in SOURCES) == pytest.approx(1)
    assert found.sources == CAUSES[1:], "no recurrent state"


def test_order_is_the_difference_between_the_shares_of_earlier(found: Trace) -> None:
    """The share of order, and the difference of shares that the two orders of intervention give to `earlier`."""
    data, fresh = found.branches.data, found.components["total"]
    own, direct, lent = (component(data, name) for name in ("total_a", "total", "left"))
    orders = {"total": fresh, "first": own - direct, "second": own - data["lent_a"] - lent}
    products = Products.by_queries(orders, found.ordinary.data["weight"], ("first", "second"))["all"]
    for norm, numbers in found.model["all"].norms.items():
        averaged = products.averaged((0, 1)).norms[norm]
        total = unbiased(averaged.own["total"], found.ordinary.prompts)
        one, two = (unbiased(averaged.with_total[name], found.ordinary.prompts) / total for name in ("first", "second"))
        assert numbers.ratios["order"].value == pytest.approx(one - two)
        assert numbers.share["earlier"].value == pytest.approx((one + two) / 2)


def test_the_first_layer_and_shapes(found: Trace) -> None:
    layers = found.layers["all"]
    assert float(np.abs(layers.power["earlier"].value[0])) < 1e-8, "the first layer has no earlier one"
    assert np.nanmax(np.abs(found.components["earlier"].values[:, 1:]), axis=(0, 2, 3, 4)).min() > 0.1
    assert found.heads["all"].power["here"].value.shape == (3, 3)


def test_the_total_is_the_one_of_an_ordinary_measurement(found: Trace, soft_llama: Subject) -> None:
    run = pl.measure(soft_llama, **ASKED)
    assert_same_bits(Run(found.ordinary.record, found.ordinary.data), Run(run.record, run.data))
    assert np.array_equal(found.layers["all"].power["total"].value, run.summary.layers["all"].power["total"].value)


def test_the_contract(found: Trace) -> None:
    contract = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (contract["definitions"], contract["origin"], contract["prompts"]) == (3, 4, 16)
    assert (contract["norm"], contract["donor"]) == ("attention", 48 + 64)
    assert len(contract["checks"]) == 2
    assert contract["remainder"] < 1e-9
    assert set(contract["attention_to_origin"]) == {"ordinary", "borrowed"}
    for number, layer in enumerate(contract["layers"]):
        assert layer["layer"] == number
        powers = {"total", "direct", *SOURCES}
        for numbers in (layer, layer["even"]):
            assert powers < set(numbers)
            assert set(numbers["share"]) == set(SOURCES)
            assert powers | {"share"} == set(numbers["ci"])
    for queries in ("all", "early"):
        for numbers in (contract[queries], contract[queries]["even"]):
            assert set(numbers["share"]) == set(SOURCES)
            assert set(numbers["power"]) == powers
            assert set(numbers["order"]) == {"value", "low", "high", "n"}


def test_lending_up_to_a_layer_leaves_the_later_ones_to_tell(found: Trace) -> None:
    """Rows are contexts lent to no layer, to the first, the first two, and all; no row changes earlier layers' D."""
    ladder = found.ladder
    assert ladder is not None
    assert ladder.upto == (-1, 0, 1, 2)
    assert np.array_equal(ladder.left.value[0], found.layers["all"].power["total"].value)
    remains = found.branches.weighted_by(found.ordinary)["all"].own["left"]
    assert np.array_equal(ladder.left.value[-1], unbiased(np.nanmean(remains, axis=1), found.ordinary.prompts))
    last = found.ordinary.data.sizes["layer"] - 1
    assert np.allclose(ladder.left.value[1:, 0], ladder.left.value[-1, 0], rtol=1e-4, atol=1e-6)
    direct = found.layers["all"].power["direct"].value
    assert ladder.left.value[-2, last] == pytest.approx(direct[last], rel=1e-4), "all but the last layer: D"
    assert found.as_dict()["by_layer"]["lent_up_to"] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (range(1), []),
        (range(2), [0]),
        (range(3), [0, 1]),
        (range(30), [0, 1, 2, 4, 8, 16]),
        ((1, 3), [1]),
        ((0, 0, 1, 1, 2, 2), [0, 1]),
        ((3, 7, 11, 15), [3, 7, 11]),
    ],
)
def test_the_rungs_of_the_ladder(layers: Sequence[int], expected: list[int]) -> None:
    assert rungs(layers) == expected


def test_what_is_there_is_not_measured_again(folder: Path, found: Trace, soft_llama: Subject) -> None:
    with counted_passes(soft_llama.model) as passes:
        again = pl.trace(soft_llama, out=folder, by_layer=True, **ASKED)
    assert passes == []
    assert_same_bits(again.branches, found.branches)
    assert again.as_dict() == found.as_dict()


def test_a_folder_without_a_borrowed_pass_has_no_trace(soft_llama: Subject, tmp_path: Path) -> None:
    pl.measure(soft_llama, out=tmp_path / "run", **ASKED)
    assert Trace.load(tmp_path / "run") is None
    added = pl.trace(soft_llama, out=tmp_path / "run", **ASKED)
    assert added.ladder is None
    loaded = Trace.load(tmp_path / "run")
    assert loaded is not None
    assert loaded.as_dict() == added.as_dict()


def test_another_trace_in_the_folder_is_refused(folder: Path, soft_llama: Subject) -> None:
    with raises(RunError, where=folder, got=("seed", 2, 3), remedy="--fresh"):
        pl.trace(soft_llama, out=folder, **{**ASKED, "seed": 3})


def test_placements_are_read_once(soft_llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once without and once with a donor; runs that borrow up to some layer use those of the borrowed run."""
    lengths = list[int]()

    def counted(model: Any, ids: Any, *more: Any) -> Any:
        lengths.append(ids.shape[1])
        return read_placements(model, ids, *more)

    monkeypatch.setattr("posleak.runs.placements.read_placements", counted)
    pl.trace(soft_llama, by_layer=True, **ASKED)
    assert lengths == [48, 48 + 64 + 48]


def test_an_unsupported_model_is_rejected_before_anything_is_measured() -> None:
    learned = subject("gpt2", n_embd=30, n_layer=3, n_head=3, n_inner=41, n_positions=256)
    with raises(UnsupportedError, where="GPT2LMHeadModel", what="borrowed", remedy="`posleak measure`"):
        pl.trace(learned, progress=lambda line: pytest.fail(line), **ASKED)
