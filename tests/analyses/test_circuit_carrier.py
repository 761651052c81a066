"""What carries position: planted directions with their share and number, and what their erasure removes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posleak.analyses.circuit import carrier as module
from posleak.analyses.circuit.carrier import CURVE_POSITIONS, Carrier, curve_positions, fit_of
from posleak.analyses.circuit.erasure import ERASURES, Erased, erasure, loss_prompts
from posleak.analyses.trace import Trace
from posleak.edits.direction import CONTROLS
from posleak.errors import InputError
from posleak.leakage import component
from posleak.models import Subject
from posleak.probe import default_plan
from posleak.runs.conditions import Conditions
from posleak.runs.spec import MeasureSpec
from posleak.typed import from_json, plain
from support.errors import raises
from support.families import subject

N, ORIGIN, W = 48, 2, 30
SPEC = MeasureSpec(length=N, prompts=16, seed=3, origin=ORIGIN, loss=True)


@contextmanager
def planted(who: Subject, added: Tensor) -> Iterator[Conditions]:
    """Add [N, W] to the embeddings of every prompt of N tokens."""
    table = who.model.get_input_embeddings()
    with table.register_forward_hook(lambda module, args, out: out + added.to(out) if out.shape[1] == N else None):
        yield Conditions(who, SPEC)


def curves(*variances: float) -> Tensor:
    """Return functions of the position [F, N], uncorrelated at positions >= ORIGIN, with these variances there."""
    p = torch.arange(N, dtype=torch.float64)
    shapes = torch.stack([(np.pi * (k + 1) * (p - ORIGIN + 0.5) / (N - ORIGIN)).cos() for k in range(len(variances))])
    return shapes * (2 * torch.tensor(variances, dtype=torch.float64)).sqrt()[:, None]


def token_variance(conditions: Conditions) -> float:
    """Return the variance of the embeddings of ordinary tokens, of which a prompt's own mean over P positions is."""
    ids = torch.from_numpy(conditions.tokens.vocabulary.allowed)
    table: Any = conditions.subject.model.get_input_embeddings()
    rows = table.weight[ids].double()
    positions = N - ORIGIN
    return float((rows - rows.mean(0)).square().sum(1).mean()) * (positions - 1) / positions


@pytest.mark.parametrize(("shares", "dimensions"), [((1.0,), 1), ((0.7, 0.3), 2), ((0.95, 0.05), 1)])
def test_planted_directions_are_found_with_their_share_and_number(shares: tuple[float, ...], dimensions: int) -> None:
    u = torch.linalg.qr(torch.randn(W, len(shares), dtype=torch.float64))[0]
    with planted(subject(), (curves(*shares).mT @ u.mT).float()) as conditions:
        fit, noise = fit_of(conditions), token_variance(conditions)
        carrier = Carrier.measure(conditions, fit)
    assert abs(float(u[:, 0] @ torch.from_numpy(fit.directions[0, :, 0]))) > 0.99
    share, planted_share = carrier.share[0], 1 / (1 + noise)
    assert share.low <= planted_share <= share.high
    assert share.high - share.low < 0.5 * planted_share, "an interval that says something"
    for k, expected in enumerate(shares):
        part = carrier.spectrum[0, k]
        assert part.value == pytest.approx(expected, abs=0.05), "the noise of 16 prompts of 46 positions"
    assert carrier.dimensions[0] == dimensions
    assert carrier.leading.value[0] == carrier.spectrum.value[0, 0]
    f = curves(*shares)[0]
    expected_curve = (f - f[ORIGIN:].mean())[list(carrier.positions)] * np.sign(float(f[-1] - f[ORIGIN]))
    assert np.abs(carrier.curve.value[0] - expected_curve.numpy()).max() < 0.25, "the mean of 16 tokens"


def test_embeddings_without_position_have_no_dimension(llama: Subject) -> None:
    conditions = Conditions(llama, SPEC)
    carrier = Carrier.measure(conditions, fit_of(conditions))
    assert carrier.share.low[0] < 0 < carrier.share.high[0]
    assert carrier.dimensions[0] is None
    assert np.isnan(carrier.leading.value[0])
    assert np.allclose(np.diag(carrier.alignment), 1)
    assert (carrier.alignment <= 1 + 1e-9).all()


def test_the_share_is_that_of_a_plain_computation(llama: Subject) -> None:
    conditions = Conditions(llama, SPEC)
    fit = fit_of(conditions)
    carrier = Carrier.measure(conditions, fit)
    with torch.no_grad():
        hidden = llama.model.model(torch.from_numpy(conditions.ids), output_hidden_states=True).hidden_states
    h = hidden[2].double().numpy()[:, ORIGIN:]
    x = h - h.mean(1, keepdims=True)
    pairs = [(b, c) for b in range(16) for c in range(16) if b != c]
    positional = np.mean([(x[b] * x[c]).sum() for b, c in pairs])
    assert carrier.share.value[2] == pytest.approx(positional / (x**2).sum((1, 2)).mean(), rel=1e-4)
    a = x @ fit.directions[2, :, 1]
    along = np.mean([(a[b] * a[c]).sum() for b, c in pairs])
    if np.isfinite(carrier.leading.value[2]):
        assert carrier.spectrum.value[2, 1] == pytest.approx(along / positional, rel=1e-3, abs=1e-4)
    at = list(carrier.positions).index(ORIGIN)
    curve = (h[:, 0] - fit.mean[2]) @ fit.directions[2, :, 0]
    assert carrier.curve.value[2, at] == pytest.approx(curve.mean(), rel=1e-4, abs=1e-5)


