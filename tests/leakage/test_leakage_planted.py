"""Synthetic logits with a known drift, sink, window or nothing at all give back exactly what was planted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings, strategies as st
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError
from posleak.leakage import Parts, narrow_layers, sink_width, split
from posleak.probe import Plan, default_plan, reduce_rows
from support.errors import raises

N = 67
PLANS = {m: default_plan(N, origin=m) for m in (1, 4)}
EXACT = 1e-10
CHANGING = ("mask", "drift", "sink", "mask_without_sink", "attention_0", "profile", "ordinary")
FLAT = torch.zeros(N, dtype=torch.float64)

widths = pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: f"origin {plan.origin}")


def profile(seed: int = 0) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def relative_logits(profile: Tensor, origin: float | None = None, width: int = 0) -> Tensor:
    """s_ij = profile[i − j] [1, 1, N, N]: a purely relative head; `origin` replaces the logits of the first keys."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    s = profile[(i - j).clamp(min=0)].clone()
    if origin is not None:
        s[:, :width] = origin
    return s[None, None]


def moved_by_offset(profile: Tensor, plan: Plan, origin: float | None = None) -> Tensor:
    """s̃_rj of a purely relative head [1, 1, R, Q, m]: only the offset i − j counts; `origin`: only content."""
    i, j = torch.tensor(plan.queries)[:, None], torch.arange(plan.origin)
    s = profile[i - j] if origin is None else torch.full((len(i), plan.origin), origin, dtype=torch.float64)
    return s.expand(1, 1, len(plan.references), -1, -1)


def reduced(
    logits: Tensor, plan: Plan, *, moved: Tensor | None = None, window: int = N, aux: Tensor | None = None
) -> Parts:
    i, j = torch.tensor(plan.rows)[:, None], torch.arange(plan.length)
    return split(reduce_rows(logits[:, :, list(plan.rows)], (j <= i) & (i - j < window), plan, aux, moved))


def relative_parts(profile: Tensor, plan: Plan, window: int = N, aux: Tensor | None = None) -> Parts:
    moved = moved_by_offset(profile, plan)
    return reduced(relative_logits(profile), plan, moved=moved, window=window, aux=aux)


def drift_of(parts: Parts) -> Tensor:
    return parts.drift[..., parts.pairs]


def total_of(parts: Parts) -> Tensor:
    return (parts.mask + parts.sink)[..., None] + parts.drift


# A head that knows only offsets


@widths
def test_a_relative_head_leaks_through_its_mask_only(plan: Plan) -> None:
    parts = relative_parts(profile(), plan)
    assert drift_of(parts).abs().max() < EXACT
    assert parts.sink.abs().max() < EXACT
    assert parts.mask.abs().max() > 0.1


@widths
def test_the_mask_is_the_log_of_the_hidden_mass(plan: Plan) -> None:
    log_z = torch.logcumsumexp(profile(), 0)  # a query at i sees i + 1 keys
    expected = log_z[list(plan.references)].mean() - log_z[list(plan.queries)]
    assert torch.allclose(relative_parts(profile(), plan).mask[0, 0], expected, atol=EXACT)


@widths
def test_an_origin_that_stays_where_it_is_takes_offsets_for_a_sink(plan: Plan) -> None:
    """Moving is what makes the law above hold: the late query meets the origin at other offsets."""
    left = reduced(relative_logits(profile()), plan)
    assert left.sink.abs().max() > 0.1
    assert torch.allclose(total_of(left), total_of(relative_parts(profile(), plan)), atol=EXACT, equal_nan=True)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), window=st.integers(2, N), width=st.sampled_from([1, 4]))
def test_any_relative_head_has_no_drift_and_no_sink(seed: int, window: int, width: int) -> None:
    parts = relative_parts(profile(seed), PLANS[width], window=max(window, width + 1))
    assert drift_of(parts).abs().max() < 1e-9
    assert parts.sink.abs().max() < 1e-9


@widths
def test_an_offset_that_is_off_by_one_is_seen(plan: Plan) -> None:
    """The law above can fail: read the early rows one key too far and a purely relative head shows drift."""
    s = relative_logits(profile())
    s[:, :, : plan.references[0]] = s[:, :, : plan.references[0]].roll(1, dims=-1)
    assert drift_of(reduced(s, plan, moved=moved_by_offset(profile(), plan))).abs().max() > 0.1


