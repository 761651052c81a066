"""`context=borrowed`: donors, who sees which keys, what stays as it was, and the models it is not defined for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import posleak as pl
from posleak.edits import parse_edits
from posleak.edits.context import carried_difference
from posleak.errors import InputError, UnsupportedError
from posleak.inputs import Prompts, prepare
from posleak.leakage import component
from posleak.models import Subject
from posleak.probe import Call, attach, default_plan, read_placements, relative_difference
from support.errors import raises
from support.families import VOCAB, WINDOW, tiny
from support.inputs_subject import byte_tokenizer, stub_subject
from tools.shrink import tiny_model

N, DONOR_MARGIN, BOS = 40, 64, 1
START = N + DONOR_MARGIN
GPT2: dict[str, Any] = {"n_embd": 30, "n_layer": 3, "n_head": 3, "n_inner": 41, "n_positions": 2048}
SCALED = {
    "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 8,
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "no_rope_layers": [1, 1], "num_hidden_layers": 2, "attn_temperature_tuning": False, "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "chunked_attention"], "hidden_size": 32, "intermediate_size": 48,
    "intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16,
}  # fmt: skip


def prompts(inputs: Any = "random", *, seed: int = 0, **more: Any) -> Prompts:
    return prepare(stub_subject(vocab_size=VOCAB), inputs, length=N, seed=seed, **more)


# Donors


def test_a_prompt_stands_after_a_donor_of_its_kind() -> None:
    plain, after = prompts(), prompts().after_donors(START)
    ids = after.batch(range(6))
    assert ids.shape == (6, START + N)
    assert np.array_equal(ids[:, START:], plain.batch(range(6)))
    donors = ids[:, :START]
    assert (donors[:, 0] == BOS).all(), "a first token of its own"
    assert len(np.unique(donors[:, 1:])) > 60
    assert after.context == after.describe().context == START
    assert plain.context == plain.describe().context == 0
    assert after.describe().same_tokens(plain.describe())


def test_a_donor_depends_on_seed_and_index_alone() -> None:
    after = prompts().after_donors(START)
    ids = after.batch(range(6))
    assert np.array_equal(after.batch([4, 2]), ids[[4, 2]])
    assert np.array_equal(prompts().after_donors(START).batch(range(3)), ids[:3])
    assert not np.array_equal(prompts(seed=1).after_donors(START).batch([0])[0, 1:START], ids[0, 1:START])
    donors = {tuple(row[1:START]) for row in ids}
    assert len(donors) == 6
    again = {tuple(row[1:N]) for row in prompts().batch(range(100))}
    assert not {donor[: N - 1] for donor in donors} & again, "no prompt is a donor"


def test_without_a_bos_donors_begin_with_ordinary_tokens() -> None:
    ids = prompts(bos="none").after_donors(START).batch(range(6))
    assert len(set(ids[:, 0])) > 3


def test_a_constant_prompt_has_a_donor_of_the_same_token() -> None:
    for inputs in ("constant", "constant:9"):
        ids = prompts(inputs, bos="none").after_donors(START).batch(range(2))
        assert len(np.unique(ids)) == 1


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 12])
def test_given_prompts_are_each_others_donors(rows: int) -> None:
    """Of the rows that follow, in turn and never the prompt itself: the first of them whole, then their bodies."""
    table = np.arange(rows * N).reshape(rows, N) % 90 + 3
    table[:, 0] = 1
    table[:, 1] = np.arange(rows) + 5  # tells the rows apart
    ids = prompts(table).after_donors(START).batch(range(rows))
    assert np.array_equal(ids[:, START:], table)
    for b in range(rows):
        others = [table[(b + 1 + step % (rows - 1)) % rows] for step in range(3)]
        expected = np.concatenate([others[0], *(row[1:] for row in others[1:])])[:START]
        assert np.array_equal(ids[b, :START], expected), b


def test_text_has_donors_from_the_same_text(tmp_path: Path) -> None:
    book, tokenizer = tmp_path / "book.txt", byte_tokenizer()
    words = np.random.default_rng(0).integers(10, 99, 2000)
    book.write_text(" ".join(f"w{word}" for word in words))
    found = prepare(stub_subject(tokenizer), f"text:{book}", length=N, seed=0).after_donors(START)
    ids = found.batch(range(4))
    assert ids.shape == (4, START + N)
    text = book.read_text()
    for row in ids:
        assert tokenizer.decode(row[1:START]) in text
        assert tokenizer.decode(row[START + 1 :]) in text
        assert tokenizer.decode(row[START - 20 : START + 20]) not in text, "two places"
    book.write_text(text[:110])
    with raises(InputError, got="tokens", expected=START, remedy="--length"):
        prepare(stub_subject(tokenizer), f"text:{book}", length=N, seed=0).after_donors(START)


# Who sees what


@dataclass
class Sight:
    """What every query of every layer may see, bool [L, T, T]."""

    seen: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.seen.append(call.visibility.dense()[0, 0])


def tokens(batch: int = 2) -> Tensor:
    return torch.from_numpy(prompts().after_donors(START).batch(range(batch)))


def sight(model: PreTrainedModel, edit: str) -> list[Tensor]:
    with attach(model, [look := Sight()], parse_edits([edit])) as probe:
        probe.forward(tokens())
    return look.seen


def states(model: PreTrainedModel, edits: list[str], ids: Tensor) -> list[Tensor]:
    with attach(model, edits=parse_edits(edits)) as probe:
        return list(probe.forward(ids, output_hidden_states=True).hidden_states)


def test_every_query_sees_exactly_as_many_keys() -> None:
    for seen in sight(tiny("llama"), "context=borrowed"):
        assert torch.equal(seen[:START, :START], torch.ones(START, START, dtype=torch.bool).tril())
        assert not bool(seen[:START, START:].any()), "a donor sees itself only"
        assert seen[START].nonzero().flatten().tolist() == [START], "so does position 0"
        for i in range(1, N):
            own = list(range(START, START + i + 1))
            assert seen[START + i].nonzero().flatten().tolist() == [*range(START - (N - len(own)), START), *own]
            assert int(seen[START + i].sum()) == N


def test_a_layers_own_window_applies_on_top() -> None:
    local, whole, _ = sight(tiny("gemma3_text"), "context=borrowed")
    assert set(whole[START + 1 :].sum(-1).tolist()) == {N}
    assert set(local[START + 1 :].sum(-1).tolist()) == {WINDOW}
    for i in range(1, N):
        assert local[START + i].nonzero().flatten().tolist() == list(range(START + i - WINDOW + 1, START + i + 1))
    assert local[START].nonzero().flatten().tolist() == [START]


def test_layers_out_of_scope_see_the_prompt_only() -> None:
    lent, *others = sight(tiny("llama"), "context=borrowed@0")
    assert set(lent[START + 1 :].sum(-1).tolist()) == {N}
    for seen in others:
        assert not bool(seen[START:, :START].any())
        assert torch.equal(seen[START:, START:], torch.ones(N, N, dtype=torch.bool).tril())
    assert parse_edits(["context=borrowed@0-1,2"])[0].text == "context=borrowed@0-1,2"


# What stays as it was


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "smollm3"])
def test_the_donor_and_position_zero_do_not_notice(family: str) -> None:
    model, ids = tiny(family), tokens()
    after, donor, alone = (states(model, e, x) for e, x in (
        (["context=borrowed"], ids), ([], ids[:, :START]), ([], ids[:, START:]),
    ))  # fmt: skip
    for depth in range(len(after)):
        assert relative_difference(after[depth][:, :START], donor[depth]) < 1e-5
        assert relative_difference(after[depth][:, START], alone[depth][:, 0]) < 1e-4
    assert relative_difference(after[1][:, START + 1 :], alone[1][:, 1:]) > 1e-2, "the others do"


def test_nothing_lent_is_the_ordinary_pass() -> None:
    """Layers that do not exist: the donor is there, and nobody sees it."""
    model, ids = tiny("mistral", dtype=torch.float64), tokens()
    for after, alone in zip(states(model, ["context=borrowed@9"], ids), states(model, [], ids[:, START:]), strict=True):
        assert relative_difference(after[:, START:], alone) < 1e-5


def test_a_lent_layer_changes_what_later_ones_read() -> None:
    model, ids = tiny("llama"), tokens()
    whole, late = (states(model, [e], ids) for e in ("context=borrowed", "context=borrowed@2"))
    alone = states(model, [], ids[:, START:])
    assert relative_difference(late[2][:, START:], alone[2]) < 1e-4, "the first two layers are as they were"
    assert relative_difference(late[3][:, START + 1 :], alone[3][:, 1:]) > 1e-2
    assert relative_difference(whole[2][:, START + 1 :], alone[2][:, 1:]) > 1e-2


def test_a_measurement_says_what_is_left() -> None:
    """`left` is the total with the lent keys; where they are not lent, nothing is taken away."""
    subject = Subject.of(tiny("llama", scale=2.0), name="llama")
    asked: dict[str, Any] = {"length": N, "prompts": 8}
    plain, run = pl.measure(subject, **asked), pl.measure(subject, **asked, edits="context=borrowed@0")
    assert run.record.inputs.context == START
    lent = run.data["lent"].values
    assert float(np.abs(lent[:, 0]).min(axis=(0, 1)).max()) > 0.1
    assert float(np.abs(lent[:, 1:]).max()) == 0
    left, total = (component(run.data, name).values for name in ("left", "total"))
    assert np.array_equal(left[:, 1:], total[:, 1:], equal_nan=True)
    assert np.nanmax(np.abs(total[:, 0] - component(plain.data, "total").values[:, 0])) < 1e-4
    powers = run.summary.layers["all"].power
    assert powers["left"].value[0] < 0.3 * powers["total"].value[0]
    assert "left" not in plain.summary.layers["all"].power
    assert run.remainder < 1e-9


# Not defined


def uneven() -> PreTrainedModel:
    model = tiny("hunyuan_v1_dense")
    for name, parameter in model.named_parameters():
        if name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
            parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: tiny("gpt2", **GPT2), "absolute position before any attention"),
        (lambda: tiny("ministral3", rope_parameters=SCALED), "queries by absolute position"),
        (uneven, "after their rotation"),
    ],
    ids=["learned positions", "scaled queries", "norm after the rotation"],
)
def test_models_in_which_positions_do_more_than_rotate_are_refused(model: Any, why: str, tmp_path: Path) -> None:
    """By `trace`, too, before anything is measured."""
    subject = Subject.of(model(), name="tiny")
    with raises(UnsupportedError, what=("borrowed", why), remedy="`posleak measure`"):
        pl.measure(subject, length=N, prompts=4, edits="context=borrowed")
    with raises(UnsupportedError, what=("borrowed", why), remedy="`posleak measure`"):
        pl.trace(subject, length=N, prompts=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "model",
    [lambda: tiny_model("bamba"), lambda: tiny("lfm2", layer_types=["conv", "full_attention", "conv"])],
    ids=["recurrent", "convolution"],
)
def test_a_donor_that_is_carried_along_needs_sequences_of_its_own(model: Any) -> None:
    """In one sequence the state would carry one branch into the next; `trace` reads them apart."""
    subject = Subject.of(model(), name="tiny")
    assert carried_difference(subject.model) > 1e-3
    with raises(UnsupportedError, what="one sequence", remedy="context=branches:apart"):
        pl.measure(subject, length=N, prompts=4, edits="context=branches")
    found = pl.trace(subject, length=N, prompts=4)
    assert found.branches.record.spec.edit_texts == ("context=branches:apart",)
    assert "state" in found.sources


# Branches


def branch_sight(model: PreTrainedModel, edit: str, documents: Tensor, rows: slice) -> list[Tensor]:
    """Which keys every query of the prompts sees in branch C, bool [N, T], and where they are."""
    seen: list[Tensor] = []

    class Look:
        def observe(self, call: Call, out: Tensor) -> None:
            seen.append(call.visibility.rows(torch.arange(call.query.shape[2]))[rows.start or 0, 0])

    places = read_placements(model, documents[:1, -N:], default_plan(N))
    with attach(model, [Look()], parse_edits([edit]), places) as probe:
        probe.forward(documents)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_one_sequence_and_three_show_the_same_keys(family: str) -> None:
    """[A][B][donor][C] against a document for each branch, in every layer and for every query."""
    model, ids = tiny(family), tokens()
    joined = branch_sight(model, "context=branches", ids, slice(None))
    for number, first in enumerate((0, N, 2 * N + START)):  # where each branch begins in the joined sequence
        apart = branch_sight(model, "context=branches:apart", ids, slice(number, None))
        document = [*range(2 * N, 2 * N + START), *range(first, first + N)]
        for one, other in zip(joined, apart, strict=True):
            assert torch.equal(one[document][:, document], other)
            others = [token for token in range(one.shape[1]) if token not in document]
            assert not bool(one[first : first + N][:, others].any()), "no branch sees another"


def test_a_long_donor_has_equally_many_keys_for_its_late_queries() -> None:
    documents = torch.from_numpy(prompts().after_donors(3 * N).batch(range(2)))
    *_, seen = branch_sight(tiny("llama"), "context=branches:apart:long", documents, slice(None))
    counts = seen[: 3 * N].sum(-1).tolist()
    assert counts == [min(position + 1, N) for position in range(3 * N)]
    assert bool(seen[: 3 * N, 0].all()), "its own position 0 stays in sight: without a sink models break down"


def test_an_edit_of_branches_is_read_from_its_text() -> None:
    for text in ("context=branches", "context=branches:apart", "context=branches:long", "context=branches:apart:long"):
        assert parse_edits([text])[0].text == text
    for text in ("context=branches:long:apart", "context=branches@0", "context=branches:wide"):
        with raises(InputError, where=text, expected="branches[:apart][:long]"):
            parse_edits([text])


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4"])
def test_rounding_is_no_reason_to_refuse(family: str) -> None:
    """Moving a prompt by a donor's length changes states in bfloat16 by a lot; the donor itself must change nothing."""
    found = pl.trace(Subject.of(tiny(family, dtype=torch.bfloat16), name=family), length=N, prompts=4)
    assert found.remainder < 1e-9


