"""Synthetic logits with a known drift, sink, window or nothing at all give back exactly what was planted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError
from posleak.leakage import Parts, split
from posleak.probe import Plan, default_plan, reduce_rows

N = 67
PLAN = default_plan(N)
EXACT = 1e-10


def relative_logits(profile: Tensor, origin: Tensor | float | None = None) -> Tensor:
    """s_ij = profile[i − j] [1, 1, N, N]: a purely relative head; `origin` replaces the logits of key 0."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    s = profile[(i - j).clamp(min=0)].clone()
    if origin is not None:
        s[:, 0] = torch.as_tensor(origin, dtype=s.dtype)
    return s[None, None]


def parts_of(logits: Tensor, window: int = N, plan: Plan = PLAN, aux: Tensor | None = None) -> Parts:
    i, j = torch.tensor(plan.rows)[:, None], torch.arange(plan.length)
    return split(reduce_rows(logits[:, :, list(plan.rows)], (j <= i) & (i - j < window), plan, aux))


def profile(seed: int = 0) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def drift_of(parts: Parts) -> Tensor:
    return parts.drift[..., parts.pairs]


def test_a_relative_head_leaks_through_its_mask_only() -> None:
    parts = parts_of(relative_logits(profile()))
    assert drift_of(parts).abs().max() < EXACT
    assert parts.sink.abs().max() < EXACT
    assert parts.mask.abs().max() > 0.1
    assert torch.allclose(parts.mask, parts.mask_without_sink, atol=EXACT)


def test_the_mask_is_the_log_of_the_hidden_mass() -> None:
    s = profile()
    parts = parts_of(relative_logits(s))
    log_z = torch.logcumsumexp(s, 0)  # a query at i sees i + 1 keys
    expected = log_z[list(PLAN.references)].mean() - log_z[list(PLAN.queries)]
    assert torch.allclose(parts.mask[0, 0], expected, atol=EXACT)


def test_zero_queries_leak_the_log_of_how_many_keys_they_see() -> None:
    parts = parts_of(torch.zeros(1, 1, N, N, dtype=torch.float64))
    for q, i in enumerate(PLAN.queries):
        expected = sum(math.log((r + 1) / (i + 1)) for r in PLAN.references) / len(PLAN.references)
        assert abs(float(parts.mask[0, 0, q]) - expected) < EXACT
    assert drift_of(parts).abs().max() < EXACT


def test_a_planted_drift_is_drift_at_its_offset() -> None:
    """One query's logit at one offset is raised, and its others are lowered so that its partition stays."""
    i, delta, h = PLAN.queries[9], 2, 0.7
    flat = torch.zeros(N, dtype=torch.float64)
    s = relative_logits(flat)
    s[0, 0, i, i - delta] = h
    rest = math.log((i - math.exp(h)) / (i - 1))  # the other body keys share what is left of n_i = i
    others = [j for j in range(1, i + 1) if j != i - delta]
    s[0, 0, i, others] = rest
    drift = parts_of(s).drift[0, 0, PLAN.queries.index(i)]
    for d, offset in enumerate(PLAN.offsets):
        if offset < i:
            assert abs(float(drift[d]) - (h if offset == delta else rest)) < EXACT


def test_a_planted_sink_at_one_query_is_sink_there_and_nowhere_else() -> None:
    s = relative_logits(torch.zeros(N, dtype=torch.float64))
    q = 8
    i = PLAN.queries[q]
    s[0, 0, i, 0] = 2.5
    parts = parts_of(s)
    assert abs(float(parts.sink[0, 0, q]) + math.log((i + math.exp(2.5)) / (i + 1))) < EXACT
    assert parts.sink[0, 0, [x for x in range(len(PLAN.queries)) if x != q]].abs().max() < EXACT
    assert drift_of(parts).abs().max() < EXACT


def test_a_constant_sink_damps_the_mask_and_is_no_leakage_of_its_own() -> None:
    parts = parts_of(relative_logits(torch.zeros(N, dtype=torch.float64), origin=6.0))
    late = torch.tensor(PLAN.references, dtype=torch.float64)
    early = torch.tensor(PLAN.queries, dtype=torch.float64)
    expected = (late + math.exp(6)).log().mean() - (early + math.exp(6)).log()
    assert torch.allclose(parts.mask[0, 0], expected, atol=EXACT)
    assert parts.sink.abs().max() < EXACT
    assert drift_of(parts).abs().max() < EXACT
    ordinary = (late + 1).log().mean() - (early + 1).log()
    assert torch.allclose(parts.mask_without_sink[0, 0], ordinary, atol=EXACT)


