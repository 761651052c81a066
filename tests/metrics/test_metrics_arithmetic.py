"""The arithmetic of other papers' measurements: inputs with known answers, and every formula again as a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import pywt
from hypothesis import given, settings, strategies as st

from posleak.metrics import graphs, spectra

N = 64


def random_attention(shape: tuple[int, ...] = (), n: int = N, seed: int = 0, sharp: float = 2.0) -> np.ndarray:
    """Causal attention with random logits and an attractive first token."""
    logits = sharp * np.random.default_rng(seed).standard_normal((*shape, n, n))
    logits[..., 0] += 2
    weights = np.exp(logits) * np.tri(n)
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def star_attention(n: int = N, centre: int = 0) -> np.ndarray:
    A = np.zeros((n, n))
    A[:, centre] = 1
    return A


def anchors_attention(k: int, n: int = N) -> np.ndarray:
    """Each query divides its attention equally among those of the first k keys that it sees."""
    A = np.tri(n) * (np.arange(n) < k)
    return np.asarray(A / A.sum(-1, keepdims=True))


def uniform_attention(n: int = N) -> np.ndarray:
    return np.asarray(np.tri(n) / np.arange(1, n + 1)[:, None])


def graph(A: np.ndarray, visible: np.ndarray | None = None) -> graphs.AttentionGraph:
    """The graph of all rows; causal, unless the visible keys are given."""
    n = A.shape[-1]
    return graphs.AttentionGraph(A, np.tri(n, dtype=np.bool_) if visible is None else visible, np.arange(n))


def star(A: np.ndarray) -> np.ndarray:
    return graph(A).star()


def centralisation(A: np.ndarray) -> np.ndarray:
    return graph(A).centralisation()


def received(A: np.ndarray, far: int = 1, visible: np.ndarray | None = None) -> np.ndarray:
    return graph(A, visible).received(far)[0]


def types(frame: dict[str, np.ndarray]) -> tuple[float, float, float]:
    return float(frame["centralized"]), float(frame["distributed"]), float(frame["bidirectional"])


EVERYTHING = np.ones((N, N), dtype=np.bool_)


# -- graphs: known answers ---------------------------------------------------------------------------------------------


def test_a_perfect_star_is_one_in_every_measure() -> None:
    A = star_attention()
    for measure in (star, centralisation):
        np.testing.assert_array_equal(measure(A), np.ones(len(graphs.THRESHOLDS)))
    assert graphs.fiedler(A) == pytest.approx(0.5, abs=1e-12)  # a star of edges of weight ½ has eigenvalues 0, ½, n/2
    assert graph(A).concentration() == 1
    assert graph(A).reference_tokens() == 1
    assert graph(A).kl_reduction() == 1
    found = graph(A).frame()
    assert types(found) == (1, 0, 0)
    assert found["anchors"] == 1


def test_two_anchors_at_both_ends_are_a_bidirectional_frame() -> None:
    A = (star_attention() + star_attention(centre=N - 1)) / 2
    found = graph(A, EVERYTHING).frame()
    assert types(found) == (0, 0, 1)
    assert found["anchors"] == 2
    assert graph(A).reference_tokens() == 2


def test_unequal_anchors_at_both_ends_are_split_between_two_types() -> None:
    A = 0.75 * star_attention() + 0.25 * star_attention(centre=N - 1)
    found = graph(A, EVERYTHING).frame()
    assert types(found) == (0.5, 0, 0.5)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_equal_anchors_in_the_first_half_are_a_distributed_frame(k: int) -> None:
    found = graph(anchors_attention(k)).frame()
    assert found["anchors"] == k
    assert types(found) == pytest.approx((1 / k, 1 - 1 / k, 0), abs=1e-12)


def test_uniform_causal_attention_has_no_frame_and_nothing_to_reduce() -> None:
    A = uniform_attention()
    found = graph(A).frame()
    assert found["anchors"] == 0
    assert (*types(found), float(found["no_frame"])) == (0, 0, 0, 1)
    assert np.isnan(graph(A).kl_reduction())
    assert graph(A).reference_tokens() == 0


def test_uniform_attention_over_everything_is_complete_and_not_concentrated() -> None:
    """The complete graph with weights 1/n has the eigenvalues 0 and 1 and equal degrees; 7 of 64 keys get 7/64."""
    A = np.full((N, N), 1 / N)
    assert graphs.fiedler(A) == pytest.approx(1, abs=1e-12)
    np.testing.assert_array_equal(star(A), [1, 1, 0, 0, 0])  # 1/64 is over 0.001 and 0.01 only
    np.testing.assert_array_equal(centralisation(A), np.zeros(5))
    assert graph(A).concentration() == pytest.approx(7 / 64, abs=1e-12)


def test_attention_to_oneself_is_no_edge() -> None:
    A = np.eye(N)
    for measure in (star, centralisation, received):
        assert np.nanmax(measure(A)) == 0
    assert graphs.fiedler(A) == 0
    assert np.isnan(graph(A).concentration())
    assert graph(A).reference_tokens() == 0
    assert graph(A).frame()["anchors"] == 0


def test_a_head_that_looks_at_its_neighbour_has_no_anchor_and_no_reference_token() -> None:
    """The last keys are seen by neighbours only: a mean over those who see them would make anchors of them."""
    A = np.eye(N, k=-1)
    A[0, 0] = 1
    assert np.nansum(received(A) > graphs.REFERENCE) > 5
    assert graph(A).reference_tokens() == 0
    assert graph(A).frame()["anchors"] == 0


def test_one_late_query_makes_no_anchor_at_the_end() -> None:
    A = star_attention()
    far = N // 8
    A[N - 1, 0], A[N - 1, N - 1 - far] = 0.5, 0.5
    assert received(A, far)[N - 1 - far] == 0.5
    found = graph(A).frame()
    assert found["anchors"] == 1
    assert found["centralized"] == 1


def test_far_keys_of_a_window_that_is_narrower_have_no_frame() -> None:
    visible = np.tri(N, dtype=np.bool_) & ~np.tri(N, k=-4, dtype=np.bool_)
    found = graph(np.where(visible, random_attention(), 0), visible).frame()
    assert found["anchors"] == 0
    assert (*types(found), float(found["no_frame"])) == (0, 0, 0, 1)


def test_what_is_left_without_the_anchor_can_be_uniform() -> None:
    """Half to the first key and half spread evenly over the others: without the first key nothing diverges."""
    A = np.where(np.arange(N) == 0, 0.5, np.tri(N) / np.maximum(np.arange(N), 1)[:, None] / 2)
    A[0] = np.eye(N)[0]
    assert graph(A).kl_reduction() == pytest.approx(1, abs=1e-12)


def test_a_learned_sink_logit_changes_no_divergence() -> None:
    """It scales a row and has no key."""
    A = random_attention()
    kept = np.random.default_rng(1).uniform(0.2, 1, (N, 1))
    assert graph(A * kept).incoming.argmax() == graph(A).incoming.argmax(), "the anchor is the same"
    assert graph(A * kept).kl_reduction() == pytest.approx(float(graph(A).kl_reduction()), abs=1e-12)


def test_a_disconnected_graph_has_fiedler_value_zero() -> None:
    A = np.zeros((N, N))
    A[:20, :20], A[20:, 20:] = random_attention(n=20), random_attention(n=N - 20)
    assert graphs.fiedler(A) == pytest.approx(0, abs=1e-12)
    A[30, 5] = 0.1
    assert graphs.fiedler(A) > 1e-4


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="1 token"):
        star(np.ones((1, 1)))
    with pytest.raises(ValueError, match=f"{N} rows for {N} queries"):
        graphs.AttentionGraph(random_attention(), EVERYTHING, np.arange(N)[::-1])
    with pytest.raises(ValueError, match="far is 0"):
        received(random_attention(), 0)


# -- graphs: every formula as a loop -----------------------------------------------------------------------------------


@pytest.fixture(params=range(3))
def attention(request: pytest.FixtureRequest) -> np.ndarray:
    return random_attention(n=40 + request.param, seed=request.param)


def test_degrees_are_those_of_networkx(attention: np.ndarray) -> None:
    n = len(attention)
    for at, threshold in enumerate(graphs.THRESHOLDS):
        graph = nx.DiGraph()
        graph.add_nodes_from(range(n))
        graph.add_edges_from((i, j) for i in range(n) for j in range(n) if i != j and attention[i, j] > threshold)
        degrees = dict(graph.in_degree())
        most = max(degrees.values())
        assert star(attention)[at] == pytest.approx(max(nx.in_degree_centrality(graph).values()), abs=1e-12)
        expected = sum(most - degree for degree in degrees.values()) / (n - 1) ** 2
        assert centralisation(attention)[at] == pytest.approx(expected, abs=1e-12)
        assert 0 < expected < 1


def test_fiedler_is_that_of_networkx(attention: np.ndarray) -> None:
    n = len(attention)
    graph = nx.Graph()
    for i in range(n):
        for j in range(i):
            graph.add_edge(i, j, weight=(attention[i, j] + attention[j, i]) / 2)
    expected = np.sort(nx.laplacian_spectrum(graph))[1]
    assert expected > 0.01
    assert graphs.fiedler(attention) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("far", [1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_received_is_a_mean_over_pairs(attention: np.ndarray, far: int, causal: bool) -> None:
    n = len(attention)
    visible = None if causal else np.ones((n, n), dtype=np.bool_)
    found = received(attention, far, visible)
    for j in range(n):
        queries = [i for i in range(n) if abs(i - j) >= far and (i > j or not causal)]
        expected = np.mean([attention[i, j] for i in queries]) if queries else np.nan
        assert found[j] == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert np.isnan(found).sum() == (far if causal else 0)


@pytest.mark.parametrize("percentile", [80.0, 90.0, 95.0])
@pytest.mark.parametrize("n", [11, 40, 41, 101])
def test_concentration_is_the_share_of_keys_from_the_percentile_on(n: int, percentile: float) -> None:
    A = random_attention(n=n)
    into = np.array([sum(A[i, j] for i in range(n) if i != j) for j in range(n)])
    sinks = into >= np.percentile(into, percentile, method="higher")
    assert graph(A).concentration(percentile) == pytest.approx(into[sinks].sum() / into.sum(), rel=1e-12)


@pytest.mark.parametrize("anchor", [0, 9])
def test_kl_reduction_is_what_it_says(attention: np.ndarray, anchor: int) -> None:
    """With an anchor at 9, the queries 2 … 8 do not see it and keep their divergence."""
    n = len(attention)
    attention[:, anchor] *= 30
    attention /= attention.sum(-1, keepdims=True)
    assert anchor == np.argmax([sum(attention[i, j] for i in range(n) if i != j) for j in range(n)])
    before, after = [], []
    for i in range(2, n):
        row = attention[i, : i + 1]
        before.append(sum(a * np.log(a * (i + 1)) for a in row))
        rest = np.delete(row, anchor) / np.delete(row, anchor).sum() if anchor <= i else row
        after.append(sum(a * np.log(a * len(rest)) for a in rest))
    expected = 1 - np.mean(after) / np.mean(before)
    assert abs(expected) > 0.01
    assert graph(attention).kl_reduction() == pytest.approx(expected, rel=1e-9)


def test_the_frame_is_the_split_of_the_definition() -> None:
    """Anchors of unequal strength at 0, 3 and 40 of 64 keys, on top of random attention."""
    A = random_attention(sharp=0.3)
    for key, weight in ((0, 0.3), (3, 0.1), (40, 0.2)):
        A[key + 1 :] *= 1 - weight
        A[key + 1 :, key] += weight
    found = graph(A).frame()
    far = N // 8
    c = {j: np.mean([A[i, j] for i in range(j + far, N)]) for j in range(N - 2 * far + 1)}
    anchors = {j: value for j, value in c.items() if value > max(0.02, 5 * np.median(list(c.values())))}
    assert set(anchors) == {0, 3, 40}
    p = {j: value / sum(anchors.values()) for j, value in anchors.items()}
    both = 2 * min(p[0], p[40])
    assert found["bidirectional"] == pytest.approx(both, rel=1e-9)
    assert found["centralized"] == pytest.approx(max(p.values()) - both / 2, rel=1e-9)
    assert found["distributed"] == pytest.approx(p[3], rel=1e-9)


# -- spectra: known answers --------------------------------------------------------------------------------------------

D = 250


@pytest.mark.parametrize(("k", "band"), [(2, 0), (40, 0), (120, 1), (160, 1), (220, 2), (240, 2)])
def test_a_cosine_is_in_its_band(k: int, band: int) -> None:
    """A whole number of cycles: the Hann window spreads it over three frequencies, with powers 1 : 4 : 1."""
    p = 1 + 0.5 * np.cos(2 * np.pi * k * np.arange(D) / (2 * D - 1))
    P = spectra.power_spectrum(p)
    assert P.shape == (D - 1,)
    np.testing.assert_allclose(P[k - 2 : k + 1] / P[k - 2], [1, 4, 1], rtol=1e-9)
    np.testing.assert_allclose(spectra.band_shares(P), np.eye(3)[band], atol=1e-12)
    assert spectra.selectivity(P) == pytest.approx(2, rel=1e-9)
    expected = -(4 / 6 * np.log(4 / 6) + 2 / 6 * np.log(1 / 6))
    assert spectra.entropy(P) == pytest.approx(expected, rel=1e-9)


def test_what_is_nearest_is_not_hidden_by_the_window() -> None:
    """A head that looks at its own token alone has a flat spectrum; one that looks everywhere has a narrow one."""
    near, far = (spectra.entropy(spectra.power_spectrum(p)) for p in (np.eye(D)[0], np.linspace(1, 0.5, D)))
    assert near == pytest.approx(np.log(D - 1), abs=0.02)
    assert far < 2


def test_bands_end_at_a_quarter_and_at_three_quarters() -> None:
    np.testing.assert_allclose(spectra.band_shares(np.ones(100)), [0.25, 0.5, 0.25], atol=1e-15)
    for last, band in ((24, 0), (25, 1), (74, 1), (75, 2)):
        assert spectra.band_shares(np.eye(100)[last]).argmax() == band
    for k, band in ((31, 0), (32, 1), (93, 1), (94, 2)):  # 31 / 125 is 0.248, 94 / 125 is 0.752
        assert spectra.band_shares(np.eye(125)[k - 1]).argmax() == band


def test_white_noise_fills_its_bands_and_its_scales_evenly() -> None:
    """Power is spread evenly over frequencies; each scale has half as many coefficients as the one before."""
    p = np.random.default_rng(0).random((2000, D))
    np.testing.assert_allclose(spectra.band_shares(spectra.power_spectrum(p)).mean(0), [0.25, 0.5, 0.25], atol=0.01)
    energy = spectra.wavelets(p)[0].mean(0)
    assert energy.shape == (6,)
    np.testing.assert_allclose(energy[1:3] / energy[:2], 0.5, atol=0.05)


def test_detail_is_at_its_own_scale() -> None:
    """What alternates from token to token is at the finest scale, what has a period of 32 tokens at coarse ones."""
    at = np.arange(256)
    finest = spectra.wavelets(1 + (-1.0) ** at)[0]
    assert finest.argmax() == 0
    slow = spectra.wavelets(1 + np.cos(2 * np.pi * at / 32))[0]
    assert slow.argmax() >= 3
    assert slow[0] < 0.01


def test_entropy_of_equal_and_of_single_values() -> None:
    assert spectra.entropy(np.full(D, 0.3)) == pytest.approx(np.log(D), rel=1e-12)
    assert spectra.entropy(np.eye(D)[7]) == 0


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_a_power_law_looks_the_same_at_every_scale(factor: int, power: float) -> None:
    at = np.arange(1.0, D)
    law = np.concatenate([[5.0], at**-power])
    assert spectra.scale_sensitivity(law, factor) == pytest.approx(0, abs=1e-15)


def test_a_profile_with_a_scale_of_its_own_does_not() -> None:
    at = np.arange(D)
    found = [float(spectra.scale_sensitivity(np.exp(-at / 20), factor)) for factor in (2, 4)]
    assert 0.01 < found[0] < found[1] < 1
    apart = np.where(at % 2 == 1, 1.0, 0.0) + np.where(at == 200, 1.0, 0.0)
    assert spectra.scale_sensitivity(apart, 2) > 0.5


def test_scale_sensitivity_is_one_minus_the_cosine_of_two_transforms() -> None:
    """The formula once more, from pywt's own coefficients."""
    p = np.random.default_rng(3).random(D)
    for factor in (2, 4):
        samples = (D - 1) // factor
        coarse = np.array([p[factor * k] for k in range(1, samples + 1)])
        fine = np.array([p[k] for k in range(1, samples + 1)])
        x, y = (np.concatenate(pywt.wavedec(profile, "db2", mode="symmetric")) for profile in (coarse, fine))
        expected = 1 - x @ y / np.sqrt((x @ x) * (y @ y))
        assert spectra.scale_sensitivity(p, factor) == pytest.approx(expected, rel=1e-9)


