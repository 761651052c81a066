"""Text of strangers, made fit to be shown: model names, tokens and messages may hold anything.

Terminals obey control characters: an escape sequence in a model's name can move the cursor, rewrite what stands above
or set the window's title. `visible` spells such characters out, and `visible_json` does it inside JSON without changing
what the JSON means. `ascii_fallback` writes text for a terminal that has fewer characters than posleak uses. `size` writes
bytes for people.
"""

from __future__ import annotations

import re

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, marks that turn the direction of writing, and halves of characters."""

ASCII_EQUIVALENTS = {
    "…": "...", "–": "-", "—": "-", "−": "-", "×": "x", "·": ".", "•": "*", "±": "+/-", "≤": "<=", "≥": ">=", "≠": "!=",
    "≈": "~", "→": "->", "←": "<-", "√": "sqrt ", "‖": "||", "⟨": "<", "⟩": ">", "¹": "^1", "²": "^2", "³": "^3",
    "⁻": "^-", "₂": "_2", "✓": "+", "✗": "x", "’": "'", "‘": "'", "“": '"', "”": '"', "╱": "/", "⏎": "\\n", "\xa0": " ",
    "░": ".", "▒": "=", "▓": "%", "█": "#",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%",
    "Δ": "Delta", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "Σ": "sum ", "σ": "sigma", "φ": "phi",
}  # fmt: skip
"""What posleak itself writes, in ASCII."""

BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def visible(text: str) -> str:
    """The text with every character spelled out that a terminal would obey instead of show."""
    return _UNSEEN.sub(lambda found: _spelled(ord(found[0])), text)


def _spelled(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a path that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible_json(text: str) -> str:
    """The same JSON, with the characters that `visible` spells out written as JSON's own escapes."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def ascii_fallback(error: UnicodeError) -> tuple[str, int]:
    """A codec's error handler: posleak's own signs become ascii_fallback, all other characters are spelled out."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_in_ascii(character) for character in error.object[error.start : error.end]), error.end


def _in_ascii(character: str) -> str:
    code = ord(character)
    if character in ASCII_EQUIVALENTS:
        return ASCII_EQUIVALENTS[character]
    if 0xD800 <= code <= 0xDFFF:
        return _spelled(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(error: BaseException, most: int = 400) -> str:
    """What another library's error says, in one line: its class and the start of its message."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # a stranger's error may fail even at this
        said = ""
    return f"{type(error).__name__}: {said[:most]}" if said else type(error).__name__


def format_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves a number above 1: `1.3 GB`, `12 MB`, `0 bytes`."""
    for unit, worth in BYTE_UNITS:
        if count >= worth:
            number = count / worth
            return f"{number:.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"
    return f"{max(count, 0):.0f} bytes"
