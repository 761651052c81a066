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

from .markdown import table
from .matrix import CommandOutcomes, run_commands, section
from .shrink import tiny_model
from .traits import Traits, traits

LENGTH, PROMPTS, TOKEN = 48, 3, 5
TIME_LIMIT = 120
"""Time limit of a family in seconds."""

INCOMPLETE = {
    "gemma4_assistant": "a draft model that reads the keys of the model it assists",
    "gemma4_unified_assistant": "a draft model that reads the keys of the model it assists",
    "musicgen": "its decoder is built from a part of this config and reads audio codebooks",
    "musicgen_melody": "its decoder is built from a part of this config and reads audio codebooks",
}
"""Families that are not complete language models."""

SUPPORTED, REFUSED, FAILS, NOT_BUILT = "supported", "refused", "fails", "cannot be built here"
STATUSES = (SUPPORTED, FAILS, REFUSED, NOT_BUILT)


@dataclass(frozen=True)
class FamilyRow:
    """One family.

    moved     whether the origin's keys can be moved, and the reason if not
    laws      laws that the model violates by design, with the cause
    why       the reason of a failure;  commands: outcomes of the commands
    """

    family: str
    model_class: str
    status: str
    positions: str = ""
    moved: str = ""
    special: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    why: str = ""
    commands: CommandOutcomes | None = None

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The columns that a test compares with the page."""
        return self.family, self.status, self.positions, self.moved, "; ".join(self.special)


def families() -> list[str]:
    """Return every model type with a causal language model in the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def examine_family(family: str, commands: bool = False) -> FamilyRow:
    """Build a model, run it and diagnose it; with `commands`, also run every command. The first failure ends it."""
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    # Constructors and forward passes of other libraries may raise anything. posleak's own code runs outside.
    try:
        with time_limit(TIME_LIMIT):
            model = tiny_model(family)
            _runs_alone(copy.deepcopy(model))  # a pass may change it
    except Exception as error:
        message = f"{type(error).__name__}: {_first_line(error)}"
        reason = f"{INCOMPLETE[family]} ({message})" if family in INCOMPLETE else message
        return FamilyRow(family, name, NOT_BUILT, why=reason)
    subject = Subject.of(model, name=family)
    try:
        with time_limit(TIME_LIMIT), silence_transformers():
            diagnosis = doctor(subject, length=LENGTH, prompts=PROMPTS, short=True)
            special = traits(subject, diagnosis.calibration, LENGTH, TOKEN)
    except UnsupportedError as error:
        return FamilyRow(family, name, REFUSED, why=error.what)
    except (CheckError, TimeoutError) as error:
        return FamilyRow(family, name, FAILS, why=_first_line(error))
    row = _diagnosed_row(family, name, diagnosis, special)
    if row.status != SUPPORTED or not commands:
        return row
    with time_limit(10 * TIME_LIMIT):  # kernels of recurrent layers are slow without their own packages
        return replace(row, commands=run_commands(subject, diagnosis.verdict.value))


def _runs_alone(model: PreTrainedModel) -> None:
    """Run the model on token ids with its own attention."""
    ids = torch.full((1, LENGTH), TOKEN)
    with silence_transformers(), torch.inference_mode():
        backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _diagnosed_row(family: str, name: str, diagnosis: Diagnosis, model: Traits) -> FamilyRow:
    """Return the row of a diagnosed family: it fails if a violated law has no known cause."""
    violated = [check for check in diagnosis.checks if not check.ok]
    unexplained = [f"{check.id}: {check.value:.2g} {check.unit}" for check in violated if check.cause is None]
    if unexplained:
        return FamilyRow(family, name, FAILS, model.positions, model.moved, model.special, why="; ".join(unexplained))
    causes: dict[str, list[str]] = {}
    for check in violated:
        causes.setdefault(str(check.cause), []).append(check.id)
    laws = tuple(f"{', '.join(ids)}: {cause}" for cause, ids in causes.items())
    special = (*model.special, *_decoder_settings(family))
    return FamilyRow(family, name, SUPPORTED, model.positions, model.moved, special, laws)