@widths
def test_zero_queries_leak_the_log_of_how_many_keys_they_see(plan: Plan) -> None:
    parts = relative_parts(FLAT, plan)
    for q, i in enumerate(plan.queries):
        expected = sum(math.log((r + 1) / (i + 1)) for r in plan.references) / len(plan.references)
        assert abs(float(parts.mask[0, 0, q]) - expected) < EXACT
    assert drift_of(parts).abs().max() < EXACT
    assert parts.sink.abs().max() < EXACT


@widths
def test_the_mask_without_a_sink_takes_the_origin_for_ordinary_keys(plan: Plan) -> None:
    """By hand: as many more keys of the mean weight for r, and its nearest n_i + m_i body keys."""
    s, m = profile(), plan.origin
    mask = relative_parts(s, plan).mask_without_sink[0, 0]
    for q, i in enumerate(plan.queries):
        by_reference = []
        for r in plan.references:
            row, n_r = [math.exp(x) for x in s[: r - m + 1].tolist()], r - m + 1  # offsets of r's body keys
            full = sum(row) * (n_r + m) / n_r
            by_reference.append(math.log(full) - math.log(sum(row[: min(i + 1, n_r)])))
        assert abs(float(mask[q]) - sum(by_reference) / len(by_reference)) < EXACT


# Planted drifts and sinks


@widths
def test_a_planted_drift_is_drift_at_its_offset(plan: Plan) -> None:
    """One query's logit at one offset is raised, and its others are lowered so that its body weighs the same."""
    i, delta, h = plan.queries[9], 2, 0.7
    s, n = relative_logits(FLAT), i - plan.origin + 1
    rest = math.log((n - math.exp(h)) / (n - 1))
    s[0, 0, i, plan.origin : i + 1] = rest
    s[0, 0, i, i - delta] = h
    parts = reduced(s, plan, moved=moved_by_offset(FLAT, plan))
    at = plan.queries.index(i)
    for d, offset in enumerate(plan.offsets):
        if offset < n:
            assert abs(float(parts.drift[0, 0, at, d]) - (h if offset == delta else rest)) < EXACT
    others = [q for q in range(len(plan.queries)) if q != at]
    assert parts.drift[0, 0, others].nan_to_num().abs().max() < EXACT
    assert parts.sink.abs().max() < EXACT


@pytest.mark.parametrize(("origin", "width"), [(1, 1), (4, 1), (4, 4)])
def test_a_planted_sink_at_one_query_is_sink_there_and_nowhere_else(origin: int, width: int) -> None:
    plan, q, h = PLANS[origin], 8, 2.5
    i = plan.queries[q]
    n = i - origin + 1
    s = relative_logits(FLAT)
    s[0, 0, i, :width] = h
    parts = reduced(s, plan, moved=moved_by_offset(FLAT, plan))
    expected = math.log(1 + origin / n) - math.log(1 + (width * math.exp(h) + origin - width) / n)
    assert abs(float(parts.sink[0, 0, q]) - expected) < EXACT
    assert parts.sink[0, 0, [x for x in range(len(plan.queries)) if x != q]].abs().max() < EXACT
    assert drift_of(parts).abs().max() < EXACT


def test_a_wide_sink_through_a_narrow_origin_is_a_drift_and_a_sink_that_cancel() -> None:
    """The width of the origin changes the parts, never the total."""
    i, h, width = 24, 2.5, 4
    s = relative_logits(FLAT)
    s[0, 0, i, :width] = h
    wide = replace(PLANS[4], queries=(12, i, 40))
    narrow = replace(wide, origin=1)
    (one, four) = (reduced(s, plan, moved=moved_by_offset(FLAT, plan)) for plan in (narrow, wide))
    assert torch.allclose(total_of(one)[..., four.pairs], total_of(four)[..., four.pairs], atol=EXACT)
    assert drift_of(four).abs().max() < EXACT
    body = i - width + 1 + (width - 1) * math.exp(h)  # three of the sink's keys count as body
    drift = math.log(i / body)
    assert torch.allclose(one.drift[0, 0, 1, :3], torch.full((3,), drift, dtype=torch.float64), atol=EXACT)
    assert abs(float(one.sink[0, 0, 1]) - (math.log(1 + 1 / i) - math.log(1 + math.exp(h) / body))) < EXACT
    assert drift < -0.5


