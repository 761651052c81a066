"""Contrasts with a baseline, and rows of tables."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from posleak.leakage import Contrast, Estimate, Jackknife, Sampled
from posleak.leakage.power import products
from posleak.leakage.sampled import LabelledEstimate
from posleak.leakage.summary import PowerKey, contrasts
from posleak.typed import plain

PROMPTS = 7


def sums(seed: int, scale: float = 1.0) -> np.ndarray:
    x = scale * (3 + np.random.default_rng(seed).standard_normal((PROMPTS, 11)))
    return products(x, x)


def sampled(seed: int, scale: float = 1.0) -> Sampled:
    return Jackknife(PROMPTS).inner(sums(seed, scale))


def estimate_of(value: float, low: float, high: float) -> Estimate:
    return Estimate(np.asarray(value), np.asarray(low), np.asarray(high), PROMPTS)


def ends(estimate: Estimate) -> tuple[float, float, float, int]:
    return float(estimate.value), float(estimate.low), float(estimate.high), estimate.n


def test_a_paired_contrast_is_computed_in_every_replicate() -> None:
    after, before = sampled(0), sampled(1)
    contrast = Contrast(after, before)
    assert ends(contrast.difference) == ends((after - before).estimate)
    assert ends(contrast.ratio.estimate) == ends(after.over(before).estimate)
    assert ends(contrast.relative) == ends((after.over(before) - 1.0).estimate)
    assert ends(contrast.removed) == ends(1 - after.over(before).estimate)


def test_what_both_have_in_common_cancels_only_if_they_are_paired() -> None:
    before = sampled(0)
    after = before + 1.0
    paired, independent = (Contrast(after, before, paired).difference for paired in (True, False))
    assert ends(paired)[:3] == pytest.approx((1, 1, 1))
    assert float(independent.value) == pytest.approx(1)
    widths = [float(x.estimate.high) - float(x.value) for x in (after, before)]
    low = [float(x.value) - float(x.estimate.low) for x in (after, before)]
    assert float(independent.high) - 1 == pytest.approx(math.hypot(widths[0], low[1]))


def test_independent_quantities_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="same prompts"):
        _ = Contrast(sampled(0), sampled(1), paired=False).ratio


def test_a_higher_level_is_wider() -> None:
    contrast = Contrast(sampled(0), sampled(1))
    assert contrast.at(0.999).difference.low < contrast.difference.low
    assert contrast.at(0.999).difference.value == contrast.difference.value


def test_contrasts_of_what_both_have() -> None:
    mask = PowerKey("attention", "all", "mask")
    after = {mask: sums(0), mask._replace(component="left"): sums(1), mask._replace(norm="even"): sums(4)}
    before = {mask: sums(2), mask._replace(queries="early"): sums(3)}
    (key, contrast), *others = contrasts(after, before, PROMPTS).items()
    assert not others
    assert key == mask
    assert ends(contrast.difference) == ends((sampled(0) - sampled(2)).estimate)


def test_a_scaled_copy_removes_its_share_exactly() -> None:
    mask = PowerKey("attention", "all", "mask")
    (contrast,) = contrasts({mask: sums(0, 0.5)}, {mask: sums(0)}, PROMPTS).values()
    assert ends(contrast.removed)[:3] == pytest.approx((0.75, 0.75, 0.75))


def test_a_row_is_read_as_it_was_written() -> None:
    labels = {"layer": 3, "queries": "all", "quantity": "power", "component": "mask", "unit": "nats²"}
    number = LabelledEstimate(estimate_of(1.5, np.nan, 2.0), labels)
    row = number.as_row()
    assert list(row) == [*labels, "value", "low", "high", "n"]
    again = LabelledEstimate.from_row(json.loads(json.dumps(plain(row))))
    assert again.labels == labels
    assert ends(again.estimate) == pytest.approx(ends(number.estimate), nan_ok=True)


def test_columns_choose_and_order() -> None:
    row = LabelledEstimate(Estimate(np.asarray(1.0), np.asarray(0.0), np.asarray(2.0), 7), {"unit": "1"}).as_row(
        ("layer", "value", "unit", "head"), layer=4
    )
    assert list(row.items()) == [("layer", 4), ("value", 1.0), ("unit", "1"), ("head", None)]


def test_cells_have_their_indices_before_other_labels() -> None:
    value = np.arange(6.0).reshape(2, 3)
    cells = list(LabelledEstimate(Estimate(value, value - 1, value + 1, 7), {"unit": "1"}).cells("call", "head"))
    assert [cell.as_row()["value"] for cell in cells] == value.ravel().tolist()
    assert cells[4].labels == {"call": 1, "head": 1, "unit": "1"}
    assert list(cells[4].labels) == ["call", "head", "unit"]
