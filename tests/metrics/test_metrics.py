"""The neighbours' measurements on real forward passes: each against its formula in numpy, on the whole attention that
the model itself returns, and the laws that they obey."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posleak.analyses.origin.states import states
from posleak.axes import HEAD, LAYER
from posleak.errors import InputError
from posleak.metrics import Meter, graphs, parse_metrics, register, spectra
from posleak.metrics.agreement import agreement, alignments
from posleak.metrics.builtin import MassiveMeter, PositionMoments, ProbeMeter, explained, projection
from posleak.metrics.catalogue import CATALOGUE, METER_CLASSES, PLUGIN_METERS, SHORT_PROMPT_METRICS
from posleak.metrics.meter import FULL_LENGTH, SAMPLED_ROWS, Glimpse, Sampling
from posleak.metrics.table import METRIC_ARRAYS
from posleak.models import Subject
from posleak.probe import Call, attach
from posleak.runs.measure import measure
from posleak.runs.run import Run
from posleak.runs.short_prompts import SHIFT, first_attention, shifted
from support.errors import raises
from support.families import FAMILIES, tiny
from support.runs_tiny import assert_same_bits

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")  # tiny models have no tokenizer

SHORT, LONG = 64, 301
"""Prompts whose attention is looked at whole, and longer ones, of which some rows are."""

KINDS = ("llama", "gemma2", "gpt_neox", "gpt_oss")
"""Plain; windows and soft-caps; partly rotated; learned sink logits."""


@dataclass
class Whole:
    """Queries and keys of every call, for logits that are made here again."""

    logits: list[Array] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        q, k = call.query.double().numpy(), call.key.double().numpy()
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        s = np.einsum("bhie,bhje->bhij", q, k) * call.scaling
        self.logits.append(s if call.softcap is None else call.softcap * np.tanh(s / call.softcap))


@dataclass(frozen=True)
class Known:
    """A run with all metrics, and what the model itself computes on the same prompts: lists over layers or depths."""

    run: Run
    ids: Array
    attention: list[Array]
    logits: list[Array]
    states: list[Array]
    visible: list[Array]

    @property
    def data(self) -> Any:
        return self.run.data


def known(family: str, length: int, prompts: int = 4) -> Known:
    model = tiny(family) if family == "gpt_oss" else tiny(family).double()  # experts are multiplied in float32
    subject = Subject.of(model, name=f"tiny-{family}")
    run = measure(subject, length=length, prompts=prompts, batch=3, metrics="all")
    ids = torch.from_numpy(np.stack([_ids(subject, length, b) for b in range(prompts)]))
    whole = Whole()
    with attach(model, [whole]) as probe:
        probe.forward(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.base_model(
            ids, attention_mask=torch.ones_like(ids), output_attentions=True, output_hidden_states=True
        )
    attention = [layer[..., :length].double().numpy() for layer in out.attentions]
    states = [x.double().numpy() for x in out.hidden_states]
    i, j = np.arange(length)[:, None], np.arange(length)
    windows = [window or length for window in subject.identity.windows or (None,) * len(attention)]
    visible = [(j <= i) & (i - j < window) for window in windows]
    assert all((a[:, :, ~seen] == 0).all() for a, seen in zip(attention, visible, strict=True))
    return Known(run, ids.numpy(), attention, whole.logits, states, visible)


def _ids(subject: Subject, length: int, prompt: int) -> Array:
    from posleak.inputs import prepare

    return prepare(subject, "random", length=length, seed=0).ids(prompt)


@pytest.fixture(scope="module", params=[(family, length) for family in KINDS for length in (SHORT, LONG)],
                ids=lambda given: f"{given[0]}, {given[1]} tokens")  # fmt: skip
def found(request: pytest.FixtureRequest) -> Known:
    family, length = request.param
    return known(family, length)


def rows_of(length: int) -> Array:
    """Which rows are looked at, worked out here again: all, or the first 32 and the last of each of 96 groups."""
    if length <= 256:
        return np.arange(length)
    starts = [*range(32), *np.rint(np.linspace(32, length, 97)).astype(int)[:-1].tolist()]
    return np.array([after - 1 for after in [*starts[1:], length]])


def weights_of(length: int) -> Array:
    """For how many queries each row stands."""
    rows = rows_of(length).tolist()
    return np.array([after - before for before, after in zip([-1, *rows], rows)])


def test_rows_stand_for_groups_that_cover_the_prompt() -> None:
    for length in (33, FULL_LENGTH, FULL_LENGTH + 1, LONG, 512, 4097):
        found = Sampling(length)
        assert (found.rows == rows_of(length)).all()
        assert (found.weights == weights_of(length)).all()
        assert found.rows[-1] == length - 1
        assert found.weights.min() >= 1
        assert found.weights.sum() == length
        assert len(found.rows) == (length if length <= FULL_LENGTH else SAMPLED_ROWS)
        line = torch.from_numpy(found.rows).double()
        assert torch.allclose(found.spread(line), torch.arange(length).double())


# -- each metric against its formula -----------------------------------------------------------------------------------


def test_the_sink_rate_is_the_mean_attention_of_64_queries(found: Known) -> None:
    for layer, a in enumerate(found.attention):
        np.testing.assert_allclose(found.data["sink_start"][:, layer], a[:, :, :64, 0].mean(-1), rtol=1e-5)
    share = np.mean([a[:, :, :64, 0].mean(-1) > 0.3 for a in found.attention])
    assert value(found.run, "sink_rate") == pytest.approx(share)


def value(run: Run, name: str) -> float:
    assert run.metrics is not None
    return next(float(row.value.value) for row in run.metrics.rows if row.metric.id == name)


def test_the_rollout_is_a_product_of_matrices(found: Known) -> None:
    """Exact where all rows are looked at. In long prompts straight lines stand for what is in between: attention of
    these models is rough, so that single prompts may be off by a third."""
    product = np.eye(found.ids.shape[1])
    for layer, a in enumerate(found.attention):
        mean = a.mean(1)
        product = mean / mean.sum(-1, keepdims=True) @ product
        near = 1e-4 if found.ids.shape[1] == SHORT else 0.5
        np.testing.assert_allclose(found.data["rollout"][:, layer], product[:, 1:, 0].mean(-1), rtol=near)


def test_a_smooth_rollout_is_right_at_any_length() -> None:
    """Queries that are all zero: uniform attention, whose powers are known."""
    model = tiny("llama").double()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    run = measure(Subject.of(model, name="tiny"), length=600, prompts=2, metrics="rollout")
    uniform = np.tri(600) / np.arange(1, 601)[:, None]
    power = np.eye(600)
    for layer in range(3):
        power = uniform @ power
        assert float(run.data["rollout"][0, layer]) == pytest.approx(power[1:, 0].mean(), rel=0.01)


def test_two_calls_of_one_layer_are_one_step_of_the_rollout() -> None:
    """DiffLlama makes two calls in every layer, whose attention is averaged."""
    model = tiny("diffllama").double()
    subject = Subject.of(model, name="tiny")
    run = measure(subject, length=64, prompts=2, metrics="rollout")
    ids = torch.from_numpy(np.stack([_ids(subject, 64, b) for b in range(2)]))
    whole = Whole()
    with attach(model, [whole]) as probe:
        probe.forward(ids)
    product, seen = np.eye(64), np.tri(64, dtype=bool)
    for first, second in zip(whole.logits[::2], whole.logits[1::2], strict=True):
        weight = np.exp(np.where(seen, np.concatenate([first, second], axis=1), -np.inf))
        product = (weight / weight.sum(-1, keepdims=True)).mean(1) @ product
    np.testing.assert_allclose(run.data["rollout"][:, -1], product[:, 1:, 0].mean(-1), rtol=1e-6)


def test_frames_are_those_of_attention_averaged_over_heads(found: Known) -> None:
    """In long prompts some rows stand for all, with all their keys."""
    rows = rows_of(found.ids.shape[1])
    for layer, a in enumerate(found.attention):
        mean, visible = a.mean(1)[:, rows], found.visible[layer][rows]
        graph = graphs.AttentionGraph(mean, visible, rows)
        expected = {
            "star": graph.star(), "centralisation": graph.centralisation(),
            "fiedler": graphs.fiedler(a.mean(1)[:, :128, :128]), "concentration": graph.concentration(),
            "reference_tokens": graph.reference_tokens(), "kl_reduction": graph.kl_reduction(), **graph.frame(),
        }  # fmt: skip
        for name, numbers in expected.items():
            counts = name in ("star", "centralisation")  # an edge more or less, by rounding
            near = 5e-3 if counts else 1e-5
            np.testing.assert_allclose(found.data[name][:, layer], numbers, rtol=1e-4, atol=near, err_msg=name)
    shares = sum(found.data[name] for name in ("centralized", "distributed", "bidirectional", "no_frame"))
    np.testing.assert_allclose(shares, 1, rtol=1e-12)


def test_some_rows_give_nearly_the_frames_of_all() -> None:
    """On the whole attention of a long prompt."""
    found = known("llama", LONG)
    for layer, a in enumerate(found.attention):
        graph = graphs.AttentionGraph(a.mean(1), np.tri(LONG, dtype=np.bool_), np.arange(LONG))
        np.testing.assert_allclose(found.data["concentration"][:, layer], graph.concentration(), atol=0.08)
        np.testing.assert_allclose(found.data["kl_reduction"][:, layer], graph.kl_reduction(), atol=0.05)
        np.testing.assert_allclose(found.data["star"][:, layer, 2:], graph.star()[:, 2:], atol=0.08)


def test_spectra_are_those_of_mean_attention_by_offset(found: Known) -> None:
    length, origin = found.ids.shape[1], 4
    late = [i for i in rows_of(length) if i >= length // 2]
    offsets = late[0] - origin + 1
    for layer, a in enumerate(found.attention):
        profile = np.mean([[a[:, :, i, i - d] for d in range(offsets)] for i in late], axis=0)
        profile = np.moveaxis(profile, 0, -1)
        power, (energy, entropy) = spectra.power_spectrum(profile), spectra.wavelets(profile)
        expected = {
            "entropy_position": spectra.entropy(profile), "entropy_spectrum": spectra.entropy(power),
            "selectivity": spectra.selectivity(power), "bands": spectra.band_shares(power),
            "wavelet_energy": energy, "wavelet_entropy": entropy,
            "scale_half": spectra.scale_sensitivity(profile, 2),
            "scale_quarter": spectra.scale_sensitivity(profile, 4),
        }  # fmt: skip
        for name, numbers in expected.items():
            np.testing.assert_allclose(found.data[name][:, layer], numbers, rtol=1e-4, atol=1e-9, err_msg=name)


def test_delta_r2_is_the_difference_of_two_regressions(found: Known) -> None:
    rows, length = rows_of(found.ids.shape[1]), found.ids.shape[1]
    i, j = np.meshgrid(rows, np.arange(length), indexing="ij")
    for layer, s in enumerate(found.logits):
        seen = found.visible[layer][rows]
        x = np.stack([np.ones_like(i), i - j, i, j], axis=-1)[seen].astype(float)
        weight = np.broadcast_to(weights_of(length)[:, None], seen.shape)[seen]
        for prompt, head in ((0, 0), (2, 1)):
            y = s[prompt, head][rows][seen]
            small, large = (_r2(design, y, weight) for design in (x[:, :2], x))
            assert float(found.data["delta_r2"][prompt, layer, head]) == pytest.approx(large - small, abs=1e-6)
            assert float(found.data["r2_offset"][prompt, layer, head]) == pytest.approx(small, abs=1e-6)


def _r2(x: Array, y: Array, weight: Array) -> float:
    """Of the weighted least squares: every row stands for as many queries as its weight says."""
    root = np.sqrt(weight)
    fit = x @ np.linalg.lstsq(x * root[:, None], y * root, rcond=None)[0]
    mean = np.average(y, weights=weight)
    return float(1 - (weight * (y - fit) ** 2).sum() / (weight * (y - mean) ** 2).sum())


def test_the_toeplitz_deviation_is_the_mean_map_minus_its_diagonals(found: Known) -> None:
    """The square of the map, averaged over the plan's pairs, without products of a prompt with itself."""
    plan, metrics, rows = found.run.record.plan, found.run.metrics, rows_of(found.ids.shape[1])
    assert metrics is not None
    pairs = found.data["pairs"].values
    for layer, s in enumerate(found.logits):
        seen = found.visible[layer]
        for head in range(s.shape[1]):
            each = list[Array]()
            for qi, i in enumerate(plan.queries):
                for di, offset in enumerate(plan.offsets):
                    if pairs[layer, qi, di]:
                        on = [p for p, r in enumerate(rows) if r >= offset and seen[r, r - offset]]
                        diagonal = [s[:, head, rows[p], rows[p] - offset] for p in on]
                        mean = np.average(diagonal, axis=0, weights=weights_of(len(seen))[on])
                        each.append(s[:, head, i, i - offset] - mean)
            x = np.array(each)  # [pairs, B]
            B = x.shape[1]
            power = float(((x.sum(1) ** 2 - (x**2).sum(1)) / (B * (B - 1))).mean())
            got = float(metrics.heads["toeplitz"].value[layer, head])
            assert got == pytest.approx(max(power, 0) ** 0.5, rel=1e-6, abs=1e-6)


