"""One self-contained HTML file: templates, style, script, the plotly bundle and the data, packed into base64."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import plotly.offline
from markupsafe import Markup

from posleak._version import __version__
from posleak.arrays import Array
from posleak.errors import RunError, error_line
from posleak.files import MAX_NAME, remove_leftovers, write_atomically
from posleak.leakage import Estimate
from posleak.leakage.sampled import LEVEL, MIN_PROMPTS
from posleak.leakage.summary import SINK_ATTENTION, SINK_RATIO
from posleak.papers import by_paper
from posleak.show import numbers, words
from posleak.show.colours import style_sheet
from posleak.signatures import checked
from posleak.typed import plain

from . import circuit_figures, metric_figures
from .circuit_drawing import draw_circuit
from .compare import Comparison, comparison
from .figures import Figure, comparison_figures, every_part, lent_to, run_figures
from .gather import Refused, RunLike, gather, require_some
from .view import RunView, run_facts

MOST_CURVES = 640
"""Number of heads per page that have curves, so that the page stays below 10 MB."""

TEMPLATE_NAMES = {
    "words": words, "numbers": numbers, "metric_figures": metric_figures, "circuit_figures": circuit_figures,
    "draw_circuit": draw_circuit, "lent_to": lent_to, "run_facts": run_facts,
    "by_paper": by_paper, "fewest": MIN_PROMPTS, "least": SINK_ATTENTION, "times": SINK_RATIO,
    "level": f"{100 * LEVEL:.0f}", "version": __version__,
}  # fmt: skip


@dataclass(frozen=True)
class PageRun:
    """A run on the page: the data that the script reads, and its rendered sections."""

    view: RunView
    data: dict[str, Any]
    article: Markup
    method: Markup

    @classmethod
    def of(cls, view: RunView, index: int, most_curves: int) -> PageRun:
        """Render a run; if its other results make that fail, render it without them and with a note."""
        try:
            figures = run_figures(view) | metric_figures.of_run(view) | circuit_figures.of_run(view)
            article, method = (
                Markup(environment().get_template(name).render(view=view, run=index, figures=figures))
                for name in ("article.html.j2", "method_run.html.j2")
            )
            return cls(view, run_data(view, most_curves) | {"figures": figures}, article, method)
        except Exception as error:
            if view.alone is view:
                raise
            note = f"other results of the folder are left out: {error_line(error)}"
            return cls.of(replace(view.alone, notes=(*view.notes, note)), index, most_curves)


@dataclass(frozen=True)
class Page:
    """A report: every result in it is computed once, for the page and for its assets."""

    runs: list[PageRun]
    comparison: Comparison | None
    refused: list[Refused]

    @classmethod
    def of(cls, views: Sequence[RunView], refused: Sequence[Refused] = ()) -> Page:
        """Render every run and compare them; a run that cannot be rendered is refused with the reason."""
        runs, left_out = list[PageRun](), list(refused)
        for view in views:
            try:
                runs.append(PageRun.of(view, len(runs), MOST_CURVES // len(views)))
            except Exception as error:
                left_out.append(Refused(str(view.run.path or view.label), error_line(error)))
        require_some(runs, left_out, 1, "a report")
        several = len(runs) > 1
        return cls(runs, comparison([run.view for run in runs], left_out) if several else None, left_out)

    @property
    def views(self) -> list[RunView]:
        return [run.view for run in self.runs]

    @cached_property
    def comparison_figures(self) -> dict[str, Figure]:
        """Figures that compare the runs; empty for one run."""
        return {} if self.comparison is None else comparison_figures(self.views, self.comparison)

    def html(self) -> str:
        """Return the page."""
        views, data = self.views, {"runs": [run.data for run in self.runs], "compared": self.comparison_figures}
        return rendered(
            "page.html.j2", data, "circuit.js", "page.js", page=self, views=views, all_parts=every_part(views)
        )


@dataclass(frozen=True)
class Written:
    """The files that `write_report` wrote, and the runs in them."""

    page: Path
    assets: list[Path]
    shown: list[str]
    partial: list[str]
    refused: list[Refused]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak report --json` (docs/report.md)."""
        return {
            "page": str(self.page), "bytes": self.page.stat().st_size, "assets": [str(path) for path in self.assets],
            "shown": self.shown, "partial": self.partial, "refused": [run.as_dict() for run in self.refused],
        }  # fmt: skip


def write_report(runs: Iterable[RunLike], out: str | Path, assets: str | Path | None = None) -> Written:
    """Write the page of these runs to `out`, and figures and tables into the folder `assets`.

    Unfinished runs are shown as partial. Runs that cannot be shown are listed on the page with the reason.
    """
    views, refused = gather(runs)
    require_some(views, refused, 1, "a report")
    path = Path(out)
    if path.is_dir():
        raise RunError("the page needs a file name, not a folder", where=str(path), remedy="use --out FILE.html")
    page = Page.of(views, refused)
    text = page.html()
    remove_leftovers(path.parent, path.name[:MAX_NAME].__eq__)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    written = list[Path]()
    if assets is not None:
        from .assets import write_assets  # imports matplotlib

        written = write_assets(page, Path(assets))
    partial = [view.label for view in page.views if view.partial]
    return Written(path, written, [view.label for view in page.views], partial, page.refused)


