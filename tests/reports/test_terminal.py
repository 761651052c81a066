"""What a terminal of any width shows: every label and every value, and no number that was cut."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rich.console import Group, RenderableType
from rich.text import Text

from benchmarks import Benchmark, BenchResult as Timed
from benchmarks.__main__ import bench_table
from benchmarks.timing import Spread
from posleak.analyses.advise.effects import advise
from posleak.analyses.claims.catalogue import ClaimResult, Finding, registry
from posleak.analyses.claims.examination import ClaimsRun
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.doctor.laws import Check
from posleak.analyses.origin.origin import origin
from posleak.analyses.trace.trace import Trace, traced
from posleak.cli.analyses import models_tables
from posleak.cli.sweep import balance_tables, plan_table, summary
from posleak.edits import parse_edits
from posleak.leakage import Estimate
from posleak.models import Subject, builtin
from posleak.reports.compare import compare
from posleak.reports.comparison_text import as_table
from posleak.reports.terminal.claims import advice_tables, claims_tables
from posleak.reports.terminal.model import doctor_tables, origin_tables
from posleak.reports.terminal.run import profile_table, run_tables, trace_tables
from posleak.runs.balance import Balance
from posleak.runs.conditions import Conditions
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.show.lines import PlainConsole, broken
from posleak.show.terminal import FittedTable, TableCell, table
from posleak.sweeps.cells import Cell, Guess
from posleak.sweeps.collect import BalanceRow, BalanceTable
from posleak.sweeps.state import CellStatus, State
from posleak.sweeps.sweep import Sweep
from support.families import tiny
from support.report_tiny import with_sink

NUMBER = re.compile(r"(?<![\w.])[−+×-]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[−-]?\d+)?[%k]?(?![\w]|\.\d)")
WIDE, WIDTHS = 200, (120, 80, 60, 40, 30)


@cache
def sink_subject() -> Subject:
    return Subject.of(with_sink(), name="tiny [bold]sink")


@cache
def source() -> Trace:
    return traced(Conditions(sink_subject(), MeasureSpec(length=64, prompts=8)), by_layer=True)


def ordinary_run() -> Run:
    return source().ordinary


def of_claims() -> list[RenderableType]:
    effects = [(0.394, 0.22, 0.5, "share removed"), (-18.39, -30.2, -9.1, "share removed"), (4.44, 3.52, 5.71, "times")]
    found = [Finding(*effect, n=16) for effect in effects]
    found.append(Finding.not_applicable("the model has no BOS, and its first token is an ordinary one"))
    chosen = {paper: zip(registry(paper), found, strict=False) for paper in ("position", "sinks")}
    results = {paper: [ClaimResult.about(*each) for each in some] for paper, some in chosen.items()}
    several = tuple(result for some in results.values() for result in some)
    selections = (tuple(results["position"]), several)
    return [item for some in selections for item in claims_tables(ClaimsRun(ordinary_run(), some))]


def of_doctor() -> list[RenderableType]:
    checks = (
        Check("parity", 3.2e-6, 1e-5, "of the largest logit", "the same logits as with the model's own attention"),
        Check("law.L2", math.nan, 0.05, "nats", "one token everywhere leaks through the mask only"),
        Check("floor.bfloat16", 0.0123, None, "nats²", "power that rounding alone makes"),
    )
    return list(doctor_tables(Diagnosis("tiny-llama", 96, 12, ordinary_run().record.calibration, checks)))


def of_balance() -> list[RenderableType]:
    cell, spec = (
        Cell("tiny-llama", MeasureSpec(length=64, prompts=8)),
        MeasureSpec(edits=parse_edits("window=16"), length=64),
    )
    removed = {"residual, all": Estimate(np.asarray(0.123), np.asarray(-0.456), np.asarray(0.789), 8)}
    balance = Balance.of(ordinary_run())
    rows = [
        BalanceRow(cell, "run", "float32", None, balance, {}),
        BalanceRow(replace(cell, spec=spec), "run", "float32", None, balance, removed),
    ]
    return list(balance_tables(BalanceTable("Does the rotation or the window decide?", rows, {})))


def of_sweep() -> list[RenderableType]:
    cells = [
        Cell("tiny-llama", MeasureSpec(edits=parse_edits(edits), seed=seed))
        for edits in ((), "window=16")
        for seed in (0, 1)
    ]
    states = [State.finished, State.failed, State.left_out, State.open]
    died = "its worker died 3 times without a word (signal 9)"
    why = ["", died, "the edit changes nothing", "No space left on device"]
    seen = [CellStatus(*each) for each in zip(cells, states, why, strict=True)]
    guesses = {cells[3].id: Guess(3_210_000_000, 4321.0, False)}
    found = Sweep("grid", "runs/grid", seen, (cells[0].id,), guesses=guesses)
    return [*plan_table(found), *summary(found)]


def of_bench() -> list[RenderableType]:
    spread, ratio = Spread(12.34, 11.98, 13.07, 5), Spread(1.234, 1.101, 1.357, 5)
    results = [
        Timed("posleak", 2048, 1, spread, ratio, 312.4, ratio_to_base=ratio, base="eager"),
        Timed("transformer-lens", 8192, 1, error="not enough memory: it needs 34.5 GB, the machine has 15.9 GB free"),
    ]
    machine = {"processor": "a processor with 2 cores at 2.40 GHz", "threads": 2}
    return [bench_table(Benchmark(ordinary_run().record.identity, results, machine))]


def of_profile() -> list[RenderableType]:
    stages = [{"stage": "forward", "seconds": 12.345, "share": 0.789, "entries": 3}]
    spent = {
        "stages": stages, "seconds": 15.6, "forward_share": 0.82, "measuring_seconds": 15.1,
        "forward_share_of_command": 0.79, "memory": {"peak_mb": 512.3, "planned_mb": 700.0},
    }  # fmt: skip
    return [profile_table(spent)]


def of_advice() -> list[RenderableType]:
    found = advise(sink_subject(), "random", groups=["rope", "scale"], edits="shift=0", length=64, prompts=4)
    return list(advice_tables(found))


KINDS: dict[str, Callable[[], list[RenderableType]]] = {
    "measure": lambda: list(run_tables(ordinary_run())),
    "trace": lambda: list(trace_tables(source())),
    "claims": of_claims,
    "origin": lambda: list(origin_tables(origin(sink_subject(), length=64, prompts=4, tokens=40))),
    "doctor": of_doctor,
    "models": lambda: list(models_tables(builtin.list_models())),
    "advise": of_advice,
    "balance": of_balance,
    "sweep": of_sweep,
    "compare": lambda: [as_table(compare([ordinary_run(), source().branches]))],
    "compare by head": lambda: [as_table(compare([ordinary_run(), source().branches], by="head"))],
    "bench": of_bench,
    "profile": of_profile,
}
"""What every command shows."""


def rendered(items: list[RenderableType], width: int) -> list[str]:
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=width)
    for item in items:
        console.print(item)
    return stream.getvalue().splitlines()


def tables(items: list[RenderableType]) -> Iterator[FittedTable]:
    for item in items:
        if isinstance(item, Group):
            yield from tables(list(item.renderables))
        elif isinstance(item, FittedTable):
            yield item


def said(text: str) -> str:
    """As one line, without what is said about the width itself."""
    return re.sub(r"intervals are left out: the terminal has \d+ columns, [^;]*;", "", " ".join(text.split()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_terminal_shows_everything_and_cuts_no_number(kind: str) -> None:
    items = KINDS[kind]()
    wide = set(NUMBER.findall(said("\n".join(rendered(items, WIDE)))))
    values = Counter(word for made in tables(items) for row in made.rows for c in row for word in c.text.plain.split())
    assert values, "there is a table"
    for width in WIDTHS:
        lines = rendered(items, width)
        assert max(map(len, lines)) <= width
        text = said("\n".join(lines))
        assert set(NUMBER.findall(text)) <= wide, width
        there = Counter(text.split())
        short = {word: count for word, count in values.items() if len(word) <= width - 4}
        missing = {word: count for word, count in short.items() if there[word] < count}
        assert not missing, width


def example() -> FittedTable:
    made = table(["layer", "total", "mask"], right=["layer"])
    for layer in range(2):
        made.add_row(str(layer), TableCell(Text("0.23"), "0.12–0.34"), TableCell(Text("1.05"), "0.98–1.12"))
    return made


def test_intervals_go_first_and_the_table_says_so() -> None:
    assert rendered([example()], 37)[1] == "    0  0.23 0.12–0.34  1.05 0.98–1.12"
    lines = rendered([example()], 36)
    assert lines[:3] == ["layer  total  mask", "    0  0.23   1.05", "    1  0.23   1.05"]
    note = " ".join(lines[3:])
    assert all(text in note for text in ("intervals are left out", "36 columns", " 37;", "--json"))


def test_then_the_table_is_turned_and_has_its_intervals_again() -> None:
    assert rendered([example()], 17)[:3] == ["layer 0", "  total 0.23", "    0.12–0.34"]
    assert rendered([example()], 17).count("    0.98–1.12") == 2


def test_a_text_column_is_wrapped_before_intervals_go() -> None:
    made = table(["why", "value"], wrap=["why"])
    made.add_row("a reason that is long and may be broken", TableCell(Text("0.23"), "0.12–0.34"))
    lines = rendered([made], 40)
    assert lines[1] == "a reason that is long     0.23 0.12–0.34"
    assert lines[2].strip() == "and may be broken"


@pytest.mark.parametrize("width", [60, 30, 20])
def test_a_number_stays_with_its_name_its_interval_and_its_unit(width: int) -> None:
    text = Text("early queries  mask 31% (20% … 41%)  sink .12 → .34 and 5 tokens, at least 1.2e-12 nats")
    lines = [line.plain for line in broken(text, width, indent=2)]
    assert max(map(len, lines)) <= width
    whole = "\n".join(lines)
    for piece in ("(20% … 41%)", ".12 → .34", "1.2e-12 nats") + (("mask 31% (20% … 41%)",) if width > 22 else ()):
        assert piece in whole


def test_a_word_that_is_too_long_is_broken_at_a_seam() -> None:
    lines = [line.plain for line in broken(Text("run runs/a-model-of-mine/conditions"), 20)]
    assert lines == ["run runs/a-model-of-", "mine/conditions"]


def test_the_command_line_obeys_the_width(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(str(tmp_path / "llama"))
    env = {**os.environ, "COLUMNS": "60", "OMP_NUM_THREADS": "1", "POSLEAK_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "posleak", "measure", "llama", "--length", "64", "--prompts", "8", "--out", "run"]
    shown = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    wide = said("\n".join(rendered(list(run_tables(Run.load(tmp_path / "run"))), WIDE)))
    assert set(NUMBER.findall(said(shown))) <= set(NUMBER.findall(wide))
    assert "the terminal has 60 columns" in " ".join(lines)
    names = next(line.split() for line in lines if line.split()[:1] == ["layer"])
    assert names[:5] == ["layer", "total", "mask", "drift", "sink"]
