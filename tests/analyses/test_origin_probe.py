"""The position probe finds what was planted, nothing in noise, and is judged on prompts it has not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posleak.analyses.origin.position_probe import orthonormal, position_probe, random_basis, written_basis
from posleak.metrics.ridge import GROUPS, DualRidge, PrimalRidge, cross_predict, ridge_problem

B, P, W = 8, 60, 13
POSITIONS = np.arange(1, P + 1)


def planted(strength: float = 1.0, direction: int = 4) -> torch.Tensor:
    """Noise [B, P, W], and the position along one channel; a constant channel keeps the rms from saying anything."""
    x = torch.randn(B, P, W)
    x[..., direction] = strength * (torch.from_numpy(POSITIONS) - P / 2) / P
    x[..., 0] = 100.0
    return x


def nothing(width: int = W) -> torch.Tensor:
    return torch.zeros(width, 0)


def test_a_planted_position_is_decoded() -> None:
    found = position_probe([planted()], POSITIONS, [nothing()])
    assert found.plain.r2.value[0] > 0.99
    assert found.plain.error.value[0] < 2
    assert found.plain.r2_log.value[0] > 0.7, "a line through a logarithm"
    assert found.plain.r2.n == B
    assert np.isnan(found.overall.value)
    assert found.chance == pytest.approx(15)
    assert found.groups == GROUPS


def test_projecting_out_the_planted_direction_kills_it_and_a_random_one_does_not() -> None:
    x = planted()
    basis = torch.zeros(W, 1)
    basis[4] = 1
    found = position_probe([x, x], POSITIONS, [nothing(), basis])
    assert found.rank == (0, 1)
    assert found.projected.r2.value[0] == found.plain.r2.value[0]
    assert found.projected.r2.value[1] < 0.02
    assert found.control.r2.value[1] > 0.9
    assert found.cost.low[1] > 10
    assert found.cost.value[0] == 0
    assert found.overall.value == pytest.approx(found.cost.value[1])


@pytest.mark.parametrize("width", [W, 900])
def test_noise_says_nothing_however_wide(width: int) -> None:
    """On the training prompts 900 columns explain everything; on held-out ones, nothing."""
    x = torch.randn(B, P, width)
    found = position_probe([x], POSITIONS, [nothing(width)])
    assert found.plain.r2.value[0] < 0.02
    assert found.plain.error.value[0] > 0.95 * found.chance
    y = torch.from_numpy(POSITIONS).double().repeat(B)[:, None]
    if width > B * P:
        fit = ridge_problem([x.flatten(0, 1).double()], [y]).fit([0], [1e-3])
        assert float((fit(x.flatten(0, 1).double())[0] - y).abs().mean()) < 1


def test_what_one_prompt_says_about_itself_is_not_counted() -> None:
    """Position written along another direction in each prompt: perfect inside, useless across."""
    x = 0.1 * torch.randn(B, P, 64)
    for b in range(B):
        x[b, :, b] = (torch.from_numpy(POSITIONS) - P / 2) / P
    x[..., -1] = 100
    assert position_probe([x], POSITIONS, [nothing(64)]).plain.r2.value[0] < 0.1


def test_a_wild_norm_does_not_swing_the_readout() -> None:
    x = planted(strength=30)
    x[3, 10] *= 1e4
    assert position_probe([x], POSITIONS, [nothing()]).plain.r2.value[0] > 0.9


def test_both_forms_are_the_same_regression() -> None:
    x = [torch.randn(31, 11).double() * torch.logspace(-2, 2, 11) for _ in range(3)]
    y = [torch.randn(31, 2).double() for _ in range(3)]
    primal, dual = ridge_problem(x, y), DualRidge(tuple(x), tuple(y))
    basis = random_basis(11, 2, seed=5)
    for a, b in ((primal, dual), (primal.without(basis), dual.without(basis))):
        one, two = a.fit([0, 2], [1e-2, 1.0]), b.fit([0, 2], [1e-2, 1.0])
        assert torch.allclose(one(x[1]), two(x[1]), atol=1e-8)
    assert isinstance(primal, PrimalRidge)
    assert isinstance(ridge_problem([x[0][:3]], [y[0][:3]]), DualRidge)


def test_ridge_by_hand() -> None:
    """One column of variance 1: the slope is the covariance over 1 + λ."""
    x = torch.tensor([[-1.0], [1.0]]).double()
    fit = ridge_problem([x], [3 * x + 7]).fit([0], [0.5])
    assert float(fit.weights) == pytest.approx(2)
    assert float(fit.bias) == pytest.approx(7)


def test_a_constant_column_gets_no_weight() -> None:
    x = torch.cat([torch.randn(20, 2), torch.full((20, 1), 3.0)], 1).double()
    for part in (ridge_problem([x], [x[:, :1]]), DualRidge((x,), (x[:, :1],))):
        assert float(part.fit([0], [1e-3]).weights[0, 2, 0]) == pytest.approx(0, abs=1e-12)


def test_the_ridge_is_chosen_inside_the_training_groups() -> None:
    """Predictions of a group do not change when its own targets do."""
    x = [torch.randn(40, 5).double() for _ in range(4)]
    y = [torch.randn(40, 2).double() for _ in range(4)]
    before = cross_predict(ridge_problem(x, y), x, y)
    spoiled = [y[0] * 1e3, *y[1:]]
    after = cross_predict(ridge_problem(x, spoiled), x, spoiled)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_bases_hold_what_earlier_layers_wrote() -> None:
    a, b = torch.eye(5)[:2], torch.eye(5)[1:3] * 100
    bases = written_basis([(0, a), (1, b)], depths=3, width=5)
    assert [basis.shape for basis in bases] == [(5, 0), (5, 2), (5, 3)], "what is spanned already adds nothing"
    assert torch.allclose(bases[2].mT @ bases[2], torch.eye(3).double(), atol=1e-12)
    assert torch.allclose(b.double() - b.double() @ bases[2] @ bases[2].mT, torch.zeros(2, 5).double(), atol=1e-9)
    assert orthonormal(torch.ones(3, 4)).shape == (4, 1)
