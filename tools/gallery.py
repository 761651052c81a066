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
from posleak.analyses.circuit.circuit import Circuit
from posleak.analyses.claims.catalogue import ClaimResult
from posleak.analyses.claims.examination import ClaimsRun
from posleak.analyses.trace.trace import CAUSES, Trace
from posleak.axes import LEFT, PARTS
from posleak.errors import InputError, UnsupportedError
from posleak.files import write_atomically, write_json
from posleak.leakage import Estimate
from posleak.leakage.sampled import LabelledEstimate
from posleak.leakage.summary import EVEN, Decomposition
from posleak.papers import ALL, OWN_CLAIMS
from posleak.reports.gather import DOCTOR_FILE
from posleak.runs.run import Run
from posleak.show.numbers import NAN, estimate
from posleak.typed import plain

from .markdown import table

NUMBERS, INDEX = "numbers.json", "index.md"
ZOO = (
    "zoo-text-rope", "zoo-text-window", "zoo-backcopy-rope", "zoo-backcopy-base", "zoo-backcopy-ntk",
    "zoo-backcopy-partial", "zoo-backcopy-nope", "zoo-backcopy-learned", "zoo-backcopy-window",
    "zoo-backcopy-window-first", "zoo-backcopy-sink-logit", "zoo-backcopy-no-bos",
)  # fmt: skip

SHOWN = (*CAUSES[1:], LEFT)
"""Parts by source; none of the models has a recurrent state."""

OnStatus = Callable[[str], None]
"""Callback that receives a status line."""


@dataclass(frozen=True)
class Entry:
    """One page: its models, what is measured in addition to the trace, and a description."""

    name: str
    models: tuple[str, ...]
    about: str
    claims: bool = False
    by_layer: bool = False
    circuit: bool = False
    length: int = 256
    prompts: int = 16


ENTRIES = (
    Entry("smollm2-135m", ("smollm2-135m",),
          "SmolLM2-135M-Instruct: rotary positions, a BOS, full attention. The page has every section.",
          claims=True, by_layer=True),
    Entry("gemma3-270m", ("gemma3-270m",),
          "gemma-3-270m: windows of 512 tokens in five of six layers, longer than these prompts, so that all keys are "
          "visible; [architectures](../architectures.md) has longer prompts, with very different results.",
          claims=True),
    Entry("qwen2.5-coder-1.5b", ("qwen2.5-coder-1.5b",),
          "Qwen2.5-Coder-1.5B-Instruct: larger, with a large RoPE base. It was trained without a BOS token; here every "
          "prompt starts with the BOS token of its config (`--bos auto`). 8 prompts.", prompts=8),
    Entry("circuit", ("smollm2-135m", "gemma3-270m"),
          "The circuit of position: the heads that write position, the direction that carries it and the heads that "
          "read it ([tutorial](../tutorials/circuit.ipynb)), and our own claims about it. One half of 48 prompts ranks "
          "the heads; the other half, n = 24, evaluates the ranking.",
          circuit=True, length=128, prompts=48),
    Entry("zoo", ZOO,
          "The twelve small models that ship with posleak, side by side; each differs from `rope` in one setting "
          "([the zoo](../zoo.md)). The model without position encoding (`nope`) can infer position from masks only: it "
          "leaks most, and nearly all of it is *earlier*. A negative leakage is not significantly different from zero.",
          length=128),
)  # fmt: skip


@dataclass(frozen=True)
class ModelResults:
    """Results of one model. `trace`: a run if a trace is not defined."""

    trace: Trace | Run
    claims: ClaimsRun | None = None
    circuit: Circuit | None = None


def measure(entry: Entry, runs: Path, progress: OnStatus) -> list[ModelResults]:
    """Measure everything that the page shows, in folders below `runs`."""
    results: list[ModelResults] = []
    for name in entry.models:
        subject, folder = pl.load(name, progress=progress), folder_of(entry, name, runs)
        options: dict[str, Any] = {"length": entry.length, "prompts": entry.prompts, "out": folder}
        if entry.circuit:
            circuit = pl.circuit(subject, progress=progress, **options)
            evaluated = options | {"prompts": circuit.trace.ordinary.prompts}
            own_claims = pl.claims(subject, paper=OWN_CLAIMS, progress=progress, **evaluated)
            results.append(ModelResults(circuit.trace, own_claims, circuit))
            continue
        try:
            trace: Trace | Run = pl.trace(subject, by_layer=entry.by_layer, progress=progress, **options)
        except (UnsupportedError, InputError):  # a borrowed context is not defined for learned positions
            trace = pl.measure(subject, **options)
        claims = pl.claims(subject, paper=ALL, progress=progress, **options) if entry.claims else None
        if entry.claims:
            write_json(folder / DOCTOR_FILE, plain(pl.doctor(subject)))
        results.append(ModelResults(trace, claims))
    return results


def folder_of(entry: Entry, name: str, runs: Path) -> Path:
    """Return the folder of a model's measurements."""
    return runs / (f"{name}-circuit" if entry.circuit else name)


