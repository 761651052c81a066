"""Edits of the residual stream along positional directions: laws, planted directions, and an independent LEACE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import posleak as pl
from posleak.edits import Site, parse_edit, parse_edits
from posleak.edits.context import AfterDonor, LendByHead
from posleak.edits.direction import PositionEdit, body_tokens
from posleak.edits.positional import (
    FIT_SEED,
    FIT_TOKENS,
    MAX_DIRECTIONS,
    PositionFit,
    fit_prompts,
    random_directions,
)
from posleak.errors import InputError, PosleakWarning, UnsupportedError
from posleak.inputs import Prompts, prepare
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.models import Subject
from posleak.probe import attach
from posleak.probe.edit import Edit
from posleak.runs.conditions import Conditions
from posleak.runs.memory import memory_plan
from posleak.runs.prepared import PreparedRun
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from support.errors import raises
from support.families import subject, tiny
from support.runs_tiny import assert_same_bits, counted_passes, full_batches
from tools.shrink import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:the origin of 2 tokens is narrower")

N, ORIGIN = 40, 2
ASKED: dict[str, Any] = {"length": N, "prompts": 4, "seed": 3, "batch": 2}
ROUNDING = 1e-4
"""Of float32 states and logits of about 10: a hundred times what single operations lose."""


class Streams:
    """Observer of the residual stream at every depth."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def observe(self, call: Any, out: Tensor) -> None:
        pass

    def stream(self, depth: int, x: Tensor) -> None:
        self.seen[depth] = x.clone()


def base_of(who: Subject, length: int = N) -> Prompts:
    return prepare(who, "random", length=length, seed=3)


def fitted(text: str, who: Subject, origin: int = ORIGIN) -> PositionEdit:
    edit = parse_edit(text)
    assert isinstance(edit, PositionEdit)
    return edit.prepared(who, base_of(who), origin, {})


def streams(who: Subject, edits: Sequence[Edit] = (), count: int = 3) -> dict[int, Tensor]:
    """Return the residual stream of some prompts by depth, after edits."""
    prompts = base_of(who)
    for edit in edits:
        prompts = edit.prompts(prompts)
    observer = Streams()
    with attach(who.model, [observer], edits) as probe:
        probe.forward(torch.from_numpy(prompts.batch(range(count))))
    return observer.seen


@pytest.fixture(scope="module")
def fit(llama: Subject) -> PositionFit:
    return PositionFit.of(llama, base_of(llama), ORIGIN, leace=2)


# Law L15


@pytest.mark.parametrize("kind", ["erase", "leace", "random", "random-leace"])
def test_erasing_no_direction_changes_no_bit(llama: Subject, kind: str) -> None:
    assert_same_bits(pl.measure(llama, edits=f"position={kind}:0", **ASKED), pl.measure(llama, **ASKED))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_a_constant_state_leaves_drift_and_sink_of_the_next_layer_at_zero(family: str) -> None:
    run = pl.measure(subject(family), edits="position=erase:all@1", origin=ORIGIN, **ASKED)
    for part in ("drift", "sink"):
        by_layer = np.nanmax(np.abs(np.moveaxis(run.data[part].values, 1, 0)).reshape(3, -1), axis=1)
        assert by_layer[1] < ROUNDING, part
        assert by_layer[[0, 2]].min() > 100 * ROUNDING, "only the state at depth 1 is constant"


def test_all_directions_are_all_of_the_width(llama: Subject) -> None:
    all_of_them, width = (streams(llama, [fitted(f"position=erase:{k}@2", llama)]) for k in ("all", 30))
    assert all(torch.equal(all_of_them[depth], width[depth]) for depth in all_of_them)


# What each does to the stream


def test_erasing_sets_the_coefficients_to_their_mean_and_leaves_the_rest(llama: Subject, fit: PositionFit) -> None:
    before, after = streams(llama), streams(llama, [parse_position("position=erase:2@2").fitted(fit)])
    v, c = torch.from_numpy(fit.directions[2, :, :2]).float(), torch.from_numpy(fit.mean[2]).float()
    body = (slice(None), slice(ORIGIN, None))
    assert ((after[2][body] - c) @ v).abs().max() < ROUNDING
    assert ((before[2][body] - c) @ v).abs().max() > 0.1
    rest = torch.eye(len(c)) - v @ v.mT
    assert ((after[2] - before[2])[body] @ rest).abs().max() < ROUNDING
    assert torch.equal(after[2][:, :ORIGIN], before[2][:, :ORIGIN])
    assert all(torch.equal(after[depth], before[depth]) for depth in (0, 1))
    assert not torch.equal(after[3], before[3])


