"""The zoo: reproducible text, variants that differ in one setting, training that resumes to the bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posleak.errors import CheckError, InputError, PosleakWarning, RunError
from posleak.files import file_lock
from posleak.inputs.backcopy import CHAIN_TOKENS, CHAIN_TRIGGERS, BackcopyBody, walk
from posleak.inputs.corpus import Corpus
from posleak.models import load
from support.errors import raises
from zoo import corpus, training
from zoo.corpus import ALPHABET, encode, passages, read_text
from zoo.entropy import entropies
from zoo.jobs import Job, plan_jobs, train_all, trained
from zoo.measuring import UNSEEN
from zoo.recipe import RECIPES
from zoo.tokens import BackcopyTokens, character_tokenizer, tokens_for
from zoo.training import TrainingProgress, read_training, train
from zoo.variants import STANDARD, VARIANTS, ntk_base, variant_named

SMALL = replace(RECIPES["backcopy"], width=16, heads=2, feedforward=24, layers=2, context=32, batch=4, steps=40)
"""Large enough to learn something in a second."""


def backcopy() -> BackcopyTokens:
    return BackcopyTokens(BackcopyBody(np.arange(CHAIN_TOKENS)))


# Text


def test_a_paragraph_is_kept_once_and_only_if_it_is_plain() -> None:
    seen: set[bytes] = set()
    text = "One  is\nhere.\n\n  \nTwo\tis.\n\nDrei ist ß.\n\nOne is here."
    assert list(passages(text, seen)) == ["One  is\nhere.\n\nTwo is."]
    assert list(passages("One is here.", seen)) == []


def test_passages_are_about_a_thousand_characters_long() -> None:
    pieces = list(passages("\n\n".join(f"{number} " + "x" * 300 for number in range(10)), set()))
    assert [len(each.split("\n\n")) for each in pieces] == [4, 4, 2]


def long_text(words: int) -> str:
    return "\n\n".join(" ".join(f"word{number + step}" for step in range(40)) for number in range(0, words, 40))


def test_one_passage_in_twenty_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(long_text(80_000))
    text = read_text(str(tmp_path / "text.txt"))
    train, held = ("".join(ALPHABET[token] for token in part) for part in (text.train, text.held_out))
    assert 0.02 < len(held) / len(train) < 0.09
    assert not set(held.split("\n\n")) & set(train.split("\n\n"))
    assert np.array_equal(encode(train), text.train)
    assert text.sha256 == read_text.__wrapped__(str(tmp_path / "text.txt")).sha256
    shares = np.bincount(text.train) / len(text.train)
    assert math.isclose(text.unigram_nats, -sum(share * math.log(share) for share in shares if share))


def test_a_text_without_blank_lines_is_cut_into_pieces(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(" ".join(f"word{number}" for number in range(40_000)))
    text = read_text(str(tmp_path / "one.txt"))
    assert 0.02 < len(text.held_out) / len(text.train) < 0.09


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("word " * 100)
    with raises(InputError, got=("499", "0"), expected="100,000"):
        read_text(str(tmp_path / "short.txt"))


def test_documentation_comes_from_python_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PACKAGES", ("xarray",))
    monkeypatch.setattr(corpus, "read_corpus", lambda path: Corpus(("stdlib",), ("A module.\n\nIt has a function.",)))
    python, package = [(name, list(documents)) for name, _, documents in corpus._documentation()]
    assert python == ("Python", ["A module.\n\nIt has a function."])
    assert package[0] == "xarray"
    assert any("labeled" in text.lower() for text in package[1])
    monkeypatch.setattr(corpus, "PACKAGES", ("no-such-package",))
    with raises(InputError, got="no-such-package", remedy=("pip install no-such-package", "--text")):
        list(corpus._documentation())


@pytest.mark.parametrize("bos", [True, False])
def test_a_character_is_a_token(bos: bool) -> None:
    tokenizer = character_tokenizer(bos=bos)
    ids = tokenizer("a\tÄ\n~ €").input_ids
    start = [len(ALPHABET)] if bos else []
    assert ids == start + [ALPHABET.index(each) for each in "a    A?\n~ ?"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a    A?\n~ ?"
    assert len(tokenizer) == len(ALPHABET) + bos


# The task


def test_after_a_trigger_the_token_before_it_comes_again() -> None:
    ids = walk(3, list(range(50)), 200)
    after = ids[:, 1:-1] < CHAIN_TRIGGERS
    assert (ids[:, 2:][after] == ids[:, :-2][after]).all()
    assert (ids[:, 2:][after] >= CHAIN_TRIGGERS).all()
    assert 0.18 < (ids < CHAIN_TRIGGERS).mean() < 0.22, "a fifth"


def test_the_chain_is_the_same_at_every_place() -> None:
    ids = walk(0, list(range(4000)), 40)
    counts = np.stack([np.bincount(ids[:, place], minlength=CHAIN_TOKENS) for place in range(40)]) / 4000
    assert np.abs(counts - counts.mean(0)).max() < 0.03


def test_a_walk_depends_on_seed_and_index_alone_and_begins_with_the_shorter_one() -> None:
    body = BackcopyBody(np.arange(100, 100 + CHAIN_TOKENS))
    rows = body.rows(5, [7, 2, 9], 60)
    assert np.array_equal(rows[1], body.ids(5, 2, 60))
    assert np.array_equal(body.ids(5, 2, 30), rows[1][:30])
    assert not np.array_equal(body.ids(6, 2, 60), rows[1])
    assert rows.min() >= 100


def test_entropies_are_those_of_a_long_walk() -> None:
    ids, entropy = walk(1, list(range(400)), 500), entropies()
    shares = np.bincount(ids.ravel()) / ids.size
    assert abs(-(shares * np.log(shares)).sum() - entropy.unigram) < 0.01
    pairs = np.zeros((CHAIN_TOKENS, CHAIN_TOKENS))
    np.add.at(pairs, (ids[:, :-1].ravel(), ids[:, 1:].ravel()), 1)
    ordinary = pairs[CHAIN_TRIGGERS:]
    chances = ordinary / ordinary.sum(1, keepdims=True)
    left_open = -np.where(chances > 0, chances * np.log(np.where(chances > 0, chances, 1)), 0).sum(1)
    assert abs((ordinary.sum(1) / pairs.sum() * left_open).sum() - entropy.conditional) < 0.02


def test_the_lowest_loss_counts_missing_context() -> None:
    """Three tokens after BOS: one without context, one that may be copied from outside, one with full context."""
    entropy = entropies()
    with_bos = entropy.unigram + (entropy.conditional + entropy.ordinary / 5) + entropy.conditional
    assert math.isclose(entropy.lowest_loss(4, bos=True), with_bos / 3)
    assert math.isclose(entropy.lowest_loss(3, bos=False), (2 * entropy.conditional + entropy.ordinary / 5) / 2)


# Variants


OFF: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": None},
    "window-first": {"kept_window": None},
    "nope": {"no_rope_layers": [1, 1]},
    "learned": {"learned_positions": False},
    "no-bos": {},
    "sink-logit": {},
    "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}},
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "ntk": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
}
"""Config fields that undo the setting of each variant."""


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != STANDARD])
def test_a_variant_differs_in_its_setting_and_in_nothing_else(name: str) -> None:
    """Without its setting a variant is standard RoPE with the same initial weights: the logits are equal."""
    variant = VARIANTS[name]
    standard, model = VARIANTS[STANDARD].build(SMALL, 3), variant.build(SMALL, 3)
    without = replace(variant, changes={**variant.changes, **OFF[name]}).build(SMALL, 3)
    if name == "sink-logit":
        for own in without.model.layers:
            own.self_attn.sinks.data.fill_(-1e4)
    ids = torch.arange(20)[None] % CHAIN_TOKENS
    with torch.no_grad():
        one, same, other = (each(ids).logits[..., :CHAIN_TOKENS] for each in (standard, without, model))
    assert torch.allclose(one, same, atol=1e-6)
    assert torch.allclose(one, other, atol=1e-6) == (name == "no-bos")
    assert (model.config.bos_token_id is None) == (name == "no-bos")
    added = {"learned": 32 * 16, "sink-logit": 2 * 2, "no-bos": -16}
    assert model.num_parameters() - standard.num_parameters() == added.get(name, 0)


def test_windows_hide_what_they_say(tmp_path: Path) -> None:
    """Changing one token changes the first layer's output at the queries that see it."""
    recipe = replace(SMALL, context=256, layers=1)
    for name, first in (("window", False), ("window-first", True)):
        model = VARIANTS[name].build(recipe, 0)
        ids = torch.arange(100)[None] % CHAIN_TOKENS
        for token in (0, 10):
            other = ids.clone()
            other[0, token] = 63
            with torch.no_grad():
                changed = (model(ids).logits != model(other).logits).any(-1)[0].nonzero().ravel()
            reach = 99 if token == 0 and first else token + (62 if first else 63)
            assert (int(changed[0]), int(changed[-1])) == (token, reach), name


