"""What a position does to keys and queries is read off the model, in every layout; a wrong reading is refused.

Law L10: moving a key by zero changes nothing, and a model's own key at p is its key at 0 moved by p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.edits import parse_edits
from posleak.probe import Call, Motion, Placement, Plan, attach, default_plan, placement, read_placements
from posleak.probe.placement import ABSOLUTE_STATES, CHANGED_AFTER_ROTATION, Rotation, moved_logits, read_rotation
from support.families import FAMILIES, VOCAB, tiny
from support.made_up import made_up
from tools.shrink import tiny_model

N = 64
PLAN = default_plan(N)
HALVES = {10: [(d, d + 5) for d in range(5)], 4: [(0, 2), (1, 3)]}
NEIGHBOURS = {10: [(d, d + 1) for d in range(0, 10, 2)], 4: [(0, 1), (2, 3)]}
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
GPT2: dict[str, Any] = {"n_embd": 30, "n_layer": 3, "n_head": 3, "n_inner": 41, "n_positions": 256}


def tokens(length: int = N) -> Tensor:
    return torch.randint(3, VOCAB - 1, (2, length), generator=torch.Generator().manual_seed(7))


def read(model: PreTrainedModel, plan: Plan = PLAN, edits: Sequence[str] = ()) -> list[Placement]:
    return read_placements(model, tokens(plan.length), plan, parse_edits(edits))


def rotations(model: PreTrainedModel, plan: Plan = PLAN) -> list[Rotation]:
    by_call = [place.rotation for place in read(model, plan)]
    assert all(rotation is not None for rotation in by_call), [place.stays for place in read(model, plan)]
    return [rotation for rotation in by_call if rotation is not None]


def pairs(rotation: Rotation) -> list[tuple[int, int]]:
    return list(zip(rotation.first.tolist(), rotation.second.tolist(), strict=True))


@dataclass
class Calls:
    """Every attention call of a pass."""

    seen: list[Call] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.seen.append(call)


def calls(model: PreTrainedModel, ids: Tensor, **arguments: Any) -> list[Call]:
    with attach(model, [look := Calls()]) as probe:
        probe.forward(ids, **arguments)
    return look.seen


def keys_alone(model: PreTrainedModel, token: int, places: Sequence[int]) -> list[Tensor]:
    """By layer: the keys [places, K, E] of one token that stands alone at each of these positions."""
    at = torch.tensor(places)[:, None]
    return [call.key[:, :, 0].double() for call in calls(model, torch.full_like(at, token), position_ids=at)]


# The layout


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [HALVES[10]] * 3),
        ("gpt_neox", [HALVES[4]] * 3),
        ("phi", [HALVES[4]] * 3),
        ("stablelm", [HALVES[4]] * 3),
        ("glm4", [NEIGHBOURS[4]] * 3),
        ("cohere2", [NEIGHBOURS[10], [], NEIGHBOURS[10]]),
        ("smollm3", [HALVES[10], [], HALVES[10]]),
        ("diffllama", [[(0, 1)]] * 6),
    ],
)
def test_halves_neighbours_parts_and_none_are_told_apart(family: str, expected: list[Any]) -> None:
    model = tiny(family)
    assert [pairs(rotation) for rotation in rotations(model)] == expected
    motion = Motion.of(read(model), PLAN, model.dtype)
    assert motion.layers == tuple("rotation" if layer else "no rotation" for layer in expected)
    assert (motion.stays, motion.why) == ((), None)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("deepseek_v3", [[(8 + d, 12 + d) for d in range(4)]] * 2),
        ("deepseek_v2", [[(8 + d, 9 + d) for d in range(0, 8, 2)]] * 2),
        ("gemma4_text", [[(d, 8 + d) for d in range(8)], [(d, 16 + d) for d in range(4)]]),
    ],
)
def test_split_keys_and_layers_of_different_widths(family: str, expected: list[Any]) -> None:
    """Latent attention turns the last dimensions of its keys only."""
    assert [pairs(rotation) for rotation in rotations(tiny_model(family))] == expected


def test_a_family_that_nobody_knows() -> None:
    assert [pairs(rotation) for rotation in rotations(made_up())] == [[(0, 1), (2, 3), (4, 5)]] * 3


# The angles


def assert_turns(rotation: Rotation, frequencies: Tensor, plan: Plan = PLAN) -> None:
    """Angles are position × frequency, up to whole turns."""
    expected = torch.tensor(plan.rows)[:, None].double() * frequencies.double()
    assert (rotation.angles - expected).sin().abs().max() < 1e-5
    assert (rotation.angles - expected).cos().min() > 0.99


def test_angles_are_position_times_frequency() -> None:
    frequencies = 10000.0 ** -(torch.arange(5).double() / 5)
    for rotation in rotations(tiny("llama")):
        assert_turns(rotation, frequencies)


def test_layers_have_bases_of_their_own() -> None:
    model: Any = tiny("gemma3_text")
    bases = [model.config.rope_parameters[kind]["rope_theta"] for kind in model.config.layer_types]
    assert len(set(bases)) == 2
    for rotation, base in zip(rotations(model), bases, strict=True):
        assert_turns(rotation, float(base) ** -(torch.arange(5).double() / 5))


def test_yarn_is_read_as_it_is() -> None:
    """Its frequencies are neither the plain ones nor a quarter of them; its keys are longer, wherever they stand."""
    model: Any = tiny("llama", rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0})
    scaled, plain = model.base_model.rotary_emb.inv_freq, 10000.0 ** -(torch.arange(5).double() / 5)
    assert not torch.allclose(scaled.double(), plain, rtol=0.1)
    for place, rotation in zip(read(model), rotations(model), strict=True):
        assert_turns(rotation, scaled)
        assert place.temperature is None, "a factor of all positions is no scale by position"


@pytest.mark.parametrize(("length", "factor"), [(32, 1.5), (64, 6.0)])
def test_longrope_is_read_at_the_length_that_is_measured(length: int, factor: float) -> None:
    """Beyond 32 positions this model turns all of its keys four times more slowly."""
    rope = {**ROPE, "rope_type": "longrope", "short_factor": [1.5] * 5, "long_factor": [6.0] * 5}
    model, plan = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=32), default_plan(length)
    for rotation in rotations(model, plan):
        assert_turns(rotation, 10000.0 ** -(torch.arange(5).double() / 5) / factor, plan)


@pytest.mark.parametrize(("edit", "slower"), [("rope=linear:2", 2.0), ("shift=64", 1.0)])
def test_edits_of_positions_are_in_force(edit: str, slower: float) -> None:
    frequencies = 10000.0 ** -(torch.arange(5).double() / 5) / slower
    for place in read(tiny("llama"), edits=[edit]):
        assert place.rotation is not None
        turned = place.rotation.angles - place.rotation.angles[:1]
        expected = (torch.tensor(PLAN.rows) - PLAN.rows[0])[:, None].double() * frequencies
        assert (turned - expected).sin().abs().max() < 1e-4


def test_without_rotation_nothing_turns() -> None:
    assert [place.moves for place in read(tiny("llama"), edits=["rope=none"])] == ["no rotation"] * 3


# Law L10


OTHERS = ("deepseek_v3", "gemma4_text", "cohere", "helium", "olmo", "dbrx", "persimmon", "llama4_text")


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_key_at_a_place_is_the_key_at_zero_moved_there(family: str) -> None:
    """On a token that was not read; also from the origin's places to others, by the angles between two rows."""
    model = tiny_model(family) if family in OTHERS else tiny(family)
    Q, i, r = len(PLAN.queries), 3, -2
    by = PLAN.rows[r] - PLAN.rows[i]
    places = [0, *PLAN.rows, *range(PLAN.origin), *(j + by for j in range(PLAN.origin))]
    rounding = 1e-4 if family == "apertus" else 1e-5  # its states are 10^5 times its keys
    for key, rotation in zip(keys_alone(model, 97, places), rotations(model), strict=True):
        first, rows, origin, moved = key.split([1, len(PLAN.rows), PLAN.origin, PLAN.origin])
        size = float(key.abs().max())
        still = torch.zeros_like(rotation.angles[:1])
        assert torch.equal(rotation.turned(rows, still), rows), "by zero: not a bit"
        assert (rotation.turned(first.expand_as(rows), rotation.angles[:, None]) - rows).abs().max() < rounding * size
        between = rotation.angles[r] - rotation.angles[i]
        assert (rotation.turned(origin, between) - moved).abs().max() < rounding * size
        if len(rotation.first):
            assert (rows[Q:] - rows[:1]).abs().max() > 0.1 * size, "they do turn"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_neox", "glm4", "cohere2", "smollm3"])