def test_behind_a_window_the_mask_leaks_exactly_nothing() -> None:
    window = 11
    parts = parts_of(relative_logits(profile(), origin=4.0), window=window)
    behind = [q for q, i in enumerate(PLAN.queries) if i >= window]
    assert bool((parts.mask[0, 0, behind] == 0).all())
    assert bool((parts.mask_without_sink[0, 0, behind] == 0).all())
    assert bool((parts.attention_0[0, 0, behind] == 0).all())
    assert bool((parts.sink_attention == 0).all())
    before = [q for q, i in enumerate(PLAN.queries) if i < window]
    log_z = torch.logcumsumexp(profile(), 0)
    expected = log_z[window - 1] - log_z[[PLAN.queries[q] for q in before]]
    assert torch.allclose(parts.mask[0, 0, before], expected, atol=EXACT)


def test_a_learned_sink_logit_is_a_constant_in_every_denominator() -> None:
    aux = torch.tensor([1.3], dtype=torch.float64)
    parts = parts_of(torch.zeros(1, 1, N, N, dtype=torch.float64), aux=aux)
    late, early = torch.tensor(PLAN.references).double(), torch.tensor(PLAN.queries).double()
    expected = (late + 1 + math.exp(1.3)).log().mean() - (early + 1 + math.exp(1.3)).log()
    assert torch.allclose(parts.mask[0, 0], expected, atol=EXACT)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(0, 40),
    origin=st.floats(-30, 30),
    window=st.integers(2, N),
    aux=st.one_of(st.none(), st.floats(-10, 10)),
)
def test_parts_add_up_and_ignore_constants(
    seed: int, scale: float, origin: float, window: int, aux: float | None
) -> None:
    """L1 for any logits; and a constant added to a query's whole row, s_aux included, changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(2, 3, N, N, generator=generator, dtype=torch.float64) * scale
    s[..., 0] += origin
    sinks = None if aux is None else torch.full((3,), aux, dtype=torch.float64)
    parts = parts_of(s, window, aux=sinks)
    assert parts.remainder < 1e-9
    moved = parts_of(s + 5.0, window, aux=None if sinks is None else sinks + 5.0)
    for name in ("mask", "drift", "sink", "mask_without_sink"):
        assert torch.allclose(getattr(parts, name), getattr(moved, name), atol=1e-8, equal_nan=True)


def test_a_constant_in_one_row_moves_drift_and_sink_but_not_the_total() -> None:
    """A softmax does not see it, so that the total cannot change; the definitions of drift and sink do see it."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(1, 1, N, N, generator=generator, dtype=torch.float64)
    shifted = s.clone()
    q = 8
    shifted[:, :, PLAN.queries[q]] += 7.0
    before, after = parts_of(s), parts_of(shifted)
    total, same = ((p.mask + p.sink)[..., None] + p.drift for p in (before, after))
    assert torch.allclose(total, same, atol=EXACT, equal_nan=True)
    assert torch.allclose(before.mask, after.mask, atol=EXACT)
    assert float((before.sink - after.sink)[0, 0, q].abs()) > 0.01


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), window=st.integers(2, N))
def test_any_relative_head_has_no_drift_and_no_sink(seed: int, window: int) -> None:
    parts = parts_of(relative_logits(profile(seed)), window)
    assert drift_of(parts).abs().max() < 1e-9
    assert parts.sink.abs().max() < 1e-9


def test_an_offset_that_is_off_by_one_is_seen() -> None:
    """The law above can fail: read the early rows one key too far and a purely relative head shows drift."""
    s = relative_logits(profile())
    s[:, :, : PLAN.references[0]] = s[:, :, : PLAN.references[0]].roll(1, dims=-1)
    assert drift_of(parts_of(s)).abs().max() > 0.1


def test_seeing_the_future_is_refused_by_name() -> None:
    rows = len(PLAN.rows)
    with pytest.raises(UnsupportedError, match="a query sees keys after itself"):
        reduce_rows(torch.zeros(1, 1, rows, N), torch.ones(rows, N, dtype=torch.bool), PLAN)


def test_a_gap_in_sight_is_refused_by_name() -> None:
    i, j = torch.tensor(PLAN.rows)[:, None], torch.arange(N)
    with pytest.raises(UnsupportedError, match="nearest keys without a gap"):
        reduce_rows(torch.zeros(1, 1, len(PLAN.rows), N), (j <= i) & ((i - j) != 1), PLAN)


def test_nan_logits_name_the_heads() -> None:
    s = torch.zeros(2, 5, len(PLAN.rows), N)
    s[1, 3, 0, 0] = torch.nan
    i, j = torch.tensor(PLAN.rows)[:, None], torch.arange(N)
    with pytest.raises(CheckError, match=r"heads \[3\], prompts \[1\]"):
        reduce_rows(s, j <= i, PLAN)
