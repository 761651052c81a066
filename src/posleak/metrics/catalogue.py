"""Every metric of others that a run can have: its definition, where it comes from, what it cannot see, and published
values of other models. Those are context for a reader, never something to be reached."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    """What a metric looks at."""

    LOGITS = "logits, before the softmax"
    ATTENTION = "attention, after the softmax"
    STATES = "the residual stream"


class Level(Enum):
    """What has a value of its own; the table has the mean over them, or what the definition says instead."""

    HEAD = "head"
    LAYER = "layer"
    DEPTH = "depth"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One line of the table.

    meter       the name that `--metrics` calls it by
    definition  how the number in the table is made, in words
    blind       what it cannot see of leakage; empty if nothing needs to be said
    published   values of other models, as their authors report them
    short       its title in fewer letters, for axes
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
        """Its name where there is little room."""
        return self.short or self.title

    @property
    def array(self) -> str:
        """The run's array that it is made of."""
        return ARRAYS.get(self.id, self.id)


ARRAYS = {
    "sink_rate": "sink_start", "sink_rate_natural": "sink_natural", "sink_rate_repeated": "sink_repeated",
    "first_repeated": "sink_repeated", "sink_attention": "sink_start", "toeplitz": "diagonal", "valley": "norm_0",
    "band_low": "bands", "band_middle": "bands", "band_high": "bands", "uncertainty": "entropy_position",
}  # fmt: skip
"""Arrays of metrics that are not called as their metric is."""

NO_MASK = "the mask's part, which is in the softmax's denominator"
LENGTHS = "which source: mask, drift and sink all move it"

