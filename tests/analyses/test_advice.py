"""`advise`: every setting has leakage and loss with intervals, nulls are exactly 0, sentences follow from intervals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.analyses.advise.effects import ADVICE_FILE, PLOT_FILE, SIMULTANEOUS, STORED_ADVICE, Advice, Effect
from posleak.analyses.advise.settings import GROUPS, Setting, of_edits, settings_for
from posleak.analyses.claims.catalogue import ENOUGH
from posleak.edits import parse_edits
from posleak.errors import InputError
from posleak.inputs import prepare
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.summary import PowerKey, model_products
from posleak.runs.loss import loss_by_prompt
from support.errors import raises
from tools.shrink import tiny_model

ASKED: dict[str, Any] = {"length": 96, "prompts": 6, "seed": 2}


@cache
def advice() -> Advice:
    return pl.advise("zoo-text-rope", groups=["bos", "rope", "scale"], edits=["shift=0", "sink=cut"], **ASKED)


def effect(name: str) -> Effect:
    return next(each for each in advice().effects if each.setting.name == name)


def test_every_setting_has_leakage_and_loss_with_intervals() -> None:
    names = {each.setting.name for each in advice().effects}
    assert {"bos=none", "rope=ntk:2", "rope=linear:2", "rope=yarn:4", "scale=logn", "sink=cut", "shift=0"} <= names
    for each in advice().effects:
        numbers: dict[Any, Estimate] = {**each.leakage, **each.loss, **each.simultaneous}
        assert {("all", "total"), ("all", "mask"), ("all", "residual"), ("early", "total")} <= set(numbers)
        assert {"first", "middle", "end", "loss"} <= set(numbers)
        for found in numbers.values():
            assert found.n == 6
            assert found.low <= found.value <= found.high


def test_a_null_setting_is_exactly_0_in_both() -> None:
    null = effect("shift=0")
    assert null.unchanged
    for found in (*null.leakage.values(), *null.loss.values()):
        assert found.value == found.low == found.high == 0
    assert null.sentence == "shift=0 changes nothing: leakage and loss are bit-identical."
    assert "Leakage and loss are bit-identical: shift=0." in advice().sentences


def test_directions_of_position_can_be_erased() -> None:
    settings = ["position=erase:1", "position=erase:0"]
    erased, nothing = pl.advise("zoo-text-rope", groups=[], edits=settings, **ASKED).effects
    assert nothing.unchanged
    asked: dict[str, Any] = {**ASKED, "inputs": "text:stdlib", "loss": True}
    after, before = (pl.measure("zoo-text-rope", **asked, edits=edits).loss for edits in (settings[:1], []))
    assert after is not None
    assert before is not None
    change = float(after.numbers["end"].value) - float(before.numbers["end"].value)
    assert erased.loss["end"].value == pytest.approx(change, abs=1e-9)
    assert change != 0


def test_a_window_changes_no_bit_of_the_loss_before_it_hides_something() -> None:
    (found,) = pl.advise("zoo-text-rope", groups=[], edits=["window=48"], **ASKED).effects
    assert found.loss["first"].value == found.loss["first"].low == found.loss["first"].high == 0
    assert found.loss["end"].value != 0


def test_changes_are_differences_of_two_plain_runs_paired_by_prompts() -> None:
    """Against the same two measurements by hand."""
    asked: dict[str, Any] = {**ASKED, "inputs": "text:stdlib", "loss": True}
    before, after = pl.measure("zoo-text-rope", **asked), pl.measure("zoo-text-rope", edits=["rope=linear:2"], **asked)
    found = effect("rope=linear:2")
    assert found.even is not None
    own, even = (
        [run.summary.model["all"].norms[norm].power for run in (after, before)] for norm in ("attention", "even")
    )
    weighted = model_products(after.weighted_by(before))
    for part in ("total", "mask", "residual"):
        change = float(even[0][part].value - even[1][part].value)
        assert float(found.even.leakage["all", part].value) == pytest.approx(change)
        now = float(Jackknife(6).inner(weighted[PowerKey("attention", "all", part)]).value)
        assert float(found.leakage["all", part].value) == pytest.approx(now - float(own[1][part].value))
        assert now != pytest.approx(float(own[0][part].value)), "the weights are those of the unchanged model"
    plan = before.record.plan
    losses = loss_by_prompt(after.data, plan)["all"] - loss_by_prompt(before.data, plan)["all"]
    assert float(found.loss["all"].value) == pytest.approx(float(losses.mean()))
    assert float(found.loss["all"].high) == pytest.approx(float(Jackknife(6).mean(losses).estimate.high))
    assert found.loss["all"].low > 0, "half the rotation at every offset is another model"


def test_the_factor_of_scaled_logits_is_told_apart() -> None:
    found = effect("scale=logn")
    assert found.leakage["all", "scaling"].low > 0
    assert ("all", "scaling") not in effect("rope=ntk:2").leakage


def made(total: tuple[float, float, float], loss: tuple[float, float, float], name: str = "x") -> Effect:
    of = {"total": total, "mask": total, "residual": total, "loss": loss}
    ends = {key: [np.asarray(end, dtype=np.float64) for end in of[key]] for key in SIMULTANEOUS}
    intervals = {key: Estimate(value, low, high, ENOUGH) for key, (value, low, high) in ends.items()}
    flat = {("all", "total"): intervals["total"]}
    return Effect(Setting("own", "", (name,)), flat, flat, {"all": intervals["loss"]}, intervals)


DOWN, NEITHER, UP = (-2.0, -3.0, -1.0), (0.1, -1.0, 1.0), (2.0, 1.0, 3.0)


@cache
def enough() -> Advice:
    """One with as many prompts as sentences need."""
    return pl.advise("zoo-text-rope", groups=[], edits=["shift=0"], length=48, prompts=ENOUGH)


def test_words_follow_from_intervals() -> None:
    found = replace(
        enough(),
        effects=[made(DOWN, UP, "a"), made(DOWN, NEITHER, "b"), made(UP, UP, "c"), made(NEITHER, NEITHER, "d")],
    )
    assert [sentence.partition(": ")[2] for sentence in found.sentences] == ["b.", "a.", "d.", "c."]
    lower, worse, neither, higher = found.sentences
    assert "goes down" in lower
    assert "loss goes up" in worse
    assert neither.startswith("Neither")
    assert "both go up" in higher
    assert replace(enough(), effects=[made(DOWN, UP)]).sentences[0].startswith("Every setting that lowers leakage")
    assert replace(enough(), effects=[made(UP, DOWN)]).sentences[0].startswith("None of these settings")
    assert "loss goes up" in made(DOWN, UP).sentence.lower()


def test_sentences_say_where_evenly_weighted_leakage_changes_otherwise() -> None:
    other, same = (replace(made(DOWN, UP, name), even=made(even, UP, name)) for name, even in (("a", UP), ("b", DOWN)))
    assert "Evenly weighted, leakage goes up: 2 (1 … 3) nats²; mask goes up" in other.sentence
    assert "venly" not in same.sentence
    found = replace(enough(), effects=[other, same]).sentences
    assert found[-1] == "Evenly weighted, leakage goes up under: a."
    assert sum("venly" in sentence for sentence in found) == 1


def test_json_has_both_norms() -> None:
    document = advice().as_dict()
    assert document["norm"] == "attention"
    setting = next(each for each in document["settings"] if each["setting"] == "rope=linear:2")
    assert set(setting["even"]) == {"leakage", "relative", "sure"}
    assert set(setting["even"]["leakage"]) == set(setting["leakage"]) >= {"all/total", "early/mask"}
    assert setting["even"]["leakage"]["all/total"]["value"] != setting["leakage"]["all/total"]["value"]
    numbers = advice().baseline.summary.model["all"]
    assert numbers.even is not None
    assert document["baseline"]["power"]["total"]["value"] == numbers.power["total"].value
    assert document["baseline"]["even"]["power"]["total"]["value"] == numbers.even.power["total"].value


def test_few_prompts_say_nothing() -> None:
    assert advice().sentences[0] == "6 prompts are too few for conclusions; use 16 or more."
    assert effect("rope=linear:2").direction("loss") == 0, "although its interval of 95% leaves out 0"


def test_a_setting_under_which_the_model_breaks_down_costs_no_other_its_numbers() -> None:
    """MiniMax's own attention mixes dtypes as soon as its weights are not float32."""
    subject = pl.Subject.of(tiny_model("minimax"), name="minimax")
    found = pl.advise(subject, "random", groups=["dtype"], edits=["shift=0"], length=48, prompts=4, bos=1)
    assert [each.setting.name for each in found.effects] == ["shift=0"]
    assert "BFloat16" in found.left_out["dtype=bfloat16"]