def test_the_default_is_every_depth_but_the_embedding(llama: Subject, fit: PositionFit) -> None:
    after = streams(llama, [parse_position("position=erase:1").fitted(fit)])
    for depth, x in after.items():
        a = (x[:, ORIGIN:].double() - torch.from_numpy(fit.mean[depth])) @ torch.from_numpy(fit.directions[depth, :, 0])
        assert (float(a.abs().max()) < ROUNDING) == (depth > 0), depth


@pytest.mark.parametrize("at", [ORIGIN, 17, N - 1])
def test_steering_sets_the_coefficient_to_the_mean_of_that_position(llama: Subject, at: int) -> None:
    edit = fitted(f"position=at:{at}@1-3", llama)
    assert edit.fit is not None
    for depth, x in streams(llama, [edit]).items():
        v, c = (torch.from_numpy(part) for part in (edit.fit.directions[depth, :, 0], edit.fit.mean[depth]))
        target = edit.fit.coefficient[depth, at - ORIGIN, 0]
        gap = float(((x[:, ORIGIN:].double() - c) @ v - target).abs().max())
        assert (gap < ROUNDING) == (depth > 0), depth


def test_the_coefficient_is_the_mean_over_the_prompts_of_the_fit(llama: Subject, fit: PositionFit) -> None:
    observer = Streams()
    with attach(llama.model, [observer]) as probe:
        probe.forward(torch.from_numpy(fit_prompts(llama, base_of(llama)).batch(range(fit.prompts))))
    mean = observer.seen[2][:, ORIGIN:].double().mean(0).numpy()
    assert np.allclose(mean.mean(0), fit.mean[2], atol=1e-6)
    assert np.allclose((mean - fit.mean[2]) @ fit.directions[2], fit.coefficient[2], atol=1e-5)
    late = np.arange(N - ORIGIN) - (N - ORIGIN - 1) / 2
    assert (late @ fit.coefficient[2] >= 0).all(), "coefficients increase with the position"


def test_random_directions_depend_on_seed_and_depth_only() -> None:
    one = random_directions(30, 4, 7, 2)
    assert torch.equal(one, random_directions(30, 4, 7, 2))
    assert torch.allclose(one.mT @ one, torch.eye(4, dtype=torch.float64))
    for other in (random_directions(30, 4, 8, 2), random_directions(30, 4, 7, 3)):
        assert (one - other).abs().max() > 0.1
    assert parse_edit("position=random:4:7") != parse_edit("position=random:4")


def test_leace_of_full_rank_is_that_of_concept_erasure(llama: Subject) -> None:
    """Twelve positions, so that the rank 11 is below the width 30. Without the shrinkage and the cap of the package."""
    from concept_erasure import LeaceFitter

    positions, prompts = 12, 24
    found = PositionFit.of(llama, base_of(llama), N - positions, prompts=prompts, leace=None)
    observer = Streams()
    with attach(llama.model, [observer]) as probe:
        probe.forward(torch.from_numpy(fit_prompts(llama, base_of(llama)).batch(range(prompts))))
    z = torch.eye(positions, dtype=torch.float64).repeat(prompts, 1)
    for depth in (1, 3):
        x = observer.seen[depth][:, -positions:].flatten(0, 1).double()
        theirs = LeaceFitter(
            30, positions, dtype=torch.float64, shrinkage=False, constrain_cov_trace=False, svd_tol=1e-9
        )
        expected = theirs.update(x, z).eraser(x)
        erased = parse_position("position=leace:all").fitted(found).projection(depth, found).of(x)
        assert torch.allclose(erased, expected, atol=1e-8)
        assert (x - erased).abs().max() > 0.1
        by_position = erased.view(prompts, positions, -1).mean(0)
        assert (by_position - by_position.mean(0)).abs().max() < 1e-8, "no linear probe reads the position"


