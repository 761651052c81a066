"""Generate docs/edits.md from the registry of edits: `python -m tools.edit_docs > docs/edits.md`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence

from posleak.edits import KINDS, EditKind, NamedEdit, Site, parse_edit
from posleak.edits.parse import ACTS_BY_PLACE

WIDTH = 120
MODEL = "smollm2-135m"

HEAD = """\
# Edits

Every what-if that posleak knows, to look up how it is written and what it does. An edit changes one thing in the model
or in its input, and everything else stays. `posleak measure` takes edits with `--edit`, which can be repeated. (Made by
`python -m tools.edit_docs`, and checked by a test to be current.)

```sh
posleak measure smollm2-135m --edit bos=mean --edit window=64
```

In Python they are `posleak.measure(subject, edits=["bos=mean", "window=64"])`. The run's record names its edits. To see
what an edit does, compare the run with one without it that has the same seed, length and number of prompts:
`posleak compare RUN RUN` then pairs the prompts.

An edit lasts as long as the run and leaves the model as it was: weights, buffers and attention function are the same
afterwards, also after an error. The run says what each edit changed: which layers, and how many heads, or what else
(`touched` in its record and in `--json`). An edit that changes nothing is an error, so that a slip of the pen does not
become "no effect"; only an edit that says so itself, `shift=0` or a scaling by 1, is kept as a control, and changes no
bit of the result.

You can add edits of your own: [extending.md](extending.md). Words are explained in [definitions.md](definitions.md):
the reference queries, for example, are the late queries that all others are compared with.
"""

SCOPES = """\
## Layers and heads

Some edits take a scope, written behind an @. Without one they act everywhere. Layers and heads are counted from 0, and
layers as the model counts them: a hybrid has attention in some of its layers only.

| scope | means |
|---|---|
| `@3` | layer 3, all heads |
| `@2-5` | layers 2 to 5, all heads |
| `@3.1` | layer 3, head 1 |
| `@2-5,7.0` | layers 2 to 5, and head 0 of layer 7 |

A layer or head that the model does not have is an error, and so is a layer without attention that is named alone.
"""


def page() -> str:
    """Return the page, ending in one newline."""
    known = sorted(KINDS.values(), key=lambda kind: list(Site).index(example(kind).site))
    lines = (line for kind in known for line in section(kind))
    return "\n".join([HEAD, *order(known), *combinations(known), SCOPES, *lines]).rstrip("\n") + "\n"


def example(kind: EditKind) -> NamedEdit:
    """Return the edit of the kind's example."""
    return parse_edit(kind.example)


def order(known: Sequence[EditKind]) -> Iterator[str]:
    """Yield the sites of edits in the order of application."""
    yield "## Order\n"
    yield "Edits are applied in this order, however they are written on the command line:\n"
    yield "| | acts on | edits |"
    yield "|---|---|---|"
    for number, site in enumerate(Site, start=1):
        there = names(kind for kind in known if example(kind).site is site)
        yield f"| {number} | {site.value} | {there or 'none of posleak itself'} |"
    yield ""


def combinations(known: Sequence[EditKind]) -> Iterator[str]:
    """Yield the combinations of edits that are rejected."""
    seeing = names((kind for kind in known if not example(kind).causal), " or ")
    needing = names((kind for kind in known if example(kind).needs_causal), " or ")
    yield "These are refused, with the reason, before a model is loaded:\n"
    yield item("two edits in one row of the table: both would change the same thing")
    yield item(f"{seeing} together with {needing}, which are defined only where queries do not see later keys")
    yield item("`ring` together with edits of positions or visibility, which it sets itself")
    by_place = names((kind for kind in known if example(kind).site in ACTS_BY_PLACE), " or ")
    yield item(f"`context` together with {by_place}, which act by place, where the prompt is not read first")
    yield item(f"{seeing} in `posleak measure`: leakage is not defined where queries see later keys")
    yield ""


def section(kind: EditKind) -> Iterator[str]:
    """Yield the section of one kind of edit."""
    yield f"## `{kind.name}`\n"
    yield item(f"**Written** `{kind.form}`")
    yield item(f"**Acts on** {example(kind).site.value}")
    yield item(f"**Scope** {scope(kind)}")
    yield item(f"**Changes** {kind.changes}.")
    yield item(f"**Refuses** {kind.refuses}.")
    yield ""
    yield from command(kind) if example(kind).causal else in_python(kind)
    yield ""


def scope(kind: EditKind) -> str:
    """Return the scopes that a kind accepts after @."""
    if not kind.scoped:
        return "none: it acts everywhere"
    return "layers and heads" if "HEADS" in kind.form else "whole layers"


def command(kind: EditKind) -> Iterator[str]:
    """Yield the example as a command."""
    yield f"```sh\nposleak measure {MODEL} --edit {kind.example}\n```"


def in_python(kind: EditKind) -> Iterator[str]:
    """Yield the example of an edit that `measure` rejects: the states of a model under it."""
    yield "```python\nfrom posleak.edits import parse_edits\nfrom posleak.probe import attach\n"
    yield f'with attach(subject.model, edits=parse_edits(["{kind.example}"])) as probe:'
    yield "    states = probe.forward(ids).last_hidden_state  # ids [prompts, length], a tensor of tokens\n```"


def names(kinds: Iterator[EditKind], last: str = ", ") -> str:
    """Return a list such as `a`, `b` or `c`."""
    found = [f"`{kind.name}`" for kind in kinds]
    return last.join([", ".join(found[:-1]), *found[-1:]] if len(found) > 1 else found)


def item(text: str) -> str:
    """Return a wrapped list item."""
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(page())