def test_the_front_has_settings_that_nothing_beats() -> None:
    cheap, strong, worse = (
        made((-1, -2, -0.5), (0.1, 0, 0.2), "cheap"),
        made(DOWN, UP, "strong"),
        made((-1, -2, -0.5), UP, "worse"),
    )
    found = replace(advice(), effects=[strong, worse, cheap, made(UP, DOWN, "up")])
    assert [each.setting.name for each in found.pareto_front] == ["cheap", "strong"]


def test_intervals_of_sentences_hold_for_all_that_is_said() -> None:
    """They are wider than those of the table, by as much as the number of things said asks for."""
    found = effect("rope=ntk:4")
    alone = pl.advise("zoo-text-rope", groups=[], edits=["rope=ntk:4"], **ASKED).effects[0]
    width = {
        name: float(each.simultaneous["loss"].high - each.simultaneous["loss"].low)
        for name, each in (("many", found), ("one", alone))
    }
    table = float(found.loss["all"].high - found.loss["all"].low)
    assert table < width["one"] < width["many"]
    assert float(found.loss["all"].value) == float(alone.loss["all"].value)


def test_settings_are_made_for_the_model() -> None:
    subject = pl.load("zoo-text-rope")
    base = prepare(subject, "text:stdlib", bos="auto", length=64, seed=0)
    found = settings_for(subject, base, 64)
    assert [setting.group for setting in found] == sorted((s.group for s in found), key=GROUPS.index)
    for setting in found:
        parse_edits(setting.edits)
        assert setting.about
    assert {"window=16", "window=16+sink", "window=16+sink4", "window=32"} <= {setting.name for setting in found}
    with raises(InputError, got="ropes", remedy="'rope'"):
        settings_for(subject, base, 64, ["ropes"])


