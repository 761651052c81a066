"""docs/families.md is true: every family is built and examined again, and gives the row that is written there.

Supported means measured from beginning to end, too.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import transformers

from posleak.errors import ModelError
from posleak.models import Subject
from posleak.runs import measure
from posleak.tools import shrink
from posleak.tools.census import (
    FAILS,
    LENGTH,
    NOT_BUILT,
    SUPPORTED,
    Row,
    examine_family,
    families,
    limited,
    page,
    read_page,
)

SUPPORTED_AT_LEAST = 148
PAGE = (Path(__file__).parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
WRITTEN = read_page(PAGE)
same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} has" not in PAGE,
    reason="docs/families.md was written with another transformers",
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of 183 foreign models


@same_version
@pytest.mark.parametrize("family", families())
def test_the_page_is_true(family: str) -> None:
    row = examine_family(family)
    if row.status == NOT_BUILT and WRITTEN[family][1] != NOT_BUILT:
        pytest.fail(row.why)
    assert row.key == WRITTEN[family], row.why
    if row.status == SUPPORTED:
        run = measure(Subject.of(shrink.tiny_model(family), name=family), length=LENGTH, prompts=2)
        assert run.data.attrs["remainder"] < 1e-8


@same_version
def test_the_page_has_every_family() -> None:
    assert sorted(WRITTEN) == families()


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
        Row("a", "A", SUPPORTED, "rotary", "no: why", ("x", "y | z"), ("L2: why",)),
        Row("b", "B", NOT_BUILT, why="no timm"),
        Row("c", "C", FAILS, "rotary", "yes", ("x", "y"), why="L4: 3 nats"),
    ]
    found = read_page(page(rows))
    assert found["a"][:4] == rows[0].key[:4]
    assert (found["b"], found["c"]) == (rows[1].key, rows[2].key)


def test_the_page_says_of_every_family_whether_its_origin_can_be_moved() -> None:
    moved = {family: row[3] for family, row in WRITTEN.items() if row[1] == SUPPORTED}
    assert {answer.partition(":")[0].partition(" ")[0] for answer in moved.values()} <= {"yes", "no", "in"}
    assert moved["llama"] == "yes"
    assert moved["deepseek_v3"] == "yes"
    assert moved["gpt2"].startswith("no: its states depend on absolute position")
    assert "after their rotation" in moved["hunyuan_v1_dense"]


def test_a_large_model_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the meta device: an unknown name of a size is an error, not a full machine."""
    monkeypatch.setattr(shrink, "SIZES", {})
    with pytest.raises(ModelError, match=r"not small[\s\S]*parameters"):
        shrink.tiny_model("llama")


def test_a_family_that_hangs_is_left() -> None:
    with pytest.raises(TimeoutError, match="longer than 1 s"), limited(1):
        time.sleep(30)
