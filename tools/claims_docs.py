"""Generate docs/claims.md from the registry of claims and the results of the gallery.

python -m tools.claims_docs docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posleak.analyses.claims.catalogue import ENOUGH, Claim, registry
from posleak.papers import ALL, PAPERS
from posleak.show.numbers import effect

from .gallery import NUMBERS, read
from .made import row

PAGE = "claims.md"

HEAD = f"""\
# Claims

What three papers say about position, sinks and frequencies, sentence by sentence, how `posleak claims` tests each, and
what came out on models of the [gallery](gallery/index.md). Made by `python -m tools.claims_docs docs`, and
checked by a test to be current.

```sh
posleak claims smollm2-135m               # the paper on position
posleak claims smollm2-135m --paper all   # all three
```

One rule judges all claims, and was written before any was tested. A claim puts its effect on one side of "no effect";
the 95% interval then decides:

| verdict | means |
|---|---|
| ✓ supported | the whole interval lies on the claimed side |
| ✗ contradicted | the whole interval lies on the other side |
| ? inconclusive | the interval contains "no effect", or n is below {ENOUGH} |
| – not applicable | the model does not have what the claim is about |

Numbers of claims are ours: a sentence of a paper that has several sides is tested side by side, under one number.
Effects below are on random tokens, 16 prompts of 256, seed 0. They are about these models, not about all. Claims of
your own: [extending](extending.md#a-claim).
"""

MARKS = {"supported": "✓", "contradicted": "✗", "inconclusive": "?", "not applicable": "–"}


def page(kept: Mapping[str, Any]) -> str:
    """Return the page. `kept`: docs/gallery/numbers.json."""
    found = {name: said["claims"] for of in kept.values() for name, said in of.items() if "claims" in said}
    known = [claim for claim in registry(ALL) if claim.paper is not None]
    lines = [HEAD, *summary(known, found), ""]
    for name, paper in PAPERS.items():
        lines += [
            f"## {paper.title}",
            "",
            f"[arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}); `--paper {name}`.",
            "",
        ]
        for claim in known:
            if claim.paper == name:
                lines += section(claim, found)
    return "\n".join(lines).rstrip("\n") + "\n"


def summary(known: Sequence[Claim], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of verdicts of all claims on all models."""
    yield "## Verdicts"
    yield ""
    yield row("paper", "claim", *found)
    yield row("---", "---", *["---"] * len(found))
    for claim in known:
        verdicts = (MARKS[results[claim.id]["verdict"]] for results in found.values())
        yield row(str(claim.paper), f"{claim.number}. {claim.title}", *verdicts)


def section(claim: Claim, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield one claim: its sentence, its test, and its results."""
    yield f"### {claim.number}. {claim.title}"
    yield ""
    yield f"{claim.sentence.rstrip('.')}."
    yield ""
    yield f"*Tested:* {claim.method.rstrip('.')}."
    yield ""
    there = {name: results[claim.id] for name, results in found.items() if claim.id in results}
    if there:
        yield row("model", "effect", "verdict")
        yield row("---", "---", "---")
        for name, result in there.items():
            yield row(name, _effect(result), f"{MARKS[result['verdict']]} {result['verdict']}")
        yield ""


def _effect(result: Mapping[str, Any]) -> str:
    if result["reason"] is not None:
        return str(result["reason"])
    return f"{' '.join(effect(read(result), result['unit']))}, n = {result['n']}"


def main() -> None:
    docs = Path(sys.argv[1])
    kept = json.loads((docs / "gallery" / NUMBERS).read_text(encoding="utf-8"))
    (docs / PAGE).write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
