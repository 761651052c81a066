"""Census of the causal-LM families of the installed transformers, each as a tiny random model.

    python -m tools.census --write docs/families.md

Each family is built from its config class (shrink.py) and checked by the short form of doctor. Its row is one of:
supported; refused, with posleak's message; fails, with the check; cannot be built here, with the reason. A family is
supported if its model violates a law by design and doctor finds the cause. posleak's own checks must hold in every
family: parity, partition, additivity, zero queries, closure, batches.
"""

from __future__ import annotations

import argparse
import copy
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from posleak.analyses.doctor.doctor import Diagnosis, doctor
from posleak.errors import CheckError, PosleakError, UnsupportedError
from posleak.models import Subject
from posleak.models.pretrained import silence_transformers
from posleak.probe import backbone

from .matrix import Tried, section, tried
from .shrink import tiny_model
from .traits import Traits, traits

LENGTH, PROMPTS, TOKEN = 48, 3, 5
SECONDS = 120
"""Time limit of a family."""

INCOMPLETE = {
    "gemma4_assistant": "a draft model, which reads the keys of the model that it assists",
    "gemma4_unified_assistant": "a draft model, which reads the keys of the model that it assists",
    "musicgen": "its decoder is built from a part of this config and reads audio codebooks",
    "musicgen_melody": "its decoder is built from a part of this config and reads audio codebooks",
}
"""Families that are not complete language models."""

SUPPORTED, REFUSED, FAILS, NOT_BUILT = "supported", "refused", "fails", "cannot be built here"
STATUSES = (SUPPORTED, FAILS, REFUSED, NOT_BUILT)


@dataclass(frozen=True)
class FamilyRow:
    """One family. `laws`: laws that the model violates by design, with the cause; `tried`: outcomes of the commands."""

    family: str
    model_class: str
    status: str
    positions: str = ""
    moved: str = ""
    special: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    why: str = ""
    tried: Tried | None = None

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The columns that a test compares with the page."""
        return self.family, self.status, self.positions, self.moved, "; ".join(self.special)


def families() -> list[str]:
    """Return every model type with a causal language model in the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def examine_family(family: str, commands: bool = False) -> FamilyRow:
    """Build a model, run it, diagnose it, and with `commands` try every command; the first failure decides the row."""
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    # Constructors and forward passes of other libraries may raise anything. posleak's own code runs outside.
    try:
        with limited(SECONDS):
            model = tiny_model(family)
            _runs_alone(copy.deepcopy(model))  # a pass may change it
    except Exception as error:
        said = f"{type(error).__name__}: {_first_line(error)}"
        return FamilyRow(
            family, name, NOT_BUILT, why=f"{INCOMPLETE[family]} ({said})" if family in INCOMPLETE else said
        )
    subject = Subject.of(model, name=family)
    try:
        with limited(SECONDS), silence_transformers():
            diagnosis = doctor(subject, length=LENGTH, prompts=PROMPTS, short=True)
            found = traits(subject, diagnosis.calibration, LENGTH, TOKEN)
    except UnsupportedError as error:
        return FamilyRow(family, name, REFUSED, why=error.what)
    except (CheckError, TimeoutError) as error:
        return FamilyRow(family, name, FAILS, why=_first_line(error))
    row = _judged(family, name, diagnosis, found)
    if row.status != SUPPORTED or not commands:
        return row
    with limited(10 * SECONDS):  # kernels of recurrent layers are slow without their own packages
        return replace(row, tried=tried(subject, diagnosis.verdict.value))


def _runs_alone(model: PreTrainedModel) -> None:
    """Run the model on token ids with its own attention."""
    ids = torch.full((1, LENGTH), TOKEN)
    with silence_transformers(), torch.inference_mode():
        backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _judged(family: str, name: str, diagnosis: Diagnosis, found: Traits) -> FamilyRow:
    broken = [check for check in diagnosis.checks if not check.ok]
    wrong = [f"{check.id}: {check.value:.2g} {check.unit}" for check in broken if check.cause is None]
    if wrong:
        return FamilyRow(family, name, FAILS, found.positions, found.moved, found.special, why="; ".join(wrong))
    causes: dict[str, list[str]] = {}
    for check in broken:
        causes.setdefault(str(check.cause), []).append(check.id)
    laws = tuple(f"{', '.join(ids)}: {cause}" for cause, ids in causes.items())
    return FamilyRow(
        family, name, SUPPORTED, found.positions, found.moved, (*found.special, *_as_decoder(family)), laws
    )