@widths
def test_a_constant_sink_damps_the_mask_and_is_no_leakage_of_its_own(plan: Plan) -> None:
    m, h = plan.origin, 6.0
    s, moved = relative_logits(FLAT, origin=h, width=m), moved_by_offset(FLAT, plan, origin=h)
    parts = reduced(s, plan, moved=moved)
    late, early = (torch.tensor(rows).double() - m + 1 for rows in (plan.references, plan.queries))
    expected = (late + m * math.exp(h)).log().mean() - (early + m * math.exp(h)).log()
    assert torch.allclose(parts.mask[0, 0], expected, atol=EXACT)
    assert parts.sink.abs().max() < EXACT
    assert drift_of(parts).abs().max() < EXACT
    seen = torch.minimum(early + m, late[:, None])  # no more keys than r has in its body
    ordinary = ((late + m).log()[:, None] - seen.log()).mean(0)
    assert torch.allclose(parts.mask_without_sink[0, 0], ordinary, atol=EXACT)
    assert (parts.mask_without_sink**2).mean() > 5 * (parts.mask**2).mean(), "the sink stabilises"


@widths
def test_a_learned_sink_logit_is_a_constant_in_every_denominator(plan: Plan) -> None:
    aux = torch.tensor([1.3], dtype=torch.float64)
    parts = relative_parts(FLAT, plan, aux=aux)
    late, early = torch.tensor(plan.references).double(), torch.tensor(plan.queries).double()
    expected = (late + 1 + math.exp(1.3)).log().mean() - (early + 1 + math.exp(1.3)).log()
    assert torch.allclose(parts.mask[0, 0], expected, atol=EXACT)
    first = plan.queries.index(16)  # sees fewer keys than any late query has in its body
    assert torch.allclose(parts.mask_without_sink[0, 0, :first], expected[:first], atol=EXACT)
    assert drift_of(parts).abs().max() < EXACT
    assert parts.sink.abs().max() < EXACT


# Windows


@widths
def test_behind_a_window_the_mask_leaks_exactly_nothing(plan: Plan) -> None:
    """To the bit, for any logits: i and r see equally many body keys, and nothing of the origin."""
    window, m = 11, plan.origin
    s = torch.randn(2, 3, N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    behind = [q for q, i in enumerate(plan.queries) if i - window + 1 >= m]
    for logits in (s, s.float()):
        parts = reduced(logits, plan, window=window)
        assert bool((parts.mask[..., behind] == 0).all())
        assert bool((parts.mask_without_sink[..., behind] == 0).all())
        assert bool((parts.sink[..., behind] == 0).all())
        assert bool((parts.attention_0[..., behind] == 0).all())
        assert bool((parts.profile == 0).all())
    assert float(parts.mask[..., : behind[0]].abs().min()) > 0


@widths
def test_what_a_window_hides_from_the_late_query_is_the_masks_doing(plan: Plan) -> None:
    """Where i sees the origin and r does not, the crop shows it to r: no sink, and the mask is the hidden mass."""
    window, s = 11, profile()
    parts = relative_parts(s, plan, window=window)
    log_z = torch.logcumsumexp(s, 0)
    for q, i in enumerate(plan.queries):
        assert abs(float(parts.mask[0, 0, q] - (log_z[window - 1] - log_z[min(i, window - 1)]))) < EXACT
    assert parts.sink.abs().max() < EXACT


@widths
def test_a_sink_that_a_window_hides_from_the_late_query_is_in_the_mask_too(plan: Plan) -> None:
    window, m, h = 11, plan.origin, 6.0
    moved = moved_by_offset(FLAT, plan, origin=h)
    parts = reduced(relative_logits(FLAT, origin=h, width=m), plan, moved=moved, window=window)
    for q, i in enumerate(plan.queries):
        seen = max(0, min(m, m - (i - window + 1)))
        body = min(i + 1, window) - seen
        expected = math.log(window) - math.log(body + seen * math.exp(h))
        assert abs(float(parts.mask[0, 0, q]) - expected) < EXACT
    assert parts.sink.abs().max() < EXACT
    assert float(parts.mask.min()) < -1, "the early query's sink takes weight from its body"


# What a softmax does not see


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(0, 40),
    origin=st.floats(-30, 30),
    window=st.integers(5, N),
    aux=st.one_of(st.none(), st.floats(-10, 10)),
    width=st.sampled_from([1, 4]),
)
def test_parts_add_up_and_ignore_constants(
    seed: int, scale: float, origin: float, window: int, aux: float | None, width: int
) -> None:
    """L1 for any logits; and a constant added to all logits, s_aux included, changes nothing."""
    s, moved = anything(seed, scale, origin, PLANS[width])
    sinks = None if aux is None else torch.full((3,), aux, dtype=torch.float64)
    parts = reduced(s, PLANS[width], moved=moved, window=window, aux=sinks)
    assert parts.remainder < 1e-9
    up = None if sinks is None else sinks + 5
    assert_same(parts, reduced(s + 5, PLANS[width], moved=moved + 5, window=window, aux=up), CHANGING)


