"""Text of strangers is shown as it is, and posleak's own can be read on any terminal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import posleak
from posleak.leakage import Estimate
from posleak.show.numbers import interval, percent
from posleak.show.streams import HANDLER, prepare_streams
from posleak.text import ASCII_EQUIVALENTS, format_bytes, one_line, visible, visible_json

ROOT = Path(posleak.__file__).parent
SHOWN = [*(ROOT / "cli").glob("*.py"), *(ROOT / "show").glob("*.py"), *(ROOT / "reports").glob("compar*.py")]
"""Where the signs stand that posleak itself writes on a terminal."""


@pytest.fixture(autouse=True)
def _prepared() -> None:
    prepare_streams()


def written(text: str, encoding: str = "ascii") -> str:
    return text.encode(encoding, HANDLER).decode(encoding)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("tab\tand\nlines stay", "tab\tand\nlines stay"),
        ("\r\x7f\x9b", r"\x0d\x7f\x9b"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("a\u2028b", r"a\u2028b"),
        ("caf\xe9 −0.1 🙂", "caf\xe9 −0.1 🙂"),
        ("name\udcff", r"name\xff"),
        ("half\ud83d", r"half\ud83d"),
    ],
)
def test_control_characters_are_spelled_out_and_nothing_else(text: str, expected: str) -> None:
    assert visible(text) == expected
    assert visible(expected) == expected


def test_json_means_the_same_after_its_characters_are_made_visible() -> None:
    value = {"\x1bname\x9b": "a\u202eb\u2028c\x7f\udcff", "caf\xe9": ["🙂", "\t"]}
    text = visible_json(json.dumps(value, indent=2, ensure_ascii=False))
    assert visible(text) == text
    assert "caf\xe9" in text
    assert json.loads(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5–0.7", "0.5-0.7"),
        ("−0.1", "-0.1"),
        ("31% (20% … 41%)", "31% (20% ... 41%)"),
        ("×4.4 nats²", "x4.4 nats^2"),
        ("✓ ✗ █▒·", "+ x #=."),
        ("▁▂▃▄▅▆▇█", "_.-=+*%#"),
        ("caf\xe9 🙂", r"caf\u00e9 \U0001f642"),
        ("name\udcff", r"name\xff"),
    ],
)
def test_numbers_and_signs_can_be_read_in_ascii(text: str, expected: str) -> None:
    assert written(text) == expected


def test_only_what_an_encoding_lacks_is_replaced() -> None:
    assert written("×4 −1 caf\xe9", "latin-1") == "×4 -1 caf\xe9"
    assert written("×4 −1 \udcff", "utf-8") == r"×4 −1 \xff"


def test_a_handler_of_encoding_does_not_decode() -> None:
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("ascii", HANDLER)


def test_every_sign_that_posleak_writes_has_a_lookalike() -> None:
    signs = {sign for path in SHOWN for sign in path.read_text(encoding="utf-8") if ord(sign) > 127}
    assert signs <= set(ASCII_EQUIVALENTS)
    assert all(lookalike.isascii() for lookalike in ASCII_EQUIVALENTS.values())
    assert len({ASCII_EQUIVALENTS[block] for block in "▁▂▃▄▅▆▇█"}) == 8


def test_numbers_as_posleak_writes_them_survive_ascii() -> None:
    found = Estimate(np.array(-0.04), np.array(-0.2), np.array(0.1), 5)
    assert written(f"{percent(found.value)} {interval(found, 'share')}") == "-4% (-20% ... 10%)"


def test_an_error_in_one_line() -> None:
    assert one_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 1000))) < 500


def test_an_error_that_cannot_say_what_it_is_still_has_a_name() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert one_line(Mute()) == "Mute"


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 bytes"), (999, "999 bytes"), (1.3e9, "1.3 GB"), (12e6, "12 MB"), (-5, "0 bytes")]
)
def test_bytes_for_people(count: float, expected: str) -> None:
    assert format_bytes(count) == expected
