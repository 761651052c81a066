"""Helpers for the tests of reports: small run folders of every kind, and a browser without access to the network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posleak.analyses.circuit.carrier import Carrier, FitFacts
from posleak.analyses.circuit.circuit import CIRCUIT_FILE, SEALED, Circuit, CircuitFile, CircuitParts, circuit_digest
from posleak.analyses.circuit.erasure import Erased
from posleak.analyses.circuit.ranking import Ranking
from posleak.analyses.circuit.writing import Edge, Reader, RemovedBySize, SetEffect, Writer, Writing
from posleak.analyses.claims.examination import claims
from posleak.analyses.trace.trace import Trace, trace
from posleak.leakage import Estimate
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


def made_up_circuit(trace: Trace, seed: int = 0, writers: int = 3) -> Circuit:
    """Return a made-up circuit that fits a trace; its numbers are clear, unclear, not defined, or not measured."""
    generator, n = np.random.default_rng(seed), trace.ordinary.prompts
    calls, heads = trace.ordinary.data.sizes["layer"], trace.ordinary.data.sizes["head"]
    ids, depths = trace.ordinary.summary.layer_ids, max(trace.ordinary.summary.layer_ids) + 2

    def estimate(value: float, width: float) -> Estimate:
        return Estimate(np.asarray(value), np.asarray(value - width), np.asarray(value + 1.2 * width), n)

    def effect(k: int) -> SetEffect:
        own, draws = estimate(1 - 0.55 ** (k * 3 / writers), 0.15 / k), tuple(generator.normal(0.1, 0.2, 8).tolist())
        others = estimate(0.4, 0.2) if k <= writers else None
        if k not in (1, writers):
            return SetEffect(own, others)
        return SetEffect(own, others, estimate(0.1, 0.15), estimate(0.6, 0.2), draws)

    order = [divmod(int(at), heads) for at in generator.permutation((calls - 1) * heads)[:writers]]
    late = [divmod(int(at), heads) for at in heads + generator.permutation((calls - 1) * heads)[:4]]
    alone = [estimate(0.5 * 0.7**k, 0.1) for k in range(writers)]
    every = [Writer(ids[c], c, h, f"{ids[c]}.{h}", 0.4 * 0.7**k, alone[k], alone[k]) for k, (c, h) in enumerate(order)]
    readers = [
        Reader(ids[c], c, h, f"{ids[c]}.{h}", estimate(0.3 / (k + 1), 0.1), estimate(0.8, 0.1))
        for k, (c, h) in enumerate(late)
    ]
    edges = [
        Edge(w, r, estimate(0.05 * (w + r % 2), 0.02), estimate(0.3 * (r % 2) + 0.1 * w, 0.05))
        for w, writer in enumerate(every)
        for r, reader in enumerate(readers)
        if reader.call > writer.call
    ]
    attribution = Ranking("gradients", generator.normal(size=(calls, heads)), 0.3, n, 5, {1: 1.0, 3: 2 / 3}, 0.7)
    sizes = sorted({1, 2, 3, 5, writers})
    writing = Writing(
        calls * heads, attribution, tuple(RemovedBySize(k, effect(k), effect(k)) for k in sizes), tuple(every), True,
        tuple(readers), tuple(edges),
    )  # fmt: skip
    return Circuit(writing, made_up_carrier(n, depths, generator), made_up_erasure(estimate), None, (HOSTILE,), trace)


def made_up_carrier(n: int, depths: int, generator: np.random.Generator) -> Carrier:
    """Return a carrier whose direction is not defined at depth 0, with 4 directions at 12 positions."""
    positions = tuple(range(4, 64, 5))
    spectrum = np.array([0.9, 0.06, 0.02, 0.005]) * generator.uniform(0.9, 1.05, (depths, 4))
    spectrum[0] = np.nan
    curve = np.arange(1, depths + 1)[:, None] * (4 / np.sqrt(np.array(positions)) - 1)
    share, turns = np.linspace(0.002, 0.05, depths), np.abs(np.arange(depths)[:, None] - np.arange(depths))

    def estimated(value: Any, width: float) -> Estimate:
        return Estimate(value, value - width, value + width, n)

    return Carrier(
        estimated(share, 0.004), estimated(spectrum[:, 0], 0.03), estimated(spectrum, 0.03),
        (None, *(1,) * (depths - 1)), np.exp(-turns / depths), np.linspace(-0.3, 0.9, depths),
        np.linspace(0, 0.5, depths), ((), *((3, 7),) * (depths - 1)), estimated(curve, 0.2), positions,
        FitFacts("ab" * 32, 24, 64, 7, "random"),
    )  # fmt: skip


def made_up_erasure(estimate: Callable[[float, float], Estimate]) -> tuple[Erased, ...]:
    """Return one row per edit, one of which is at some depths only; the source of the loss is a script."""
    rows = []
    texts = "erase:1", "erase:1@1-2", "random:1@1-2", "erase:2", "leace:1", "random:1", "random:2", "random-leace:1"
    for text in texts:
        method, k, random = text.split(":")[0], int(text.split(":")[1][0]), text.startswith("random")
        share, loss = estimate(0.02 if random else 0.7 + 0.05 * k, 0.08), estimate(0.001 if random else 0.02 * k, 0.01)
        control = (None, None) if random else (estimate(0.02, 0.08), estimate(0.001, 0.01))
        powers, edit = (share, share, estimate(0.1, 0.05)), f"position={text}"
        rows.append(Erased(method, k, edit, *powers, loss, f"text:{HOSTILE}", *control))
    return tuple(rows)


def with_circuit(folder: Path, **changes: Any) -> Circuit:
    """Write a made-up circuit into a folder that has a trace, and return it; `changes` are fields of the circuit."""
    trace = Trace.load(folder)
    assert trace is not None
    circuit = replace(made_up_circuit(trace), **changes)
    parts = CircuitParts(*(getattr(circuit, field.name) for field in fields(CircuitParts)))
    ranking = circuit.writing.attribution
    digest = circuit_digest(trace, ranking.method, ranking.nodes)
    SEALED.write(folder / CIRCUIT_FILE, CircuitFile(digest, parts))
    return circuit