def test_edits_that_act_together_are_joined_by_commas_and_scopes_keep_theirs() -> None:
    assert [setting.edits for setting in of_edits(["window=64+sink4, rope=ntk:2", "sink=cut@3-5,7.0"])] == [
        ("rope=ntk:2", "window=64+sink4"),
        ("sink=cut@3-5,7.0",),
    ]


def test_what_cannot_be_had_is_left_out_with_the_reason() -> None:
    asked: dict[str, Any] = {"length": 64, "prompts": 4, "origin": 11}
    found = pl.advise("zoo-backcopy-nope", "random", groups=[], edits=["rope=ntk:4", "sink=cut"], **asked)
    assert [each.setting.name for each in found.effects] == ["sink=cut"]
    assert "effect" in found.left_out["rope=ntk:4"]


def test_the_folder_goes_on_and_holds_what_was_said(tmp_path: Path) -> None:
    asked: dict[str, Any] = {**ASKED, "groups": ["bos"], "out": tmp_path / "advice"}
    first = pl.advise("zoo-text-rope", **asked)
    kept = STORED_ADVICE.read(tmp_path / "advice" / ADVICE_FILE)
    assert kept.items() >= json.loads(json.dumps(first.as_dict())).items()
    assert (tmp_path / "advice" / PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "advice").rglob("results.nc")}
    assert len(written) == 1 + len(first.effects)
    again = pl.advise("zoo-text-rope", **asked)
    assert again.sentences == first.sentences
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "advice").rglob("results.nc")} == written


def test_prompts_are_no_longer_than_the_context_unless_asked_for() -> None:
    subject = pl.load("zoo-text-rope")
    found = pl.advise(subject, groups=[], edits=["shift=0"], prompts=4)
    assert found.baseline.record.spec.length == subject.context == 256


@pytest.mark.filterwarnings("ignore:the prompts were given")
def test_without_a_tokenizer_nothing_is_advised_on_random_tokens(llama: pl.Subject) -> None:
    with raises(InputError, where="tiny-llama", what=("loss", "tokenizer"), got="text:stdlib", remedy="--tokenizer"):
        pl.advise(llama)
    chosen = pl.advise(llama, "random", groups=[], edits=["sink=cut"], length=48, prompts=ENOUGH)
    assert chosen.pareto_front == []
    assert "nothing is advised" in chosen.sentences[0]
    ids = prepare(llama, "random", length=48, seed=3).batch(range(ENOUGH))
    assert pl.advise(llama, ids, groups=[]).has_meaningful_loss