def test_massive_activations_and_the_spectrum_of_states(found: Known) -> None:
    """The last depth is left out: transformers returns it after the final norm."""
    step = -(-found.ids.shape[1] // 64)
    for depth, x in enumerate(found.states[:-1]):
        size = np.abs(x)
        some = np.sort(size[:, ::step].reshape(len(x), -1), axis=-1)
        median = some[:, (some.shape[1] - 1) // 2]  # torch takes the lower of two in the middle
        np.testing.assert_allclose(found.data["largest"][:, depth], size.max((1, 2)), rtol=1e-5)
        np.testing.assert_allclose(found.data["largest_times"][:, depth], size.max((1, 2)) / median, rtol=1e-5)
        for prompt in range(len(x)):
            p = np.linalg.svd(x[prompt, :128], compute_uv=False) ** 2
            p = p / p.sum()
            p = p[p > 0]
            expected = -(p * np.log(p)).sum()
            assert float(found.data["spectrum_entropy"][prompt, depth]) == pytest.approx(expected, rel=1e-5)
            assert float(found.data["norm_0"][prompt, depth]) == pytest.approx(np.linalg.norm(x[prompt, 0]), rel=1e-5)


def test_an_activation_is_massive_above_100_and_above_1000_medians() -> None:
    x = torch.full((2, 10, 8), 0.1)
    x[0, 0, 3], x[0, 0, 5], x[0, 4, 2] = -150.0, 90.0, 101.0  # 100 is also 1000 medians
    x[1] *= 2
    x[1, 3, 3] = 199.0  # above 100, below 1000 medians
    found = MassiveMeter().depth(0, x)
    assert found["massive"].tolist() == [2, 0]
    assert found["massive_first"].tolist() == [1, 0]
    assert found["largest"].tolist() == pytest.approx([150, 199])


def test_the_probe_finds_a_position_that_is_written_into_states() -> None:
    """A planted stream: one depth has the position in a direction, the other has noise alone."""
    rng, B, T, W = np.random.default_rng(0), 12, 96, 300
    meter = ProbeMeter(T)
    noise = torch.from_numpy(rng.standard_normal((B, T, W)))
    written = noise + torch.arange(T)[:, None] / T * 1.2 * torch.from_numpy(rng.standard_normal(W))
    states = np.stack([meter.depth(d, x)["probe_states"] for d, x in enumerate((noise, written))], axis=1)
    error = meter.finished({"probe_states": states})["probe_error"].mean(0)
    chance = np.abs(meter.places - meter.places.mean()).mean()
    assert error[0] > 0.7 * chance
    assert error[1] < 0.4 * chance
    assert projection(W, 5).shape == (W, 5)
    assert torch.equal(projection(W, 5), projection(W, 5))


# -- laws --------------------------------------------------------------------------------------------------------------


UNIFORM = sum(1 / (i + 1) for i in range(64)) / 64


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi", "mistral", "gemma2", "smollm3"])
def test_where_one_token_is_repeated_position_0_is_no_sink(family: str) -> None:
    """All states are equal there, so that a logit depends on the offset alone. The sink rate is that of uniform
    attention, 0, unless a head prefers its farthest keys. Where keys are not rotated, attention is uniform."""
    model = tiny(family).double()
    subject = Subject.of(model, name="tiny")
    ids = np.repeat(np.array([[7], [50]]), 64, axis=1)
    found, whole = first_attention(subject, ids), Whole()
    with attach(model, [whole]) as probe:
        probe.forward(torch.from_numpy(ids))
    assert (found > 0.3).mean() == (UNIFORM > 0.3) == 0
    for layer, s in enumerate(whole.logits):
        window = (subject.identity.windows or (None,) * 9)[layer] or 64
        weight = np.exp(s[:, :, -1, ::-1])  # by offset, from the last query
        below = np.stack([weight[..., : min(i + 1, window)].sum(-1) for i in range(64)], axis=-1)
        expected = np.where(np.arange(64) < window, weight / below, 0).mean(-1)
        np.testing.assert_allclose(found[:, layer], expected, rtol=1e-5)
    if family == "smollm3":  # no rotation in the second layer
        np.testing.assert_allclose(found[:, 1], UNIFORM, rtol=1e-12)
    assert pytest.approx(0.0741, abs=5e-5) == UNIFORM  # what the catalogue says


def test_a_head_that_prefers_far_keys_can_find_position_0_among_repeated_tokens() -> None:
    """No law, then: position 0 is the farthest key of every query. Slow rotation and large logits are enough."""
    largest = 0.0
    for seed in range(8):
        model = tiny("llama", rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).double()
        torch.manual_seed(seed)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data = 20 * torch.randn_like(layer.self_attn.q_proj.weight)
            layer.self_attn.k_proj.weight.data = 20 * torch.randn_like(layer.self_attn.k_proj.weight)
        largest = max(largest, float(first_attention(Subject.of(model, name="tiny"), np.full((1, 64), 7)).max()))
    assert largest > 0.3


def test_learned_positions_find_position_0_among_repeated_tokens() -> None:
    torch.manual_seed(0)
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=30, n_layer=2, n_head=3, n_positions=128)).eval()
    model.transformer.wpe.weight.data *= 50
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 20
    found = first_attention(Subject.of(model, name="tiny"), np.full((1, 64), 7))
    assert np.abs(found - UNIFORM).max() > 0.01


