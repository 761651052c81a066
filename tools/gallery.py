"""Generate the gallery: offline pages of real results, their index, and their numbers for other pages and tests.

python -m tools.gallery docs/gallery --runs runs/gallery
python -m tools.gallery docs/gallery --runs runs/gallery --only zoo

Results are measured with the defaults of the commands, except for the length in small models. Results in the folder of
runs are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posleak as pl
from posleak.analyses.claims.catalogue import ClaimResult
from posleak.analyses.claims.examination import ClaimsRun
from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.axes import PARTS
from posleak.errors import InputError, UnsupportedError
from posleak.files import write_atomically, write_json
from posleak.leakage import Estimate
from posleak.leakage.sampled import LabelledEstimate
from posleak.papers import ALL
from posleak.reports.gather import DOCTOR_FILE
from posleak.runs.run import Run
from posleak.show.numbers import NAN, estimate
from posleak.typed import plain

from .made import row

NUMBERS, INDEX = "numbers.json", "index.md"
ZOO = (
    "zoo-text-rope", "zoo-text-window", "zoo-backcopy-rope", "zoo-backcopy-base", "zoo-backcopy-ntk",
    "zoo-backcopy-partial", "zoo-backcopy-nope", "zoo-backcopy-learned", "zoo-backcopy-window",
    "zoo-backcopy-window-first", "zoo-backcopy-sink-logit", "zoo-backcopy-no-bos",
)  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One page: its models, what is measured in addition to the trace, and a description."""

    name: str
    models: tuple[str, ...]
    about: str
    claims: bool = False
    by_layer: bool = False
    length: int = 256


ENTRIES = (
    Entry("smollm2-135m", ("smollm2-135m",),
          "SmolLM2-135M-Instruct: rotary positions, a BOS, full attention. The page has every section.",
          claims=True, by_layer=True),
    Entry("gemma3-270m", ("gemma3-270m",),
          "gemma-3-270m: windows of 512 tokens in five of six layers, which hide nothing of prompts that are shorter; "
          "[architectures](../architectures.md) has longer ones, where much changes.",
          claims=True),
    Entry("qwen2.5-coder-1.5b", ("qwen2.5-coder-1.5b",),
          "Qwen2.5-Coder-1.5B-Instruct: larger, with a large rotary base. It was trained without a BOS; here the token "
          "that its config names as one stands first, as `--bos auto` has it."),
    Entry("zoo", ZOO,
          "The twelve small models that come with posleak, side by side; each differs from `rope` in one thing "
          "([the zoo](../zoo.md)). The one without any positions (`nope`) has only masks to tell position by: it leaks "
          "most, and nearly all of it is *earlier*. A leakage below 0 is one of 0, with noise.", length=128),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Results of one model; a run if a trace is not defined."""

    trace: Trace | Run
    claims: ClaimsRun | None = None


def measured(entry: Entry, runs: Path, say: Say) -> list[Found]:
    """Measure everything that the page shows, in folders below `runs`."""
    found: list[Found] = []
    for name in entry.models:
        subject, folder = pl.load(name, progress=say), runs / name
        asked: dict[str, Any] = {
            "length": entry.length,
            "prompts": 16,
            "out": folder,
            "progress": say,
        }
        try:
            trace: Trace | Run = pl.trace(subject, by_layer=entry.by_layer, **asked)
        except (UnsupportedError, InputError):  # learned positions: there is no place before the first one
            trace = pl.measure(subject, **{**asked, "progress": None})
        claims = pl.claims(subject, paper=ALL, **asked) if entry.claims else None
        if entry.claims:
            write_json(folder / DOCTOR_FILE, plain(pl.doctor(subject)))
        found.append(Found(trace, claims))
    return found


def numbers(found: Sequence[Found]) -> dict[str, Any]:
    """Return the shares, the leakage and the claims of each model, with intervals, as JSON."""
    said: dict[str, Any] = {}
    for each in found:
        run = each.trace.ordinary if isinstance(each.trace, Trace) else each.trace
        shares = {name: run.summary.model["all"].share[name] for name in PARTS}
        if isinstance(each.trace, Trace):
            shares |= {name: each.trace.model["all"].share[name] for name in SOURCES}
        said[run.name] = plain(
            {"leakage": run.summary.model["all"].power["total"], "shares": shares,
             "facts": [*run.record.model_facts, *run.record.facts]}
            | ({} if each.claims is None else {"claims": {result.id: _kept(result) for result in each.claims.results}})
        )  # fmt: skip
    return said


def _kept(result: ClaimResult) -> dict[str, Any]:
    return {
        "value": result.effect, "low": result.low, "high": result.high, "n": result.n, "unit": result.unit,
        "verdict": result.verdict, "reason": result.reason,
    }  # fmt: skip


def index(kept: dict[str, dict[str, Any]]) -> str:
    """Return the index page, from the stored numbers."""
    lines = [
        "# Gallery", "",
        "Results of real models, as `posleak report` draws them: pages that open without a network, to click through.",
        "They are made by `make gallery`; a test compares their numbers.", "",
    ]  # fmt: skip
    for entry in ENTRIES:
        if entry.name in kept:
            prompts = f"{entry.about} Prompts of {entry.length} tokens."
            lines += [f"## [{entry.name}]({entry.name}.html)", "", prompts, "",
                      *_table(kept[entry.name]), ""]  # fmt: skip
    lines += [
        "Leakage: power in nats², all queries, mean over heads and layers. Shares of it: *earlier*, *here* and "
        "*origin* say where it comes from, *mask*, *drift* and *sink* where it is read "
        "([definitions](../definitions.md)). 95% jackknife intervals over n = 16 prompts of random tokens; – where a "
        "number is not defined.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _table(of: dict[str, Any]) -> list[str]:
    """Return two tables, one per decomposition."""
    lines = [row("where it comes from", "leakage", *SOURCES), row(*["---"] * (2 + len(SOURCES)))]
    lines += [row(name, _cell(said["leakage"]), *_shares(said, SOURCES)) for name, said in of.items()]
    lines += ["", row("where it is read", *PARTS), row(*["---"] * (1 + len(PARTS)))]
    return [*lines, *(row(name, *_shares(said, PARTS)) for name, said in of.items())]


def _shares(said: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [_cell(said["shares"].get(name), "share") for name in names]


def _cell(kept: Mapping[str, Any] | None, unit: str = "") -> str:
    """Return a number with its interval, joined by non-breaking spaces."""
    return NAN if kept is None else estimate(read(kept), unit).replace(" … ", "\u00a0…\u00a0")


def read(kept: Mapping[str, Any]) -> Estimate:
    """Return an estimate from JSON, in which undefined values are null."""
    return LabelledEstimate.from_row(kept).estimate


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the gallery.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the measurements")
    parser.add_argument("--only", nargs="*", default=[entry.name for entry in ENTRIES], help="names of pages")
    options = parser.parse_args(arguments)
    for entry in ENTRIES:
        if entry.name in options.only:
            made(entry, options.folder, options.runs)


def made(entry: Entry, folder: Path, runs: Path) -> None:
    """Write one page with its numbers, and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    found = measured(entry, runs, lambda what: print(f"{entry.name}: {what}", flush=True))
    pl.report([runs / name for name in entry.models], folder / f"{entry.name}.html")
    kept = json.loads((folder / NUMBERS).read_text(encoding="utf-8")) if (folder / NUMBERS).exists() else {}
    kept[entry.name] = numbers(found)
    write_json(folder / NUMBERS, kept)
    write_atomically(folder / INDEX, lambda path: path.write_text(index(kept), encoding="utf-8"))


if __name__ == "__main__":
    main()
