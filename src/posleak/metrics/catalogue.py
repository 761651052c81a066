"""The catalogue of metrics from the literature: definition, source, what a metric cannot detect, and published values;
and the names of meters that `--metrics` accepts.

Published values are of other models; they are context for the reader, not targets. This module does not import torch,
so that invalid names are rejected quickly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from posleak.errors import InputError, did_you_mean
from posleak.plugins import load_plugins

if TYPE_CHECKING:
    from posleak.probe import Plan

    from .meter import Meter

GU = "Gu et al., When Attention Sink Emerges (ICLR 2025)"
KIM = "Kim et al., Behind RoPE (arXiv 2509.21042)"
ONCE = "Ruscio, Once upon a token (2025)"
WU = "Wu et al., On the Emergence of Position Bias (2025)"
SUN = "Sun et al., Massive Activations (2024)"
QUEIPO = "Queipo-de-Llano et al., Attention Sinks and Compression Valleys (2025)"
HAVIV = "Haviv et al., Transformer Language Models without Positional Encodings (2022)"
WANG = "Wang et al., When Precision Meets Position (2024)"
SINKS = "Ruscio et al., What are you sinking? (arXiv 2508.02546)"
WAVES = "Ruscio et al., Beyond Position (arXiv 2410.18067)"
OURS = "posleak"


class Looks(Enum):
    """What a metric is computed from."""

    LOGITS = "logits, before the softmax"
    ATTENTION = "attention, after the softmax"
    STATES = "the residual stream"


class Level(Enum):
    """What a metric has one value for. The table has the mean over these, unless the definition says otherwise."""

    HEAD = "head"
    LAYER = "layer"
    DEPTH = "depth"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, a row of the table.

    meter       its name in `--metrics`
    definition  how the value in the table is computed, in words
    blind       what it cannot detect about leakage; may be empty
    published   values of other models, as reported by their authors
    short       a shorter title, for axes
    """

    id: str
    title: str
    meter: str
    source: str
    definition: str
    unit: str
    looks: Looks
    level: Level
    blind: str = ""
    published: str = ""
    short: str = ""

    @property
    def label(self) -> str:
        """The short title, if there is one, else the title."""
        return self.short or self.title

    @property
    def array(self) -> str:
        """Name of the array in the run's dataset from which the metric is computed."""
        return ARRAYS.get(self.id, self.id)


ARRAYS = {
    "sink_rate": "sink_start", "sink_rate_natural": "sink_natural", "sink_rate_repeated": "sink_repeated",
    "first_repeated": "sink_repeated", "sink_attention": "sink_start", "toeplitz": "diagonal", "valley": "norm_0",
    "band_low": "bands", "band_middle": "bands", "band_high": "bands", "uncertainty": "entropy_position",
}  # fmt: skip
"""Arrays whose name differs from the id of the metric."""

NO_MASK = "the mask part, which arises in the softmax's denominator"
WHICH_PART = "which part changes: mask, drift and sink all affect it"
ROUNDING_ONLY = "any leakage that is not due to rounding"
WHERE = "where in the prompt leakage occurs"

_on_heads = partial(Metric, looks=Looks.ATTENTION, level=Level.HEAD)
_on_states = partial(Metric, looks=Looks.STATES, level=Level.DEPTH)
_sinks = partial(_on_heads, source=GU, unit="share of heads")
_shift = partial(_on_heads, meter="shift", source=WANG, unit="attention", blind=ROUNDING_ONLY)
_frame = partial(
    Metric, meter="frames", source=SINKS, unit="share", looks=Looks.ATTENTION, level=Level.LAYER, blind=WHICH_PART
)
_wave = partial(_on_heads, meter="wavelets", source=WAVES, blind=WHERE)