@pytest.mark.parametrize("profile", ["linear", "any"])
def test_delta_r2_of_a_toeplitz_matrix_is_0(profile: str) -> None:
    """Of a linear profile the offset explains everything; of any other, position adds nothing to what it leaves: in a
    causal triangle the mean position of a diagonal is a linear function of its offset."""
    T = 60
    i, j = torch.arange(T)[:, None], torch.arange(T)
    by_offset = 3.0 - 0.7 * torch.arange(T).double() if profile == "linear" else torch.randn(T).double()
    s = by_offset[(i - j).clamp(min=0)][None, None]
    moments = PositionMoments(j <= i, torch.arange(T), torch.ones(T, dtype=torch.long))
    r2, more = explained(s, moments)
    assert float(more) < 1e-24
    assert profile != "linear" or float(r2) == pytest.approx(1, abs=1e-12)
    r2, more = explained(s + 0.01 * i, moments)  # linear in i
    assert float(more) > 1e-6


def test_metrics_before_the_softmax_are_blind_to_leakage_of_the_mask() -> None:
    """One token repeated, no BOS: logits depend on the offset alone, and all leakage is the mask's (L2)."""
    run = measure(
        Subject.of(tiny("llama").double(), name="tiny"), inputs="constant", bos="none", length=96, prompts=4,
        metrics="all",
    )  # fmt: skip
    assert run.metrics is not None
    evenly = run.summary.heads["all"].even
    assert evenly is not None
    heads = evenly.power
    assert (heads["total"].value > 0.1).all()
    np.testing.assert_allclose(heads["mask"].value, heads["total"].value, rtol=1e-4)
    assert np.nanmax(run.metrics.heads["toeplitz"].value) < 1e-5  # the rotation is made in float32
    assert np.nanmax(run.data["delta_r2"].values) < 1e-12
    logits = {metric.id for metric in CATALOGUE if metric.looks.name == "LOGITS"}
    assert logits == {"toeplitz", "delta_r2"}