def test_wavelets_are_those_of_single_steps() -> None:
    """Energy and entropy by scale, one step of the transform after the other."""
    p = np.random.default_rng(4).random(D) / np.arange(1, D + 1)
    rest, energies, entropies = p, list[float](), list[float]()
    for _ in range(6):
        rest, detail = pywt.dwt(rest, "db2", mode="symmetric")
        energies.append(float(sum(detail**2)))
        q = detail**2 / sum(detail**2)
        entropies.append(float(-sum(q * np.log(q))))
    energy, entropy = spectra.wavelets(p)
    np.testing.assert_allclose(energy, np.array(energies) / sum(energies), rtol=1e-9)
    np.testing.assert_allclose(entropy, entropies, rtol=1e-9)


@pytest.mark.parametrize("length", [16, 33, 250])
def test_the_spectrum_is_a_sum_over_offsets(length: int) -> None:
    p = np.random.default_rng(5).random(length)
    at, cycle = np.arange(1 - length, length), 2 * length - 1
    mirrored = p[np.abs(at)]
    signal = (mirrored - mirrored.mean()) * np.cos(np.pi * at / cycle) ** 2
    for k, power in enumerate(spectra.power_spectrum(p), start=1):
        expected = sum(signal * np.cos(2 * np.pi * k * at / cycle)) ** 2
        expected += sum(signal * np.sin(2 * np.pi * k * at / cycle)) ** 2
        assert power == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.0])
