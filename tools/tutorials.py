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

SECONDS = 1800
"""Time limit of one cell."""


def scripts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def notebook(script: Path) -> Any:
    """Return the script as a notebook without outputs, with reproducible cell ids."""
    import jupytext

    made = jupytext.read(script)
    made.metadata.pop("jupytext", None)
    for place, cell in enumerate(made.cells):
        cell.id = f"cell-{place}"
    return made


def executed(script: Path, *, lean: bool) -> Any:
    """Run all cells in an empty folder; return the notebook. An exception in a cell is raised."""
    from nbclient import NotebookClient

    made = notebook(script)
    with tempfile.TemporaryDirectory() as folder:
        settings = {**os.environ, LEAN: "1" if lean else "0", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        client = NotebookClient(made, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute(env=settings)
    for cell in made.cells:
        cell.metadata = {}
        if "outputs" in cell:  # without progress and warnings, which contain local paths
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    made.metadata.pop("language_info", None)
    return made


def printed(made: Any) -> Iterator[str]:
    """Yield the lines that the cells of a notebook printed."""
    for cell in made.cells:
        for out in cell.get("outputs", ()):
            if out.output_type == "stream":
                yield from out.text.splitlines()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run the tutorials and write the notebooks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of scripts")
    parser.add_argument("--lean", action="store_true", help="with fewer and shorter prompts")
    options = parser.parse_args(arguments)
    for script in scripts(options.folder):
        if not options.only or script.stem in options.only:
            keep(executed(script, lean=options.lean), script.with_suffix(".ipynb"))


def keep(made: Any, place: Path) -> None:
    """Write a notebook."""
    import jupytext

    text: str = jupytext.writes(made, fmt="ipynb")
    write_atomically(place, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