def test_leace_of_fewer_directions_takes_the_leading_ones(llama: Subject, fit: PositionFit) -> None:
    three = PositionFit.of(llama, base_of(llama), ORIGIN, leace=3)
    assert fit.leace is not None
    assert three.leace is not None
    assert np.allclose(three.leace.out[..., :2], fit.leace.out, atol=1e-8)
    assert three.leace.out.shape == (4, 30, 3)


def test_the_control_of_leace_is_a_projection_of_whitened_states(llama: Subject, fit: PositionFit) -> None:
    """It is idempotent and removes as many dimensions as LEACE, but other ones."""
    assert fit.leace is not None
    edits = [parse_position(f"position={kind}:2").fitted(fit).projection(2, fit) for kind in ("leace", "random-leace")]
    x = torch.randn(500, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for edit, other in (edits, edits[::-1]):
        once = edit.of(x)
        assert torch.allclose(edit.of(once), once, atol=1e-8)
        assert torch.linalg.matrix_rank((x - once) - (x - once).mean(0)) == 2
        assert (other.of(x) - once).abs().max() > 0.1
    out, read = (torch.from_numpy(part[2]) for part in fit.leace.arrays[2:])
    assert torch.allclose(read.mT @ out, torch.eye(2, dtype=torch.float64), atol=1e-8)


# Planted directions


@contextmanager
def planted(who: Subject, added: Tensor) -> Iterator[None]:
    """Add [N, W] to the embeddings of every prompt of N tokens."""
    table = who.model.get_input_embeddings()
    with table.register_forward_hook(lambda module, args, out: out + added.to(out) if out.shape[1] == N else None):
        yield


def test_a_planted_direction_is_found_and_erased() -> None:
    who, u = subject(), torch.nn.functional.normalize(torch.randn(30), dim=0)
    with planted(who, torch.linspace(-1, 1, N)[:, None] * u):
        edit = fitted("position=erase:1@0", who)
        assert edit.fit is not None
        assert float(u.double() @ torch.from_numpy(edit.fit.directions[0, :, 0])) > 0.99, "it increases"
        before, after = (streams(who, edits, 32)[0][:, ORIGIN:].double().mean(0) for edits in ([], [edit]))
    late = torch.linspace(-1, 1, N, dtype=torch.float64)[ORIGIN:]
    slope = [
        float((late - late.mean()) @ x @ u.double() / (late - late.mean()).square().sum()) for x in (before, after)
    ]
    assert slope[0] == pytest.approx(1, abs=0.2), "the noise of 32 embeddings of norm 1 in 38 positions"
    assert slope[1] == pytest.approx(0, abs=0.02), "cos > 0.99 leaves at most 2% of the planted slope"


# The tokens that are changed


@pytest.mark.parametrize(
    ("context", "starts"),
    [
        ("context=branches", [0, N, 2 * N, 3 * N + DONOR_MARGIN]),
        ("context=branches:long", [0, N, 2 * N, 5 * N]),
        ("context=branches:apart", [0, N + DONOR_MARGIN]),
        ("context=borrowed", [0, N + DONOR_MARGIN]),
    ],
)
def test_each_document_keeps_its_first_tokens(llama: Subject, context: str, starts: list[int]) -> None:
    edits, observer = parse_edits([context, "position=erase:all@1"]), Streams()
    pl.measure(llama, edits=edits, observers=[observer], origin=ORIGIN, **ASKED)
    x = observer.seen[1]
    constant = (x == x[:, -1:]).all(-1).all(0)
    kept = {start + first for start in starts for first in range(ORIGIN)}
    assert set((~constant).nonzero()[:, 0].tolist()) == kept
    (after_donor,) = (edit for edit in edits if isinstance(edit, AfterDonor))
    assert sorted(after_donor.document_starts(x.shape[1])) == sorted(starts)
    assert torch.equal(constant, body_tokens(edits, x.shape[1], ORIGIN))


@pytest.mark.parametrize("apart", [False, True])
def test_each_copy_of_a_prompt_is_a_document(apart: bool) -> None:
    edit, donor = LendByHead(torch.zeros(3, 1, 1), apart), N + DONOR_MARGIN
    sequences, tokens = edit.sequences(N)
    assert edit.document_starts(tokens) == [0, donor, *([] if apart else [donor + N, donor + 2 * N])]
    assert (sequences, tokens) == ((3, donor + N) if apart else (1, donor + 3 * N))


def test_joined_branches_are_those_read_apart(llama: Subject) -> None:
    joined, apart, plain = (
        pl.measure(llama, edits=edits, origin=ORIGIN, **ASKED).data
        for edits in (
            ["context=branches", "position=erase:1"],
            ["context=branches:apart", "position=erase:1"],
            ["context=branches"],
        )
    )
    for name in ("total_a", "mask", "drift", "total_c"):
        one, other, without = (np.nan_to_num(data[name].values) for data in (joined, apart, plain))
        assert np.abs(one - other).max() < 10 * ROUNDING, name
        if name != "mask":  # of the first layer nothing is changed
            assert np.abs(one - without).max() > 0.1, name


# Runs


@pytest.mark.parametrize(("length", "prompts"), [(40, 64), (200, 40), (256, 32), (2000, 16)])
def test_a_fit_reads_as_many_prompts_as_its_limits_allow(llama: Subject, length: int, prompts: int) -> None:
    fit = PositionFit.of(llama, base_of(llama, length), ORIGIN)
    assert fit.prompts == prompts
    assert prompts * length <= FIT_TOKENS or prompts == 16


def test_the_hash_covers_what_steering_uses(fit: PositionFit) -> None:
    moved = fit.coefficient.copy()
    moved[1, 5, 0] += 1e-9
    assert replace(fit, coefficient=moved).sha256 != fit.sha256


def test_the_fit_reads_other_prompts(llama: Subject) -> None:
    base = base_of(llama)
    own = fit_prompts(llama, base)
    assert (own.source, own.length, own.first, own.seed) == (base.source, base.length, base.first, 3 + FIT_SEED)
    rows = {ids.tobytes() for ids in base.batch(range(64))[:, 1:]}
    assert not any(ids.tobytes() in rows for ids in own.batch(range(24))[:, 1:])


def test_prompts_of_the_user_are_replaced_by_random_ones(llama: Subject) -> None:
    ids = base_of(llama).batch(range(4))
    with pytest.warns(PosleakWarning, match="given"):
        run = pl.measure(llama, ids, edits="position=erase:1")
    assert run.record.touched[0].beside
    own = fit_prompts(llama, prepare(llama, ids, length=N, seed=0))
    assert (own.source, int(own.ids(0)[0])) == ("random", int(ids[0, 0]))


def test_the_record_has_the_hash_and_the_folder_is_read_back(llama: Subject, tmp_path: Path, fit: PositionFit) -> None:
    text = "position=at:20@1-2"
    run = pl.measure(llama, out=tmp_path / "run", edits=text, origin=ORIGIN, **ASKED)
    (effect,) = run.record.touched
    assert replace(fit, leace=None).sha256[:12] in effect.beside[0]
    loaded = Run.load(tmp_path / "run")
    assert loaded.record.spec.edit_texts == (text,)
    assert loaded.record.spec.edits == run.record.spec.edits
    with counted_passes(llama.model) as passes:
        again = pl.measure(llama, out=tmp_path / "run", edits=text, origin=ORIGIN, **ASKED)
    assert_same_bits(again, run)
    assert not full_batches(passes), "neither prompts nor the fit"


def test_a_run_that_was_stopped_is_resumed_with_the_same_directions(llama: Subject, tmp_path: Path) -> None:
    spec = MeasureSpec(edits=parse_edits("position=erase:2"), **ASKED)

    def stop(done: int, of: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        PreparedRun.of(llama, spec).run(tmp_path, progress=stop)
    resumed, whole = PreparedRun.of(llama, spec).run(tmp_path), PreparedRun.of(llama, spec).run()
    assert_same_bits(resumed, whole)
    assert resumed.record.touched == whole.record.touched


def test_conditions_share_one_fit(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    made, of = list[Any](), PositionFit.of

    def counted(*args: Any, **more: Any) -> PositionFit:
        made.append(args)
        return of(*args, **more)

    monkeypatch.setattr(PositionFit, "of", counted)
    conditions = Conditions(llama, MeasureSpec(loss=True, **ASKED))
    runs = [conditions.run(text) for text in ("position=erase:1", "position=erase:2", "position=random:1")]
    assert len(made) == 1
    assert all(run.loss is not None for run in runs)
    hashes = {run.record.touched[0].beside[0].partition("sha256")[2] for run in runs}
    assert len(hashes) == 1


def test_a_trace_under_an_edit(llama: Subject, tmp_path: Path) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "batch"}
    trace = pl.trace(llama, edits="position=erase:1", out=tmp_path / "run", **asked)
    assert trace.as_dict()["edits"] == ["position=erase:1"]
    assert trace.branches.record.spec.edit_texts == ("context=branches", "position=erase:1")
    assert trace.remainder < 1e-9
    state, total = (np.nanmax(np.abs(trace.components[name].values)) for name in ("state", "total"))
    assert state < ROUNDING * total, "0 to rounding, which grows with the logits"
    without = pl.trace(llama, **asked)
    assert without.as_dict()["edits"] == []
    change = trace.components["total"].values - without.components["total"].values
    assert np.nanmax(np.abs(change[:, 0])) < ROUNDING, "the first layer reads the embedding"
    assert np.nanmax(np.abs(change[:, 1])) > 0.1
    with raises(InputError, where=("window=9", "context=borrowed")):
        pl.trace(llama, edits=["window=9"], **asked)


def test_the_memory_of_a_fit_is_planned(llama: Subject) -> None:
    for text in ("position=erase:1", "position=leace:all"):
        plain, edited = (
            memory_plan(llama, MeasureSpec(edits=edits, **ASKED)).activations for edits in ((), parse_edits(text))
        )
        fit = fitted(text, llama).fit
        assert fit is not None
        arrays = [fit.directions, fit.mean, fit.coefficient, *(vars(fit.leace).values() if fit.leace else ())]
        assert edited - plain > sum(array.nbytes for array in arrays)


# Refusals


def parse_position(text: str) -> PositionEdit:
    edit = parse_edit(text)
    assert isinstance(edit, PositionEdit)
    assert (edit.text, edit.site) == (text, Site.STREAM)
    return edit


@pytest.mark.parametrize(
    "text", ["erase", "erase:", "erase:-1", "erase:1:2", "at:all", "at:1:2", "random:1:x", "wipe:1", "erase:1.5"]
)
def test_malformed_texts_are_refused(text: str) -> None:
    with raises(InputError, where=text, remedy="position=erase:1"):
        parse_edit(f"position={text}")


@pytest.mark.parametrize(
    "text", ["erase:1", "erase:all@0-3", "leace:2@1,3", "leace:all", "random:4", "random:4:7@2", "at:17"]
)
def test_texts_are_read_back(text: str) -> None:
    assert parse_edit(parse_position(f"position={text}").text) == parse_position(f"position={text}")


def test_what_cannot_be_fitted_is_refused(llama: Subject, fit: PositionFit) -> None:
    with raises(InputError, where="@1.2", expected="@0-5"):
        parse_edit("position=erase:1@1.2")
    with raises(InputError, got="depth 4", expected="3"):
        fitted("position=erase:1@4", llama)
    with raises(InputError, got="position 40", expected="39", remedy="--length"):
        pl.measure(llama, edits="position=at:40", **ASKED)
    with raises(InputError, got="position 1", expected="2 to 39", remedy="--origin"):
        pl.measure(llama, edits="position=at:1", origin=ORIGIN, **ASKED)
    with raises(InputError, got=9, expected=(str(MAX_DIRECTIONS), "all")):
        fitted("position=erase:9", llama)
    with raises(InputError, where="leace", remedy="PositionFit.of"):
        parse_position("position=leace:1").fitted(replace(fit, leace=None))
    with (
        raises(InputError, where="erase:1", remedy="edit.fitted(fit)"),
        attach(llama.model, edits=parse_edits("position=erase:1")),
    ):
        pass
    with raises(InputError, got="residual stream"):
        parse_edits(["position=erase:1", "position=at:9"])


def test_several_streams_are_refused_by_name() -> None:
    who = Subject.of(tiny_model("gemma3n_text"), name="streams")
    with raises(UnsupportedError, where="Gemma3n", remedy="posleak measure"):
        PositionFit.of(who, base_of(who), ORIGIN)


def test_the_model_is_left_as_it_was(llama: Subject, fit: PositionFit) -> None:
    before = streams(llama)
    streams(llama, [parse_position("position=erase:1").fitted(fit)])
    assert all(torch.equal(x, before[depth]) for depth, x in streams(llama).items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny("llama").modules())