def test_a_constant_has_neither_bands_nor_scales(value: float) -> None:
    P = spectra.power_spectrum(np.full(D, value))
    assert not P.any()
    for nothing in (
        spectra.band_shares(P),
        spectra.selectivity(P),
        spectra.entropy(P),
        *spectra.wavelets(np.full(D, value)),
    ):
        assert np.isnan(nothing).all()


def test_zeros_have_nothing_at_all() -> None:
    zeros = np.zeros((2, D))
    assert np.isnan(spectra.entropy(zeros)).all()
    assert np.isnan(spectra.scale_sensitivity(zeros, 2)).all()
    assert np.isnan(spectra.wavelets(zeros)[0]).all()
    assert np.isnan(spectra.scale_sensitivity(np.eye(D)[1], 2)), "one of the samplings is 0 everywhere"


def test_short_profiles_are_refused_and_short_samplings_have_no_number() -> None:
    for measure in (spectra.power_spectrum, spectra.wavelets):
        with pytest.raises(ValueError, match="15 offsets"):
            measure(np.ones(15))
    short = np.random.default_rng(6).random(16)
    assert np.isfinite(spectra.scale_sensitivity(short, 2))
    assert np.isnan(spectra.scale_sensitivity(short, 4))


# -- both: laws --------------------------------------------------------------------------------------------------------

