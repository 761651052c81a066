"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def named(text: str) -> str:
    """A name that is one. An empty one would silently be the current folder: a shell's variable may be unset."""
    if not text.strip():
        raise typer.BadParameter("it is empty; name one, or leave it out. The current folder is `.`")
    return text


def named_path(text: str | Path) -> Path:
    """A path that was named."""
    return Path(named(str(text)))


Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]

Inputs = Annotated[str, typer.Option(help="random, constant[:ID], text:PATH, text:stdlib or backcopy.")]
Bos = Annotated[str, typer.Option(help="Position 0: auto, tokenizer, none, or a token.")]
Length = Annotated[int, typer.Option(help="Tokens per prompt, position 0 included.")]
Seed = Annotated[int, typer.Option(help="Seed of the tokens.")]
OriginWidth = Annotated[int, typer.Option(help="Width of the origin: how many first tokens count as it.")]

Metrics = Annotated[
    str, typer.Option(help="What others measure, on the same passes: all, none, or names (docs/metrics.md).")
]

Loss = Annotated[bool, typer.Option("--loss", help="The next token's loss at the sampled positions, too.")]

RunFolder = Annotated[
    Path | None,
    typer.Option("--out", parser=named_path, metavar="<path>", help="Run folder. Default: runs/MODEL-DIGEST."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what the folder has already.")]
MaxMemory = Annotated[
    str | None, typer.Option(help="What the process may hold, model included, e.g. 8GB: batches are chosen to fit.")
]
Profiled = Annotated[bool, typer.Option("--profile", help="Show where time and memory went.")]

Runs = Annotated[
    list[Path],
    typer.Argument(help="Run folders that `measure`, `trace` or `claims` wrote.", parser=named_path, metavar="RUN..."),
]
