"""Tests every claim of a paper on one subject, into a folder. The baseline and each condition are ordinary runs; what
the folder has already is not done again.

run.json …    the baseline;  conditions/: a run for every edit
claims.json   findings so far, of all papers that were asked for
origin.json   position 0 of the same subject, and origin.nc with the arrays that figures need
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posleak.analyses.origin.store import read_origin, write_origin
from posleak.errors import PosleakError, RunError, is_recoverable, warn
from posleak.files import Sealed
from posleak.inputs import Inputs
from posleak.models import AnyModel
from posleak.papers import ALL, PAPERS, POSITION, Paper, named_papers
from posleak.runs.request import resolve_request
from posleak.runs.run import Run, said
from posleak.show.unexpected import describe_unexpected
from posleak.signatures import checked
from posleak.stopwatch import stage
from posleak.typed import plain

from .catalogue import Claim, ClaimResult, registry
from .finding import ENOUGH, Finding
from .lab import CLAIMS_FILE, Lab

LENGTH, PROMPTS = 256, 16


@dataclass(frozen=True)
class Findings:
    """claims.json: what was found about the run with this digest."""

    digest: str
    claims: tuple[ClaimResult, ...]


FINDINGS = Sealed("posleak claims", 1, Findings, "delete it and start `posleak claims` again")


@dataclass(frozen=True, repr=False)
class ClaimsRun:
    """The baseline, and what was found: one result per claim, with its effect, interval and verdict.

    The results are those of the papers that were asked for, and of claims of your own."""

    run: Run
    results: tuple[ClaimResult, ...]

    def __repr__(self) -> str:
        verdicts = Counter(result.verdict.value for result in self.results)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        return f"ClaimsRun({len(self.results)} claims: {counted}; {said(self.run)})"

    @property
    def papers(self) -> tuple[Paper, ...]:
        """The papers whose claims were tested."""
        return tuple(PAPERS[name] for name in PAPERS if any(result.paper == name for result in self.results))

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak claims --json`."""
        record = self.run.record
        found: dict[str, Any] = plain(
            {
                "model": self.run.name, "identity": record.identity, "positions": record.positions,
                "inputs": record.inputs,
                "length": record.spec.length, "prompts": record.spec.prompts, "seed": record.spec.seed,
                "calibration": record.calibration, "papers": self.papers, "claims": self.results,
                "warnings": record.warnings,
                "run": None if self.run.path is None else str(self.run.path),
            }
        )  # fmt: skip
        return found


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
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> ClaimsRun:
    """Test every claim of a paper on a subject: each gets an effect, an interval and a verdict.

    subject     a Subject, a model of transformers, or what `load` takes
    inputs      what it reads, as in `measure`: a source, or prompts that you have
    paper       whose claims: position, sinks, wavelets, one of a plugin's, or all of them (all)
    length      tokens per prompt: 256; prompts that you have are cut to it, or must be equally long
    prompts     how many: 16; of prompts that you have the first ones, or all
    seed        of the tokens
    bos         position 0, as in `measure`
    out         a folder: findings that it has are kept, and each new one is written at once
    fresh       test again what is in `out`
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    named_papers(paper)
    found = resolve_request(
        subject, inputs, length=length, prompts=prompts, default=(LENGTH, PROMPTS), seed=seed, bos=bos
    )
    folder, say = None if out is None else Path(out), progress or (lambda what: None)
    return examined(Lab(found.subject, found.spec, folder, fresh, max_memory, say, found.given), paper)


def examined(lab: Lab, paper: str = POSITION) -> ClaimsRun:
    """Test every claim of a paper that the lab's folder has no finding of yet; returns the findings about them all.

    Findings about other papers stay in the folder."""
    with lab.writing():
        return _examined(lab, lab.folder, registry(paper))


def _examined(lab: Lab, folder: Path | None, chosen: Sequence[Claim]) -> ClaimsRun:
    if lab.spec.prompts < ENOUGH:
        warn(f"{lab.spec.prompts} prompts are too few for a verdict: use --prompts {ENOUGH} or more")
    run = lab.run()
    kept = {result.id: result for result in (read_findings(folder, run.record.digest) if folder is not None else ())}
    for result in examine(lab, [claim for claim in chosen if claim.id not in kept]):
        kept[result.id] = result
        if folder is not None:
            FINDINGS.write(folder / CLAIMS_FILE, Findings(run.record.digest, tuple(_ordered(kept, registry(ALL)))))
    reads_origin = any(claim.paper == POSITION for claim in chosen)
    if folder is not None and reads_origin and not _has_origin(folder, run.record.digest):
        _keep_origin(lab, folder)
    return ClaimsRun(run, tuple(_ordered(kept, chosen)))


def examine(lab: Lab, chosen: Sequence[Claim] | None = None) -> Iterator[ClaimResult]:
    """One result after the other, so that a caller can keep each. A claim that posleak refuses to test on this model is
    not applicable, and the refusal is the reason. So is one in whose test the model breaks down: others go on."""
    for each in registry() if chosen is None else chosen:
        lab.progress(f"claim {each.number}: {each.title}")
        try:
            with stage(each.id):
                finding = each.test(lab)
        except PosleakError as error:
            finding = Finding.not_applicable(str(error))
        except Exception as error:
            if not is_recoverable(error):
                raise
            finding = Finding.not_applicable(describe_unexpected(error))
        yield ClaimResult.about(each, finding)


def _ordered(found: dict[str, ClaimResult], chosen: Sequence[Claim]) -> list[ClaimResult]:
    return [found[claim.id] for claim in chosen if claim.id in found]


def read_findings(folder: Path, digest: str) -> tuple[ClaimResult, ...]:
    """The findings that a folder has about the run with this digest; none where it has none."""
    if not (folder / CLAIMS_FILE).is_file():
        return ()
    found = FINDINGS.read(folder / CLAIMS_FILE)
    return found.claims if found.digest == digest else ()


def _has_origin(folder: Path, digest: str) -> bool:
    """Does the folder hold position 0 of this run, whole? What is damaged is made again."""
    try:
        stored = read_origin(folder)
    except RunError:
        return False
    return stored is not None and stored.digest == digest


def _keep_origin(lab: Lab, folder: Path) -> None:
    """Write what is found at position 0 beside the run; left out if posleak cannot read it in this model."""
    try:
        found = lab.origin
    except PosleakError as error:
        lab.progress(f"position 0 is left out: {error.what}")
        return
    write_origin(folder, lab.run().record.digest, found, lab.tokens.vocabulary.spell)