def test_shifting_positions_changes_attention_by_rounding_only() -> None:
    subject = Subject.of(tiny("llama"), name="tiny")
    ids = np.stack([_ids(subject, 32, b) for b in range(3)])
    own, rounded = shifted(subject, ids, []), shifted(subject, ids, ["dtype=bfloat16"])
    assert own.shape == rounded.shape == (3, 3, 3)
    assert own.max() < 1e-4
    assert rounded.mean() > 20 * own.mean()
    assert subject.model.dtype == torch.float32  # given back


def test_a_shift_is_the_total_variation_of_two_attentions() -> None:
    """The formula on attention that the model returns: with a rotation that depends on the largest position (dynamic
    NTK), moving all positions changes much."""
    model = tiny("llama", max_position_embeddings=2048).double()
    subject = Subject.of(model, name="tiny")
    ids = np.stack([_ids(subject, 32, b) for b in range(2)])
    with_edit = shifted(subject, ids, ["dtype=float32"])
    tokens = torch.from_numpy(ids)
    model.float().set_attn_implementation("eager")
    with torch.no_grad():
        still, moved = (
            model.base_model(
                tokens, attention_mask=torch.ones_like(tokens), output_attentions=True,
                position_ids=torch.arange(32).expand(2, -1) + start,
            ).attentions
            for start in (0, SHIFT)
        )  # fmt: skip
    for layer, (a, b) in enumerate(zip(still, moved)):
        expected = (a - b).abs().sum(-1).mean(-1).double().numpy() / 2
        np.testing.assert_allclose(
            with_edit[:, layer], expected, rtol=0.5, atol=2e-6
        )  # both are rounding, alike in size


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_metrics(family: str) -> None:
    run = measure(Subject.of(tiny(family), name=f"tiny-{family}"), length=72, prompts=4, metrics="all")
    assert run.metrics is not None
    rows = {row.metric.id: row.value for row in run.metrics.rows}
    missing = {metric.id for metric in CATALOGUE} - set(rows)
    assert missing <= {"sink_rate_natural"}  # tiny models have no tokenizer
    unknown = {name for name, found in rows.items() if not np.isfinite(found.value)}
    assert unknown <= {"massive_first"}  # none is massive here
    assert any("natural text" in note for note in run.record.warnings)
    assert run.metrics.frame is not None
    assert len(run.metrics.frames) == run.data.sizes[LAYER]


