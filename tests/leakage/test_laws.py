"""The laws of definitions.md on tiny random models of every family, both splits: L1, L2, L3, L9, L11, L12 and L13.

L4, L5, L7 and L8 are checked by the doctor (test_doctor.py), L6 in test_edits.py, L10 in test_placement.py.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
import xarray as xr

from posleak.analyses.doctor.passes import GaugeObserver
from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.edits import parse_edits
from posleak.leakage import Jackknife, Parts, Sampled, assemble, component
from posleak.leakage.dataset import stack_layers
from posleak.leakage.power import products
from posleak.models import Subject
from posleak.models.pretrained import silence_transformers
from posleak.probe import Placement, Plan, attach, default_plan, read_placements
from posleak.runs.conditions import Conditions
from posleak.runs.loop import Passes
from posleak.runs.spec import MeasureSpec
from support.families import FAMILIES, VOCAB, tiny
from tools.shrink import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")

N, B = 48, 24
SINGLE = ("gpt_oss", "mixtral")
"""Their experts do not run in float64."""

LEARNED_SINKS = ("gpt_oss",)
families = pytest.mark.parametrize("family", FAMILIES)


def dtype_of(family: str) -> torch.dtype:
    return torch.float32 if family in SINGLE else torch.float64


@cache
def constant_token(family: str) -> Trace:
    """One token repeated, without a BOS; attention is sharp."""
    subject = Subject.of(tiny(family, dtype=dtype_of(family)), name=family)
    return Trace.of(Conditions(subject, MeasureSpec("constant", "none", length=N, prompts=1)))


@cache
def random_tokens(family: str) -> Trace:
    """I.i.d. tokens, without a BOS, in float32; attention is soft, so that intervals are short."""
    subject = Subject.of(tiny(family, scale=0.5), name=family)
    return Trace.of(Conditions(subject, MeasureSpec("random", "none", length=N, prompts=B)))


def by_layer(x: xr.DataArray) -> np.ndarray:
    """The largest mean square of any prompt and head [L]: no cancelling, so that rounding cannot hide."""
    largest: np.ndarray = np.nanmax(np.nanmean(x.values**2, axis=(-1, -2)), axis=(0, 2))
    return largest


def first_layer_power(x: xr.DataArray) -> Sampled:
    """Power in the first layer, at a level that a true law misses once in a thousand."""
    values = x.values[:, 0].reshape(x.shape[0], x.shape[2], -1)
    return Jackknife(len(values)).inner(np.nanmean(products(values, values), axis=0)).at(0.999)


@families
def test_both_splits_add_up(family: str) -> None:
    """L1"""
    for trace in (constant_token(family), random_tokens(family)):
        assert trace.remainder < 1e-9
        for run in (trace.ordinary, trace.branches):
            parts = sum(component(run.data, name) for name in ("mask", "drift", "sink"))
            assert float(np.nanmax(np.abs(parts - component(run.data, "total")))) < 1e-9
        assert np.nanmax(np.abs(trace.components["total"].values)) > 0.1


@families
def test_a_constant_token_leaks_through_this_layers_mask_only(family: str) -> None:
    """L2: all states are equal, so that positions differ only in the number of visible keys."""
    trace, data = constant_token(family), constant_token(family).ordinary.data
    bound = 1e-6 if family in SINGLE else 1e-9
    layers = slice(1) if family in LEARNED_SINKS else slice(None)
    zero = {name: component(data, name) for name in ("drift", "sink")} | {
        name: trace.components[name] for name in ("state", "earlier", "origin", "left")
    }
    for name, x in zero.items():
        assert by_layer(x)[layers].max() < bound, name
    total = by_layer(trace.components["total"])[layers]
    assert total.min() > 1e-4
    for x in (component(data, "mask"), trace.components["here"]):
        assert np.allclose(by_layer(x)[layers], total, rtol=1e-3, atol=bound)


def test_learned_sink_logits_break_it_after_the_first_layer() -> None:
    """The exception of L2, and that the test above can fail: their weights do not add up to one."""
    trace = constant_token("gpt_oss")
    for x in (component(trace.ordinary.data, "drift"), trace.components["earlier"], trace.components["origin"]):
        assert by_layer(x)[1:].min() > 1e-3


@families
def test_the_first_layer_has_met_no_position(family: str) -> None:
    """L3 and L13, in windowed models too; the intervals are short enough to say something."""
    trace = random_tokens(family)
    data, earlier = trace.ordinary.data, by_layer(trace.components["earlier"])
    assert earlier[0] < 1e-8
    assert by_layer(trace.components["state"])[0] < 1e-8
    assert earlier[-1] > 1e-6, "later layers have"
    mask = float(first_layer_power(component(data, "mask")).value)
    for name, x in {
        "drift": component(data, "drift"), "sink": component(data, "sink"), "origin": trace.components["origin"],
        "left": trace.components["left"],
    }.items():  # fmt: skip
        power = first_layer_power(x)
        low, high = power.interval
        assert low <= 0 <= high, (name, float(power.value))
        assert high < max(0.3 * mask, 0.03), (name, "would not see much")
    here = first_layer_power(trace.components["here"])
    assert here.interval[0] > 0


@families
def test_a_donor_that_nobody_sees_changes_nothing(family: str) -> None:
    """L11: T = T_fresh to rounding in models without a recurrent state, in every layer."""
    trace = random_tokens(family)
    assert by_layer(trace.components["state"]).max() < 1e-8
    assert "state" not in trace.sources
    assert float(trace.model["all"].share["state"].value) == pytest.approx(0, abs=1e-4)


@families
def test_equal_logits_over_equally_many_keys_leak_nothing(family: str) -> None:
    """L12: with zero query-key products T' = O = Z = 0 to rounding, behind a window too; T and D are the log of counts.

    It can fail: without lent keys the number of keys tells the position.
    """
    if family in LEARNED_SINKS:
        pytest.skip("a learned sink logit is a key of its own")
    model = tiny(family, dtype=dtype_of(family))
    for module in model.modules():
        for name in ("q_proj", "qkv_proj", "query_key_value"):
            if isinstance(projection := getattr(module, name, None), torch.nn.Linear):
                projection.weight.data.zero_()
                if projection.bias is not None:
                    projection.bias.data.zero_()
    trace = Trace.of(Conditions(Subject.of(model, name=family), MeasureSpec("random", "none", length=N, prompts=4)))
    x, lent_a = trace.components, trace.branches.data["lent_a"]
    own = component(trace.branches.data, "total_a")
    zero = {"T'": own - lent_a, "O": x["origin"] + x["left"], "Z": x["left"], "earlier": x["earlier"]}
    for name, values in zero.items():
        assert by_layer(values).max() < (1e-8 if family in SINGLE else 1e-12), name
    assert by_layer(own).max() > 1e-2
    assert by_layer(x["here"]).max() > 1e-2


HYBRIDS = ("bamba", "qwen3_next", "falcon_h1", "jamba")


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_recurrent_state_is_a_source_of_its_own(family: str) -> None:
    """Hybrids have all parts, in an exact sum; what the donor left in the state is `state`."""
    with silence_transformers():
        subject = Subject.of(tiny_model(family), name=family)
        trace = Trace.of(Conditions(subject, MeasureSpec("random", "none", length=N, prompts=6)))
    assert trace.branches.record.spec.edit_texts == ("context=branches:apart",)
    assert trace.sources == ("state", "earlier", "here", "origin")
    assert trace.remainder < 1e-9
    assert by_layer(trace.components["state"]).max() > 1e-4
    parts = sum(trace.components[name] for name in SOURCES)
    assert float(np.nanmax(np.abs(parts - component(trace.ordinary.data, "total")))) < 1e-9


# Position 0 in sight behind a window


SPAN = 16


@cache
def windowed(moved: bool, origin: int = 4) -> xr.Dataset:
    """The first layer of a rotary model under window=16+sink, its origin's keys moved in the crop or left.

    Its queries and keys have biases, so that the mean logit depends on the offset.
    """
    plan, edits = default_plan(N, origin=origin), parse_edits([f"window={SPAN}+sink"])
    model, ids = tiny("qwen2", scale=0.1, num_hidden_layers=1), np.random.default_rng(1).integers(3, VOCAB, (32, N))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            parameter.normal_(0, 1.5, generator=generator)
    if moved:
        return assemble(list(Passes(model, plan, edits=edits).measure([ids])), plan)
    return assemble(list(Passes(model, plan, edits, placements=()).measure([ids])), plan)


@pytest.mark.parametrize("origin", [1, 4])
def test_an_origin_in_sight_behind_a_window_is_no_sink_of_the_first_layer(origin: int) -> None:
    """definitions.md says both that mask = 0 to the bit where i and r see equally many keys, and that k is the origin
    as i has it. With position 0 in sight behind the window the two contradict each other: it stands at another offset
    from i than from r. By the formula, which is followed, law L3 holds: what its offset does is the mask's doing."""
    data = windowed(moved=True, origin=origin)
    behind = data["query"] >= SPAN + origin
    sink, mask = (component(data, name).sel(query=behind) for name in ("sink", "mask"))
    power = first_layer_power(sink)
    assert power.interval[0] <= 0 <= power.interval[1]
    assert first_layer_power(mask).interval[0] > 20 * abs(power.value)

    left = windowed(moved=False, origin=origin)
    sink, mask = (component(left, name).sel(query=behind) for name in ("sink", "mask"))
    assert float(np.nanmax(np.abs(mask.values[:, 0]))) < 1e-12, "the other reading of the sentence"
    assert first_layer_power(sink).interval[0] > 0, "and it breaks law L3"