CATALOGUE: tuple[Metric, ...] = (
    _sinks(
        id="sink_rate", title="Sink rate, these prompts", short="Sink rate", meter="sinks", blind=WHICH_PART,
        definition="share of heads with a mean attention of the first 64 queries to position 0 above 0.3, per prompt",
        published="random tokens: Mistral-7B 0.752, LLaMA2-7B 0.901, LLaMA3-8B 0.912, GPT2-XL 0.703",
    ),
    _sinks(
        id="sink_rate_natural", title="Sink rate, natural text", short="Sink rate, text", meter="inputs",
        definition="sink rate on 64 tokens of English prose, with the same BOS if there is one", blind=WHICH_PART,
        published="Mistral-7B 0.975, LLaMA2-7B 0.925, LLaMA3-8B 0.990, GPT2-XL 0.770",
    ),
    _sinks(
        id="sink_rate_repeated", title="Sink rate, one token repeated", meter="inputs",
        definition=(
            "sink rate on one token repeated 64 times, without BOS: with rotated keys all states are equal and "
            "attention depends on the offset alone; uniform attention gives 0"
        ),
        published="RoPE models 0.0, GPT2-XL (learned positions) 0.623",
    ),
    _on_heads(
        id="first_repeated", title="Attention to position 0, one token repeated", short="One token repeated to 0",
        meter="inputs", source=GU, unit="attention",
        definition="mean attention to position 0 on one token repeated 64 times; uniform attention gives 0.0741",
    ),
    _on_heads(
        id="sink_attention", title="Attention to position 0, late queries", short="Late queries to 0", meter="sinks",
        source=OURS, unit="attention", blind=WHICH_PART,
        definition="mean attention to position 0 of the references, the last quarter of the prompt",
    ),
    Metric(
        id="toeplitz", title="Toeplitz deviation", meter="toeplitz", source=KIM, unit="nats", looks=Looks.LOGITS,
        level=Level.HEAD,
        definition=(
            "root mean square, over the plan's pairs, of the logits averaged over prompts minus the mean of their "
            "diagonal; the mean square is unbiased"
        ),
        blind=f"{NO_MASK}; and it counts row constants, which do not change attention",
        published="first layer: absent; elsewhere about 1, logits being about 10",
    ),
    Metric(
        id="delta_r2", title="ΔR²", meter="positions", source=ONCE, unit="R²", looks=Looks.LOGITS, level=Level.HEAD,
        definition="R² of logits on offset, i and j, minus R² on the offset alone, per prompt, over visible pairs",
        blind=f"{NO_MASK}; and effects that are not linear in position. Computed per prompt, it is biased above 0",
        published="Llama-3.2-1B: 85 of 512 heads significant",
    ),
    Metric(
        id="rollout", title="Rollout to position 0", short="Rollout to 0", meter="rollout", source=WU,
        unit="share of reading", looks=Looks.ATTENTION, level=Level.LAYER,
        definition="weight of position 0 in the product of all layers' head-averaged attention, mean over positions",
        blind=f"{WHICH_PART}; residual connections are ignored",
        published="causal models: tends to 1 with depth",
    ),
    _on_states(
        id="largest_times", title="Massive activations: the largest", short="Largest activation", meter="massive",
        source=SUN, unit="times the median", blind="whether attention reads the activation",
        definition="largest |x| divided by the median of |x|, at the depth after the embedding where it is largest",
        published="massive: above 100, and above about 1000 times the median",
    ),
    _on_states(
        id="massive_first", title="Massive activations at position 0", meter="massive", source=SUN, unit="share",
        definition="share at position 0 of the massive activations (|x| > 100 and > 1000 times the median), all depths",
        published="Llama-3.2-3B with BOS: all four of them",
    ),
    Metric(
        id="valley", title="Compression valley: correlation with the norm at 0", meter="valley", source=QUEIPO,
        unit="correlation", looks=Looks.STATES, level=Level.MODEL,
        definition="correlation over depths of the states' singular-spectrum entropy with the log norm at position 0",
        blind="position: it depends on the norm of one state only",
        published="six models: −0.9 ± 0.18",
    ),
    _on_states(
        id="spectrum_entropy", title="Compression valley: lowest entropy", short="Spectrum of states", meter="valley",
        source=QUEIPO, unit="nats", blind="position: it depends only on how many directions states use",
        definition="lowest entropy, over depths after the embedding, of the singular spectrum of the first 128 states",
    ),
    _on_states(
        id="probe_error", title="Position probe", meter="probe", source=HAVIV, unit="tokens",
        definition=(
            "mean absolute error of a linear probe that predicts the position from states, on held-out prompts, at the "
            "depth after the embedding where it is lowest; always predicting the middle gives a quarter of the length"
        ),
        blind="whether attention uses what the probe reads",
        published="NoPE 1.3B: below 100 of 1024 by layer 4",
    ),
    _shift(
        id="shift_bfloat16", title="Shift of all positions, in bfloat16", short="Shift, bfloat16",
        definition=(
            "total variation distance between attention before and after all position ids move by 512, mean over "
            "queries; weights in bfloat16"
        ),
        published="vanishes in float32, not in bfloat16",
    ),
    _shift(
        id="shift_own", title="Shift of all positions, as loaded", short="Shift, as loaded",
        definition="total variation distance under the same shift, with the weights in the dtype they are loaded in",
    ),
    _frame(
        id="star", title="Star-likeness",
        definition="largest in-degree divided by n − 1, of the graph of head-averaged attention above 0.1",
    ),
    _frame(
        id="centralisation", title="Degree centralisation", short="Centralisation",
        definition="Freeman's centralisation of the in-degrees of the same graph; only a star has 1",
    ),
    _frame(
        id="fiedler", title="Fiedler value", unit="1",
        definition="second smallest Laplacian eigenvalue of the symmetrised averaged attention of the first 128 tokens",
    ),
    _frame(
        id="concentration", title="Sink concentration", short="Concentration",
        definition="share of incoming attention that goes to the tenth of keys that receive most",
    ),
    _frame(
        id="reference_tokens", title="Reference tokens", unit="tokens",
        definition="number of keys that receive more than 0.1 on average over all other queries",
        published="Llama-3.2-3B: 120 of 120 analysed heads specialised on BOS; Qwen2.5-7B: 7",
    ),
    _frame(
        id="kl_reduction", title="KL reduction",
        definition="relative drop of the KL divergence from uniform attention without the strongest anchor (our form)",
    ),
    _frame(
        id="centralized", title="Frame: centralized",
        definition="share of the anchors' attention that one anchor has beyond others; the four shares sum to 1",
    ),
    _frame(
        id="distributed", title="Frame: distributed",
        definition="share of the anchors' attention that all weaker anchors have",
    ),
    _frame(
        id="bidirectional", title="Frame: bidirectional",
        definition="twice the share of the weaker of two anchors at both ends; few causal queries see the end",
    ),
    _frame(id="no_frame", title="Frame: none", definition="share of layers and prompts without any anchor"),
    _wave(
        id="band_low", title="Power at low frequencies", short="Low frequencies", unit="share",
        definition="share of the power spectrum of attention by offset below a quarter of the Nyquist frequency",
        blind=f"{WHERE}: it is a mean over late queries",
    ),
    _wave(
        id="band_middle", title="Power at middle frequencies", short="Middle frequencies", unit="share",
        definition="share of the power spectrum between a quarter and three quarters of the Nyquist frequency",
    ),
    _wave(
        id="band_high", title="Power at high frequencies", short="High frequencies", unit="share",
        definition="share of the power spectrum above three quarters of the Nyquist frequency",
    ),
    _wave(
        id="selectivity", title="Spectral selectivity", short="Selectivity", unit="ratio",
        definition="power of the strongest frequency divided by the power of all others, median over heads",
    ),
    _wave(
        id="wavelet_entropy", title="Wavelet entropy", unit="nats",
        definition="entropy of the squared db2 coefficients within a scale, mean over scales and heads",
    ),
    _wave(id="entropy_position", title="Positional entropy", unit="nats", definition="entropy of attention by offset"),
    _wave(
        id="entropy_spectrum", title="Spectral entropy", unit="nats",
        definition="entropy of the power spectrum of attention by offset",
    ),
    _wave(
        id="uncertainty", title="Positional against spectral entropy", unit="correlation", level=Level.MODEL,
        definition="correlation of positional and spectral entropy over all heads",
        published="Llama-3.2-1B −0.51, Mistral-7B −0.42, Qwen2.5-0.5B −0.44, Pythia-2.8B −0.74",
    ),
    _wave(
        id="scale_half", title="Scale sensitivity, half sampling", short="Scale, half", unit="1 − cosine",
        definition="1 − cosine of the wavelet transforms of attention at every second and every offset (our alignment)",
        published="Llama-3.2-1B 0.038, Qwen2.5-0.5B 0.058, Gemma2-2B 0.038",
    ),
    _wave(
        id="scale_quarter", title="Scale sensitivity, quarter sampling", short="Scale, quarter", unit="1 − cosine",
        definition="1 − cosine of the wavelet transforms of attention at every fourth and every offset",
        published="Llama-3.2-1B 0.089, Qwen2.5-0.5B 0.100, Gemma2-2B 0.090",
    ),
)  # fmt: skip
"""All metrics, in the order of the table."""