def test_leakage_is_the_same_with_metrics_and_without() -> None:
    subject = Subject.of(tiny("gemma2"), name="tiny")
    plain, more = (measure(subject, length=64, prompts=4, metrics=metrics) for metrics in ("none", "all"))
    assert plain.metrics is None
    assert more.metrics is not None
    assert not any(name in plain.data for name in METRIC_ARRAYS)
    for name in plain.data.data_vars:
        assert plain.data[name].values.tobytes() == more.data[name].values.tobytes()


def test_only_what_was_asked_for_is_there() -> None:
    run = measure(Subject.of(tiny("llama"), name="tiny"), length=64, prompts=4, metrics="rollout, sinks")
    assert run.record.spec.metrics == ("sinks", "rollout")
    assert run.metrics is not None
    assert {row.metric.id for row in run.metrics.rows} == {"sink_rate", "sink_attention", "rollout"}
    assert run.metrics.frame is None
    assert run.metrics.frames == ()
    assert run.metrics.depths == {}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_stream_that_passes_by_is_the_one_that_the_model_returns(family: str) -> None:
    """Before the final norm, at every depth; without holding all of them."""
    seen = dict[int, Tensor]()

    class Stream:
        def observe(self, call: Call, out: Tensor) -> None:
            pass

        def stream(self, depth: int, x: Tensor) -> None:
            seen[depth] = x

    model, ids = tiny(family), torch.arange(60).view(2, 30)
    with attach(model, [Stream()]) as probe:
        expected = states(probe, ids)
        assert sorted(seen) == list(range(len(expected)))
        for depth, x in enumerate(expected):
            assert torch.equal(seen[depth], x)


