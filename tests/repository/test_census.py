"""docs/families.md is true: every family is built and examined again, and gives the row that is written there."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from posleak.errors import ModelError
from support.errors import raises
from tools import shrink
from tools.census import (
    FAILS,
    NOT_BUILT,
    SUPPORTED,
    FamilyRow,
    examine_family,
    families,
    page,
    read_page,
    time_limit,
)
from tools.matrix import WORKS, CommandOutcomes, read_section

SUPPORTED_AT_LEAST = 168
PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
WRITTEN, OUTCOMES = read_page(PAGE), read_section(PAGE)
same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} has" not in PAGE,
    reason="docs/families.md was written with another transformers",
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of 189 foreign models


DAILY = families()[::4]
"""Families that every test run examines; `make nightly` examines all."""


@same_version
@pytest.mark.parametrize(
    "family", [family if family in DAILY else pytest.param(family, marks=pytest.mark.nightly) for family in families()]
)
def test_the_page_is_true(family: str) -> None:
    row = examine_family(family)
    if row.status == NOT_BUILT and WRITTEN[family][1] != NOT_BUILT:
        pytest.fail(row.why)
    assert row.key == WRITTEN[family], row.why


VARIED = (
    "bamba", "bloom", "deepseek_v3", "falcon", "gemma3n_text", "gpt2", "gpt_oss", "gptj", "hy_v4", "llama4_text",
    "minimax", "nemotron_h", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "xglm",
)  # fmt: skip
"""Families that differ: experts, hybrids, several streams, tables, ALiBi, attention of their own. The page has all."""


@same_version
@pytest.mark.parametrize("family", VARIED)
def test_every_command_ends_in_a_result_or_a_reason(family: str) -> None:
    assert examine_family(family, commands=True).commands == OUTCOMES[family]


@same_version
def test_the_page_has_every_family_and_of_the_supported_every_command() -> None:
    assert sorted(WRITTEN) == families()
    assert set(OUTCOMES) == {family for family, row in WRITTEN.items() if row[1] == SUPPORTED}
    assert {outcomes.outcomes["measure"] for outcomes in OUTCOMES.values()} == {WORKS}
    assert {outcomes.outcomes["doctor"] for outcomes in OUTCOMES.values()} == {"sound", "by design"}
    assert sum(outcomes.outcomes["trace"] == WORKS for outcomes in OUTCOMES.values()) > 100


def test_the_number_supported_does_not_fall() -> None:
    stated = re.search(r"^\*\*(\d+) families supported\*\*", PAGE, re.MULTILINE)
    assert stated is not None
    counted = sum(status == SUPPORTED for _, status, *_ in WRITTEN.values())
    assert int(stated[1]) == counted >= SUPPORTED_AT_LEAST


def test_every_refusal_has_its_reason() -> None:
    for line in PAGE.splitlines():
        if line.startswith("| ") and WRITTEN.get(line.split(" | ")[0][2:], ("", SUPPORTED))[1] != SUPPORTED:
            assert len(line.split(" | ")[2]) > 20, line


def test_a_page_is_read_as_it_was_written() -> None:
    rows = [
        FamilyRow("a", "A", SUPPORTED, "rotary", "no: why", ("x", "y | z"), ("L2: why",)),
        FamilyRow("b", "B", NOT_BUILT, why="no timm"),
        FamilyRow("c", "C", FAILS, "rotary", "yes", ("x", "y"), why="L4: 3 nats"),
    ]
    outcomes = {"measure": WORKS, "metrics": "30 of 34", "trace": "a reason | long enough", "circuit": WORKS,
                "origin": WORKS, "claims": "3 of 9", "doctor": "by design"}  # fmt: skip
    commands = CommandOutcomes("a", outcomes)
    rows[0] = replace(rows[0], commands=commands)
    assert read_section(page(rows)) == {"a": commands}
    keys = read_page(page(rows))
    assert keys["a"][:4] == rows[0].key[:4]
    assert (keys["b"], keys["c"]) == (rows[1].key, rows[2].key)


def test_the_page_says_of_every_family_whether_its_origin_can_be_moved() -> None:
    moved = {family: row[3] for family, row in WRITTEN.items() if row[1] == SUPPORTED}
    assert {answer.partition(":")[0].partition(" ")[0] for answer in moved.values()} <= {"yes", "no", "in"}
    assert moved["llama"] == "yes"
    assert moved["deepseek_v3"] == "yes"
    assert moved["gpt2"].startswith("no: ")
    assert "absolute position" in moved["gpt2"]
    assert "rotation" in moved["hunyuan_v1_dense"]


def test_a_large_model_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the meta device: an unknown name of a size is an error, not a full machine."""
    monkeypatch.setattr(shrink, "SIZES", {})
    with raises(ModelError, where="llama", got="6,738,415,616 parameters", expected=20000000):
        shrink.tiny_model("llama")


def test_a_family_that_hangs_is_left() -> None:
    with pytest.raises(TimeoutError, match="longer than 1 s"), time_limit(1):
        time.sleep(30)
