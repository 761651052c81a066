"""The variants: models that differ from standard RoPE in one setting and start from the same weights.

Where transformers has an architecture that differs from Llama in this setting only, it is used: Mistral (window),
SmolLM3 (layers without RoPE), Phi-3 (partial rotation), Granite SWA (learned sink logit). The others are in
posleak/models/siblings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posleak.errors import InputError, did_you_mean
from posleak.models.identity import SIBLING_MODEL_TYPE

from .recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

STANDARD = "rope"
BASE = 10_000.0
NTK = 4.0


@dataclass(frozen=True)
class Variant:
    """One setting that differs from standard RoPE.

    about        the difference in words
    kind         architecture, as transformers names it
    changes      changed fields of its config
    bos          whether training prompts start with a BOS; without it, the vocabulary has none
    """

    name: str
    about: str
    kind: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict)
    bos: bool = True

    def config(self, recipe: Recipe) -> Any:
        """Return the config of a model of the recipe's size."""
        from transformers import AutoConfig

        if self.kind == SIBLING_MODEL_TYPE:
            from posleak.models import siblings  # noqa: F401  makes them known to transformers
        changes = {name: value(recipe) if callable(value) else value for name, value in self.changes.items()}
        sizes: dict[str, Any] = {
            "vocab_size": recipe.tokens + self.bos, "hidden_size": recipe.width,
            "intermediate_size": recipe.feedforward, "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.heads, "max_position_embeddings": recipe.context,
            "rope_parameters": {"rope_type": "default", "rope_theta": BASE}, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6, "bos_token_id": recipe.bos if self.bos else None, "eos_token_id": None,
            "pad_token_id": None, "use_cache": False,
        }  # fmt: skip
        return AutoConfig.for_model(self.kind, **{**sizes, **changes})

    def build(self, recipe: Recipe, seed: int) -> PreTrainedModel:
        """Return an untrained model. Variants of one seed have the same initial weights."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made: list[PreTrainedModel] = [
                AutoModelForCausalLM.from_config(each.config(recipe), dtype=torch.float32, trust_remote_code=False)
                for each in (VARIANTS[STANDARD], self)
            ]
        first, model = made
        own, given = model.state_dict(), _fused(first.state_dict())
        model.load_state_dict({name: given[name][: len(new)] if name in given else new for name, new in own.items()})
        return model


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by name, also under the names of the fused matrices of Phi-3."""
    import torch

    made = dict(weights)
    for name in weights:
        layer, query, rest = name.partition("q_proj")
        if query:
            parts = [weights[f"{layer}{each}_proj{rest}"] for each in "qkv"]
            made[f"{layer}qkv_proj{rest}"] = torch.cat(parts)
        layer, gate, rest = name.partition("gate_proj")
        if gate:
            made[f"{layer}gate_up_proj{rest}"] = torch.cat([weights[name], weights[f"{layer}up_proj{rest}"]])
    return made


def ntk_base(base: float, factor: float, dimensions: int) -> float:
    """Return the NTK-scaled base, base · s^(d / (d − 2)), which slows the slowest of d dimensions by a factor s."""
    return float(base * factor ** (dimensions / (dimensions - 2)))


def _rotation(base: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(STANDARD, "standard RoPE, base 10,000: what the others are compared with"),
        Variant("base", "a large RoPE base, 1,000,000", changes={"rope_parameters": _rotation(1e6)}),
        Variant(
            "ntk",
            f"a RoPE base that is NTK-scaled by {NTK:g}, from the first step on",
            changes={"rope_parameters": lambda made: _rotation(ntk_base(BASE, NTK, made.width // made.heads))},
        ),
        Variant(
            "window",
            "every layer sees only the nearest keys: a quarter of the context",
            "mistral",
            {"sliding_window": lambda made: made.window},
        ),
        Variant(
            "window-first",
            "a window of the same size, in which position 0 is always seen",
            SIBLING_MODEL_TYPE,
            {"kept_window": lambda made: made.window},
        ),
        Variant(
            "nope",
            "no positions at all",
            "smollm3",
            {"no_rope_layers": lambda made: [0] * made.layers, "use_sliding_window": False},
        ),
        Variant(
            "learned",
            "a learned vector for each position, added to the token's, and no RoPE: the control",
            SIBLING_MODEL_TYPE,
            {"learned_positions": True},
        ),
        Variant("no-bos", "no BOS in training: prompts begin anywhere in a text", bos=False),
        Variant(
            "sink-logit",
            "a learned logit in every head's softmax, to which attention can go instead of to a key",
            "granite_swa",
            {
                "layer_types": lambda made: ["full_attention"] * made.layers,
                "attention_multiplier": lambda made: (made.width // made.heads) ** -0.5,
            },
        ),
        Variant(
            "partial",
            "half of each head's dimensions rotated",
            "phi3",
            {"rope_parameters": _rotation(BASE, partial_rotary_factor=0.5), "sliding_window": None},
        ),
    )
}


def variant_named(name: str) -> Variant:
    """Return a variant by name."""
    if name not in VARIANTS:
        raise InputError("unknown variant", where="zoo", got=name, remedy=did_you_mean(name, VARIANTS))
    return VARIANTS[name]
