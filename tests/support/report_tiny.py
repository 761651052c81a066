"""Helpers for the tests of reports: small run folders of every kind, and a browser without access to the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posleak.analyses.claims.examination import claims
from posleak.analyses.trace.trace import trace
from posleak.models import Subject
from posleak.runs.measure import measure
from support.families import VOCAB, subject, tiny

HOSTILE = "<script>window.pwned=1</script>"
NAME = f"tiny </script>{HOSTILE}<b>&amp;"
PROMPTS = 8
ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def hostile_tokenizer() -> Any:
    """Return a tokenizer whose tokens are scripts, which a browser runs wherever they are not escaped."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<script>window.pwned={k}</script>": k for k in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def with_sink() -> Any:
    """Return a tiny model with a sink: in layer 0, queries and the key of BOS are large in the slowest channel."""
    model: Any = tiny("llama", scale=2.0, attention_bias=True)
    slowest = 4  # of the ten channels of a head; the last of the five frequencies
    with torch.no_grad():
        attention, bos = model.model.layers[0].self_attn, model.get_input_embeddings().weight[1]
        attention.q_proj.bias.view(-1, 10)[:, slowest] = 10.0
        attention.k_proj.weight[slowest] = 0.5 * bos / bos.norm()
    return model


def hostile_run(folder: Path) -> Path:
    """Test claims on a model with a sink whose name and tokens are scripts; return the folder."""
    claims(Subject.of(with_sink(), hostile_tokenizer(), name=NAME), out=folder, length=64, prompts=4)
    return folder


def traced(folder: Path) -> Path:
    """Trace a model with a sink whose name and tokens are scripts, by layer; return the folder."""
    trace(
        Subject.of(with_sink(), hostile_tokenizer(), name=NAME), out=folder, length=64, prompts=PROMPTS, by_layer=True
    )
    return folder


def measured(folder: Path, family: str = "llama", **options: Any) -> Path:
    """Measure a tiny model and return the folder; `layers` and `heads` are those of the model."""
    shape = {"num_hidden_layers": options.pop("layers", 3), "num_attention_heads": options.pop("heads", 3)}
    measure(subject(family, **shape), out=folder, **{"length": 64, "prompts": PROMPTS, **options})
    return folder


@dataclass
class Opened:
    """A page in the browser, with the forbidden requests and the errors that it caused."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        try:
            yield chromium
        finally:
            chromium.close()


def opened(chromium: Any, path: Path, fragment: str = "", width: int = 1280, scheme: str = "light") -> Opened:
    """Open the page and wait until it is drawn; requests other than for files are aborted and recorded."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    result = Opened(context.new_page())

    def refuse(route: Any) -> None:
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            result.requests.append(route.request.url)
            route.abort()

    result.page.route("**/*", refuse)
    result.page.on("console", lambda message: result.errors.extend([message.text] if message.type == "error" else []))
    result.page.on("pageerror", lambda error: result.errors.append(str(error)))
    result.page.goto(path.as_uri() + fragment)
    result.page.wait_for_function("document.documentElement.dataset.ready === 'true'")
    return result
