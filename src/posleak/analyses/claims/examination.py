"""Tests all claims of a paper on one model. The baseline and each condition are ordinary runs. With a folder, finished
runs and findings are reused.

run.json …    the baseline;  conditions/: one run for each edit
claims.json   the findings so far, for all papers
origin.json   the analysis of position 0 of the same model, and origin.nc with the arrays for figures
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posleak.analyses.origin.origin import read_origin, write_origin
from posleak.defaults import TRACED
from posleak.errors import PosleakError, RunError, is_recoverable, warn
from posleak.files import Sealed
from posleak.inputs import Inputs
from posleak.models import AnyModel
from posleak.papers import PAPERS, POSITION, Paper, named_papers
from posleak.runs.run import Run, describe_run
from posleak.show.unexpected import describe_unexpected
from posleak.signatures import checked
from posleak.stopwatch import stage
from posleak.typed import plain

from .catalogue import ENOUGH, Claim, ClaimResult, Finding, registry
from .lab import CLAIMS_FILE, Lab


@dataclass(frozen=True)
class Findings:
    """claims.json: the results for the baseline with this digest."""

    digest: str
    claims: tuple[ClaimResult, ...]


FINDINGS = Sealed("posleak claims", 1, Findings, "delete it and run `posleak claims` again")


@dataclass(frozen=True, repr=False)
class ClaimsRun:
    """The baseline and one result per claim of the chosen papers and of your own: effect, interval and verdict."""

    run: Run
    results: tuple[ClaimResult, ...]

    def __repr__(self) -> str:
        verdicts = Counter(result.verdict.value for result in self.results)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        return f"ClaimsRun({len(self.results)} claims: {counted}; {describe_run(self.run)})"

    @property
    def papers(self) -> tuple[Paper, ...]:
        """The papers whose claims were tested."""
        return tuple(PAPERS[name] for name in PAPERS if any(result.paper == name for result in self.results))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `posleak claims --json` (docs/json.md)."""
        record = self.run.record
        document: dict[str, Any] = plain(
            {
                "model": self.run.name, "identity": record.identity, "positions": record.positions,
                "inputs": record.inputs,
                "length": record.spec.length, "prompts": record.spec.prompts, "seed": record.spec.seed,
                "calibration": record.calibration, "papers": self.papers, "claims": self.results,
                "warnings": record.warnings,
                "run": None if self.run.path is None else str(self.run.path),
            }
        )  # fmt: skip
        return document


@checked
def claims(
    subject: AnyModel,
    inputs: Inputs = "random",
    *,
    paper: str = POSITION,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    out: str | Path | None = None,
    root: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> ClaimsRun:
    """Test all claims of a paper on a model; each result has an effect, an interval and a verdict.

    subject     a Subject, a transformers model, or anything that `load` accepts
    inputs      source of the prompts, or your own prompts, as in `measure`
    paper       position, sinks, wavelets, posleak, a paper of a plugin, several of these separated by commas, or all
                of them except posleak
    length      tokens per prompt (default 256); your own prompts are truncated to `length`, as in `measure`
    prompts     number of prompts to use (default 16, or all of your own prompts)
    seed        random seed for the prompts
    bos         token at position 0, as in `measure`
    out         folder for the runs and findings; finished ones are reused, and each new finding is written at once
    root        parent of the folder if `out` is not given, as in `measure`
    fresh       discard results in the folder and test again
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.claims("smollm2-135m", paper="sinks").results`
    """
    named_papers(paper)
    lab = Lab.of(
        subject, inputs, length=length, prompts=prompts, default_length=TRACED, seed=seed, bos=bos, out=out,
        root=root, fresh=fresh, max_memory=max_memory, progress=progress,
    )  # fmt: skip
    return examined(lab, paper)


def examined(lab: Lab, paper: str = POSITION) -> ClaimsRun:
    """Test the claims of a paper without a finding in the lab's folder; return the findings of all its claims.

    Findings about other papers stay in the folder.
    """
    with lab.writing():
        chosen = registry(paper)
        if lab.spec.prompts < ENOUGH:
            warn(f"{lab.spec.prompts} prompts are too few for a verdict: use --prompts {ENOUGH} or more")
        run, folder = lab.measure_baseline(metrics=any(claim.metrics for claim in chosen)), lab.folder
        stored = () if folder is None else read_findings(folder, run.record.digest)
        results = {result.id: result for result in stored}
        for result in examine(lab, [claim for claim in chosen if claim.id not in results]):
            results[result.id] = result
            if folder is not None:
                FINDINGS.write(folder / CLAIMS_FILE, Findings(run.record.digest, _ordered(results, registry(None))))
        if folder is not None and any(claim.paper == POSITION for claim in chosen):
            _store_origin(lab, folder, run.record.digest)
        return ClaimsRun(run, _ordered(results, chosen))


def examine(lab: Lab, chosen: Sequence[Claim] | None = None) -> Iterator[ClaimResult]:
    """Test claims one by one and yield each result.

    A claim whose test raises an error caused by the model or by its input is not applicable, with the error as reason.
    """
    for claim in registry() if chosen is None else chosen:
        lab.progress(f"claim {claim.number}: {claim.title}")
        try:
            with stage(claim.id):
                finding = lab.tested(claim.test)
        except PosleakError as error:
            finding = Finding.not_applicable(str(error))
        except Exception as error:
            if not is_recoverable(error):
                raise
            finding = Finding.not_applicable(describe_unexpected(error))
        yield ClaimResult.about(claim, finding)


def _ordered(results: dict[str, ClaimResult], chosen: Sequence[Claim]) -> tuple[ClaimResult, ...]:
    return tuple(results[claim.id] for claim in chosen if claim.id in results)


def read_findings(folder: Path, digest: str) -> tuple[ClaimResult, ...]:
    """Return the folder's findings about the run with this digest, if it has any."""
    if not (folder / CLAIMS_FILE).is_file():
        return ()
    findings = FINDINGS.read(folder / CLAIMS_FILE)
    return findings.claims if findings.digest == digest else ()


def _store_origin(lab: Lab, folder: Path, digest: str) -> None:
    """Write the analysis of position 0 next to the run, unless it is there undamaged or the model is not supported."""
    with suppress(RunError):
        stored = read_origin(folder)
        if stored is not None and stored.digest == digest:
            return
    try:
        origin = lab.origin
    except PosleakError as error:
        lab.progress(f"position 0 is skipped: {error.what}")
        return
    write_origin(folder, digest, origin, lab.tokens.vocabulary.spell)