def test_narrow_dtypes_are_read_too(family: str, dtype: torch.dtype) -> None:
    """Keys are right to a few roundings of the dtype, slow pairs too, whose turn is hardly more than that."""
    model, expected = tiny(family, dtype=dtype), rotations(tiny(family))
    narrow = rotations(model)
    for rotation, exact in zip(narrow, expected, strict=True):
        assert set(pairs(rotation)) <= set(pairs(exact))
        if dtype in (torch.float64, torch.float32):
            assert pairs(rotation) == pairs(exact)
    rounding = 4 * max(torch.finfo(dtype).eps, 1e-6)
    for key, rotation in zip(keys_alone(model, 97, [0, *PLAN.rows]), narrow, strict=True):
        moved = rotation.turned(key[:1].expand_as(key[1:]), rotation.angles[:, None])
        assert (moved - key[1:]).abs().max() < rounding * key.abs().max()


# The moved logits


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_moved_logits_are_those_of_the_model_with_the_origin_at_other_position_ids(family: str) -> None:
    """In the first layer, which no other state has met: the origin's tokens get the ids r − i + j, and r is read."""
    model, ids = tiny_model(family) if family in OTHERS else tiny(family), tokens()
    (plain, *_), place = calls(model, ids), read(model)[0]
    moved = moved_logits(plain, place, PLAN)
    assert moved is not None
    for q, R in ((0, 14), (7, 3), (20, 0)):
        i, r = PLAN.queries[q], PLAN.references[R]
        positions = torch.arange(N).expand_as(ids).clone()
        positions[:, : PLAN.origin] += r - i
        there = calls(model, ids, position_ids=positions)[0].logits(torch.tensor([r]))[:, :, 0, : PLAN.origin]
        assert torch.allclose(moved[:, :, R, q], there, atol=2e-4 * float(there.abs().max()))
        here = plain.logits(torch.tensor([r]))[:, :, 0, : PLAN.origin]
        if place.moves == "rotation":
            assert not torch.allclose(here, there, atol=1e-2 * float(there.abs().max()))