def test_ntk_slows_the_slowest_dimensions_by_the_factor() -> None:
    base = ntk_base(10_000, 4, 32)
    slowest = 30 / 32
    assert math.isclose(base**slowest / 10_000**slowest, 4, rel_tol=1e-9)
    built = VARIANTS["ntk"].config(RECIPES["text"])
    assert built.rope_parameters["rope_theta"] == base


def test_an_unknown_variant_is_refused_with_the_nearest_name() -> None:
    with raises(InputError, got="window-fist", remedy="'window-first'"):
        variant_named("window-fist")


# Training


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    recipe = replace(SMALL, steps=1000, warmup=100, rate=2.0)
    assert math.isclose(recipe.rate_at(0), 2.0 / 100, rel_tol=1e-3)
    assert math.isclose(recipe.rate_at(500), 2.0 * 0.55)
    assert math.isclose(recipe.rate_at(1000), 0.2)
    assert recipe.kept_steps == (0, 16, 32, 64, 128, 256, 512, 1000)


def test_training_lowers_the_loss_and_keeps_its_way(tmp_path: Path) -> None:
    recipe = replace(SMALL, steps=120, rate=1e-2, warmup=10)
    seen: list[TrainingProgress] = []
    record = train(VARIANTS["rope"], recipe, 0, backcopy(), tmp_path / "m", on_progress=seen.append, threads=1)
    assert record.finished
    assert record == read_training(tmp_path / "m")
    assert [point.step for point in record.held_out] == [0, 16, 32, 64, 120]
    assert abs(record.held_out[0].loss - math.log(CHAIN_TOKENS + 1)) < 0.2
    assert record.final_loss < record.data.unigram_nats - 0.4
    assert [point.step for point in record.curve] == list(range(10, 121, 10))
    assert (seen[-1].step, seen[-1].steps, seen[-1].left) == (120, 120, 0)
    assert not (tmp_path / "m" / training.RESUME).exists()
    subject = load(tmp_path / "m")
    assert subject.identity.weights_sha256 == load(tmp_path / "m" / "checkpoint-120").identity.weights_sha256


