"""Trajectory, portrait and fingerprint: worked by hand, planted, and the same however the work is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posleak.analyses.origin.fingerprint import carried_difference, fingerprint, projections
from posleak.analyses.origin.portrait import (
    BodyScale,
    Portrait,
    Trajectory,
    dimensions,
    joined_cosines,
    mean_cosine,
    ordinary_tokens,
    pair_cosine,
    picture,
    resultant,
    settled,
)
from posleak.analyses.origin.states import Alone, alone, first_values
from posleak.inputs import Vocabulary
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.power import of_gram
from posleak.probe import Collector, attach
from posleak.typed import plain
from support.families import VOCAB, tiny


def pair_cosines(x: list[torch.Tensor], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    return joined_cosines([pair_cosine(rows, jackknife) for rows in x], jackknife)


def scale(depths: int, entry: float = 1.0, norm: float = 2.0) -> BodyScale:
    return BodyScale(np.full(depths, entry), np.full(depths, norm), np.zeros(depths), 10)


def test_massive_channels_by_both_halves_of_the_rule() -> None:
    x = torch.zeros(50)
    x[7], x[3], x[9] = -2000, 150, 90
    assert [(d.index, d.massive) for d in dimensions(x, 0.1)] == [(7, True), (3, True)]
    assert [d.index for d in dimensions(x, 1.0)] == [7], "150 is not 1000 times the median"
    top = dimensions(x / 100, 0.001)
    assert [d.index for d in top][:3] == [7, 3, 9]
    assert len(top) == 4
    assert not any(d.massive for d in top), "20 is 20000 times the median, and not above 100"
    assert top[0].share == pytest.approx(2000**2 / (2000**2 + 150**2 + 90**2))


def test_where_a_trajectory_settles() -> None:
    assert settled(np.array([0.1, 1.0, 0.5, 0.995, 1.0, 0.999, 0.98, 1.0])) == (3, 5)
    assert settled(np.array([1.0, 1.0, 1.0, 1.0])) == (0, 3)
    assert settled(np.array([0.0, 0.0, 1.0, 0.0])) == (2, 2)


def test_a_trajectory_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 300.0], [0.0, 200.0], [200.0, 200.0]])
    path = Trajectory.of(x, scale(5, entry=0.1), token=1, spelled="<s>")
    assert path.norm.tolist()[:4] == [1, 3, 300, 200]
    assert path.relative[2] == 150
    assert (path.settles, path.leaves, path.jump) == (1, 3, 2)
    assert [sum(channel.massive for channel in depth) for depth in path.dimensions] == [0, 0, 1, 1, 2]
    assert np.isnan(path.step[0])
    assert path.step[1:].tolist() == pytest.approx([0, 1, 1, 0.5**0.5])
    assert plain(path)["step"][0] is None


def test_mean_cosines_by_the_full_matrix() -> None:
    x = torch.randn(20, 7) + 0.5
    u = (x / x.norm(dim=-1, keepdim=True)).double()
    gram = u @ u.T
    expected = float((gram.sum() - 20) / (20 * 19))
    assert mean_cosine(x) == pytest.approx(expected, abs=1e-6)
    each, whole = pair_cosines([x, -x], Jackknife(20))
    assert each.value.tolist() == pytest.approx([expected, expected])
    assert each.low[0] < expected < each.high[0]
    assert (whole.value, whole.low) == pytest.approx((expected, each.low[0]))
    assert resultant(x) == pytest.approx(float(u.mean(0).norm()))


def test_the_interval_of_a_mean_cosine_agrees_with_that_of_its_gram_matrix() -> None:
    x, jackknife = torch.randn(15, 6) + 0.3, Jackknife(15)
    u = (x / x.norm(dim=-1, keepdim=True)).double().numpy()
    expected = jackknife.inner(of_gram(u @ u.T)).estimate
    found, _ = pair_cosines([x], jackknife)
    ends = [expected.value, expected.low, expected.high]
    assert np.allclose([found.value[0], found.low[0], found.high[0]], ends, atol=1e-5)


def test_random_directions_are_not_alike_and_equal_ones_are() -> None:
    each, _ = pair_cosines([torch.randn(300, 50), torch.ones(300, 50)], Jackknife(300))
    assert abs(each.value[0]) < 0.01
    assert each.value[1] == pytest.approx(1)
    assert np.isnan(pair_cosines([torch.zeros(3, 5)], Jackknife(3))[0].value[0]), "no direction, no cosine"


def test_the_draw_of_tokens_is_stable_distinct_and_ordinary() -> None:
    ordinary = np.ones(101, dtype=bool)
    ordinary[:3] = False
    vocabulary = Vocabulary(rows=101, size=101, ordinary=ordinary)
    few, many = ordinary_tokens(vocabulary, 10, seed=4), ordinary_tokens(vocabulary, 50, seed=4)
    assert many[:10].tolist() == few.tolist()
    assert len(set(many.tolist())) == 50
    assert min(many) >= 3
    everything = ordinary_tokens(vocabulary, 1000, seed=4, without=17)
    assert sorted(everything.tolist()) == [token for token in range(3, 101) if token != 17]
    assert ordinary_tokens(vocabulary, 10, seed=5).tolist() != few.tolist()


def test_a_portrait_does_not_depend_on_batches() -> None:
    model, ids = tiny("qwen3"), torch.arange(1, 90)
    one, two = (Portrait.of(alone(model, ids, batch=size), scale(4)) for size in (89, 8))
    for name in ("norm", "cosine", "resultant", "top_share", "overlap", "explained"):
        assert np.allclose(getattr(one, name), getattr(two, name), atol=1e-5), name
    assert np.allclose(np.abs(one.picture), np.abs(two.picture), atol=1e-3)
    assert one.picture.shape == (89, 4, 2)
    assert one.to_reference.n == 88


def test_a_planted_pull_is_seen() -> None:
    """Depth 0: random states; depth 1: one direction and a massive channel for all but one token in ten."""
    x = torch.randn(101, 2, 40)
    x[:, 1, 5] += 5000
    x[10::10, 1, 5] = 0
    found = Portrait.of(Alone(torch.arange(101), x, ()), scale(2))
    assert abs(found.among.value[0]) < 0.02
    assert found.among.value[1] == pytest.approx(0.81, abs=0.02)
    assert found.to_reference.value[1] == pytest.approx(0.9, abs=0.02)
    assert (found.top[1], found.top_share[1], found.massive_share.tolist()) == (5, 0.9, [0, 0.9])


def test_the_picture_is_the_plane_of_most_variance() -> None:
    flat = torch.randn(60, 2).double() * torch.tensor([5.0, 2.0])
    turn = torch.linalg.qr(torch.randn(9, 9).double()).Q[:2]
    for x in (flat @ turn, (flat @ turn)[:6]):
        seen, share = picture(x)
        assert share.sum() == pytest.approx(1)
        distances = torch.cdist(x, x).numpy()
        assert np.allclose(np.linalg.norm(seen[:, None] - seen[None], axis=-1), distances, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_a_fingerprint_is_the_first_tokens(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, VOCAB, (6, 33), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = 9
    found, look = projections(model, ids[:2, :9]), Collector(first_values)
    with attach(model, [look]) as probe:
        probe.forward(ids)
    readers = np.ones((3, 3), dtype=bool)
    readers[1, 2] = False
    others = alone(model, torch.arange(9, 60))
    carried, changed = np.zeros((6, 4)), np.full((6, 2), 9)
    marks = fingerprint(found, readers, look.collect(), others.values, carried, changed)
    assert marks.same.worst is not None
    assert marks.same.worst < 1e-6
    assert len(marks.heads) == 8
    assert (1, 2) not in [(head.call, head.head) for head in marks.heads]
    assert max(head.different.value for head in marks.heads) < 0.9
    assert marks.different.high < 1
    assert marks.different.n == 50
    assert np.allclose(marks.matrices[:, np.arange(16), np.arange(16)], 1)
    broken = [value + torch.randn_like(value) for value in others.values]
    assert (fingerprint(found, readers, broken, others.values, carried, changed).same.worst or 0) > 0.1


def test_without_a_reader_there_is_no_fingerprint() -> None:
    model = tiny("llama")
    found, single = projections(model, torch.arange(9)[None]), alone(model, torch.arange(5))
    marks = fingerprint(
        found, np.zeros((3, 3), dtype=bool), single.values, single.values, np.zeros((2, 4)), np.zeros((2, 2), dtype=int)
    )
    assert marks.same.worst is None
    assert plain(marks)["different"]["value"] is None


def test_the_difference_that_is_carried() -> None:
    x = torch.ones(2, 8, 4)
    y = x.clone()
    y[1, 6:] *= 1.5
    y[:, :6] = 100
    assert carried_difference([x, x], [x, y]).tolist() == [[0, 0], [0, 0.5]]