def test_a_rotation_that_changes_with_the_length_is_refused() -> None:
    """Short prompts are turned by other frequencies than prompts after a donor."""
    rope = {**SCALED, "rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [4.0] * 5}
    del rope["llama_4_scaling_beta"]
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=START)
    with raises(UnsupportedError, where="Phi3ForCausalLM", what=("borrowed", "rotation"), remedy="`posleak measure`"):
        pl.measure(Subject.of(model, name="long"), length=N, prompts=4, edits="context=borrowed")
    longer = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    assert pl.measure(Subject.of(longer, name="long"), length=N, prompts=4, edits="context=borrowed").remainder < 1e-9


@pytest.mark.parametrize("length", [48, 56])
def test_chunks_that_begin_elsewhere_after_a_donor_are_refused(length: int) -> None:
    """Chunks of 16 tokens: a prompt of 48 begins one after its donor of 112, and a prompt of 56 does not."""
    subject = Subject.of(tiny("llama4_text", **LLAMA4), name="chunks")
    if length + DONOR_MARGIN == 112:
        found = pl.trace(subject, length=length, prompts=4, bos="none")
        assert np.nanmax(np.abs(found.components["earlier"].values[:, 0])) < 1e-4
        return
    with raises(UnsupportedError, what=("borrowed", "chunks"), remedy=("--length", DONOR_MARGIN)):
        pl.trace(subject, length=length, prompts=4, bos="none")