class Stopped(Exception):
    pass


def stop_at(step: int) -> Any:
    def on_progress(progress: TrainingProgress) -> None:
        if progress.step >= step:
            raise Stopped

    return on_progress


@pytest.mark.parametrize("name", ["rope", "sink-logit"])
def test_interrupted_training_ends_with_the_same_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_INTERVAL", 0.0)
    whole = train(VARIANTS[name], SMALL, 1, backcopy(), tmp_path / "whole", threads=1)
    for step in (10, 20, 30):
        with pytest.raises(Stopped):
            train(VARIANTS[name], SMALL, 1, backcopy(), tmp_path / "parts", on_progress=stop_at(step), threads=1)
    assert (tmp_path / "parts" / training.RESUME).exists()
    parts = train(VARIANTS[name], SMALL, 1, backcopy(), tmp_path / "parts", threads=1)
    assert (parts.curve, parts.held_out) == (whole.curve, whole.held_out)
    for folder in (".", "checkpoint-32"):
        one, other = (load(tmp_path / each / folder).identity.weights_sha256 for each in ("whole", "parts"))
        assert one == other
    again = train(VARIANTS[name], SMALL, 1, backcopy(), tmp_path / "parts", on_progress=stop_at(0), threads=1)
    assert again == parts, "what is finished is read back"


def test_the_test_above_can_fail(tmp_path: Path) -> None:
    """Another seed gives other weights."""
    one, other = (tmp_path / str(seed) for seed in (1, 2))
    for seed, folder in ((1, one), (2, other)):
        train(VARIANTS["rope"], replace(SMALL, steps=2), seed, backcopy(), folder, threads=1)
    assert load(one).identity.weights_sha256 != load(other).identity.weights_sha256