def numbers(results: Sequence[ModelResults]) -> dict[str, Any]:
    """Return the shares, the leakage and the claims of each model, with intervals, as JSON.

    Evenly weighted shares are there where they lead to another conclusion.
    """
    by_model: dict[str, Any] = {}
    for each in results:
        run = each.trace.ordinary if isinstance(each.trace, Trace) else each.trace
        read, traced = run.summary.model["all"], each.trace.model["all"] if isinstance(each.trace, Trace) else None
        model = _shares_and_total(read, traced) | {"facts": [*run.record.model_facts, *run.record.facts]}
        if read.disagreement(PARTS) or (traced is not None and traced.disagreement(SHOWN)):
            model["even"] = _shares_and_total(read.norms[EVEN], None if traced is None else traced.norms[EVEN])
        if each.claims is not None:
            model["claims"] = {result.id: _claim_row(result) for result in each.claims.results}
        if each.circuit is not None:
            model["sentences"] = each.circuit.sentences
        by_model[run.name] = plain(model)
    return by_model


def _shares_and_total(read: Decomposition, traced: Decomposition | None) -> dict[str, Any]:
    """Return the leakage and all shares of a model in one norm."""
    shares = {name: read.share[name] for name in PARTS}
    shares |= {} if traced is None else {name: traced.share[name] for name in SHOWN}
    return {"leakage": read.power["total"], "shares": shares}


def _claim_row(result: ClaimResult) -> dict[str, Any]:
    return {
        "value": result.effect, "low": result.low, "high": result.high, "n": result.n, "unit": result.unit,
        "verdict": result.verdict, "even_verdict": result.even_verdict, "reason": result.reason,
    }  # fmt: skip


def index(stored: dict[str, dict[str, Any]]) -> str:
    """Return the index page, from the stored numbers by page and model."""
    lines = [
        "# Gallery", "",
        "Results of real models as interactive pages of `posleak report`, which need no network. They are generated by",
        "`make gallery`; a test checks their numbers.", "",
    ]  # fmt: skip
    for entry in ENTRIES:
        if entry.name in stored:
            prompts = f"{entry.about} Prompts of {entry.length} tokens."
            said = [f"- {name}: {' '.join(model['sentences'])}" for name, model in stored[entry.name].items()
                    if "sentences" in model]  # fmt: skip
            lines += [f"## [{entry.name}]({entry.name}.html)", "", prompts, "", *said, *[""][: len(said)],
                      *_tables(stored[entry.name]), ""]  # fmt: skip
    lines += [
        "Leakage: power in nats², all queries, mean over heads and layers, weighted by attention; evenly weighted if "
        "that leads to another conclusion. Shares of the leakage by source (*earlier*, *here*, *origin*, and what is "
        "*left*) and by part (*mask*, *drift*, *sink*), see [definitions](../definitions.md). 95% jackknife intervals "
        "over prompts of random tokens, n = 16 unless stated otherwise; –: not defined, since the leakage is not "
        "significantly above 0.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _tables(models: dict[str, Any]) -> list[str]:
    """Return two tables, one per decomposition; evenly weighted numbers are shown where the norms disagree."""
    norms = [
        (title, numbers)
        for name, own in models.items()
        for title, numbers in ((name, own), (f"{name}, evenly weighted", own.get("even")))
        if numbers is not None
    ]
    sources = [(title, _cell(numbers["leakage"]), *_shares(numbers, SHOWN)) for title, numbers in norms]
    parts = [(title, *_shares(numbers, PARTS)) for title, numbers in norms]
    return [
        *table(("where it comes from", "leakage", *SHOWN), sources), "",
        *table(("where it is read", *PARTS), parts),
    ]  # fmt: skip


def _shares(model: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [_cell(model["shares"].get(name), "share") for name in names]


def _cell(stored: Mapping[str, Any] | None, unit: str = "") -> str:
    """Return a number with its interval, joined by non-breaking spaces."""
    return NAN if stored is None else estimate(read_estimate(stored), unit).replace(" … ", "\u00a0…\u00a0")


def read_estimate(stored: Mapping[str, Any]) -> Estimate:
    """Return an estimate from JSON, in which undefined values are null."""
    return LabelledEstimate.from_row(stored).estimate


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the gallery.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the measurements")
    parser.add_argument("--only", nargs="*", default=[entry.name for entry in ENTRIES], help="names of pages")
    options = parser.parse_args(arguments)
    for entry in ENTRIES:
        if entry.name in options.only:
            generate(entry, options.folder, options.runs)


def generate(entry: Entry, folder: Path, runs: Path) -> None:
    """Write one page with its numbers, and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    results = measure(entry, runs, lambda status: print(f"{entry.name}: {status}", flush=True))
    pl.report([folder_of(entry, name, runs) for name in entry.models], folder / f"{entry.name}.html")
    stored = json.loads((folder / NUMBERS).read_text(encoding="utf-8")) if (folder / NUMBERS).exists() else {}
    stored[entry.name] = numbers(results)
    write_json(folder / NUMBERS, stored)
    write_atomically(folder / INDEX, lambda path: path.write_text(index(stored), encoding="utf-8"))


if __name__ == "__main__":
    main()
