"""Tutorials: scripts in the percent format, run into notebooks that hold their outputs.

python -m tools.tutorials docs/tutorials             all of them, in full; a quarter of an hour on two cores
python -m tools.tutorials docs/tutorials --only your_own

The scripts are edited; the notebooks are generated and stored, so that the site shows outputs without running models.
Tests run every script in a lean form and compare its output with the library.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posleak.files import write_atomically

LEAN = "POSLEAK_LEAN"
"""Environment variable; with the value 1, scripts use fewer and shorter prompts."""

CELL_TIMEOUT = 1800
"""Time limit of one cell in seconds."""


def scripts(folder: Path) -> list[Path]:
    """Return the scripts of the tutorials."""
    return sorted(folder.glob("*.py"))


def notebook(script: Path) -> Any:
    """Return the script as a notebook without outputs, with reproducible cell ids."""
    import jupytext

    cells = jupytext.read(script)
    cells.metadata.pop("jupytext", None)
    for place, cell in enumerate(cells.cells):
        cell.id = f"cell-{place}"
    return cells


def execute(script: Path, *, lean: bool) -> Any:
    """Run all cells in an empty folder and return the notebook. Raise the first exception of a cell."""
    from nbclient import NotebookClient

    executed = notebook(script)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**os.environ, LEAN: "1" if lean else "0", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        client = NotebookClient(
            executed, timeout=CELL_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env=settings)
    for cell in executed.cells:
        cell.metadata = {}
        if "outputs" in cell:  # drop progress and warnings, which contain local paths
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    executed.metadata.pop("language_info", None)
    return executed


def printed_lines(executed: Any) -> Iterator[str]:
    """Yield the lines that the cells of an executed notebook printed."""
    for cell in executed.cells:
        for out in cell.get("outputs", ()):
            if out.output_type == "stream":
                yield from out.text.splitlines()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run the tutorials and write the notebooks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of scripts")
    parser.add_argument("--lean", action="store_true", help="use fewer and shorter prompts")
    options = parser.parse_args(arguments)
    for script in scripts(options.folder):
        if not options.only or script.stem in options.only:
            write_notebook(execute(script, lean=options.lean), script.with_suffix(".ipynb"))


def write_notebook(executed: Any, path: Path) -> None:
    """Write a notebook to a file."""
    import jupytext

    text: str = jupytext.writes(executed, fmt="ipynb")
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
