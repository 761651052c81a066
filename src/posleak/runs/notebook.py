"""A run in a notebook: a few lines of HTML with the shares, their intervals, and where they come from."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from posleak.leakage import Estimate

    from .run import Run

COLOURS = {"mask": "#0072b2", "drift": "#e69f00", "sink": "#009e73", "scaling": "#d55e00"}


def compact_html(run: Run) -> str:
    """A heading, one bar and one line of numbers for early and for all queries."""
    record, spec, summary = run.record, run.record["spec"], run.summary
    prompts = f"n = {summary.prompts} prompts of {spec['length']} tokens"
    facts = " · ".join([prompts, spec["inputs"], record["inputs"]["first_token"]])
    rows = "".join(
        f"<tr><td style='text-align:left'>{queries}</td><td>{_bar(numbers.share)}</td>"
        + "".join(
            f"<td style='text-align:left'>{_share(name, numbers.share[name])}</td>" for name in _names(numbers.share)
        )
        + f"<td>{float(numbers.power['total'].value):.3g} nats²</td></tr>"
        for queries, numbers in summary.model.items()
    )
    edits = f" · edits: {escape(', '.join(spec['edits']))}" if spec["edits"] else ""
    return (
        f"<div><b>{escape(record['identity']['name'])}</b>: shares of position leakage{edits}<br>"
        f"<small>{escape(facts)}</small><table>{rows}</table></div>"
    )


def _names(shares: dict[str, Estimate]) -> list[str]:
    return [name for name in COLOURS if name in shares]


def _share(name: str, share: Estimate) -> str:
    if not np.isfinite(share.value):
        return f"{name} n.s."
    return f"{name} <b>{float(share.value):.0%}</b> <small>({float(share.low):.0%} … {float(share.high):.0%})</small>"


def _bar(shares: dict[str, Estimate]) -> str:
    """Positive shares as one bar; one that cancels leakage has no length."""
    sizes = {name: max(float(np.nan_to_num(shares[name].value)), 0.0) for name in _names(shares)}
    whole = sum(sizes.values()) or 1.0
    cells = "".join(
        f"<span style='display:inline-block;height:12px;width:{120 * size / whole:.0f}px;"
        f"background:{COLOURS[name]}'></span>"
        for name, size in sizes.items()
    )
    return f"<span style='white-space:nowrap;font-size:0'>{cells}</span>"