def anything(seed: int, scale: float, origin: float, plan: Plan) -> tuple[Tensor, Tensor]:
    """Random logits, and random ones of the moved origin."""
    generator, m = torch.Generator().manual_seed(seed), plan.origin
    s = torch.randn(2, 3, N, N, generator=generator, dtype=torch.float64) * scale
    s[..., :m] += origin
    shape = (2, 3, len(plan.references), len(plan.queries), m)
    return s, torch.randn(shape, generator=generator, dtype=torch.float64) * scale + origin


def assert_same(one: Parts, other: Parts, names: Sequence[str]) -> None:
    for name in names:
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-8, equal_nan=True), name


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    row=st.integers(0, len(PLANS[1].rows) - 1),
    by=st.sampled_from([-50.0, 50.0]),
    window=st.integers(5, N),
    width=st.sampled_from([1, 4]),
)
def test_a_constant_added_to_any_one_row_changes_no_part(
    seed: int, row: int, by: float, window: int, width: int
) -> None:
    """L9. The moved logits are of the late query's row, and get the constant with it."""
    plan = PLANS[width]
    p = plan.rows[row % len(plan.rows)]
    s, moved = anything(seed, 3.0, 1.0, plan)
    plain = reduced(s, plan, moved=moved, window=window)
    s[:, :, p] += by
    if p in plan.references:
        moved[:, :, plan.references.index(p)] += by
    assert_same(plain, reduced(s, plan, moved=moved, window=window), CHANGING)


def test_a_constant_that_misses_one_logit_is_seen() -> None:
    """The law above can fail."""
    plan = PLANS[4]
    s, moved = anything(0, 3.0, 1.0, plan)
    plain = reduced(s, plan, moved=moved)
    s[:, :, plan.references[0]] += 50
    changed = reduced(s, plan, moved=moved)
    assert float((plain.sink - changed.sink).abs().max()) > 0.1
    assert float((plain.mask - changed.mask).abs().max()) > 0.1


def test_a_learned_sink_logit_fixes_the_scale() -> None:
    """The exception of L9: with s_aux in its denominator, a row is another one when its logits move."""
    plan, aux = PLANS[4], torch.zeros(3, dtype=torch.float64)
    s, moved = anything(0, 3.0, 1.0, plan)
    plain = reduced(s, plan, moved=moved, aux=aux)
    s[:, :, plan.queries[5]] -= 50
    assert float((plain.drift - reduced(s, plan, moved=moved, aux=aux).drift).nan_to_num().abs().max()) > 1


# The sink profile


@widths
def test_the_profile_is_the_attention_of_late_queries_to_first_positions(plan: Plan) -> None:
    parts = relative_parts(FLAT, plan)
    share = sum(1 / (r + 1) for r in plan.references) / len(plan.references)
    assert parts.profile.shape[-1] == 16 + plan.origin
    assert torch.allclose(parts.profile, torch.full_like(parts.profile, share), atol=EXACT)
    assert torch.allclose(parts.ordinary, torch.full_like(parts.ordinary, share), atol=EXACT)
    early = [1 / (i + 1) for i in plan.queries]
    assert torch.allclose(parts.attention_0[0, 0], torch.tensor(early).double(), atol=EXACT)
    planted = reduced(relative_logits(FLAT, origin=6.0, width=3), plan, moved=moved_by_offset(FLAT, plan))
    sunk = [[math.exp(6) / (3 * math.exp(6) + r - 2), 1 / (3 * math.exp(6) + r - 2)] for r in plan.references]
    first, other = np.mean(sunk, axis=0)
    assert torch.allclose(planted.profile[0, 0, :3], torch.full((3,), first, dtype=torch.float64), atol=EXACT)
    assert torch.allclose(planted.profile[0, 0, 3:], torch.full_like(planted.profile[0, 0, 3:], other), atol=EXACT)
    assert abs(float(planted.ordinary) - other) < EXACT


