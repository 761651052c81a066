"""Take the screenshots of docs/report.md and README.md in a browser (needs the extra `dev` and chromium).

python -m tools.pictures REPORT.html COMPARED.html docs/images
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

PICTURES = (
    ("answer", 1280, "light"), ("answer", 1280, "dark"), ("answer", 400, "light"), ("depth", 1280, "light"),
    ("heads", 1280, "light"), ("heads", 1280, "dark"), ("heads", 400, "light"), ("origin", 1280, "light"),
    ("edits", 1280, "light"), ("edits", 400, "light"), ("compare", 1280, "light"), ("compare", 400, "dark"),
)  # fmt: skip
"""Section, width in pixels, theme."""

HEIGHT = 900
"""Height of the browser window in pixels."""
ANSWER = "answer.png", (1280, 390)
"""File and size in pixels of the picture in README.md: the first question with its answer."""


def take(report: Path, compared: Path, folder: Path) -> None:
    """Take a screenshot of the top of each section; `compare` is a section of the page with several runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for section, width, theme in PICTURES:
            page = browser.new_page(
                viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if theme == "dark" else "light"
            )
            page.goto((compared if section == "compare" else report).resolve().as_uri())
            top = page.locator(f'[data-section="{section}"]:visible').first
            top.scroll_into_view_if_needed()
            page.wait_for_timeout(1500)  # figures are drawn when they become visible
            top.evaluate("element => element.scrollIntoView({block: 'start'})")
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"report-{section}-{width}-{theme}.png")
            if (section, width, theme) == PICTURES[0]:
                name, (clip_width, clip_height) = ANSWER
                page.screenshot(path=folder / name, clip={"x": 0, "y": 0, "width": clip_width, "height": clip_height})
            page.close()
        browser.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Take the screenshots of docs/report.md.")
    for name in ("report", "compared", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args(arguments)
    take(options.report, options.compared, options.folder)


if __name__ == "__main__":
    main()
