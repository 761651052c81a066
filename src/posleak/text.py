"""Formatting of text for display: escaping of untrusted text, ASCII equivalents, byte counts.

Model names, tokens and error messages of other libraries may contain any character. Terminals interpret control
characters: an escape sequence in a model name can move the cursor, overwrite earlier output or set the window title.
`visible` escapes such characters; `visible_json` escapes them inside JSON without changing its value.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that change the writing direction, and lone surrogates."""

ASCII_EQUIVALENTS = {
    "…": "...", "–": "-", "—": "-", "−": "-", "×": "x", "·": ".", "•": "*", "±": "+/-", "≤": "<=", "≥": ">=", "≠": "!=",
    "≈": "~", "→": "->", "←": "<-", "√": "sqrt ", "‖": "||", "⟨": "<", "⟩": ">", "¹": "^1", "²": "^2", "³": "^3",
    "⁻": "^-", "₂": "_2", "✓": "+", "✗": "x", "’": "'", "‘": "'", "“": '"', "”": '"', "╱": "/", "⏎": "\\n", "\xa0": " ",
    "░": ".", "▒": "=", "▓": "%", "█": "#",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%",
    "Δ": "Delta", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "Σ": "sum ", "σ": "sigma", "φ": "phi",
}  # fmt: skip
"""ASCII replacements of all non-ASCII characters that posleak itself prints."""


def visible(text: str) -> str:
    r"""Escape control characters, so that a terminal shows them instead of interpreting them: `\x1b`."""
    return _UNSAFE.sub(lambda match: _escaped(ord(match[0])), text)


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # Python's encoding of a path byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def escape_surrogates(name: str) -> str:
    """Return the name with bytes that are not UTF-8 escaped, so that it can be written to a file."""
    return re.sub("[\ud800-\udfff]", lambda match: _escaped(ord(match[0])), name)


def visible_json(text: str) -> str:
    """Return equivalent JSON in which the characters that `visible` escapes are written as JSON escapes."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def ascii_fallback(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the output encoding lacks: posleak's own by ASCII equivalents, others by escapes.

    This is an error handler for `codecs.register_error`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_in_ascii(character) for character in error.object[error.start : error.end]), error.end


def _in_ascii(character: str) -> str:
    code = ord(character)
    if character in ASCII_EQUIVALENTS:
        return ASCII_EQUIVALENTS[character]
    if 0xD800 <= code <= 0xDFFF:
        return _escaped(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(error: BaseException, most: int = 400) -> str:
    """Return an error of another library in one line: its class and at most `most` characters of its message."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # the __str__ of a foreign exception may fail
        message = ""
    return f"{type(error).__name__}: {message[:most]}" if message else type(error).__name__


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest suitable unit: `1.3 GB`, `12 MB`, `0 bytes`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            number = count / factor
            return f"{number:.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"
    return f"{max(count, 0):.0f} bytes"