GRAPHS: dict[str, Callable[[np.ndarray], Any]] = {
    "star": star,
    "centralisation": centralisation,
    "fiedler": graphs.fiedler,
    "received": lambda A: received(A, 3),
    "concentration": lambda A: graph(A).concentration(),
    "reference_tokens": lambda A: graph(A).reference_tokens(),
    "kl_reduction": lambda A: graph(A).kl_reduction(),
    "frame": lambda A: np.stack([*graph(A).frame().values()], axis=-1),
}
SPECTRA: dict[str, Callable[[np.ndarray], Any]] = {
    "power": spectra.power_spectrum,
    "bands": lambda p: spectra.band_shares(spectra.power_spectrum(p)),
    "selectivity": lambda p: spectra.selectivity(spectra.power_spectrum(p)),
    "positional": spectra.entropy,
    "spectral": lambda p: spectra.entropy(spectra.power_spectrum(p)),
    "energy": lambda p: spectra.wavelets(p)[0],
    "entropy": lambda p: spectra.wavelets(p)[1],
    "half": lambda p: spectra.scale_sensitivity(p, 2),
    "quarter": lambda p: spectra.scale_sensitivity(p, 4),
}


@pytest.mark.parametrize("name", GRAPHS | SPECTRA)
def test_many_at_once_are_one_by_one(name: str) -> None:
    rng = np.random.default_rng(7)
    x = random_attention((3, 2), n=32) if name in GRAPHS else rng.random((3, 2, D)) / np.arange(1, D + 1)
    x[1, 1] = star_attention(32) if name in GRAPHS else 0.25
    before = x.copy()
    measure = (GRAPHS | SPECTRA)[name]
    found = measure(x)
    assert found.shape[:2] == (3, 2)
    for cell in np.ndindex(3, 2):
        np.testing.assert_allclose(found[cell], measure(x[cell]), rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(x, before)


seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=40, deadline=None)


