"""Generate the tables of docs/architectures.md from named sweeps.

python -m tools.architectures docs/architectures.md runs                      # all sweeps
python -m tools.architectures docs/architectures.md runs --sweeps knobs       # some of them

Finished cells in runs/NAME are loaded, the others are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from posleak.cli.sweep import balance_markdown
from posleak.files import write_atomically
from posleak.sweeps.sweep import sweep

from .markdown import replace_part

SWEEPS = ("architectures", "knobs", "first-token", "dtypes")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the tables of docs/architectures.md.")
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=SWEEPS)
    options = parser.parse_args(arguments)
    page = options.page.read_text(encoding="utf-8")
    for name in options.sweeps:
        page = replace_part(page, name, balance_markdown(sweep(name, out=options.runs / name).balance))
    write_atomically(options.page, lambda path: path.write_text(page, encoding="utf-8"))


if __name__ == "__main__":
    main()
