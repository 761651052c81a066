"""Tables about a model itself: `posleak origin` and `posleak doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from posleak.show.lines import Prose, prose
from posleak.show.numbers import formatted, scientific, size
from posleak.show.terminal import Column, FittedTable, TableCell, spark, table

if TYPE_CHECKING:
    from posleak.analyses.doctor.doctor import Diagnosis
    from posleak.analyses.origin.origin import Origin
    from posleak.leakage import Estimate

COLUMNS = (
    "layer", "‖x_0‖", "alike", "body", "readers", "at 0", "writes", "spread", "along", "moved", "error", "−sink",
)  # fmt: skip
LEGEND = """\
‖x_0‖: norm before each layer; alike: mean cosine there among first tokens; body: the same among ordinary positions
readers: heads with mean a_r0 > {epsilon}, with interval; the next four are means over them
at 0: a_r0; writes: norm of a_r0 W_O v_0 over the norm of the output; spread: standard deviation of a_i0 over i; \
along: share of the variance of the output over i in the direction of W_O v_0
moved: relative change of states in the last quarter under another first token
error: mean error of the position probe on held-out prompts, in tokens, with interval; −sink: after removing the \
directions that sink-reading heads have written"""

VERDICT_STYLES = {"sound": "green", "by design": "yellow", "wrong": "red"}
MARKS = {
    "✓": "holds", "!": "violated by design of the model; the results are correct", "✗": "failed",
    "·": "measured, without a bound",
}  # fmt: skip


def origin_tables(origin: Origin) -> Iterator[RenderableType]:
    """Yield the heading, one line per analysis, one row per depth, and the legend."""
    setting = (
        f"{origin.prompts} prompts of {origin.length} random tokens · {origin.portrait.n} first tokens · "
        f"seed {origin.seed}\n{origin.inputs.first_token}"
    )
    facts = prose(" · ".join(origin.identity.facts), style="dim")
    yield Group(prose(f"{origin.identity.name}: position 0", style="bold"), facts, prose(setting, style="dim"))
    answers = FittedTable((Column(""), Column("", wraps=True, most=68)), gap=1)
    for answer in (_closed, _trajectory, _portrait, _readers, _fingerprint, _position):
        answers.add_row(Text(answer.__name__.lstrip("_"), style="bold"), answer(origin))
    yield answers
    yield _depths_table(origin)
    yield prose(LEGEND.format(epsilon=origin.reading.epsilon), style="dim", indent=2)


def _closed(origin: Origin) -> Text:
    closure = origin.closure
    mark = Text("✓ ", style="green") if closure.ok else Text("✗ ", style="red")
    verdict = "its state is the same in context and alone" if closure.ok else "its state depends on later tokens"
    mark.append(f"{verdict}: within {closure.worst:.1e}, {len(closure.per_layer)} depths")
    return mark.append(f" (bound {closure.bound:.0e}, n={closure.n})", style="dim")


def _trajectory(origin: Origin) -> Text:
    path = origin.trajectory
    text = Text(f"{spark(math.log(norm) if norm > 0 else math.nan for norm in path.norm)}  norm by depth (log)\n")
    peak, jump = int(np.argmax(np.nan_to_num(path.relative))), path.jump
    text.append(f"×{path.norm[jump] / path.norm[jump - 1]:.0f} in layer {jump - 1}; ")
    text.append(f"{size(path.norm[peak])} at depth {peak}, {path.relative[peak]:.0f} times a body state\n")
    text.append(f"one direction from depth {path.settles} to {path.leaves} (cosine > 0.99); ")
    middle = path.dimensions[(path.settles + path.leaves) // 2]
    kind = "massive" if middle[0].massive else "largest"
    shown = ", ".join(f"{d.index} ({d.share:.1%})" for d in middle[:3])
    return text.append(f"{kind} channel{'s' if len(middle) > 1 else ''} {shown} of ‖x_0‖²")


def _portrait(origin: Origin) -> Text:
    portrait, path = origin.portrait, origin.trajectory
    at = int(np.argmax(np.nan_to_num(portrait.among.value[path.settles : path.leaves + 1], nan=-1))) + path.settles
    text = Text(f"{spark(portrait.among.value, 0, 1)}  cosine among first tokens\n")
    text.append(f"{portrait.among.value[0]:.2f} at the embedding, {formatted(portrait.among[at], '.3f')} at depth {at}")
    text.append(f"\n  to {origin.reference.name} {formatted(portrait.to_reference[at], '.3f')}; ")
    text.append(f"among body states {path.body.alike[at]:.3f}\n")
    text.append(f"channel {portrait.top[at]} is the largest for {portrait.top_share[at]:.0%} of them, ")
    text.append(f"massive for {portrait.massive_share[at]:.0%}")
    return text.append(f" (n={portrait.n})", style="dim")


def _readers(origin: Origin) -> Text:
    reading = origin.reading
    text = Text(f"{formatted(reading.readers, '.0f')} of {reading.of} heads read it: ")
    text.append(f"mean a_r0 > {reading.epsilon}")
    text.append(f" (n={origin.prompts})", style="dim")
    if reading.heads:
        text.append(f"\n‖a_r0 W_O v_0‖ is {formatted(reading.mean['written'], '.0%')} of the norm of their output")
        text.append(f"\na_i0 varies over i by {formatted(reading.mean['spread'], '.2f')} (standard deviation); ")
        text.append(f"\n{formatted(reading.mean['positional'], '.0%')} of that variance is the same in every prompt")
    if reading.space != "output":
        text.append("\nW_O was not found: measured on value vectors", style="yellow")
    return text


def _fingerprint(origin: Origin) -> Text:
    marks = origin.fingerprint
    if marks.same.worst is None:
        return Text("no head reads position 0", style="dim")
    text = Text(f"W_O v_0, same first token: 1 − cosine ≤ {max(marks.same.worst, 1e-16):.0e}")
    text.append(f" (n={marks.same.n})", style="dim")
    text.append(f"\nanother first token: cosine {formatted(marks.different, '.3f')}")
    text.append(f" (n={marks.different.n})", style="dim")
    return text.append(f", late states change by {formatted(marks.carried[-1], '.0%')}")


def _position(origin: Origin) -> Text:
    probe = origin.position_probe
    assert probe is not None
    error, best = probe.plain.error, int(np.argmin(probe.plain.error.value))
    text = Text(f"{spark(-error.value, -probe.chance, 0)}  position decoded from the states\n")
    text.append(f"error {formatted(error[best], '.1f')} tokens at depth {best}, R² {probe.plain.r2.value[best]:.2f}")
    text.append(f" (chance {probe.chance:.1f})", style="dim")
    if math.isnan(probe.overall.value):
        return text
    text.append(f"\n{formatted(probe.overall, '+.2f')} tokens without the directions written by sink-reading heads,")
    return text.append(" compared with as many random directions, mean over depths")


def _depths_table(origin: Origin) -> FittedTable:
    """Return one row per layer: the state that it reads, its heads, and the probe on that state."""
    rows = table(COLUMNS, right=COLUMNS, gap=1)
    depths = len(origin.trajectory.norm)
    probe, marks = origin.position_probe, origin.fingerprint
    assert probe is not None
    for depth in range(depths):
        alike, body = origin.portrait.among.value[depth], origin.trajectory.body.alike[depth]
        state = (size(origin.trajectory.norm[depth]), f"{alike:.2f}", f"{body:.2f}")
        moved = f"{marks.carried.value[depth]:.0%}"
        after = f"{probe.projected.error.value[depth]:.1f}" if probe.rank[depth] else "–"
        name = str(depth) if depth < depths - 1 else "end"
        rows.add_row(name, *state, *_heads(origin, depth), moved, _error(probe.plain.error[depth]), after)
    return rows


def _heads(origin: Origin, layer: int) -> Sequence[TableCell | str]:
    """Return the columns readers, at 0, writes, spread and along of one layer."""
    reading = origin.reading
    counts = [call.readers for call in reading.calls if call.layer == layer]
    if not counts:
        return [""] * 5
    heads = [head for head in reading.heads if head.layer == layer]
    low, high = sum(count.low for count in counts), sum(count.high for count in counts)
    count = TableCell(Text(f"{len(heads)}"), "" if math.isnan(low) else f"{low:.0f}–{high:.0f}")
    if not heads:
        return [count, *["–"] * 4]
    means = [np.mean([getattr(head, name).value for head in heads]) for name in ("at_0", "written", "spread", "along")]
    return [count, *(f"{mean:.2f}" for mean in means)]


def _error(estimate: Estimate) -> TableCell:
    """Return `23.1 22–24`."""
    interval = "" if math.isnan(estimate.low) else f"{estimate.low:.0f}–{estimate.high:.0f}"
    return TableCell(Text(f"{estimate.value:.1f}"), interval)


def doctor_tables(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Yield the verdict, one row per check, and notes."""
    verdict = (diagnosis.sentence, VERDICT_STYLES[diagnosis.verdict.value])
    prompts = f"({diagnosis.prompts} prompts of {diagnosis.length} tokens; positions: {diagnosis.positions})"
    yield Prose(Text.assemble((diagnosis.model, "bold"), ": ", verdict, " ", (prompts, "dim")))
    checks = table(("", "check", "value", "bound", "unit", "why"), right=("value", "bound"), wrap=("unit", "why"))
    for check in diagnosis.checks:
        mark = Text(check.mark, style="dim" if check.bound is None else VERDICT_STYLES[check.verdict.value])
        checks.add_row(mark, check.id, scientific(check.value), scientific(check.bound), check.unit, check.why)
    yield checks
    for note in diagnosis.notes:
        yield prose(f"note: {note}", style="yellow")
    marks = {check.mark for check in diagnosis.checks}
    yield prose("  ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marks), style="dim")
