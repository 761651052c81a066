"""Options that several commands share. Defaults are in `posleak.defaults`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def named(text: str) -> str:
    """Reject an empty name or path, which an unset shell variable would leave: it would mean the current folder."""
    if not text.strip():
        raise typer.BadParameter("it is empty; give a name or omit it. The current folder is `.`")
    return text


def named_path(text: str | Path) -> Path:
    """Return the path, rejecting an empty one."""
    return Path(named(str(text)))


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

Inputs = Annotated[
    str, typer.Option(help="Source of the prompts: random, constant[:ID], text:PATH, text:stdlib or backcopy.")
]
Bos = Annotated[
    str,
    typer.Option(
        help="Token at position 0: auto (BOS of the config, if any), tokenizer (what it prepends), none, or a token."
    ),
]
Length = Annotated[int, typer.Option(help="Tokens per prompt, including position 0.")]
Prompts = Annotated[int, typer.Option(help="Number of prompts. Estimates and intervals are computed over prompts.")]
Seed = Annotated[int, typer.Option(help="Random seed for the prompts.")]
OriginWidth = Annotated[int, typer.Option(help="Number of leading tokens treated as the origin.")]

Metrics = Annotated[
    str,
    typer.Option(help="Metrics of other papers, from the same forward passes: all, none, or names (docs/metrics.md)."),
]
Loss = Annotated[bool, typer.Option("--loss", help="Also compute the next-token loss at the sampled positions.")]

RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        parser=named_path,
        metavar="<path>",
        help="Run folder. Default: a folder in runs/, named after the measurement.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard results in the folder and measure again.")]
MaxMemory = Annotated[
    str | None,
    typer.Option(help="Memory limit of the process, including the model, e.g. 8GB. Batches are chosen to fit."),
]
Profiled = Annotated[bool, typer.Option("--profile", help="Show time by stage and peak memory.")]

Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders written by `measure`, `trace` or `claims`.", parser=named_path, metavar="RUN..."),
]