def _decoder_settings(family: str) -> Iterator[str]:
    """Yield the config field that makes a decoder of families that are not decoders by default."""
    default = CONFIG_MAPPING[family]()
    if default.is_encoder_decoder:
        yield "the decoder of an encoder-decoder, with is_encoder_decoder=False"
    elif getattr(default, "causal", True) is False:
        yield "an encoder family, with causal=True"
    elif getattr(default, "is_decoder", True) is False and family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        yield "an encoder family, with is_decoder=True"


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after `seconds` seconds. It has no effect outside the main thread."""
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
    """Return the first informative line of a message."""
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
        "Which model families can be measured, which are rejected and why, and the outcome of each command. Generated "
        "by `python -m tools.census --write docs/families.md`; a test runs the census again and compares.",
        "",
        f"transformers {transformers.__version__} has {len(rows)} causal-LM families. Each was built as a tiny random "
        f"model from its config class ({LENGTH} tokens, {PROMPTS} prompts) and checked by the short form of "
        "`posleak doctor`: calibration, parity with eager attention, laws L1, L2, L4, L5 and L7 to L10 "
        "([definitions](definitions.md)).",
        "",
        f"**{len(supported)} families supported**, {counts[FAILS]} fail, {counts[REFUSED]} refused, "
        f"{counts[NOT_BUILT]} cannot be built here.",
        "",
        f"{lawful} of the supported families satisfy every law. The others violate some by design, and doctor names "
        f"the cause: {tables} have a table of absolute positions, so that position enters the residual stream before "
        "the first layer; they serve as controls. Tiny random models show that the arithmetic is correct. They do not "
        "show how trained models behave.",
    ]
    for status in STATUSES:
        chosen = [row for row in rows if row.status == status]
        if chosen:
            parts += ["", f"## {status.capitalize()} ({len(chosen)})", "", *_table(status, chosen)]
        if status == SUPPORTED and (outcomes := [row.commands for row in chosen if row.commands is not None]):
            parts += ["", *section(outcomes)]
    return "\n".join(parts) + "\n"


def _table(status: str, rows: Sequence[FamilyRow]) -> list[str]:
    """Return the table of the families with one status."""
    if status in (REFUSED, NOT_BUILT):
        return table(("family", "class", "reason"), [(row.family, row.model_class, row.why) for row in rows])
    last = "violated laws, with their causes" if status == SUPPORTED else "failed checks"
    cells = [
        (row.family, row.model_class, row.positions, row.moved, "; ".join(row.special), "; ".join(row.laws) or row.why)
        for row in rows
    ]
    return table(("family", "class", "positions", "origin can be moved", "special", last), cells)


def read_page(text: str) -> dict[str, tuple[str, str, str, str, str]]:
    """Return the keys of the rows of a page, by family."""
    keys: dict[str, tuple[str, str, str, str, str]] = {}
    status = ""
    for line in text.splitlines():
        if line.startswith("## "):
            status = line[3:].rsplit(" (", 1)[0].lower()
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and status in STATUSES and cells[0] != "family":
            wide = status in (SUPPORTED, FAILS)
            keys[cells[0]] = (cells[0], status, *(cells[2:5] if wide else ("", "", "")))
    return keys


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check which causal-LM families can be measured.")
    parser.add_argument("--write", type=Path, help="page to write, e.g. docs/families.md")
    parser.add_argument("families", nargs="*", help="families to examine; default: all")
    options = parser.parse_args(arguments)
    rows = [examine_family(family, commands=True) for family in options.families or families()]
    if options.write is not None:
        options.write.write_text(page(rows), encoding="utf-8")
    print(page(rows) if options.families else dict(Counter(row.status for row in rows)))


if __name__ == "__main__":
    main()