@checked
def report(runs: Iterable[RunLike] | RunLike, out: str | Path, assets: str | Path | None = None) -> Path:
    """Write one self-contained page of one run or several, and return its path.

    Unfinished runs are shown as partial. Runs that cannot be shown are listed on the page with the reason.

    runs        runs, traces, circuits or run folders: one, or several
    out         path of the page, such as report.html
    assets      folder for figures (PNG, SVG) and tables (CSV, Parquet); None: write the page only

    Example: `posleak.report([run, "runs/gemma3"], "report.html", assets="figures")`
    """
    return write_report([runs] if isinstance(runs, RunLike) else runs, out, assets).page


def rendered(template: str, data: dict[str, Any], *scripts: str, **context: Any) -> str:
    """Return a whole page: a template with its data, the shared style and script, and scripts of its own."""
    return environment().get_template(template).render(
        data=script_json(data), style=Markup(style_sheet()) + static("page.css"),
        script=Markup().join(map(static, ("common.js", *scripts))), plotly=Markup(plotly.offline.get_plotlyjs()),
        **context,
    )  # fmt: skip


def script_json(value: Any) -> Markup:
    """Return JSON in which no character can end or start a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def environment() -> jinja2.Environment:
    """Return the package's templates: every value is escaped, and an unknown name is an error."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("posleak.reports"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    templates.tests["nan"] = lambda value: math.isnan(value)
    templates.globals |= TEMPLATE_NAMES
    return templates


def static(name: str) -> Markup:
    return Markup(files("posleak.reports").joinpath("static", name).read_text(encoding="utf-8"))


def run_data(view: RunView, most_curves: int) -> dict[str, Any]:
    """Return the data of a run except its figures; only the `most_curves` heads with the largest power have curves."""
    data: dict[str, Any] = {
        "length": view.record.spec.length, "parts": view.parts, "sources": view.by_source,
        "names": view.summary.layer_names, "windows": view.record.calibration.windows,
        "curves": _curves(view, most_curves), "origin": _origin(view), "circuit": _circuit(view),
    }  # fmt: skip
    columns = view.head_columns
    data["heads"] = {  # numbers: float64 [column, layer, head, (value, low, high)]
        "shape": list(view.existing.shape), "heads": view.existing.sum(-1).tolist(),
        "columns": [list(key) for key in columns],
        "numbers": packed(np.stack([_ends(cells, -1) for cells in columns.values()]), "<f8"),
    }  # fmt: skip
    return plain(data)  # type: ignore[no-any-return]


def _curves(view: RunView, most: int) -> dict[str, Any]:
    """Return the curves of some heads as float32; `at[layer][head]` is the index of a head in the arrays, or −1."""
    curves, total = view.curves, view.summary.heads["all"].power["total"].value
    order = np.argsort(-np.where(np.isfinite(total), total, -np.inf), axis=None, kind="stable")
    chosen = np.sort(order[view.existing.flat[order]][:most])
    at = np.full(total.size, -1)
    at[chosen] = np.arange(len(chosen))

    def pack(estimate: Estimate) -> str:
        cells = _ends(estimate, -2)  # [L, H, 3, X]
        return packed(cells.reshape(total.size, *cells.shape[2:])[chosen], "<f4")

    mean, power = (
        {name: pack(x) for (quantity, name), x in curves.by_query.items() if quantity == kind}
        for kind in ("mean", "power")
    )
    return {
        "queries": curves.queries, "offsets": curves.offsets, "at": at.reshape(total.shape).tolist(), "mean": mean,
        "power": power, "attention": pack(curves.by_query["attention_0", None]),
        "early": pack(curves.by_offset["early"]), "late": pack(curves.by_offset["reference"]),
    }  # fmt: skip


def _origin(view: RunView) -> dict[str, Any] | None:
    """Return the portrait [J, token, 2], and cosines of fingerprints: their mean, then one matrix per head."""
    if view.origin is None:
        return None
    arrays, portrait = view.origin.arrays, view.origin.record.portrait
    cosine = arrays["cosine"].values
    matrices = packed(np.concatenate([cosine.mean(0, keepdims=True), cosine]), "<f4") if view.readers else None
    return {
        "picture": packed(np.moveaxis(arrays["picture"].values, 1, 0), "<f4"), "depths": int(arrays.sizes["depth"]),
        "cosine": matrices, "cosine_size": int(arrays.sizes["token_a"]), "explained": portrait.explained,
        "among": portrait.among,
    }  # fmt: skip


def _circuit(view: RunView) -> dict[str, Any] | None:
    """Return the coefficient along the direction, float32 [depth, (value, low, high), position]."""
    if view.circuit is None or view.circuit.carrier is None:
        return None
    curve = view.circuit.carrier.curve
    return {"curve": packed(_ends(curve, -2), "<f4"), "positions": curve.value.shape[-1]}


def _ends(estimate: Estimate, axis: int) -> Array:
    return np.stack([estimate.value, estimate.low, estimate.high], axis=axis)


def packed(array: Any, dtype: str) -> str:
    """Return the base64 of little-endian numbers in C order."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()
