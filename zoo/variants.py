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
"""Name of the baseline."""
BASE = 10_000.0
"""RoPE base of the baseline."""
NTK = 4.0
"""Factor of the NTK scaling."""


@dataclass(frozen=True)
class Variant:
    """A model that differs from standard RoPE in one setting.

    about        description of the setting
    kind         model type in transformers
    changes      changed fields of its config, or functions of the recipe that return them
    bos          whether training prompts start with a BOS token; if not, the vocabulary has none
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
            from posleak.models import siblings  # noqa: F401  registers them with transformers
        changes = {name: value(recipe) if callable(value) else value for name, value in self.changes.items()}
        sizes: dict[str, Any] = {
            "vocab_size": recipe.tokens + self.bos, "hidden_size": recipe.width,
            "intermediate_size": recipe.feedforward, "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.heads, "max_position_embeddings": recipe.context,
            "rope_parameters": _rotation(BASE), "tie_word_embeddings": True,
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
            models: list[PreTrainedModel] = [
                AutoModelForCausalLM.from_config(each.config(recipe), dtype=torch.float32, trust_remote_code=False)
                for each in (VARIANTS[STANDARD], self)
            ]
        standard, model = models
        weights, shared = model.state_dict(), _with_fused(standard.state_dict())
        model.load_state_dict(
            {name: shared[name][: len(own)] if name in shared else own for name, own in weights.items()}
        )
        return model


def _with_fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by name, with the fused matrices of Phi-3 (qkv_proj, gate_up_proj) added."""
    import torch

    fused = dict(weights)
    for name in weights:
        layer, query, rest = name.partition("q_proj")
        if query:
            parts = [weights[f"{layer}{each}_proj{rest}"] for each in "qkv"]
            fused[f"{layer}qkv_proj{rest}"] = torch.cat(parts)
        layer, gate, rest = name.partition("gate_proj")
        if gate:
            fused[f"{layer}gate_up_proj{rest}"] = torch.cat([weights[name], weights[f"{layer}up_proj{rest}"]])
    return fused


def ntk_base(base: float, factor: float, dimensions: int) -> float:
    """Return the NTK-scaled base, base · s^(d / (d − 2)), which slows the slowest of d dimensions by a factor s."""
    return float(base * factor ** (dimensions / (dimensions - 2)))


def _rotation(base: float, **settings: Any) -> dict[str, Any]:
    """Return the config field `rope_parameters` for a base."""
    return {"rope_type": "default", "rope_theta": base, **settings}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(STANDARD, "standard RoPE with base 10,000 (baseline)"),
        Variant("base", "RoPE with a large base, 1,000,000", changes={"rope_parameters": _rotation(1e6)}),
        Variant(
            "ntk",
            f"RoPE with an NTK-scaled base (factor {NTK:g}), from the first training step",
            changes={"rope_parameters": lambda recipe: _rotation(ntk_base(BASE, NTK, recipe.width // recipe.heads))},
        ),
        Variant(
            "window",
            "sliding window of a quarter of the context, in every layer",
            "mistral",
            {"sliding_window": lambda recipe: recipe.window},
        ),
        Variant(
            "window-first",
            "sliding window of a quarter of the context, with position 0 always visible",
            SIBLING_MODEL_TYPE,
            {"kept_window": lambda recipe: recipe.window},
        ),
        Variant(
            "nope",
            "no position encoding (NoPE)",
            "smollm3",
            {"no_rope_layers": lambda recipe: [0] * recipe.layers, "use_sliding_window": False},
        ),
        Variant(
            "learned",
            "learned absolute position embeddings instead of RoPE (control)",
            SIBLING_MODEL_TYPE,
            {"learned_positions": True},
        ),
        Variant("no-bos", "no BOS token in training; prompts start at arbitrary positions of the data", bos=False),
        Variant(
            "sink-logit",
            "a learned sink logit per head in the softmax denominator",
            "granite_swa",
            {
                "layer_types": lambda recipe: ["full_attention"] * recipe.layers,
                "attention_multiplier": lambda recipe: (recipe.width // recipe.heads) ** -0.5,
            },
        ),
        Variant(
            "partial",
            "partial RoPE: half of each head's dimensions are rotated",
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