def test_short_prompts_have_no_spectra() -> None:
    run = measure(Subject.of(tiny("llama"), name="tiny"), length=36, prompts=4, metrics="all")
    assert run.metrics is not None
    assert "bands" not in run.data
    assert "star" in run.data
    assert any("wavelets" in note for note in run.record.warnings)


def test_a_run_with_metrics_is_read_back_and_resumed_to_the_bit(tmp_path: Path, monkeypatch: Any) -> None:
    subject = Subject.of(tiny("llama"), name="tiny")
    asked: dict[str, Any] = {"length": 64, "prompts": 6, "batch": 2, "metrics": "all"}
    whole = measure(subject, out=tmp_path / "whole", **asked)
    from posleak.runs import loop
    from posleak.runs.folder import write_batch

    write, written = write_batch, list[range]()

    def stops(folder: Path, prompts: range, arrays: Any, digest: str) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(prompts)
        write(folder, prompts, arrays, digest)

    monkeypatch.setattr(loop, "write_batch", stops)
    with pytest.raises(KeyboardInterrupt):
        measure(subject, out=tmp_path / "part", **asked)
    monkeypatch.undo()
    part = Run.load_partial(tmp_path / "part")
    assert part.prompts == 4
    assert part.metrics is not None
    assert_same_bits(measure(subject, out=tmp_path / "part", **asked), whole)
    again = Run.load(tmp_path / "whole")
    assert_same_bits(again, whole)
    assert again.as_dict()["metrics"] == whole.as_dict()["metrics"]


