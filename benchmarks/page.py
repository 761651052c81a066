"""Generate docs/cost.md and its figure from the results in this folder: `python benchmarks/page.py`.

Only the text between markers is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, PICTURE = (
    Path(__file__).parent / "results",
    ROOT / "docs" / "cost.md",
    ROOT / "docs" / "images" / "cost.png",
)
MARKERS = "<!-- {name} -->\n", "<!-- end of {name} -->"

# Colours of Okabe and Ito, and markers for prints without colour.
STYLES = {
    "forward": ("#000000", "o"),
    "posleak": ("#0072b2", "s"),
    "eager": ("#d55e00", "^"),
    "TransformerLens": ("#e69f00", "v"),
    "nnsight": ("#009e73", "D"),
}


def read_results(name: str) -> dict[str, Any]:
    """Return a JSON file of results."""
    results: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return results


def read_comparison() -> dict[str, Any]:
    """Return the comparison of all cases, with one more length that was run once."""
    results, longer = read_results("comparison.json"), read_results("longer.json")
    return {**results, "cases": results["cases"] + longer["cases"]}


def machine(results: dict[str, Any]) -> Iterator[str]:
    """Yield the description of the machine, the versions and the model."""
    about, versions, dtype = results["machine"], results["versions"], results["identity"]["dtype"]
    packages = ", ".join(f"{name} {versions[name]}" for name in versions if name != "posleak")
    yield f"{about['processor']}, {about['cores']} cores ({about['threads']} threads), {about['memory_gb']} GB, "
    yield f"{about['system']}, Python {about['python']}, {packages}. {results['model']}, {dtype}, "
    yield "one prompt of random tokens, the default plan.\n"


def comparison(results: dict[str, Any]) -> Iterator[str]:
    """Yield one row per case and length."""
    yield "| tokens | case | seconds | times the forward pass | peak MB above the loaded model | n |\n"
    yield "|---:|---|---:|---:|---:|---:|\n"
    for row in results["cases"]:
        yield f"| {row['length']:,} | {row['name']} | " + " | ".join(cells(row)) + f" | {row['n']} |\n"


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Yield seconds, ratio and memory of a case, with ranges."""
    if row["seconds"] is None:
        yield from ("–", row["error"] or "–")
    else:
        yield "{:.2f} ({:.2f} – {:.2f})".format(row["seconds"], *row["seconds_range"])
        yield "{:.3f} ({:.3f} – {:.3f})".format(row["ratio_to_forward"], *row["ratio_range"])
    yield "–" if row["peak_mb"] is None else f"{row['peak_mb']:,.0f}"


def long_contexts(results: dict[str, Any]) -> Iterator[str]:
    """Yield one row per model and length of `posleak measure --prompts 1 --profile --json`."""
    yield "| model | tokens | seconds | in the model's own forward pass | peak MB above the model | planned MB |\n"
    yield "|---|---:|---:|---:|---:|---:|\n"
    for row in results["runs"]:
        profile, memory = row["profile"], row["profile"]["memory"]
        yield f"| {row['model']} | {row['length']:,} | {profile['measuring_seconds']:,.0f} | "
        yield f"{profile['forward_share']:.1%} | {memory['peak_mb']:,.0f} | {memory['planned_mb']:,.0f} |\n"


def compared_with_base(results: dict[str, Any]) -> Iterator[str]:
    """Yield the cases that are compared with another case than the forward pass."""
    yield "| tokens | case | seconds | divided by | ratio | n |\n"
    yield "|---:|---|---:|---|---:|---:|\n"
    for row in results["cases"]:
        seconds = "{:.2f} ({:.2f} – {:.2f})".format(row["seconds"], *row["seconds_range"])
        ratio = "{:.3f} ({:.3f} – {:.3f})".format(row["ratio_to_base"], *row["ratio_to_base_range"])
        if row["base"] not in (row["name"], "forward"):
            yield f"| {row['length']:,} | {row['name']} | {seconds} | {row['base']} | {ratio} | {row['n']} |\n"


def replace_section(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of `name` replaced."""
    start, end = (marker.format(name=name) for marker in MARKERS)
    if start not in page or end not in page:
        raise SystemExit(f"{PAGE.name} has no markers for {name}")
    return re.sub(re.escape(start) + r".*?" + re.escape(end), lambda _: start + text + end, page, flags=re.S)


def generated_page() -> str:
    """Return docs/cost.md with all generated sections replaced."""
    results = read_comparison()
    page = PAGE.read_text(encoding="utf-8")
    parts = {
        "machine": machine(results),
        "comparison": comparison(results),
        "long": long_contexts(read_results("long.json")),
        "sweep": compared_with_base(read_results("sweep.json")),
        "loss": compared_with_base(read_results("loss.json")),
    }
    for name, text in parts.items():
        page = replace_section(page, name, "".join(text))
    return page


def draw(results: dict[str, Any]) -> None:
    """Draw seconds and memory by length on logarithmic axes, with ranges over rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, (colour, marker) in STYLES.items():
        rows = [row for row in results["cases"] if row["name"] == name]
        timed, sized = ([row for row in rows if row[key] is not None] for key in ("seconds", "peak_mb"))
        style = {"color": colour, "marker": marker, "label": name, "markersize": 5, "linewidth": 1.3}
        spans = [
            [r["seconds"] - r["seconds_range"][0] for r in timed],
            [r["seconds_range"][1] - r["seconds"] for r in timed],
        ]
        left.errorbar([r["length"] for r in timed], [r["seconds"] for r in timed], yerr=spans, capsize=2, **style)
        right.plot([r["length"] for r in sized], [r["peak_mb"] for r in sized], **style)
    for axes, title in ((left, "seconds, one prompt"), (right, "peak MB above the loaded model")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        lengths = sorted({row["length"] for row in results["cases"]})
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.25, which="major")
    left.legend(frameon=False)
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    PAGE.write_text(generated_page(), encoding="utf-8")
    draw(read_comparison())