BY_ID = {metric.id: metric for metric in CATALOGUE}

ALL, NONE = "all", "none"

METER_CLASSES = {
    "sinks": "SinkMeter", "toeplitz": "ToeplitzMeter", "positions": "PositionMeter",
    "frames": "FrameMeter", "wavelets": "WaveletMeter", "rollout": "RolloutMeter",
    "massive": "MassiveMeter", "valley": "ValleyMeter", "probe": "ProbeMeter",
}  # fmt: skip
"""Meters that read the forward passes of the measurement: name -> class in builtin.py."""

SHORT_PROMPT_METRICS = ("inputs", "shift")
"""Metrics that read short prompts of their own: natural text and repeated tokens; shifted positions, in bfloat16."""

PLUGIN_METERS: dict[str, type[Meter]] = {}
"""Meters registered by plugins, by name."""


def register(meter: type[Meter]) -> None:
    """Make a meter available as `--metrics NAME`; its classmethod `of(plan)` constructs it."""
    if meter.name in (*METER_CLASSES, *SHORT_PROMPT_METRICS, ALL, NONE):
        raise InputError("this name belongs to a metric of posleak", where=meter.__module__, got=meter.name,
                         remedy="choose another name")  # fmt: skip
    PLUGIN_METERS[meter.name] = meter


def parse_metrics(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in `all`, `none` or comma-separated text, each once, in a fixed order; reject unknown names."""
    load_plugins()
    known = (*METER_CLASSES, *SHORT_PROMPT_METRICS, *PLUGIN_METERS)
    texts = [part for text in ([given] if isinstance(given, str) else given) for part in str(text).split(",")]
    names = {text.strip() for text in texts if text.strip() and text.strip() != NONE}
    for name in names - {ALL, *known}:
        remedy = did_you_mean(name, (ALL, NONE, *known))
        raise InputError("unknown metrics", where=f"--metrics {name}", got=name, remedy=remedy)
    return tuple(known) if ALL in names else tuple(name for name in known if name in names)


def make_meters(names: Iterable[str], plan: Plan) -> list[Meter]:
    """Construct the meters of these names that read the measurement's own passes, for prompts of this plan."""
    meters = []
    for name in names:
        if name in PLUGIN_METERS:
            meters.append(PLUGIN_METERS[name].of(plan))
        elif name in METER_CLASSES:
            meters.append(getattr(import_module("posleak.metrics.builtin"), METER_CLASSES[name]).of(plan))
    return meters