def test_the_direction_in_massive_channels_and_of_position_0() -> None:
    added = torch.zeros(N, W)
    added[0, 7] = 5000.0
    added[:, 7] += torch.linspace(-3, 3, N)
    with planted(subject(), added) as conditions:
        fit = fit_of(conditions)
        carrier = Carrier.measure(conditions, fit)
    assert carrier.massive[0] == (7,)
    assert carrier.in_massive[0] == pytest.approx(fit.directions[0, 7, 0] ** 2)
    assert carrier.in_massive[0] > 0.98
    assert carrier.with_origin[0] == pytest.approx(fit.directions[0, 7, 0], abs=1e-3)


def test_depths_in_several_passes_are_the_same(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = Conditions(llama, SPEC)
    at_once = Carrier.measure(conditions, fit_of(conditions))
    monkeypatch.setattr(module, "STATES_BYTES", 1)
    assert plain(Carrier.measure(conditions, fit_of(conditions))) == plain(at_once)


def test_what_does_not_fit_into_memory_is_refused(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = Conditions(llama, SPEC)
    _ = conditions.baseline
    monkeypatch.setattr(module, "STATES_BYTES", 2**60)
    with raises(InputError, where="tiny-llama", got="16 prompts of 48 tokens", remedy="--length"):
        fit_of(conditions)


def test_it_is_read_back_from_json(llama: Subject) -> None:
    conditions = Conditions(llama, SPEC)
    carrier = Carrier.measure(conditions, fit_of(conditions))
    text = json.dumps(plain(carrier))
    assert plain(from_json(Carrier, text)) == plain(carrier)
    assert carrier.fit.sha256 == fit_of(conditions).sha256
    assert carrier.fit.seed != conditions.spec.seed
    rows = carrier.as_list()
    assert [row["depth"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]["variance_share"]) == {"value", "low", "high", "n"}
    assert len(rows[2]["eigenvalues"]["value"]) == 8


def test_the_curve_has_at_most_so_many_positions() -> None:
    for length, density in ((N, 1), (256, 1), (1024, 8)):
        plan = default_plan(length, density)
        positions = curve_positions(plan)
        assert len(positions) <= CURVE_POSITIONS
        assert (positions[0], positions[-1]) == (plan.origin, plan.references[-1])
        assert set(positions) <= {plan.origin, *plan.rows}


# Erasure

ERASED = MeasureSpec(length=N, prompts=16, seed=3, loss=True)


@pytest.fixture(scope="module")
def erased() -> tuple[Conditions, Trace, tuple[Erased, ...]]:
    """A model whose BOS is twenty times as long as other tokens: what it reads there tells the number of keys."""
    who = subject(scale=3.0)
    with torch.no_grad():
        next(who.model.get_input_embeddings().parameters())[1] *= 20
    conditions = Conditions(who, ERASED)
    trace = Trace.of(conditions)
    rows, notes = erasure(conditions, trace, loss_prompts(conditions), (1, 3))
    assert not notes
    return conditions, trace, rows


def power(x: Any, weight: Any) -> float:
    """Return the power of a component [B, L, H, Q, D] with the weights [L, H, D], summed over layers after the first.

    Mean over queries of the weighted sum over offsets, mean over heads.
    """
    pairs = (x.sum(0) ** 2 - (x**2).sum(0)) / (len(x) * (len(x) - 1))
    by_query = np.where(np.isnan(pairs).all(-1), np.nan, np.nansum(pairs * weight[:, :, None], axis=-1))
    return float(np.nanmean(by_query, axis=2).mean(1)[1:].sum())


def test_each_row_is_the_difference_between_two_runs(erased: tuple[Conditions, Trace, tuple[Erased, ...]]) -> None:
    conditions, trace, rows = erased
    assert [(row.method, row.k) for row in rows if not row.depths] == list(ERASURES)
    assert [row.edit for row in rows if row.depths] == ["position=erase:1@1,3", "position=random:1@1,3"]
    weight = np.nan_to_num(trace.ordinary.data["weight"].values.mean(0))
    total, direct = (power(trace.components[name].values, weight) for name in ("total", "direct"))
    for row in rows:
        run = conditions.run(row.edit)
        after = power(component(run.data, "total").values, weight)
        assert run.record.spec.edit_texts == (f"position={row.method}:{row.k}" + "@1,3" * bool(row.depths),)
        assert row.earlier_removed.value == pytest.approx((total - after) / (total - direct))
        assert row.left.value == pytest.approx(after)
        assert row.loss_inputs == "random", "the model has no tokenizer"
        assert run.loss is not None
        assert trace.ordinary.loss is not None
        expected = float(run.loss.numbers["all"].value) - float(trace.ordinary.loss.numbers["all"].value)
        assert row.loss_change.value == pytest.approx(expected, abs=1e-6)
    assert float(rows[0].earlier_removed.low) > 0, "one direction carries some of it"


def test_each_erasure_has_as_many_random_directions_as_control(
    erased: tuple[Conditions, Trace, tuple[Erased, ...]],
) -> None:
    rows = {(row.method, row.k, row.depths): row for row in erased[2]}
    for (method, k, depths), row in rows.items():
        control = rows.get((CONTROLS.get(method, ""), k, depths))
        assert row.random == (None if control is None else control.earlier_removed)
        assert row.random_loss == (None if control is None else control.loss_change)
        assert (control is None) == method.startswith("random")
    assert rows["erase", 1, "1,3"].random != rows["erase", 1, ""].random, "at the same depths"
    assert plain(from_json(tuple[Erased, ...], json.dumps(plain(erased[2])))) == plain(erased[2])
