"""Powers are unbiased, shares add up to one, intervals cover, and one prompt gives NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posleak.leakage import Bootstrap, Estimate, combined
from posleak.leakage.power import gram_matrix, unbiased


def sample(rng: np.random.Generator, mean: float, prompts: int, width: int) -> np.ndarray:
    """Prompts with shared and private noise around one mean: [B, P]."""
    shared = rng.standard_normal((prompts, 3)) @ rng.standard_normal((3, width))
    return mean + shared + rng.standard_normal((prompts, width))


def test_the_unbiased_form_is_the_one_in_the_definitions() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 7, 5))
    B = len(x)
    expected = ((x.sum(0) * y.sum(0) - (x * y).sum(0)) / (B * (B - 1))).mean()
    assert unbiased(gram_matrix(x, y)) == pytest.approx(expected, rel=1e-12)


def test_noise_has_no_power_on_average_and_the_plain_estimate_has() -> None:
    rng = np.random.default_rng(1)
    draws = [sample(rng, 0.0, 8, 11) for _ in range(2000)]
    powers = [float(unbiased(gram_matrix(x, x))) for x in draws]
    assert abs(np.mean(powers)) < 4 * np.std(powers) / np.sqrt(len(powers))
    assert np.mean([(x.mean(0) ** 2).mean() for x in draws]) > 0.3


@pytest.mark.parametrize(("mean", "least"), [(0.0, 0.95), (0.5, 0.93), (2.0, 0.86)])
def test_intervals_cover(mean: float, least: float) -> None:
    """95% intervals of 16 prompts contain the true power about that often; near zero they are cautious."""
    rng, inside, trials = np.random.default_rng(2), 0, 200
    bootstrap = Bootstrap.of(16, seed=0, resamples=400)
    for _ in range(trials):
        x = sample(rng, mean, 16, 11)
        found = bootstrap.inner(gram_matrix(x, x)).estimate
        inside += bool(found.low <= mean**2 <= found.high)
    assert inside / trials >= least


def test_a_resample_that_multiplies_a_prompt_with_itself_is_biased() -> None:
    """Why the bootstrap leaves out equal prompts: the naive one shifts pure noise away from zero."""
    rng, shift = np.random.default_rng(3), []
    bootstrap = Bootstrap.of(8, seed=0, resamples=300)
    for _ in range(200):
        x = sample(rng, 0.0, 8, 50)
        naive = [float(unbiased(gram_matrix(x[p], x[p]))) for p in (rng.integers(8, size=8) for _ in range(30))]
        ours = bootstrap.inner(gram_matrix(x, x))
        shift.append((np.mean(naive), ours.samples.mean()))
    naive_mean, our_mean = np.mean(shift, axis=0)
    assert naive_mean > 0.3
    assert abs(our_mean) < 0.1


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), prompts=st.integers(2, 9))
def test_shares_add_up_to_one(seed: int, prompts: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [sample(rng, 3.0 * k, prompts, 7) for k in range(3)]
    total = sum(parts)
    assert isinstance(total, np.ndarray)
    shares = [unbiased(gram_matrix(part, total)) / unbiased(gram_matrix(total, total)) for part in parts]
    assert sum(shares) == pytest.approx(1.0, abs=1e-9)


def test_one_prompt_is_nan_and_not_zero() -> None:
    x = np.ones((1, 4))
    found = Bootstrap.of(1, seed=0).inner(gram_matrix(x, x)).estimate
    assert np.isnan(found.value)
    assert np.isnan(found.low)
    assert np.isnan(found.high)


def test_pairs_that_do_not_exist_do_not_count() -> None:
    x = np.full((3, 6), 2.0)
    x[:, 4:] = np.nan
    assert unbiased(gram_matrix(x, x)) == pytest.approx(4.0)


def test_a_ratio_over_nothing_is_nan() -> None:
    rng = np.random.default_rng(4)
    noise, signal = rng.standard_normal((8, 5)), np.full((8, 5), 3.0)
    bootstrap = Bootstrap.of(8, seed=0)
    clear, nothing = (bootstrap.inner(gram_matrix(x, x)) for x in (signal, noise))
    found = clear.over(nothing).estimate
    assert np.isnan([found.value, found.low, found.high]).all()
    assert clear.over(clear).value == pytest.approx(1.0)


def test_arithmetic_is_resampled_and_paired() -> None:
    """x − x has no spread at all, whatever x is; and a sum is as wide as the sum itself is."""
    bootstrap, x = Bootstrap.of(9, seed=0), np.random.default_rng(5).standard_normal((9, 2))
    a, b = bootstrap.mean(x[:, 0]), bootstrap.mean(x[:, 1])
    nothing = (a - a).estimate
    assert [float(x) for x in (nothing.value, nothing.low, nothing.high)] == [0, 0, 0]
    both, expected = (a + b).estimate, bootstrap.mean(x.sum(1)).estimate
    assert np.allclose([both.value, both.low, both.high], [expected.value, expected.low, expected.high])
    half = (a / 2).estimate
    assert half.low == pytest.approx(a.interval[0] / 2)
    smaller = combined(np.minimum, a, b)
    assert smaller.value == min(a.value, b.value)
    assert np.array_equal(smaller.samples, np.minimum(a.samples, b.samples))
    assert a.at(level=0.5).interval[0] > a.interval[0]


def test_an_interval_turns_round_with_its_sign() -> None:
    removed = 1 - Estimate(np.array(0.4), np.array(0.3), np.array(0.6), 7)
    assert (removed.value, removed.low, removed.high) == pytest.approx((0.6, 0.4, 0.7))
    assert removed.n == 7


def test_intervals_are_seeded() -> None:
    assert np.array_equal(Bootstrap.of(9, seed=3).weights, Bootstrap.of(9, seed=3).weights)
    assert not np.array_equal(Bootstrap.of(9, seed=3).weights, Bootstrap.of(9, seed=4).weights)