# Law L9


def shifted(family: str, plan: Plan, ids: torch.Tensor, row: int | None) -> list[Parts]:
    """The parts of the rows as they are, or with 50 added to one of them; what the model computes is the same."""

    look = GaugeObserver(plan, placements=places(family, plan), row=row or 0, by=0.0 if row is None else 50.0)
    model = gauged(family)
    with attach(model, [look]) as probe:
        probe.forward(ids % model.config.vocab_size)
    return look.collect()


@cache
def gauged(family: str):  # type: ignore[no-untyped-def]
    return tiny(family, dtype=dtype_of(family)) if family in FAMILIES else tiny_model(family).double()


@cache
def places(family: str, plan: Plan) -> list[Placement]:
    model = gauged(family)
    return read_placements(model, torch.arange(3, 3 + plan.length)[None] % model.config.vocab_size, plan)


@pytest.mark.parametrize("family", [*FAMILIES, "ernie4_5", "seed_oss"])
def test_a_constant_added_to_one_row_changes_no_part(family: str) -> None:
    if family in LEARNED_SINKS:
        pytest.skip("a learned sink logit fixes the scale")
    plan, ids = default_plan(N), torch.randint(3, VOCAB, (2, N), generator=torch.Generator().manual_seed(3))
    plain = shifted(family, plan, ids, None)
    bound = 1e-4 if family in SINGLE else 1e-9
    for row in (plan.queries[0], plan.queries[12], plan.references[0], plan.references[9]):
        for one, other in zip(plain, shifted(family, plan, ids, row), strict=True):
            for name in ("mask", "drift", "sink", "mask_without_sink"):
                gap = (getattr(one, name) - getattr(other, name)).nan_to_num().abs().max()
                assert float(gap) < bound, (row, name)
    assert float(stack_layers(plain)["drift"][0, 0, 0, 0, 0]) != 0
