"""Powers are unbiased, shares add up to one, intervals cover, and too few prompts have none."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st
from scipy.special import stdtrit

from posleak.leakage import MIN_PROMPTS, Estimate, Jackknife, combined
from posleak.leakage.power import of_gram, products, prompt_pairs, unbiased
from posleak.leakage.summary import Decomposition, Products


def sample(rng: np.random.Generator, mean: float, prompts: int, width: int) -> np.ndarray:
    """Prompts with shared and private noise around one mean: [B, P]."""
    shared = rng.standard_normal((prompts, 3)) @ rng.standard_normal((3, width))
    return mean + shared + rng.standard_normal((prompts, width))


def test_the_unbiased_form_is_the_one_in_the_definitions() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 7, 5))
    B = len(x)
    expected = ((x.sum(0) * y.sum(0) - (x * y).sum(0)) / (B * (B - 1))).mean()
    assert unbiased(products(x, y), len(x)) == pytest.approx(expected, rel=1e-12)


def test_noise_has_no_power_on_average_and_the_plain_estimate_has() -> None:
    rng = np.random.default_rng(1)
    draws = [sample(rng, 0.0, 8, 11) for _ in range(2000)]
    powers = [float(unbiased(products(x, x), len(x))) for x in draws]
    assert abs(np.mean(powers)) < 4 * np.std(powers) / np.sqrt(len(powers))
    assert np.mean([(x.mean(0) ** 2).mean() for x in draws]) > 0.3


REGIMES = {
    "strong": lambda rng, shape: 2 + rng.standard_normal(shape),
    "middling": lambda rng, shape: 0.5 + rng.standard_normal(shape),
    "prompts of unequal gain": lambda rng, shape: (
        np.exp(0.3 * rng.standard_normal((*shape[:2], 1)) - 0.045) + 0.5 * rng.standard_normal(shape)
    ),
}
TRUTH = {"strong": 4.0, "middling": 0.25, "prompts of unequal gain": 1.0}


@pytest.mark.parametrize("prompts", [8, 16])
@pytest.mark.parametrize("regime", REGIMES)
def test_intervals_cover(regime: str, prompts: int) -> None:
    """95% intervals contain the true power in 93% to 97% of 2000 experiments, give or take two standard errors."""
    x = REGIMES[regime](np.random.default_rng(2), (2000, prompts, 40))
    estimate = Jackknife(prompts).inner(of_gram(x @ x.swapaxes(1, 2) / 40)).estimate
    inside = np.mean((estimate.low <= TRUTH[regime]) & (estimate.high >= TRUTH[regime]))
    assert 0.92 <= inside <= 0.98


def test_intervals_near_zero_are_cautious() -> None:
    """Where there is nothing, an interval does not claim that there is something more often than it says."""
    for width in (1, 3, 300):
        x = np.random.default_rng(3).standard_normal((500, 16, width))
        estimate = Jackknife(16).inner(of_gram(x @ x.swapaxes(1, 2) / width)).estimate
        assert np.mean((estimate.low <= 0) & (estimate.high >= 0)) >= 0.94


def test_intervals_of_ratios_cover() -> None:
    rng = np.random.default_rng(4)
    x = 1 + rng.standard_normal((2000, 8, 40))
    y = 0.5 * x + 0.3 * rng.standard_normal(x.shape)
    after, before = (Jackknife(8).inner(of_gram(z @ z.swapaxes(1, 2) / 40)) for z in (y, x))
    estimate = after.over(before).estimate
    clear = np.isfinite(estimate.value)
    assert clear.mean() > 0.95
    assert 0.92 <= np.mean((estimate.low <= 0.25) & (estimate.high >= 0.25), where=clear) <= 0.98


def test_differences_of_other_prompts_cover() -> None:
    x, y = np.random.default_rng(5).standard_normal((2, 2000, 9, 40))
    one = Jackknife(8).inner(of_gram((z := 1 + x[:, :8]) @ z.swapaxes(1, 2) / 40))
    other = Jackknife(9).inner(of_gram((z := 2 + y) @ z.swapaxes(1, 2) / 40))
    estimate = one.estimate.minus_independent(other.estimate)
    assert estimate.n == 8
    assert 0.92 <= np.mean((estimate.low <= -3) & (estimate.high >= -3)) <= 0.98


def test_the_error_of_noise_is_right() -> None:
    """Pairs of prompts make all the noise of a power of nothing; plain jackknives take its variance for twice that."""
    x = np.random.default_rng(6).standard_normal((1000, 16, 300))
    powers = Jackknife(16).inner(of_gram(x @ x.swapaxes(1, 2) / 300))
    low, high = powers.interval
    error = np.minimum(high - powers.value, powers.value - low) / stdtrit(15, 0.975)
    plain = np.sqrt(15 / 16 * ((powers.samples[:16] - powers.value) ** 2).sum(0))
    assert np.mean(error**2) == pytest.approx(np.var(powers.value), rel=0.35)
    assert np.mean(plain**2) > 1.8 * np.var(powers.value)


@pytest.mark.parametrize("prompts", [4, 5, 9, 16, 17, 40])
def test_replicates_are_the_number_without_some_prompts(prompts: int) -> None:
    rng = np.random.default_rng(prompts)
    x, y = rng.standard_normal((2, prompts, 6))
    inner, mean = Jackknife(prompts).inner(products(x, y)), Jackknife(prompts).mean(x)
    left_out = [(b,) for b in range(prompts)] + list(zip(*prompt_pairs(prompts), strict=True))
    assert len({frozenset(out) for out in left_out}) == len(left_out) == len(inner.samples)
    for k, out in enumerate(left_out):
        rest = np.delete(np.arange(prompts), out)
        if len(rest) > 1:
            assert inner.samples[k] == pytest.approx(unbiased(products(x[rest], y[rest]), len(x[rest])), abs=1e-12)
        assert mean.samples[k] == pytest.approx(x[rest].mean(0), abs=1e-12)


@pytest.mark.parametrize("prompts", range(2, MIN_PROMPTS))
def test_too_few_prompts_have_no_interval(prompts: int) -> None:
    x = 3 + np.random.default_rng(7).standard_normal((prompts, 5))
    number = Jackknife(prompts).inner(products(x, x))
    for estimate in (number.estimate, number.over(number).estimate, Jackknife(prompts).mean(x).estimate):
        assert np.isfinite(estimate.value).all()
        assert np.isnan([estimate.low, estimate.high]).all()


def test_prompts_that_do_not_differ_have_no_interval() -> None:
    """Eight times the same prompt is one prompt; but a part that is exactly 0 in every prompt is 0."""
    x = np.ones((8, 5))
    same, zero = (Jackknife(8).inner(products(z, z)) for z in (x, 0 * x))
    assert np.isnan(same.interval).all()
    assert same.over(same).value == 1
    assert [float(end) for end in zero.interval] == [0, 0]
    assert zero.over(same).value == 0
    differ = Jackknife(8).inner(products(z := x + np.random.default_rng(8).standard_normal(x.shape) / 9, z))
    unchanged = differ.over(differ)
    assert [float(end) for end in unchanged.interval] == [1, 1], "the same in every prompt, and prompts differ"


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), prompts=st.integers(2, 9))
def test_shares_add_up_to_one(seed: int, prompts: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [sample(rng, 3.0 * k, prompts, 7) for k in range(3)]
    total = sum(parts)
    assert isinstance(total, np.ndarray)
    shares = [
        unbiased(products(part, total), len(total)) / unbiased(products(total, total), len(total)) for part in parts
    ]
    assert sum(shares) == pytest.approx(1.0, abs=1e-9)


def test_one_prompt_is_nan_and_not_zero() -> None:
    x = np.ones((1, 4))
    estimate = Jackknife(1).inner(products(x, x)).estimate
    assert np.isnan(estimate.value)
    assert np.isnan(estimate.low)
    assert np.isnan(estimate.high)


def test_pairs_that_do_not_exist_do_not_count() -> None:
    x = np.full((3, 6), 2.0)
    x[:, 4:] = np.nan
    assert unbiased(products(x, x), len(x)) == pytest.approx(4.0)


def test_a_ratio_over_nothing_is_nan() -> None:
    rng = np.random.default_rng(4)
    noise, signal = rng.standard_normal((8, 5)), np.full((8, 5), 3.0)
    jackknife = Jackknife(8)
    clear, nothing = (jackknife.inner(products(x, x)) for x in (signal, noise))
    estimate = clear.over(nothing).estimate
    assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    assert clear.over(clear).value == pytest.approx(1.0)


def test_arithmetic_acts_on_replicates_and_is_paired() -> None:
    """x − x has no spread at all, whatever x is; and a sum is as wide as the sum itself is."""
    jackknife, x = Jackknife(9), np.random.default_rng(5).standard_normal((9, 2))
    a, b = jackknife.mean(x[:, 0]), jackknife.mean(x[:, 1])
    nothing = (a - a).estimate
    assert [float(x) for x in (nothing.value, nothing.low, nothing.high)] == [0, 0, 0]
    both, expected = (a + b).estimate, jackknife.mean(x.sum(1)).estimate
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


@pytest.mark.parametrize("prompts", [1, 2, 3, 4, 16, 17, 18, 19, 31, 32, 33, 40, 71])
def test_products_are_those_of_the_whole_gram_matrix(prompts: int) -> None:
    """Of a ring that is cut into blocks, too; with pairs that do not exist, and with other arrays than x itself."""
    rng = np.random.default_rng(prompts)
    x, y = (rng.standard_normal((prompts, 3, 2, 11)) for _ in range(2))
    x[:, 1, :, 4:] = y[:, 1, :, 4:] = np.nan
    for one, other in ((x, y), (x, x)):
        a, b = (np.moveaxis(np.nan_to_num(z), 0, -2) for z in (one, other))
        count = np.isfinite(one[0]).sum(-1)
        whole = a @ np.swapaxes(b, -1, -2) / count[..., None, None]
        assert np.allclose(products(one, other), of_gram(whole), rtol=0, atol=1e-12)
    assert products(x, y).shape == (3, 2, prompts + len(prompt_pairs(prompts)[0]))


def test_products_grow_with_the_prompts_and_not_with_their_square() -> None:
    sizes = [products(x := np.ones((prompts, 1, 1, 2)), x).size for prompts in (100, 200)]
    assert sizes == [900, 1800]


# Two norms


def weighted_run(seed: int = 0, B: int = 6) -> tuple[dict[str, xr.DataArray], xr.DataArray]:
    """Two components [B, L, H, Q, D] with missing pairs, and weights [B, L, H, D]; every axis is another prime."""
    rng, (L, H, Q, D) = np.random.default_rng(seed), (2, 3, 7, 5)
    axes, exists = ("prompt", "layer", "head", "query", "offset"), np.arange(D) <= np.arange(1, Q + 1)[:, None]
    part, rest = (np.where(exists, 1 + rng.standard_normal((B, L, H, Q, D)), np.nan) for _ in range(2))
    at = {"query": [1, 5, 17, 31, 32, 40, 50]}
    parts = {"mask": xr.DataArray(part, at, axes), "total": xr.DataArray(part + rest, at, axes)}
    return parts, xr.DataArray(rng.dirichlet(np.ones(D), (B, L, H)), dims=("prompt", "layer", "head", "offset"))


@pytest.mark.parametrize(("queries", "first"), [("early", 4), ("all", 7)])
def test_a_weighted_power_is_the_mean_over_queries_of_weighted_sums(queries: str, first: int) -> None:
    parts, weight = weighted_run()
    products = Products.by_queries(parts, weight)[queries]
    B, w, x = len(weight), weight.values.mean(0), {name: part.values[:, :, :, :first] for name, part in parts.items()}
    for name in parts:
        for sums, other in ((products.own, name), *([(products.with_total, "total")] if name == "mask" else [])):
            expected = np.zeros(w.shape[:2])
            for b in range(B):
                for c in range(B):
                    if b != c:
                        pairs = x[name][b] * x[other][c] * w[:, :, None]
                        expected += np.nansum(pairs, axis=-1).mean(-1) / (B * (B - 1))
            assert np.allclose(unbiased(sums[name], B), expected)


def test_even_weights_are_the_mean_over_existing_pairs() -> None:
    parts, weight = weighted_run()
    even = Products.by_queries(parts, weight)["all"].even
    assert even is not None
    x = parts["mask"].values.reshape(*parts["mask"].shape[:3], -1)
    assert np.allclose(even.own["mask"], products(x, x))


def test_a_head_that_looks_elsewhere_counts_less() -> None:
    """Its power is proportional to the attention that it gives to the body; evenly weighted, it is not."""
    parts, weight = weighted_run()
    less = weight.copy(data=weight.values * np.array([1.0, 0.03, 1.0])[:, None])
    before, after = (Products.by_queries(parts, w)["all"] for w in (weight, less))
    assert np.allclose(after.own["total"][:, 1], 0.03 * before.own["total"][:, 1])
    assert np.allclose(after.own["total"][:, ::2], before.own["total"][:, ::2])
    assert before.even is not None
    assert after.even is not None
    assert np.array_equal(after.even.own["total"], before.even.own["total"])


def test_norms_disagree_about_the_largest_part_or_about_an_interval() -> None:
    def shares(first: float, half: float = 0.05) -> dict[str, Estimate]:
        values = {"mask": first, "drift": 1 - first}
        return {name: of(value, half) for name, value in values.items()}

    def of(value: float, half: float = 0.0) -> Estimate:
        return Estimate(np.asarray(value), np.asarray(value - half), np.asarray(value + half), 16)

    def disagree(one: dict[str, Estimate], other: dict[str, Estimate]) -> bool:
        return Decomposition({}, one, even=Decomposition({}, other)).disagreement(("mask", "drift", "absent"))

    nothing = {name: of(np.nan) for name in ("mask", "drift")}
    assert not disagree(shares(0.7), shares(0.75))
    assert disagree(shares(0.52), shares(0.48)), "another part is the largest"
    assert disagree(shares(0.6), shares(0.75)), "the intervals do not overlap"
    assert disagree(shares(0.7), nothing), "one norm has no significant total"
    assert not disagree(nothing, nothing)
