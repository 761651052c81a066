"""The documentation site builds without warnings, all links work, and nothing is fetched from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import posleak

ROOT = Path(__file__).parents[2]
MIN_CHARACTERS = 40
"""Minimum length of the first paragraph of a page, which states its purpose."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site with the command of `make docs`; warnings are errors."""
    out = tmp_path_factory.mktemp("site")
    (recipe,) = re.findall("^\t(.*mkdocs build.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = f"{recipe.replace('$(BIN)', str(Path(sys.executable).parent))} --site-dir {out}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search("^WARNING", done.stderr, flags=re.MULTILINE), done.stderr
    return out


def pages(site: Path) -> list[Path]:
    """Return the generated pages, without HTML files that are only copied."""
    paths = (path.relative_to(site) for path in sorted(site.rglob("*.html")))
    return [site / path for path in paths if not (ROOT / "docs" / path).exists()]


@dataclass
class PageParser(HTMLParser):
    """One page: its anchors, links, the addresses that a browser fetches, and what follows its title."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    scripts: str = ""
    after_title: list[str] = field(default_factory=list)  # tags, from the end of the title to the end of a paragraph
    first: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if tag != "a":
            self.fetched += [
                attributes[name] for name in ("href", "src", "srcset", "poster", "data") if name in attributes
            ]
        if self.after_title and "/p" not in self.after_title:
            self.after_title.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "h1" or (tag == "p" and self.after_title):
            self.after_title.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts += data
        elif "p" in self.after_title and "/p" not in self.after_title:
            self.first += data


read = cache(PageParser)


def test_every_file_of_docs_is_a_page(site: Path) -> None:
    docs = ROOT / "docs"
    written = [path.relative_to(docs) for end in ("md", "ipynb") for path in docs.rglob(f"*.{end}")]
    assert {site / path.with_suffix(".html") for path in written} <= set(pages(site))


def test_every_page_says_what_it_is_in_its_first_paragraph(site: Path) -> None:
    parsed = {str(page.relative_to(site)): read(page) for page in pages(site)}
    assert {name for name, page in parsed.items() if len(page.first.strip()) < MIN_CHARACTERS} == set()
    before = {"/h1", "p", "/p", "a", "code", "em", "strong", "div"}  # no heading, table, picture or code in between
    assert {name: tags for name, page in parsed.items() if (tags := set(page.after_title) - before)} == {}


def test_every_link_leads_to_a_file_and_to_an_anchor_of_it(site: Path) -> None:
    generated, dead = set(pages(site)), list[str]()
    for page in generated:
        for link in read(page).links:
            to = urlsplit(link)
            target = (page.parent / unquote(to.path)).resolve() if to.path else page
            if to.scheme not in ("http", "https", "data") and not (
                target.is_file()
                and (target not in generated or not to.fragment or unquote(to.fragment) in read(target).ids)
            ):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    """Pages, including copied ones, and their styles; scripts of generated pages contain no address."""
    remote = [
        f"{path.relative_to(site)}: {address}"
        for path in sorted(site.rglob("*.html"))
        for address in read(path).fetched
        if urlsplit(address).scheme not in ("", "data") or address.startswith("//")
    ]
    remote += [
        f"{page.relative_to(site)}: a script" for page in pages(site) if re.search("https?://", read(page).scripts)
    ]
    for style in [*site.rglob("*.css"), *pages(site)]:
        text = style.read_text(encoding="utf-8")
        remote += [
            f"{style.relative_to(site)}: {address}"
            for address in re.findall(r"(?:url\(|@import)[\"' ]*(?:https?:)?//", text)
        ]
    assert remote == []


def test_it_can_be_searched_without_a_server(site: Path) -> None:
    assert (site / "search" / "search_index.js").is_file()
    assert 'src="theme/iframe-worker.js"' in (site / "index.html").read_text(encoding="utf-8")


def test_links_between_the_root_and_docs_work_here_too(site: Path) -> None:
    assert "LOG.html" in read(site / "definitions.html").links
    assert "definitions.html" in read(site / "LOG.html").links
    assert "<code>benchmarks/README.md</code>" in (site / "cost.html").read_text(encoding="utf-8")  # no page


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    page = read(site / "api.html")
    assert {f"posleak.{name}" for name in dir(posleak)} <= page.ids
    assert {"posleak.Run.load", "posleak.analyses.trace.Trace.plot"} <= page.ids
    assert not [name for name in page.ids if re.search(r"^posleak[\w.]*\._(?!_version__)", name)], "nothing private"