def test_a_bias_by_distance_is_the_one_of_the_new_distance() -> None:
    model, ids = made_up(alibi=True), tokens()
    for call, place in zip(calls(model, ids), read(model), strict=True):
        assert place.moves == "no rotation"
        moved = moved_logits(call, place, PLAN)
        assert moved is not None
        bare = replace(call, bias=None)
        for q, R, j in ((0, 14, 3), (9, 2, 0), (20, 0, 1)):
            i, r = PLAN.queries[q], PLAN.references[R]
            s = bare.logits(torch.tensor([r]))[:, :, 0, j]
            slopes = 2.0 ** -torch.arange(1, 7)
            assert torch.allclose(moved[:, :, R, q, j], s - slopes * (i - j), atol=1e-5)


def test_a_prompt_after_padding_moves_as_one_without() -> None:
    model, ids, pad = tiny("glm4"), tokens(), 5
    keep, positions = torch.ones(2, N + pad, dtype=torch.long), (torch.arange(N + pad) - pad).clamp(min=0)
    keep[:, :pad] = 0
    padded = torch.nn.functional.pad(ids, (pad, 0), value=5)
    place = read(model)
    plain = [moved_logits(call, at, PLAN) for call, at in zip(calls(model, ids), place, strict=True)]
    later = calls(model, padded, padding=keep, position_ids=positions.expand_as(padded))
    for one, call, at in zip(plain, later, place, strict=True):
        two = moved_logits(call, at, PLAN, start=pad)
        assert one is not None
        assert two is not None
        assert torch.allclose(one, two, atol=1e-3)