CATALOGUE: tuple[Metric, ...] = (
    Metric(
        id="sink_rate",
        title="Sink rate, these prompts",
        short="Sink rate",
        meter="sinks",
        source=GU,
        definition=(
            "share of heads whose mean attention to position 0, over the first 64 queries, is above 0.3; per prompt, "
            "then averaged"
        ),
        unit="share of heads",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind=LENGTHS,
        published="random tokens: Mistral-7B 0.752, LLaMA2-7B 0.901, LLaMA3-8B 0.912, GPT2-XL 0.703",
    ),
    Metric(
        id="sink_rate_natural",
        title="Sink rate, natural text",
        short="Sink rate, text",
        meter="inputs",
        source=GU,
        definition="the same on 64 tokens of English prose; with the same BOS, where there is one",
        unit="share of heads",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind=LENGTHS,
        published="Mistral-7B 0.975, LLaMA2-7B 0.925, LLaMA3-8B 0.990, GPT2-XL 0.770",
    ),
    Metric(
        id="sink_rate_repeated",
        title="Sink rate, one token repeated",
        meter="inputs",
        source=GU,
        definition=(
            "the same on one token repeated 64 times, no BOS: with rotated keys all states are equal there and "
            "attention depends on the offset alone; uniform attention gives 0"
        ),
        unit="share of heads",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        published="RoPE models 0.0, GPT2-XL (learned positions) 0.623",
    ),
    Metric(
        id="first_repeated",
        title="Attention to position 0, one token repeated",
        short="One token repeated to 0",
        meter="inputs",
        source=GU,
        definition=(
            "mean attention to position 0, its farthest key, of 64 queries that read one token repeated; uniform "
            "attention gives 0.0741"
        ),
        unit="attention",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
    ),
    Metric(
        id="sink_attention",
        title="Attention to position 0, late queries",
        short="Late queries to 0",
        meter="sinks",
        source=OURS,
        definition=(
            "mean attention of the references, the last quarter of the prompt, to position 0: the first entry of "
            "the sink profile"
        ),
        unit="attention",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind=LENGTHS,
    ),
    Metric(
        id="toeplitz",
        title="Toeplitz deviation",
        meter="toeplitz",
        source=KIM,
        definition=(
            "logits averaged over prompts, minus the mean of their diagonal: root of the mean square over the plan's "
            "pairs, which is unbiased before the root"
        ),
        unit="nats",
        looks=Looks.LOGITS,
        level=Level.HEAD,
        blind=f"{NO_MASK}; and constants that a row adds to all its logits count, though no attention changes",
        published="first layer: absent; elsewhere about 1, logits being about 10",
    ),
    Metric(
        id="delta_r2",
        title="ΔR²",
        meter="positions",
        source=ONCE,
        definition=("R² of logits on offset, i and j, minus R² on the offset alone, per prompt, over visible pairs"),
        unit="R²",
        looks=Looks.LOGITS,
        level=Level.HEAD,
        blind=f"{NO_MASK}; and whatever is not linear in position. Made per prompt, it is above 0 by noise, too",
        published="Llama-3.2-1B: 85 of 512 heads significant",
    ),
    Metric(
        id="rollout",
        title="Rollout to position 0",
        short="Rollout to 0",
        meter="rollout",
        source=WU,
        definition=(
            "what positions read of position 0 through all attention layers: the product of attention averaged over "
            "heads; mean over positions, after the last layer"
        ),
        unit="share of reading",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=f"{LENGTHS}; residual connections are left out",
        published="causal models: tends to 1 with depth",
    ),
    Metric(
        id="largest_times",
        title="Massive activations: the largest",
        short="Largest activation",
        meter="massive",
        source=SUN,
        definition="largest |x| over the median of |x|, at the depth after the embedding where that is largest",
        unit="times the median",
        looks=Looks.STATES,
        level=Level.DEPTH,
        blind="how attention reads it",
        published="massive: above 100, and above some 1000 times the median",
    ),
    Metric(
        id="massive_first",
        title="Massive activations at position 0",
        meter="massive",
        source=SUN,
        definition=(
            "share of all massive activations (|x| > 100 and > 1000 times the median) of all depths that are at "
            "position 0"
        ),
        unit="share",
        looks=Looks.STATES,
        level=Level.DEPTH,
        published="Llama-3.2-3B with BOS: all four of them",
    ),
    Metric(
        id="valley",
        title="Compression valley: correlation with the norm at 0",
        meter="valley",
        source=QUEIPO,
        definition=(
            "correlation, over depths, of the entropy of the states' singular spectrum with the log of the norm at "
            "position 0"
        ),
        unit="correlation",
        looks=Looks.STATES,
        level=Level.MODEL,
        blind="position: only the size of one state",
        published="six models: −0.9 ± 0.18",
    ),
    Metric(
        id="spectrum_entropy",
        title="Compression valley: lowest entropy",
        short="Spectrum of states",
        meter="valley",
        source=QUEIPO,
        definition=(
            "entropy of the singular spectrum of the first 128 states, at the depth after the embedding where it is "
            "lowest"
        ),
        unit="nats",
        looks=Looks.STATES,
        level=Level.DEPTH,
        blind="position: only how many directions states use",
    ),
    Metric(
        id="probe_error",
        title="Position probe",
        meter="probe",
        source=HAVIV,
        definition=(
            "mean error of a linear probe that reads the position off states, on held-out prompts, at the depth after "
            "the embedding where it is lowest; always guessing the middle gives a quarter of the length"
        ),
        unit="tokens",
        looks=Looks.STATES,
        level=Level.DEPTH,
        blind="whether attention uses what the probe finds",
        published="NoPE 1.3B: below 100 of 1024 by layer 4",
    ),
    Metric(
        id="shift_bfloat16",
        title="Shift of all positions, in bfloat16",
        short="Shift, bfloat16",
        meter="shift",
        source=WANG,
        definition=(
            "mean over queries of half the summed change of attention when all position ids move by 512; weights in"
            " bfloat16"
        ),
        unit="attention",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="all leakage that is not rounding",
        published="vanishes in float32, not in bfloat16",
    ),
    Metric(
        id="shift_own",
        title="Shift of all positions, as loaded",
        short="Shift, as loaded",
        meter="shift",
        source=WANG,
        definition="the same with the weights as they are loaded",
        unit="attention",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="all leakage that is not rounding",
    ),
    Metric(
        id="star",
        title="Star-likeness",
        meter="frames",
        source=SINKS,
        definition="largest in-degree over n − 1, of the graph of attention above 0.1, averaged over heads",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="centralisation",
        title="Degree centralisation",
        short="Centralisation",
        meter="frames",
        source=SINKS,
        definition="Freeman's centralisation of in-degrees of the same graph: 1 is a star and nothing else",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="fiedler",
        title="Fiedler value",
        meter="frames",
        source=SINKS,
        definition=(
            "second smallest eigenvalue of the Laplacian of the symmetrised averaged attention, of the first 128 tokens"
        ),
        unit="1",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="concentration",
        title="Sink concentration",
        short="Concentration",
        meter="frames",
        source=SINKS,
        definition="share of incoming attention that goes to the tenth of keys that get most",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="reference_tokens",
        title="Reference tokens",
        meter="frames",
        source=SINKS,
        definition="keys that get more than 0.1 on average over all other queries",
        unit="tokens",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
        published="Llama-3.2-3B: 120 of 120 analysed heads specialised on BOS; Qwen2.5-7B: 7",
    ),
    Metric(
        id="kl_reduction",
        title="KL reduction",
        meter="frames",
        source=SINKS,
        definition=(
            "how much of the rows' divergence from uniform attention goes away with the strongest anchor; the form "
            "is ours"
        ),
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="centralized",
        title="Frame: centralized",
        meter="frames",
        source=SINKS,
        definition="share of the anchors' attention that one anchor has beyond others; the four shares add up to 1",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="distributed",
        title="Frame: distributed",
        meter="frames",
        source=SINKS,
        definition="share that several weaker anchors have",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="bidirectional",
        title="Frame: bidirectional",
        meter="frames",
        source=SINKS,
        definition="twice what the weaker of two anchors at both ends has; in causal attention the end is seen by few",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="no_frame",
        title="Frame: none",
        meter="frames",
        source=SINKS,
        definition="share of layers and prompts without any anchor",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.LAYER,
        blind=LENGTHS,
    ),
    Metric(
        id="band_low",
        title="Power at low frequencies",
        short="Low frequencies",
        meter="wavelets",
        source=WAVES,
        definition="share of the power spectrum of attention by offset below a quarter of Nyquist's frequency",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt: it is a mean over late queries",
    ),
    Metric(
        id="band_middle",
        title="Power at middle frequencies",
        short="Middle frequencies",
        meter="wavelets",
        source=WAVES,
        definition="the same between a quarter and three quarters",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
    ),
    Metric(
        id="band_high",
        title="Power at high frequencies",
        short="High frequencies",
        meter="wavelets",
        source=WAVES,
        definition="the same above three quarters",
        unit="share",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
    ),
    Metric(
        id="selectivity",
        title="Spectral selectivity",
        short="Selectivity",
        meter="wavelets",
        source=WAVES,
        definition="power of the strongest frequency over that of all others, median over heads",
        unit="ratio",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
    ),
    Metric(
        id="wavelet_entropy",
        title="Wavelet entropy",
        meter="wavelets",
        source=WAVES,
        definition="entropy of the squared db2 coefficients within a scale, mean over scales and heads",
        unit="nats",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
    ),
    Metric(
        id="entropy_position",
        title="Positional entropy",
        meter="wavelets",
        source=WAVES,
        definition="entropy of attention by offset",
        unit="nats",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
    ),
    Metric(
        id="entropy_spectrum",
        title="Spectral entropy",
        meter="wavelets",
        source=WAVES,
        definition="entropy of its power spectrum",
        unit="nats",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
    ),
    Metric(
        id="uncertainty",
        title="Positional against spectral entropy",
        meter="wavelets",
        source=WAVES,
        definition="correlation of the two over all heads",
        unit="correlation",
        looks=Looks.ATTENTION,
        level=Level.MODEL,
        blind="where in the prompt",
        published="Llama-3.2-1B −0.51, Mistral-7B −0.42, Qwen2.5-0.5B −0.44, Pythia-2.8B −0.74",
    ),
    Metric(
        id="scale_half",
        title="Scale sensitivity, half sampling",
        short="Scale, half",
        meter="wavelets",
        source=WAVES,
        definition=(
            "1 − cosine of the wavelet transforms of attention at every second offset and at every one; the "
            "alignment is ours"
        ),
        unit="1 − cosine",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
        published="Llama-3.2-1B 0.038, Qwen2.5-0.5B 0.058, Gemma2-2B 0.038",
    ),
    Metric(
        id="scale_quarter",
        title="Scale sensitivity, quarter sampling",
        short="Scale, quarter",
        meter="wavelets",
        source=WAVES,
        definition="the same at every fourth offset",
        unit="1 − cosine",
        looks=Looks.ATTENTION,
        level=Level.HEAD,
        blind="where in the prompt",
        published="Llama-3.2-1B 0.089, Qwen2.5-0.5B 0.100, Gemma2-2B 0.090",
    ),
)
"""In the order of the table."""

BY_ID = {metric.id: metric for metric in CATALOGUE}