@widths
def test_no_far_key_in_sight_is_no_number(plan: Plan) -> None:
    assert bool(relative_parts(FLAT, plan, window=9).ordinary.isnan().all())


def row(*first: float, rest: float = 0.001, size: int = 20) -> list[float]:
    return [*first, *[rest] * (size - len(first))]


@pytest.mark.parametrize(
    ("first", "ordinary", "width"),
    [
        ((0.5,), 0.001, 1),
        ((0.42, 0.38, 0.10, 0.04), 0.001, 4),
        ((0.42, 0.38, 0.10, 0.04), 0.015, 3),
        ((0.5, 0.0, 0.0, 0.1), 0.001, 4),
        ((0.019, 0.019), 0.0001, 0),
        ((0.03, 0.03), 0.01, 0),
        ((0.5, 0.3), math.nan, 2),
    ],
)
def test_the_width_of_a_sink_is_up_to_the_last_position_that_stands_out(
    first: tuple[float, ...], ordinary: float, width: int
) -> None:
    widths = sink_width(np.array([row(*first), row()]), np.array([ordinary, 0.001]))
    assert widths.tolist() == [width, 0]


def test_layers_whose_sink_goes_on_behind_the_origin_are_named_with_a_width_that_would_do() -> None:
    rows = [
        row(0.4, 0.3),
        row(0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1),  # seven wide
        row(0.2, 0.2, 0.2, 0.1, 0.015, rest=0.0001),  # not over 0.02 in all
        row(rest=0.05),  # as far as one can see
        row(0.2, 0.2, 0.2, 0.1, rest=0.01),  # no more than ordinary keys get
    ]
    far = np.array([0.001, 0.001, 0.001, 0.001, 0.009])
    heads = np.stack([np.array(rows) * 1.5, np.array(rows) * 0.5, np.full((5, 20), np.nan)], axis=1)
    data = xr.Dataset(
        {
            "profile": (("prompt", "layer", "head", "position"), np.stack([heads * 1.2, heads * 0.8])),
            "ordinary": (("prompt", "layer", "head"), np.stack([np.stack([far, far, far * np.nan], axis=1)] * 2)),
        }
    )
    assert narrow_layers(data, 4) == {1: 7, 3: 12}
    assert narrow_layers(data, 1) == {0: 2, 1: 7, 2: 4, 3: 12, 4: 3}
    assert narrow_layers(data, 7) == {3: 12}


# Refusals


def test_seeing_the_future_is_refused_by_name() -> None:
    plan = PLANS[4]
    seen = torch.ones(len(plan.rows), N, dtype=torch.bool)
    with raises(UnsupportedError, where="query 5", what="later keys"):
        reduce_rows(torch.zeros(1, 1, len(plan.rows), N), seen, plan)


@widths
def test_a_gap_in_sight_is_refused_by_name(plan: Plan) -> None:
    i, j = torch.tensor(plan.rows)[:, None], torch.arange(N)
    first = next(row for row in plan.rows if row > plan.origin + 1)  # sees a key after the origin on both sides
    with raises(UnsupportedError, where=f"query {first}", what="gaps"):
        reduce_rows(torch.zeros(1, 1, len(plan.rows), N), (j <= i) & ((i - j) != 1), plan)


def test_nan_logits_name_the_heads() -> None:
    plan = PLANS[4]
    s = torch.zeros(2, 5, len(plan.rows), N)
    s[1, 3, 0, 0] = torch.nan
    i, j = torch.tensor(plan.rows)[:, None], torch.arange(N)
    with raises(CheckError, got=("heads [3]", "prompts [1]"), remedy="--dtype float32"):
        reduce_rows(s, j <= i, plan)
