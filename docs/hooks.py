"""What `mkdocs build` does besides: pages from the repository's root, and links that work in the repository and here.

Files in docs/ link to `../LOG.md`, and LOG.md links to `docs/definitions.md`, so that both can be read where they are;
on the site they are pages side by side. A link to a file that is no part of the site, such as a test, becomes its name.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).parent.parent
PAGES = ("CHANGELOG.md", "LOG.md", "CONTRIBUTING.md")
"""Of the repository's root, which are pages of the site too."""
API = "api.md"
"""Where names such as `posleak.load` lead to what is said about them."""

_LINK = re.compile(
    r"(?P<code>^ *(?P<fence>`{3,}).*?^ *(?P=fence)$|`[^`\n]+`)"  # holds no links
    r"|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<to>[^)#\s]+)(?P<anchor>#[^)]*)?\)"
    r"|(?P<axes>\] ?)\[",  # as in [layer][head], which mkdocstrings would read as a reference
    re.MULTILINE | re.DOTALL,
)
_SCRIPTS = re.compile(r'<script (src=""|type="text/x-mathjax-config"|type="module")>.*?</script>', re.DOTALL)
_HEADING = re.compile(r'<h\d[^>]* id="([^"]+)"[^>]*>(.*?)<a class="anchor-link"', re.DOTALL)
_PAGE_LINK = re.compile(r'(<a [^>]*href="[^":]+)\.(?:md|ipynb)([#"])')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out the page for addresses that are not there, and the map for search engines: both need a server."""
    config.theme.static_templates.clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their targets are on the site."""
    return _LINK.sub(partial(_rewritten, here=page.file.src_uri, files=files), markdown)


def _rewritten(found: re.Match[str], here: str, files: Files) -> str:
    if found["fence"]:
        return found[0]
    if found["code"]:
        name = found[0].strip("`")
        code = found[0].replace("\\|", "|")  # in tables, which are cut at | in code by others, but not here
        return f"[{code}](#{name})" if here == API and name.startswith("posleak.") else code
    if found["axes"]:
        return f"{found['axes']}\\["
    if ":" in found["to"]:
        return found[0]  # another site
    source = here if here in PAGES else f"docs/{here}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["to"]))
    page = target if target in PAGES else target.removeprefix("docs/") if target.startswith("docs/") else None
    if page is not None and files.get_file_from_path(page) is not None:
        link = posixpath.relpath(page, posixpath.dirname(here) or ".")
        return f"{found['image']}[{found['text']}]({link}{found['anchor'] or ''})"
    if not (ROOT / target).exists():
        return found[0]  # mkdocs says that it leads nowhere
    named = target.endswith(found["text"].strip("`").lstrip("./"))
    return f"`{target}`" if named else f"{found['text']} (`{target}`)"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let notebooks be like other pages: links lead to pages, nothing is fetched, and their files can be downloaded."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    for entry, (anchor, title) in zip(_entries(page.toc), _HEADING.findall(html), strict=True):
        entry.id, entry.title = anchor, re.sub("<.*?>", "", title)  # mkdocs-jupyter leaves out what is code
    html = _PAGE_LINK.sub(r"\1.html\2", _SCRIPTS.sub("", html))
    name = Path(page.file.src_uri).stem
    links = (f'<a href="{name}.{end}" download>{what}</a>' for end, what in (("ipynb", "notebook"), ("py", "script")))
    return f"{html}<p class='download'>Download this page as a {' or as a '.join(links)}.</p>"


def _entries(toc: Iterable[AnchorLink]) -> Iterator[AnchorLink]:
    for entry in toc:
        yield entry
        yield from _entries(entry.children)
