"""One self-contained page: templates, style, script, plotly's bundle and the numbers, in a single file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline
from markupsafe import Markup

from posleak._version import __version__
from posleak.errors import RunError
from posleak.files import MAX_NAME, remove_leftovers, write_atomically
from posleak.leakage.profile import SINK_ATTENTION, SINK_RATIO
from posleak.leakage.sampled import MIN_PROMPTS
from posleak.show import numbers, words
from posleak.show.colours import style_sheet
from posleak.signatures import checked
from posleak.typed import plain

from .compare import Comparison, comparison
from .figures import Figure, comparison_figures, every_part, lent_to, run_figures
from .formats import HEADS, row_name, row_pieces
from .gather import Given, Refused, ShownRun, gather, reason, require_some
from .metric_figures import FRAME_NAMES, curves_of, grouped, interval, label, leakage_of, metric_figures, unit_of
from .view import MOST_CURVES, View, view


@dataclass(frozen=True)
class Page:
    """Everything that is on the page, JSON-ready but for the comparison, which the templates read."""

    shown: list[ShownRun]
    views: list[View]
    figures: list[dict[str, Figure]]
    compared: Comparison | None
    compared_figures: dict[str, Figure]
    refused: list[Refused]

    @classmethod
    def of(cls, found: Sequence[ShownRun], refused: Sequence[Refused] = ()) -> Page:
        """A run whose view or figures cannot be made is named with the reason, and the others are shown."""
        drawn, left_out = list[tuple[ShownRun, View, dict[str, Figure]]](), list(refused)
        for shown in found:
            try:
                drawn.append(_drawn(shown, MOST_CURVES // len(found)))
            except Exception as error:
                left_out.append(Refused(str(shown.run.path or shown.label), reason(error)))
        require_some(drawn, left_out, 1, "a report")
        runs, views, figures = (list(column) for column in zip(*drawn, strict=True))
        several = len(drawn) > 1
        return cls(
            runs, views, figures, comparison(runs, left_out) if several else None,
            comparison_figures(views) if several else {}, left_out,
        )  # fmt: skip

    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        runs = [
            {"label": v.label, "length": v.length, "parts": v.parts, "sources": v.sources,
             "names": v.names, "windows": v.record.calibration.windows, "heads": v.heads, "curves": v.curves,
             "figures": figures, "origin": _origin(v)}
            for v, figures in zip(self.views, self.figures, strict=True)
        ]  # fmt: skip
        found: dict[str, Any] = plain({"runs": runs, "compared": self.compared_figures})
        return found

    def html(self) -> str:
        """The page."""
        template = environment().get_template("page.html.j2")
        return template.render(
            page=self, version=__version__, data=script_json(self.data()),
            style=Markup(style_sheet()) + static("page.css"), script=static("common.js") + static("page.js"),
            plotly=Markup(plotly.offline.get_plotlyjs()), words=words, numbers=numbers, heads=HEADS,
            row_name=row_name, row_pieces=row_pieces, all_parts=every_part(self.views), lent_to=lent_to,
            fewest=MIN_PROMPTS, least=SINK_ATTENTION, times=SINK_RATIO, frame_names=FRAME_NAMES, curves_of=curves_of, grouped=grouped,
            label=label, leakage_of=leakage_of, rho_interval=interval, unit_of=unit_of,
        )  # fmt: skip


@dataclass(frozen=True)
class Written:
    """What `write_report` put where."""

    page: Path
    assets: list[Path]
    shown: list[str]
    partial: list[str]
    refused: list[Refused]

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak report --json` (docs/report.md)."""
        refused = [{"run": each.name, "reason": each.reason} for each in self.refused]
        return {
            "page": str(self.page), "bytes": self.page.stat().st_size, "assets": [str(path) for path in self.assets],
            "shown": self.shown, "partial": self.partial, "refused": refused,
        }  # fmt: skip


def write_report(runs: Iterable[Given], out: str | Path, assets: str | Path | None = None) -> Written:
    """Write the page of these runs to `out`, and figures and tables into `assets`.

    An unfinished run is shown as partial. Runs that cannot be shown are named on the page with the reason.
    """
    found, refused = gather(runs)
    require_some(found, refused, 1, "a report")
    place = Path(out)
    if place.is_dir():
        raise RunError(
            "the page needs a file name, and this is a folder", where=str(place), remedy="use --out FILE.html"
        )
    made = Page.of(found, refused)
    text = made.html()
    remove_leftovers(place.parent, place.name[:MAX_NAME].__eq__)
    write_atomically(place, lambda path: path.write_text(text, encoding="utf-8"))
    files = list[Path]()
    if assets is not None:
        from .assets import write_assets

        files = write_assets(made.shown, Path(assets))
    partial = [shown.label for shown in made.shown if shown.partial]
    return Written(place, files, [shown.label for shown in made.shown], partial, made.refused)


def _drawn(shown: ShownRun, most_curves: int) -> tuple[ShownRun, View, dict[str, Figure]]:
    """A run with its view and its figures; without what stands beside it, if that is why they cannot be made."""
    try:
        made = view(shown, most_curves)
        return shown, made, run_figures(made) | metric_figures(made)
    except Exception as error:
        if shown.alone is shown:
            raise
        note = f"all that stands beside the run is left out: {reason(error)}"
        return _drawn(replace(shown.alone, notes=(*shown.notes, note)), most_curves)


@checked
def report(runs: Iterable[Given] | Given, out: str | Path, assets: str | Path | None = None) -> Path:
    """Write one self-contained page of one run or of several; returns its path.

    An unfinished run is shown as partial. Runs that cannot be shown are named on the page with the reason.

    runs        runs, traces or folders: one, or several
    out         the page: a file name that ends in .html
    assets      a folder for figures (PNG, SVG) and tables (CSV, Parquet); None: they are not written
    """
    return write_report([runs] if isinstance(runs, Given) else runs, out, assets).page


def _origin(v: View) -> dict[str, Any] | None:
    if v.origin is None or v.pictures is None:
        return None
    return {**vars(v.pictures), "explained": v.origin.portrait.explained, "among": v.origin.portrait.among}


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: no character of it can end the element or start another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def environment() -> jinja2.Environment:
    """Templates of the package; everything that is put into them is escaped, and a misspelt name is an error."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("posleak.reports"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.tests["nan"] = lambda value: math.isnan(value)
    return found


def static(name: str) -> Markup:
    return Markup(files("posleak.reports").joinpath("static", name).read_text(encoding="utf-8"))
