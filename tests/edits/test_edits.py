"""Each edit does what it predicts, by an independent computation; its null form changes no bit; nonsense is refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import eager_mask

import posleak as pl
from posleak.edits import KINDS, Site, parse_edit, parse_edits, register
from posleak.edits.scope import Scope
from posleak.errors import InputError, PosleakWarning, UnsupportedError
from posleak.inputs import prepare
from posleak.models import Subject
from posleak.probe import attach, default_plan, relative_difference
from posleak.probe.interface import attention_calls
from posleak.runs.loop import Passes
from posleak.runs.spec import MeasureSpec
from posleak.typed import from_json, plain
from support.errors import raises
from support.families import VOCAB, tiny

B, N = 3, 67
BOS = 1


def tokens(first: int = BOS, length: int = N) -> torch.Tensor:
    ids = torch.randint(3, VOCAB, (B, length), generator=torch.Generator().manual_seed(5))
    ids[:, 0] = first
    return ids


def states(model: PreTrainedModel, edits: Sequence[str] = (), ids: torch.Tensor | None = None) -> torch.Tensor:
    with attach(model, edits=parse_edits(edits)) as probe:
        return probe.forward(tokens() if ids is None else ids)[0].clone()


def plain_states(model: PreTrainedModel, change: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """States under attention written out here: `change(masked logits [B, H, N, N], values, layer)` is its output."""
    layer = [0]

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * scaling + mask
        out = change(s, v, layer[0])
        layer[0] += 1
        return out.transpose(1, 2), None

    AttentionInterface.register("plain_edit_test", attention)
    AttentionMaskInterface.register("plain_edit_test", eager_mask)
    model.set_attn_implementation("plain_edit_test")
    try:
        return model.base_model(tokens() if ids is None else ids, use_cache=False)[0]
    finally:
        model.set_attn_implementation("sdpa")


NULL = [
    "bos=token:1",
    "window=67",
    "window=1000+sink",
    "window=67+sink4",
    "window=off",
    "sink=cut@7",
    "sink=freeze@2.8",
    "rope=ntk:1",
    "rope=linear:1",
    "rope=yarn:1",
    "rope=base:10000",
    "shift=0",
    "patch0=1",
    "dtype=float32",
    "position=erase:0",
    "position=leace:0@2",
]


@pytest.mark.parametrize("text", NULL)
def test_an_edit_that_changes_nothing_changes_no_bit(text: str) -> None:
    model = tiny("llama")
    assert torch.equal(states(model, [text]), states(model))


EVERY = [
    "bos=zero", "bos=mean", "bos=noise", "bos=noise:3", "bos=token:7", "mask=off", "window=9", "window=9+sink", "ring",
    "sink=cut", "sink=freeze", "window=9+sink4", "scale=logn", "scale=logn:16", "patch0=9",
    "rope=ntk:4", "rope=linear:2", "rope=yarn:4",
    "rope=base:500", "rope=none", "dtype=bfloat16", "sink=cut@1.2",
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("text", EVERY)
def test_an_edit_changes_the_states_and_leaves_the_model_as_it_was(text: str, family: str) -> None:
    model = tiny(family)
    before, weights = states(model), copy.deepcopy(dict(model.state_dict()))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert relative_difference(states(model, [text]), before) > 1e-4
    assert torch.equal(states(model), before)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert parse_edit(text).text == text


# What each predicts


def test_cutting_the_sink_is_a_full_softmax_without_that_key() -> None:
    def without_origin(s: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        s = s.clone()
        s[:, :, 1:, 0] = -torch.inf
        return torch.softmax(s, -1) @ v

    model = tiny("llama", dtype=torch.float64)
    assert relative_difference(states(model, ["sink=cut"]), plain_states(model, without_origin)) < 1e-12


def test_cutting_chosen_heads_leaves_the_others() -> None:
    def without_origin(s: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        s = s.clone()
        if layer == 1:
            s[:, 2, 1:, 0] = -torch.inf
        return torch.softmax(s, -1) @ v

    model = tiny("llama", dtype=torch.float64)
    assert relative_difference(states(model, ["sink=cut@1.2"]), plain_states(model, without_origin)) < 1e-12


def test_freezing_the_sink_makes_its_share_constant() -> None:
    references = list(default_plan(N).references)

    def constant(s: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        a = torch.softmax(s, -1)
        share = a[:, :, references, 0].mean(-1)[..., None, None]
        rest = a[:, :, 1:, 1:] / a[:, :, 1:, 1:].sum(-1, keepdim=True) * (1 - share)
        later = torch.cat([share.expand(-1, -1, s.shape[2] - 1, 1), rest], dim=-1)
        return torch.cat([a[:, :, :1], later], dim=2) @ v

    model = tiny("llama", dtype=torch.float64)
    assert relative_difference(states(model, ["sink=freeze"]), plain_states(model, constant)) < 1e-12


def test_freezing_makes_attention_to_position_zero_equal_at_all_queries() -> None:
    model, plan = tiny("llama", dtype=torch.float64), default_plan(N)
    chunks = list(Passes(model, plan, edits=parse_edits(["sink=freeze"])).measure([tokens().numpy()]))
    shares = chunks[0]["attention_0"]
    assert np.ptp(shares, axis=-1).max() < 1e-12


@pytest.mark.parametrize("window", [5, 13, 40])
def test_a_window_is_the_models_own_sliding_attention(window: int) -> None:
    full = tiny("llama")
    sliding = tiny("mistral", sliding_window=window)
    sliding.load_state_dict(full.state_dict())
    expected = sliding.base_model(tokens(), use_cache=False)[0]
    assert relative_difference(states(full, [f"window={window}"]), expected) < 1e-5


@pytest.mark.parametrize(("text", "kept"), [("window=9+sink", 1), ("window=9+sink4", 4)])
def test_a_window_with_sink_keeps_the_first_keys(text: str, kept: int) -> None:
    i, j = torch.arange(N)[:, None], torch.arange(N)
    hidden = (i - j >= 9) & (j >= kept)

    def windowed(s: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.softmax(s.masked_fill(hidden, -torch.inf), -1) @ v

    model = tiny("llama", dtype=torch.float64)
    assert relative_difference(states(model, [text]), plain_states(model, windowed)) < 1e-12
    chunks = list(Passes(model, default_plan(N), edits=parse_edits([text])).measure([tokens().numpy()]))
    assert chunks[0]["attention_0"].min() > 0
    hidden_now = list(Passes(model, default_plan(N), edits=parse_edits(["window=9"])).measure([tokens().numpy()]))
    behind = np.array(default_plan(N).queries) >= 9
    assert np.all(hidden_now[0]["attention_0"][..., behind] == 0)


@pytest.mark.parametrize(("text", "keys"), [("scale=logn", N), ("scale=logn:16", 16)])
def test_scaled_logits_are_those_of_the_scalable_softmax(text: str, keys: int) -> None:
    """Logits times s · log n with s = 1 / log N; the query with one key has nothing to scale."""

    def scaled(s: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        n = torch.arange(1, N + 1, dtype=torch.float64)
        later = torch.ones(N, N, dtype=torch.bool).triu(1)
        return torch.softmax((s * (n.log() / np.log(keys))[:, None]).masked_fill(later, -torch.inf), -1) @ v

    model = tiny("llama", dtype=torch.float64)
    assert relative_difference(states(model, [text]), plain_states(model, scaled)) < 1e-12
    assert relative_difference(states(model, [text])[:, :1], states(model)[:, :1]) == 0


def test_what_the_factor_of_scaled_logits_does_is_no_residual() -> None:
    """One token everywhere: states cannot know their position, so that mask and scaling are all there is."""
    subject = Subject.of(tiny("llama", dtype=torch.float64), name="tiny")
    with pytest.warns(PosleakWarning, match="the same"):
        run = pl.measure(subject, "constant:7", edits="scale=logn", bos="none", length=N, prompts=4)
    power = run.summary.model["all"].power
    assert float(power["scaling"].value) > 1e-3
    assert abs(float(power["residual"].value)) < 1e-9, "angles are rounded to float32"
    assert run.remainder < 1e-10


def test_a_window_can_be_taken_away() -> None:
    full, sliding = tiny("llama"), tiny("mistral")
    sliding.load_state_dict(full.state_dict())
    assert torch.equal(states(sliding, ["window=off"]), states(full))


def rebuilt(family: str, **rope: Any) -> PreTrainedModel:
    """The same weights under a config with other rotary parameters."""
    model = tiny(family, scale=3.0)
    config = copy.deepcopy(model.config)
    nested = any(isinstance(value, dict) for value in config.rope_parameters.values())
    old = config.rope_parameters
    config.rope_parameters = {k: {**v, **rope} for k, v in old.items()} if nested else {**old, **rope}
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(model.state_dict())
    return other.eval().requires_grad_(False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_ntk_is_a_model_rebuilt_with_a_larger_base(family: str) -> None:
    d, S = 10, 4.0
    model = tiny(family, scale=3.0)
    base = 10000.0 if family == "llama" else None
    if base is None:  # each kind of layer has its own base
        parameters = model.config.rope_parameters
        config = copy.deepcopy(model.config)
        config.rope_parameters = {
            kind: {**p, "rope_theta": p["rope_theta"] * S ** (d / (d - 2))} for kind, p in parameters.items()
        }
        expected_model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        expected_model.load_state_dict(model.state_dict())
    else:
        expected_model = rebuilt(family, rope_theta=base * S ** (d / (d - 2)))
    expected = expected_model.base_model(tokens(), use_cache=False)[0]
    assert relative_difference(states(model, [f"rope=ntk:{S:g}"]), expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    ("text", "rope"),
    [
        ("rope=linear:2", {"rope_type": "linear", "factor": 2.0}),
        ("rope=yarn:4", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}),
        ("rope=base:500", {"rope_theta": 500.0}),
    ],
)
def test_other_rotations_are_rebuilt_models(family: str, text: str, rope: dict[str, Any]) -> None:
    expected = rebuilt(family, **rope).base_model(tokens(), use_cache=False)[0]
    assert relative_difference(states(tiny(family, scale=3.0), [text]), expected) < 1e-5


def test_without_rotation_the_order_of_the_body_does_not_matter() -> None:
    """NoPE, one layer, last query: a bag of keys."""
    model = tiny("llama", num_hidden_layers=1)
    ids = tokens()
    shuffled = ids.clone()
    shuffled[:, :-1] = ids[:, :-1].flip(1)
    last = [states(model, ["rope=none"], x)[:, -1] for x in (ids, shuffled)]
    assert relative_difference(last[0], last[1]) < 1e-5
    rotated = [states(model, [], x)[:, -1] for x in (ids, shuffled)]
    assert relative_difference(rotated[0], rotated[1]) > 1e-3


def test_a_shift_changes_nothing_but_rounding() -> None:
    model = tiny("llama", scale=1.0)
    assert 0 < relative_difference(states(model, ["shift=500"]), states(model)) < 1e-4


def test_another_first_token_by_embedding_is_that_token() -> None:
    model = tiny("gemma3_text")  # scales its embeddings
    assert torch.equal(states(model, ["bos=token:9"]), states(model, [], tokens(first=9)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt_neox"])
def test_patching_the_trajectory_is_replacing_the_token(family: str) -> None:
    """By closure: later queries cannot tell another trajectory at position 0 from another token there."""
    model = tiny(family, scale=3.0)
    patched, replaced = states(model, ["patch0=9"]), states(model, ["bos=token:9"])
    assert relative_difference(patched[:, 1:], replaced[:, 1:]) < 1e-5


@pytest.mark.parametrize("other", ["rope=yarn:4", "rope=ntk:4", "shift=5", "window=9+sink"])
def test_the_patched_token_is_read_under_the_other_edits_too(other: str) -> None:
    """Its own run has them as well: otherwise its keys would be rotated otherwise than those of the prompt."""
    model = tiny("llama", scale=3.0)
    patched, replaced = (states(model, [edit, other])[:, 1:] for edit in ("patch0=9", "bos=token:9"))
    assert relative_difference(patched, replaced) < 1e-5


def test_the_text_of_an_edit_keeps_every_digit() -> None:
    assert parse_edit("rope=base:1234567").text == "rope=base:1234567"
    assert parse_edit("rope=ntk:0.1").text == "rope=ntk:0.1"


def test_a_plugin_may_not_take_the_name_of_an_edit_of_posleak() -> None:
    mine = replace(KINDS["window"], make=lambda value, scope: parse_edit("shift=0"))
    with raises(InputError, what="already used", got="window"):
        register(mine)
    assert KINDS["window"].example == "window=64+sink"


def test_first_embeddings_are_what_they_say() -> None:
    model = tiny("gemma3_text")
    table = model.get_input_embeddings()
    seen: list[torch.Tensor] = []
    body: Any = model.base_model
    hook = body.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for text in ("bos=zero", "bos=mean", "bos=noise:3", "bos=noise:4"):
        states(model, [text])
    hook.remove()
    ids = tokens()
    zero, mean, noise, other = seen[-4:]  # the first pass finds out whether the model uses transformers' interface
    assert float(zero[:, 0].abs().max()) == 0
    assert torch.allclose(mean[:, 0], table(torch.arange(VOCAB)).mean(0).expand(B, -1), atol=1e-5)
    assert torch.allclose(noise[:, 0].norm(dim=-1), table(ids[:, 0]).norm(dim=-1), rtol=1e-5)
    assert float((noise[:, 0] - other[:, 0]).abs().max()) > 0
    assert torch.equal(noise[:, 1:], zero[:, 1:])


def test_noise_differs_between_prompts_and_depends_on_nothing_else_in_the_batch() -> None:
    """It is a function of the seed and of the prompt, whatever is read with it and whatever it replaces."""
    model, ids = tiny("llama"), tokens()
    seen: list[torch.Tensor] = []
    body: Any = model.base_model
    attention_calls(model)  # runs the model
    other_bos = torch.cat([torch.full_like(ids[:, :1], 5), ids[:, 1:]], dim=1)
    with body.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0][:, 0])):
        for batch in (ids, ids, ids.flip(0), *ids.split(1), other_bos):
            states(model, ["bos=noise:3"], ids=batch)
    first, again, reverse, *singles, other = (x / x.norm(dim=-1, keepdim=True) for x in seen)
    assert torch.equal(first, again)
    assert torch.equal(first, reverse.flip(0))
    assert torch.equal(first, torch.cat(singles))
    assert torch.allclose(first, other, atol=1e-6)
    cosines = (first @ first.T)[~torch.eye(len(first), dtype=torch.bool)]
    assert float(cosines.abs().max()) < 0.9


def test_no_bos_and_random_first_tokens_keep_the_rest() -> None:
    subject = Subject.of(tiny("llama"), name="tiny")
    prompts = prepare(subject, "random", length=N, seed=0)
    none, random = (parse_edit(text).prompts(prompts) for text in ("bos=none", "bos=random"))
    base = prompts.batch(range(6))
    assert (base[:, 0] == BOS).all()
    for changed in (none, random):
        assert np.array_equal(changed.batch(range(6))[:, 1:], base[:, 1:])
        assert len(set(changed.batch(range(6))[:, 0])) > 3
    assert not np.array_equal(none.batch(range(6))[:, 0], random.batch(range(6))[:, 0])


# Law L6


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt_neox"])
def test_on_the_ring_rolling_the_input_rolls_every_state(family: str) -> None:
    model, ids = tiny(family, dtype=torch.float64), tokens()

    def all_states(x: torch.Tensor, texts: Sequence[str]) -> list[torch.Tensor]:
        with attach(model, edits=parse_edits(texts)) as probe:
            return list(probe.forward(x, output_hidden_states=True).hidden_states)

    rolled = all_states(ids.roll(11, dims=1), ["ring"])
    still = all_states(ids, ["ring"])
    worst = max(relative_difference(a, b.roll(11, dims=1)) for a, b in zip(rolled, still, strict=True))
    assert worst < 1e-12
    masked = [states(model, [], x) for x in (ids.roll(11, dims=1), ids)]
    assert relative_difference(masked[0], masked[1].roll(11, dims=1)) > 1e-2
    unsnapped = [states(model, ["mask=off"], x) for x in (ids.roll(11, dims=1), ids)]
    assert relative_difference(unsnapped[0], unsnapped[1].roll(11, dims=1)) > 1e-6


# Text, composition, refusals


def test_edits_compose_in_one_order() -> None:
    model = tiny("llama")
    one = states(model, ["bos=zero", "window=9"])
    assert torch.equal(one, states(model, ["window=9", "bos=zero"]))
    for alone in ("bos=zero", "window=9"):
        assert relative_difference(one, states(model, [alone])) > 1e-4
    sites = [edit.site for edit in parse_edits(["sink=cut", "window=9", "shift=3", "bos=mean"])]
    assert sites == [Site.EMBEDDING, Site.POSITIONS, Site.VISIBILITY, Site.ORIGIN]
    sites = [edit.site for edit in parse_edits(["rope=ntk:2", "context=borrowed@0-2", "shift=3", "dtype=float64"])]
    assert sites == [Site.DTYPE, Site.CONTEXT, Site.POSITIONS, Site.ROTATION]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["bos=zero", "bos=mean"], ("both", "embedding")),
        (["patch0=3", "bos=zero"], ("both", "embedding")),
        (["sink=cut", "sink=freeze"], ("both", "read")),
        (["mask=off", "sink=freeze"], ("sink=freeze", "causal")),
        (["mask=off", "context=borrowed"], ("context=borrowed", "causal")),
        (["ring", "context=borrowed"], ("context=borrowed", "causal")),
        (["context=borrowed", "context=borrowed@2"], ("both", "context")),
        (["context=borrowed", "window=9"], ("window=9", "context=borrowed")),
        (["context=borrowed", "sink=cut"], ("sink=cut", "context=borrowed")),
        (["context=borrowed", "bos=random"], ("bos=random", "context=borrowed")),
        (["patch0=3", "context=borrowed"], ("patch0=3", "context=borrowed")),
        (["ring", "window=9"], ("ring", "positions")),
        (["rope=none", "rope=ntk:2"], ("both", "rotation")),
    ],
)
def test_nonsense_combinations_are_refused_with_the_reason(texts: list[str], reason: object) -> None:
    with raises(InputError, where=tuple(f"--edit {text}" for text in texts), what="combined", got=reason):
        parse_edits(texts)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("bos=seven", "bos=zero|"),
        ("window=-3", "window=W|"),
        ("window=0", "window=W|"),
        ("rope=ntk", "rope=ntk:S|"),
        ("rope=ntk:0", "rope=ntk:S|"),
        ("sink=cut@x", "@2-5"),
        ("shift=a", "shift="),
        ("bos=zero@3", "bos=zero|"),
        ("context=lent", "context=borrowed"),
    ],
)
def test_unreadable_edits_show_their_form(text: str, form: str) -> None:
    with raises(InputError, expected=form):
        parse_edit(text)


def test_an_unknown_edit_suggests_the_nearest() -> None:
    with raises(InputError, got="windw", remedy="'window'"):
        parse_edit("windw=3")


def test_an_edit_the_model_has_no_place_for_is_refused_by_name() -> None:
    model = tiny("gpt2", n_embd=30, n_layer=2, n_head=3, n_inner=41)
    with raises(UnsupportedError, where="GPT2LMHeadModel", what="rotary"):
        states(model, ["rope=none"])
    with raises(InputError, where="bos=token:999", got=999, expected=("0", "100")):
        states(model, ["bos=token:999"])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(0, 9))), min_size=1))
def test_scopes_survive_their_text(items: list[tuple[int, int, int | None]]) -> None:
    parts = [(a, a, h) if h is not None else (min(a, b), max(a, b), None) for a, b, h in items]
    scope = Scope(tuple(parts), everywhere=False)
    assert Scope.parse(scope.text[1:]) == scope


def test_every_form_is_documented_and_reachable() -> None:
    assert {text.partition("=")[0] for text in EVERY} | {"shift", "context", "position", "head"} == set(KINDS)


@pytest.mark.parametrize("text", ["patch0=3", "window=9+sink4", "sink=cut@0-1,2.0", "rope=yarn:2.5", "bos=noise:4"])
def test_a_spec_holds_edit_objects_and_json_holds_their_texts(text: str) -> None:
    spec = MeasureSpec(length=64, edits=parse_edits(text))
    assert spec.edits == (parse_edit(text),)
    assert plain(spec)["edits"] == [text]
    assert from_json(MeasureSpec, json.dumps(plain(spec))) == spec == pickle.loads(pickle.dumps(spec))