@few
@given(seeds, st.integers(8, 48), st.floats(0.1, 8))
def test_graphs_stay_within_their_bounds(seed: int, n: int, sharp: float) -> None:
    A = random_attention(n=n, seed=seed, sharp=sharp)
    for measure in (star, centralisation, GRAPHS["concentration"]):
        assert np.all((measure(A) >= 0) & (measure(A) <= 1 + 1e-12))
    assert np.all(np.diff(star(A)) <= 0), "fewer edges above a higher threshold"
    assert 0 <= graphs.fiedler(A) <= n / (n - 1) * np.min((A + A.T).sum(0) / 2 - np.diag(A)) + 1e-12, "Fiedler's bound"
    assert graph(A).kl_reduction() <= 1 + 1e-12
    found = graph(A).frame()
    parts = np.array(types(found))
    assert found["no_frame"] == (found["anchors"] == 0)
    assert parts.sum() + found["no_frame"] == pytest.approx(1, abs=1e-12)
    assert (parts >= 0).all()


@few
@given(seeds, st.integers(2, 30), st.integers(2, 30))
def test_parts_that_do_not_meet_have_fiedler_value_zero(seed: int, first: int, second: int) -> None:
    A = np.zeros((first + second, first + second))
    A[:first, :first] = random_attention(n=first, seed=seed)
    A[first:, first:] = random_attention(n=second, seed=seed + 1)
    order = np.random.default_rng(seed).permutation(len(A))
    assert 0 <= graphs.fiedler(A[order][:, order]) < 1e-12


@few
@given(seeds, st.integers(16, 300), st.floats(-3, 3))
def test_profiles_are_measured_whatever_their_scale(seed: int, length: int, exponent: float) -> None:
    p = np.random.default_rng(seed).random(length)
    for name, measure in SPECTRA.items():
        grown = 10 ** (2 * exponent) if name == "power" else 1.0
        np.testing.assert_allclose(measure(p * 10**exponent), grown * measure(p), rtol=1e-6, atol=1e-12)
    for name in ("bands", "energy"):
        assert SPECTRA[name](p).sum() == pytest.approx(1, abs=1e-12)
        assert (SPECTRA[name](p) >= 0).all()
    assert 0 <= spectra.entropy(p) <= np.log(length) + 1e-12
    assert 0 <= spectra.scale_sensitivity(p, 2) <= 2
