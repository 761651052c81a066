"""Compare JSON output with the tables of docs/json.md."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SAME = {"identity", "inputs", "calibration"}
"""Objects that are the same for every command and documented once."""

FREE: dict[str, set[str]] = {
    "measure": {"identity.rotary", "metrics.frames[]", "metrics.layers", "metrics.depths"},
    "trace": {*SAME, "by_layer"},
    "circuit": {
        *SAME,
        "positions",
        "attribution.overlap",
        "writers[].alone",
        "writers[].even",
        "removed[].others",
        "removed[].random",
        "removed[].difference",
        "removed[].even",
        "erasure[].random",
    },
    "advise": {
        "identity",
        "inputs",
        "baseline.power.total",
        "baseline.power.mask",
        "baseline.power.residual",
        "baseline.loss",
        "settings[].leakage",
        "settings[].relative",
        "settings[].loss",
        "settings[].sure",
        "settings[].even",
        "baseline.even.power",
        "left_out",
    },
    "claims": {*SAME, "claims[].details", "claims[].edited"},
    "origin": {*SAME, "closure", "trajectory", "portrait", "reading", "fingerprint", "position_probe"},
    "sweep": {"balance.rows[].balance", "balance.rows[].removed", "balance.left_out"},
    "collect": {"varied", "balance.rows[]", "balance.left_out"},
    "bench": {"identity", "versions"},
    "zoo measure": {
        "quantities",
        "tables[].trainings[]",
        "tables[].verdicts[].details",
        "tables[].comparisons[].left_out",
        "tables[].incomparable",
    },
}
"""Objects whose keys depend on the model, or that the page describes in prose."""


def documented(command: str) -> set[str]:
    """Return the keys in the tables of one section of docs/json.md, with braces expanded."""
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    section = re.split(rf"^## {command}$", page, flags=re.M)[1].split("\n## ")[0]
    keys = re.findall(r"^\| `([^`]+)` \|", section, flags=re.M)
    return {key for row in keys for key in expanded(row)}


def expanded(text: str) -> Iterator[str]:
    """`a.{b,c}` -> a.b and a.c"""
    pieces = [piece.strip("{}").split(",") if piece.startswith("{") else [piece] for piece in _PIECES.findall(text)]
    return ("".join(choice) for choice in itertools.product(*pieces))


_PIECES = re.compile(r"\{[^}]*\}|[^{]+")


def produced(value: Any, free: set[str], path: str = "") -> Iterator[str]:
    """Return the paths of all values that are not objects; a list of scalars is one value."""
    if isinstance(value, dict) and path not in free:
        for key, item in value.items():
            yield from produced(item, free, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from produced(item, free, f"{path}[]")
    else:
        yield path