def _as_decoder(family: str) -> Iterator[str]:
    """Yield the config field that makes a decoder of families that are not decoders by default."""
    default = CONFIG_MAPPING[family]()
    if default.is_encoder_decoder:
        yield "the decoder of an encoder-decoder, with is_encoder_decoder=False"
    elif getattr(default, "causal", True) is False:
        yield "an encoder family, with causal=True"
    elif getattr(default, "is_decoder", True) is False and family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        yield "an encoder family, with is_decoder=True"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after `seconds` seconds; without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def expired(_: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _first_line(error: BaseException) -> str:
    text = error.what if isinstance(error, PosleakError) else str(error)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    return lines[1] if len(lines) > 1 and lines[0].startswith("Class validation error") else lines[0]


def page(rows: Sequence[FamilyRow]) -> str:
    """Return docs/families.md."""
    counts = Counter(row.status for row in rows)
    supported = [row for row in rows if row.status == SUPPORTED]
    lawful = sum(not row.laws for row in supported)
    tables = sum(row.positions == "table of positions" for row in supported)
    parts = [
        "# Families",
        "",
        "Which families of models can be measured, which are refused and why, and what each command does with them: to "
        "look up yours before you start. Written by `python -m tools.census --write docs/families.md`; a test "
        "runs the census again and compares.",
        "",
        f"transformers {transformers.__version__} has {len(rows)} causal-LM families. Each was built as a tiny random "
        f"model from its config class ({LENGTH} tokens, {PROMPTS} prompts) and went through the short form of "
        "`posleak doctor`: calibration, parity with eager attention, laws L1, L2, L4, L5 and L7 to L10 "
        "([definitions](definitions.md)).",
        "",
        f"**{len(supported)} families supported**, {counts[FAILS]} fail, {counts[REFUSED]} refused, "
        f"{counts[NOT_BUILT]} cannot be built here.",
        "",
        f"{lawful} of the supported obey every law. The others break some on purpose, and the tool names the cause: "
        f"{tables} have a table of absolute positions, so that position enters the residual stream before the first "
        "layer; they serve as controls. Tiny random models show that the arithmetic is right, not what trained models "
        "do.",
    ]
    for status in STATUSES:
        chosen = [row for row in rows if row.status == status]
        if chosen:
            parts += ["", f"## {status.capitalize()} ({len(chosen)})", "", *_table(status, chosen)]
        if status == SUPPORTED and (known := [row.tried for row in chosen if row.tried is not None]):
            parts += ["", *section(known)]
    return "\n".join(parts) + "\n"


def _table(status: str, rows: Sequence[FamilyRow]) -> Iterator[str]:
    if status in (REFUSED, NOT_BUILT):
        yield from ("| family | class | why |", "|---|---|---|")
        yield from (f"| {row.family} | {row.model_class} | {_cell(row.why)} |" for row in rows)
        return
    last = "laws that it breaks, and why" if status == SUPPORTED else "check that fails"
    yield from (f"| family | class | positions | origin can be moved | special | {last} |", "|---|---|---|---|---|---|")
    for row in rows:
        end = "; ".join(row.laws) or row.why
        cells = (row.family, row.model_class, row.positions, row.moved, "; ".join(row.special), end)
        yield "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def read_page(text: str) -> dict[str, tuple[str, str, str, str, str]]:
    """Return the keys of the rows of a page, by family."""
    found: dict[str, tuple[str, str, str, str, str]] = {}
    status = ""
    for line in text.splitlines():
        if line.startswith("## "):
            status = line[3:].rsplit(" (", 1)[0].lower()
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and status in STATUSES and cells[0] != "family":
            wide = status in (SUPPORTED, FAILS)
            found[cells[0]] = (cells[0], status, *(cells[2:5] if wide else ("", "", "")))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check which causal-LM families can be measured.")
    parser.add_argument("--write", type=Path, help="the page to write, e.g. docs/families.md")
    parser.add_argument("families", nargs="*", help="only these")
    options = parser.parse_args(arguments)
    rows = [examine_family(family, commands=True) for family in options.families or families()]
    if options.write is not None:
        options.write.write_text(page(rows), encoding="utf-8")
    print(page(rows) if options.families else dict(Counter(row.status for row in rows)))


if __name__ == "__main__":
    main()