def test_results_do_not_depend_on_the_batch() -> None:
    subject = Subject.of(tiny("llama").double(), name="tiny")
    one, many = (measure(subject, length=LONG, prompts=4, batch=batch, metrics="all") for batch in (1, 4))
    for name in METRIC_ARRAYS:
        if name in one.data:
            np.testing.assert_allclose(one.data[name], many.data[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_edits_act_on_metrics_too() -> None:
    """A head that may not read position 0 gives it nothing; one that is frozen gives all queries the same."""
    subject = Subject.of(tiny("llama").double(), name="tiny")
    cut = measure(subject, length=64, prompts=4, metrics="sinks,rollout", edits="sink=cut")
    np.testing.assert_allclose(cut.data["sink_start"], 1 / 64, rtol=1e-9)  # position 0 itself still reads itself
    np.testing.assert_allclose(cut.data["rollout"], 0, atol=1e-15)


def test_intervals_are_made_of_prompts() -> None:
    run = measure(Subject.of(tiny("llama"), name="tiny"), length=64, prompts=5, metrics="all")
    assert run.metrics is not None
    for row in run.metrics.rows:
        assert row.value.n in (4, 5)
        if np.isfinite(row.value.low):
            assert row.value.low <= row.value.value <= row.value.high
    few = measure(Subject.of(tiny("llama"), name="tiny"), length=64, prompts=2, metrics="all")
    assert few.metrics is not None
    assert all(np.isnan(row.value.low) for row in few.metrics.rows)


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert parse_metrics("none") == parse_metrics("") == parse_metrics(()) == ()
    assert parse_metrics("all") == (*METER_CLASSES, *SHORT_PROMPT_METRICS, *PLUGIN_METERS)
    assert parse_metrics(["sinks,frames", "sinks"]) == ("sinks", "frames")
    with raises(InputError, where="--metrics sink", got="sink", remedy="'sinks'"):
        parse_metrics("sink")
    with raises(InputError, where="--metrics", what="borrowed"):
        measure(Subject.of(tiny("llama"), name="tiny"), length=64, metrics="all", edits="context=borrowed")


def test_every_metric_has_a_definition_and_a_meter() -> None:
    assert {metric.meter for metric in CATALOGUE} == {*METER_CLASSES, *SHORT_PROMPT_METRICS}
    assert len({metric.id for metric in CATALOGUE}) == len({metric.title for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.definition
        assert metric.unit
        assert metric.source


def test_a_meter_of_ones_own() -> None:
    class Nearest(Meter):
        name = "nearest"
        arrays = {"nearest": (LAYER, HEAD)}  # noqa: RUF012

        def look(self, seen: Glimpse) -> dict[str, Array]:
            own = seen.attention.gather(-1, seen.rows[:, None].expand(*seen.attention.shape[:3], 1))
            return {"nearest": own[..., 0].double().mean(-1).numpy()}

    try:
        register(Nearest)
        run = measure(Subject.of(tiny("llama"), name="tiny"), length=48, prompts=4, metrics="nearest")
        assert run.data["nearest"].dims == ("prompt", LAYER, HEAD)
        assert ((run.data["nearest"] > 0) & (run.data["nearest"] < 1)).all()
        Nearest.name = "sinks"
        with raises(InputError, what="belongs", got="sinks"):
            register(Nearest)
    finally:
        PLUGIN_METERS.clear()


# -- agreement ---------------------------------------------------------------------------------------------------------


def test_agreement_is_the_rank_correlation() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    mask, noise = rng.random((8, 5)), rng.random((8, 5))
    metrics, powers = {"star": mask**3, "fiedler": noise, "toeplitz": -mask}, {"mask": mask, "sink": noise[::-1]}
    found = agreement([metrics] * 2, [powers] * 2, "heads")
    assert found.columns == ("mask", "sink", "star", "fiedler", "toeplitz")
    assert found.n == 40
    assert found.rho[[0, 2], 0] == pytest.approx([1, -1])
    assert found.rho[1, 0] == pytest.approx(spearmanr(noise.ravel(), mask.ravel()).statistic)
    assert (found.low <= found.rho + 1e-12).all()
    assert (found.rho <= found.high + 1e-12).all()
    seen = {each.metric: each for each in alignments(found)}
    assert seen["star"].most is not None
    assert seen["star"].most.name == "mask"


def test_shared_noise_is_no_agreement() -> None:
    """Heads that do not differ: metric and power of a half have the same noise, and those of two halves have not."""
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((2, 12, 9))
    halves = [{"star": each} for each in noise], [{"mask": each + 0.1 * rng.standard_normal((12, 9))} for each in noise]
    alike = agreement(halves[0][:1] * 2, halves[1][:1] * 2, "heads")
    apart = agreement(*halves, "heads")
    assert alike.rho[0, 0] > 0.9
    assert abs(apart.rho[0, 0]) < 0.3
    assert apart.low[0, 0] < 0 < apart.high[0, 0]


def test_few_layers_have_no_intervals() -> None:
    x = np.arange(6.0).reshape(3, 2)
    found = agreement([{"star": x}] * 2, [{"mask": x}] * 2, "heads")
    assert found.rho[0, 0] == pytest.approx(1)
    assert np.isnan(found.low).all()


def test_all_numbers_can_be_written_as_json(tmp_path: Path) -> None:
    run = measure(Subject.of(tiny("llama"), name="tiny"), length=64, prompts=4, metrics="all", out=tmp_path / "run")
    metrics = json.loads(json.dumps(run.as_dict()["metrics"]))
    assert set(metrics) == {"table", "frame", "frames", "layers", "depths"}
    assert len(metrics["frames"]) == 3
