"""Two pretrained models: what the definitions say of a trained model holds here, and the numbers repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.analyses.trace.trace import Trace
from posleak.axes import COMPONENTS
from posleak.errors import PosleakWarning
from posleak.models import Subject
from posleak.runs.run import Run
from support.runs_tiny import assert_same_bits
from tools.gallery import NUMBERS, read_estimate

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = [
    pytest.mark.real,
    pytest.mark.xdist_group("measured"),  # the tests share one measurement
    pytest.mark.filterwarnings("ignore:the origin of 4 tokens is narrower than the sink"),
]


@pytest.fixture(scope="module")
def traced(smollm: Subject) -> Trace:
    with pytest.warns(PosleakWarning, match="origin of 4 tokens"):
        return pl.trace(smollm, length=256, prompts=16, seed=0)


@pytest.fixture(scope="module")
def ordinary(traced: Trace) -> Run:
    return traced.ordinary


@pytest.fixture(scope="module")
def eight(smollm: Subject) -> Run:
    return pl.measure(smollm, length=256, prompts=8, batch=8)


def layers(run: Run) -> list[dict[str, Any]]:
    """Evenly weighted powers, whose sizes are those of the logits."""
    return [layer | layer["even"] for layer in run.as_dict()["layers"]]


def test_the_parts_add_up(ordinary: Run) -> None:
    assert ordinary.as_dict()["remainder"] < 1e-9


def test_the_first_layer_has_no_residual_and_a_late_one_has(ordinary: Run) -> None:
    first, late = layers(ordinary)[0], layers(ordinary)[18]
    assert first["ci"]["residual"][0] < 0 < first["ci"]["residual"][1]
    assert first["ci"]["mask"][0] > 1, "but it has the mask's"
    assert late["ci"]["residual"][0] > 0.5
    assert late["ci"]["residual"][0] > late["ci"]["mask"][1]


def test_the_sink_stabilises_the_mask(ordinary: Run) -> None:
    late = layers(ordinary)[18]
    assert late["sink_attention"] > 0.3
    assert late["ci"]["mask_without_sink"][0] > 10 * late["ci"]["mask"][1]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-9)])
def test_one_token_repeated_leaks_through_the_mask_alone(smollm: Subject, dtype: str, bound: float) -> None:
    subject = smollm if dtype == "float32" else pl.load("smollm2-135m", dtype=dtype)
    with pytest.warns(PosleakWarning, match="4 prompts"):
        found = pl.measure(subject, "constant", bos="none", length=256, prompts=4)
    for layer in layers(found):
        assert abs(layer["drift"]) < bound, layer["layer"]
        assert abs(layer["sink"]) < bound, layer["layer"]
    assert max(layer["mask"] for layer in layers(found)) > 0.1


def test_a_wide_sink_looks_like_a_drift_through_a_narrow_origin(smollm: Subject, ordinary: Run) -> None:
    """Positions 1 to 3 are sinks of layer 3 too. With an origin of one token drift and sink nearly cancel there."""
    with pytest.warns(PosleakWarning, match="origin of 1 token .*layers .*3"):
        narrow = pl.measure(smollm, length=256, prompts=16, seed=0, origin=1)
    through, wide = layers(narrow)[3], layers(ordinary)[3]
    assert min(through["drift"], through["sink"]) > 2
    assert through["residual"] < through["drift"] / 2
    assert max(wide["drift"], wide["sink"]) < 3


def test_its_position_comes_from_masks_here_and_earlier(traced: Trace) -> None:
    """As README, the gallery and the first tutorial show it: numbers that were kept are measured again."""
    found = traced
    assert found.remainder < 1e-9
    assert abs(float(found.layers["all"].power["earlier"].value[0])) < 1e-8, "nothing is earlier than the first layer"
    kept = json.loads((DOCS / "gallery" / NUMBERS).read_text(encoding="utf-8"))["smollm2-135m"]["smollm2-135m"]
    shares = {**found.ordinary.summary.model["all"].share, **found.model["all"].share}
    for name, share in kept["shares"].items():
        before = read_estimate(share)
        for end in ("value", "low", "high"):
            assert float(getattr(shares[name], end)) == pytest.approx(float(getattr(before, end)), abs=0.005), name
    assert shares["earlier"].low > 0.3
    assert shares["here"].low > 0.3
    assert shares["origin"].low < 0.1
    ordinary, borrowed = (float(found.attention[name].value[18]) for name in ("ordinary", "borrowed"))
    assert min(ordinary, borrowed) > 0.4, "its sinks live on"


def test_one_token_repeated_has_no_other_source_than_the_mask_here(smollm: Subject) -> None:
    with pytest.warns(PosleakWarning, match="4 prompts"):
        found = pl.trace(smollm, "constant", bos="none", length=128, prompts=4).layers["all"].power
    assert np.abs(found["earlier"].value).max() < 1e-6
    assert np.abs(found["origin"].value).max() < 1e-6
    assert found["here"].value == pytest.approx(found["total"].value, rel=1e-3)


def test_the_same_seed_gives_the_same_bits(smollm: Subject, eight: Run) -> None:
    again = pl.measure(smollm, length=256, prompts=8, batch=8)
    assert_same_bits(again, eight)
    assert layers(again) == layers(eight)


def test_another_batch_agrees(smollm: Subject, eight: Run) -> None:
    """To 1e-5 of the total power of the layer."""
    three = pl.measure(smollm, length=256, prompts=8, batch=3)
    for one, two in zip(layers(eight), layers(three), strict=True):
        for name in COMPONENTS:
            assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-5 * one["total"]), (one["layer"], name)


def test_past_its_window_a_sliding_layer_has_no_mask_leakage(gemma: Subject) -> None:
    found = pl.measure(gemma, length=1024, prompts=4)
    windows = gemma.identity.windows
    sliding = [layer for layer, window in enumerate(windows) if window == 512]
    whole = [layer for layer, window in enumerate(windows) if window is None]
    assert (len(sliding), whole) == (15, [5, 11, 17])
    mask = found.data["mask"]
    past = mask.sel(query=mask["query"] >= 512)
    assert list(past["query"].values) == [626, 767]
    assert (past.isel(layer=sliding) == 0).all(), "exactly"
    assert float(np.abs(past.isel(layer=whole)).max()) > 0.01
    assert float(np.abs(mask.isel(layer=sliding).sel(query=mask["query"] < 512)).max()) > 0.01
    assert found.data.attrs["remainder"] < 1e-9


def test_what_others_measure(smollm: Subject) -> None:
    """What their papers report of other models is seen here too: signs and laws, no numbers."""
    run = pl.measure(smollm, length=128, prompts=4, metrics="all")
    assert run.metrics is not None
    found = {row.metric.id: float(row.value.value) for row in run.metrics.rows}  # intervals of four prompts are wide
    assert found["sink_rate"] > 0.3
    assert found["sink_rate_natural"] > 0.3
    assert found["sink_rate_repeated"] == 0
    assert found["first_repeated"] == pytest.approx(0.0741, rel=0.2)
    assert found["shift_own"] < 1e-4 < found["shift_bfloat16"]
    assert found["valley"] < -0.8
    assert found["uncertainty"] < -0.3
    assert run.metrics.frame is not None
    assert run.metrics.frame.kind == "centralized"
    deviation = run.metrics.layers["toeplitz"].value
    assert deviation[0] < 0.2 * np.median(deviation[2:])  # no position before the first attention