def test_a_record_that_is_ahead_of_the_state_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process dies between writing the two files, the record has one point too many."""
    monkeypatch.setattr(training, "SAVE_INTERVAL", 0.0)
    folder, state = tmp_path / "m", tmp_path / "m" / training.RESUME
    whole = train(VARIANTS["rope"], SMALL, 0, backcopy(), tmp_path / "whole", threads=1)
    with pytest.raises(Stopped):
        train(VARIANTS["rope"], SMALL, 0, backcopy(), folder, on_progress=stop_at(20), threads=1)
    early = state.read_bytes()
    with pytest.raises(Stopped):
        train(VARIANTS["rope"], SMALL, 0, backcopy(), folder, on_progress=stop_at(40), threads=1)
    record = read_training(folder)
    assert record is not None
    assert record.curve[-1].step == 30
    state.write_bytes(early)
    resumed = train(VARIANTS["rope"], SMALL, 0, backcopy(), folder, threads=1)
    assert (resumed.curve, resumed.held_out) == (whole.curve, whole.held_out)
    assert load(folder).identity.weights_sha256 == load(tmp_path / "whole").identity.weights_sha256


def test_a_damaged_state_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_INTERVAL", 0.0)
    folder = tmp_path / "m"
    with pytest.raises(Stopped):
        train(VARIANTS["rope"], SMALL, 0, backcopy(), folder, on_progress=stop_at(20), threads=1)
    state = folder / training.RESUME
    state.write_bytes(state.read_bytes()[:1000])
    with raises(RunError, where="resume.safetensors", remedy="delete"):
        train(VARIANTS["rope"], SMALL, 0, backcopy(), folder, threads=1)


def test_going_on_with_other_threads_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_INTERVAL", 0.0)
    with pytest.raises(Stopped):
        train(VARIANTS["rope"], SMALL, 0, backcopy(), tmp_path / "m", on_progress=stop_at(20), threads=1)
    with pytest.warns(PosleakWarning, match="threads"):
        record = train(VARIANTS["rope"], SMALL, 0, backcopy(), tmp_path / "m", threads=2)
    assert record.threads == 2


def test_training_that_diverges_is_stopped(tmp_path: Path) -> None:
    with raises(CheckError, where="rope-0-40", got="loss nan at step 3", remedy="learning rate"):
        train(VARIANTS["rope"], replace(SMALL, rate=1e30, clip=1e30), 0, backcopy(), tmp_path / "m", threads=1)
    assert not (tmp_path / "m" / "config.json").exists()


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    short = replace(SMALL, steps=2)
    train(VARIANTS["rope"], short, 0, backcopy(), tmp_path / "m", threads=1)
    with raises(RunError, what="another training", got="seed", remedy="--out"):
        train(VARIANTS["rope"], short, 1, backcopy(), tmp_path / "m", threads=1)
    with raises(RunError, what="another training", got="recipe", remedy="--out"):
        train(VARIANTS["rope"], SMALL, 0, backcopy(), tmp_path / "m", threads=1)


# Many


def test_jobs_have_folders_of_their_own() -> None:
    own = RECIPES["text"].steps
    names = [job.name for job in plan_jobs(["rope", "nope", "rope"], seeds=(0, 1))]
    assert names == ["rope-0", "rope-1", "nope-0", "nope-1"]
    assert [job.name for job in plan_jobs(["rope"], steps=200)] == ["rope-0-200"]
    for seed in (-1, 2**32):
        with raises(InputError, where="seed", got=seed, expected="2**32 - 1"):
            plan_jobs(["rope"], seeds=[seed])
    assert [job.name for job in plan_jobs(["rope"], steps=own)] == ["rope-0"]
    assert len(plan_jobs(data=RECIPES, seeds=(0, 1))) == 2 * 2 * len(VARIANTS)
    with raises(InputError, where="--steps", got=0, expected=1):
        plan_jobs(["rope"], steps=0)
    with raises(InputError, got="backopy", remedy="'backcopy'"):
        plan_jobs(["rope"], data=["backopy"])


def test_a_model_that_somebody_else_trains_is_left_to_them(tmp_path: Path) -> None:
    jobs = [Job(VARIANTS[name], replace(SMALL, steps=2), 0) for name in ("rope", "nope")]
    busy = jobs[0].folder(tmp_path)
    busy.mkdir(parents=True)
    finished: list[tuple[str, bool]] = []
    import threading

    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with file_lock(busy / ".lock", wait=False):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    records = train_all(
        jobs, tmp_path, on_finished=lambda job, record: finished.append((job.variant.name, record is not None))
    )
    done.set()
    thread.join()
    assert finished == [("rope", False), ("nope", True)]
    assert [each.variant for each in records] == ["nope"]
    assert [record.variant for _, record in trained(tmp_path)] == ["nope"]


def test_measured_prompts_are_none_of_training() -> None:
    """Prompts of the task are drawn like training batches, so that they need other seeds."""
    tokens, recipe = tokens_for(RECIPES["backcopy"]), RECIPES["backcopy"]
    trained_on = tokens.batch(0, 0, recipe.batch, recipe.context)
    measured = backcopy().body.rows(UNSEEN, list(range(recipe.batch)), recipe.context)
    assert not (trained_on[:, None] == measured[None]).all(-1).any()
    assert (trained_on == backcopy().body.rows(0, list(range(recipe.batch)), recipe.context)).all()


def test_recipes_are_small() -> None:
    sizes = {name: VARIANTS["rope"].build(recipe, 0).num_parameters() for name, recipe in RECIPES.items()}
    assert 1e6 < sizes["text"] < 1.5e6
    assert sizes["backcopy"] < 5e5