# Keys that cannot be moved


def test_learned_positions_stay_with_the_reason() -> None:
    model = tiny("gpt2", **GPT2)
    placements = read(model)
    assert [(place.rotation, place.stays) for place in placements] == [(None, ABSOLUTE_STATES)] * 3
    motion = Motion.of(placements, PLAN, model.dtype)
    assert (motion.layers, motion.stays, motion.why) == (("stays",) * 3, (0, 1, 2), ABSOLUTE_STATES)
    call = calls(model, tokens())[0]
    assert moved_logits(call, placements[0], PLAN) is None
    assert moved_logits(call, None, PLAN) is None


def test_a_norm_after_the_rotation_stays_if_it_has_weights() -> None:
    """HunYuan: equal weights commute with the rotation, others do not."""
    model = tiny("hunyuan_v1_dense")
    assert [place.moves for place in read(model)] == ["rotation"] * 3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("1.self_attn.key_layernorm.weight"):
                parameter.uniform_(0.5, 1.5)
    placements = read(model)
    assert [place.moves for place in placements] == ["rotation", "stays", "rotation"]
    assert placements[1].stays == CHANGED_AFTER_ROTATION
    assert placements[1].gap > 100 * Motion.of(placements, PLAN, model.dtype).bound
    assert placements[1].unevenness > 0.01


def test_a_rotation_that_is_not_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines that grow with the position: the key gets longer, and nothing can be moved."""
    model: Any = tiny("llama")
    rotary = model.base_model.rotary_emb
    forward = rotary.forward

    def absolute(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = forward(x, position_ids)
        return cos + 0.001 * position_ids[..., None], sin

    monkeypatch.setattr(rotary, "forward", absolute)
    assert [place.stays for place in read(model)] == [CHANGED_AFTER_ROTATION] * 3


def neighbours(key: Tensor, dtype: torch.dtype) -> Rotation:
    """The right number of pairs, wrongly paired."""
    first = torch.arange(0, key.shape[-1], 2)
    z = torch.complex(key[..., first], key[..., first + 1]).transpose(1, 2).flatten(0, 1)
    return Rotation(first, first + 1, (z * z[:, :1].conj()).sum(0).angle(), key.shape[-1])


def backwards(key: Tensor, dtype: torch.dtype) -> Rotation:
    rotation = read_rotation(key, dtype)
    return replace(rotation, first=rotation.second, second=rotation.first)


def one_short(key: Tensor, dtype: torch.dtype) -> Rotation:
    rotation = read_rotation(key, dtype)
    return replace(rotation, first=rotation.first[1:], second=rotation.second[1:], angles=rotation.angles[:, 1:])


@pytest.mark.parametrize("wrong", [neighbours, backwards, one_short])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_reading_is_refused(
    wrong: Callable[..., Rotation], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong pairs, the wrong sense, a pair that is missed: the check on another token sees each of them."""
    monkeypatch.setattr(placement, "read_rotation", wrong)
    assert [place.stays for place in read(tiny("llama", dtype=dtype))] == [CHANGED_AFTER_ROTATION] * 3


# Scaled queries


def test_queries_that_are_scaled_by_position_are_told_by_the_models_own_formula() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.2}
    model = tiny("ministral3", rope_parameters={**rope, "original_max_position_embeddings": 8})
    expected = torch.tensor([1 + 0.2 * math.log(1 + p // 8) for p in PLAN.rows], dtype=torch.float64)
    for place in read(model):
        assert place.moves == "rotation", "the keys are not scaled"
        assert place.temperature is not None
        assert torch.allclose(place.temperature, expected, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "smollm3", "gpt_oss", "diffllama", "gpt2"])
def test_other_models_do_not_scale_their_queries(family: str) -> None:
    assert {place.temperature for place in read(tiny(family))} == {None}
