"""Describe a model in fields that are stored with every result: enough to know years later what was measured.

All fields are read from the model's own config, not from its name. Configs differ between families (nested text
configs, lists per layer, old and new keys), so each field has one small function that knows their keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, translate_errors
from posleak.models import hashing
from posleak.text import escape_surrogates, visible
from posleak.typed import Number

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


SIBLING_MODEL_TYPE = "posleak_llama"
"""The `model_type` of siblings.py, which transformers does not have."""
OUTPUT_KEYS = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
"""Keys of a config that select the outputs of a forward pass, but change no value."""
WINDOW_KEYS = {
    "sliding_attention": ("sliding_window", "kept_window"),
    "chunked_attention": ("attention_chunk_size",),
    "local": ("window_size",),
}
"""Keys of a config that limit how many keys a layer type attends to; the first that is set counts."""


@dataclass(frozen=True)
class Provenance:
    """The origin of the weights: the part of an identity that cannot be read from the model object.

    `checksum` is that of the tensors in memory (hashing.checksum) when `weights_sha256` was computed. `adapters` are
    names and sha256 of the files of adapters that were applied to the weights.
    """

    name: str
    source: str
    weights_sha256: str
    checksum: str
    revision: str | None = None
    quantisation: str | None = None
    licence: str | None = None
    tokenizer_sha256: str | None = None
    code_sha256: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Identity:
    """The identity of a model, as measured.

    heads, kv_heads, head_dim   largest values over the layers; 0 if the family does not define them
    windows            for each layer the number of keys that a query may see; None: all keys, or no attention
    rotary             the config's `rope_parameters`, nested by layer type in some families
    bos                BOS ids of the config and of the tokenizer, and the ids that the tokenizer prepends to a text
    tokenizer_sha256   hash of the tokenizer's files or, for an object, of the files that it would save
    code_sha256        hash of the folder's *.py files, if trust_remote_code allowed them to run
    adapters           active PEFT adapters: name, and sha256 of the adapter's files or, for an object, of its tensors
    hooks              forward hooks and replaced forward methods of the modules
    fingerprint        outputs of the model on a fixed prompt (probe/fingerprint.py); None before a measurement
    """

    name: str
    architecture: str
    model_class: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    context: int | None
    rotary: dict[str, Any]
    windows: tuple[int | None, ...]
    layer_types: tuple[str, ...] | None
    dtype: str
    device: str
    quantisation: str | None
    weights_sha256: str
    config_sha256: str
    source: str
    revision: str | None
    bos: dict[str, Any]
    licence: str | None
    tokenizer_sha256: str | None = None
    code_sha256: str | None = None
    adapters: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    fingerprint: tuple[Number, ...] | None = None

    @property
    def spans(self) -> list[int]:
        """The distinct sizes of its windows."""
        return sorted({window for window in self.windows if window is not None})

    @property
    def facts(self) -> list[str]:
        """The most important facts about the model, in words."""
        windows = f"window {', '.join(map(str, self.spans))}" if self.spans else None
        size = f"{self.layers} layers × {self.heads} heads"
        return [fact for fact in (self.architecture, size, windows, self.dtype, self.quantisation) if fact]

    def short(self) -> str:
        """Return the identity as one line of text."""
        line = f"{self.name}: {', '.join(self.facts)}, on {self.device}, sha256 {self.weights_sha256[:12]}"
        return visible(line).replace("\n", "\\n")


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, provenance: Provenance) -> Identity:
    """Return the identity of a model in memory, without its fingerprint."""
    from posleak.models.configs import prepended_ids

    remedy = "correct its config, or download the files again"
    with translate_errors("the model cannot be described", provenance.name, remedy):
        config = model.config
        text = config.get_text_config(decoder=True)
        rotary = {} if getattr(text, "learned_positions", False) else getattr(text, "rope_parameters", None) or {}
        heads, width = _largest(text, "num_attention_heads"), _largest(text, "hidden_size")
        context = getattr(text, "max_position_embeddings", None)  # some configs say −1 for "unlimited"
        bos = getattr(text, "bos_token_id", None)
        return Identity(
            name=escape_surrogates(provenance.name),
            architecture=str(config.model_type),
            model_class=type(model).__name__,
            layers=_largest(text, "num_hidden_layers"),
            heads=heads,
            kv_heads=_largest(text, "num_key_value_heads", "num_kv_heads", "num_attention_heads"),
            head_dim=_largest(text, "head_dim", "qk_head_dim") or (width // heads if heads else 0),
            width=width,
            vocab=int(text.vocab_size),
            context=None if context is None or int(context) < 1 else int(context),
            rotary=json.loads(json.dumps(rotary, default=str)),
            windows=windows(text, provenance.name),
            layer_types=_layer_types(text),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(input_device(model)),
            quantisation=provenance.quantisation or _quantisation(config),
            weights_sha256=provenance.weights_sha256,
            config_sha256=config_sha256(config),
            source=provenance.source,
            revision=None if provenance.revision is None else escape_surrogates(provenance.revision),
            bos={
                "config_id": getattr(config, "bos_token_id", None) if bos is None else bos,
                "tokenizer_id": None if tokenizer is None else tokenizer.bos_token_id,
                "tokenizer_prepends": None if tokenizer is None else list(prepended_ids(tokenizer)),
            },
            licence=provenance.licence,
            tokenizer_sha256=provenance.tokenizer_sha256,
            code_sha256=provenance.code_sha256,
            adapters=_adapters(model, dict(provenance.adapters)),
            hooks=_hooks(model),
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that input ids must be on."""
    return module_device(model.get_input_embeddings())


def module_device(module: torch.nn.Module) -> torch.device:
    """Return the device of the module's weights, or the execution device if accelerate has offloaded them."""
    import torch

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    hook = getattr(module, "_hf_hook", None)
    devices = [getattr(inner, "execution_device", None) for inner in getattr(hook, "hooks", (hook,))]
    return torch.device(next((device for device in devices if device is not None), "meta"))


def _adapters(model: PreTrainedModel, known: Mapping[str, str]) -> tuple[str, ...]:
    """Return PEFT's active adapters with their hashes; merged ones are part of the weights, and are marked as merged.

    known   sha256 of the files of adapters, by name; other adapters are hashed as they are in memory
    """
    active, merged, layers = set[str](), set[str](), list[Any](model.modules())
    for layer in layers:
        if isinstance(getattr(type(layer), "active_adapters", None), property):  # a layer of PEFT
            active |= set() if layer.disable_adapters else set(map(str, layer.active_adapters))
            merged |= set(getattr(layer, "merged_adapters", ()))
    named = [(name, name) for name in active - merged] + [(name, f"{name} (merged)") for name in merged]
    hashes = {name: known.get(name) or hashing.adapter_sha256(model, name) for name, _ in named}
    return tuple(sorted(f"{text}, sha256 {hashes[name]}" for name, text in named))


def _hooks(model: PreTrainedModel) -> tuple[str, ...]:
    """Return what runs in addition to the modules' own code: forward hooks, and forward methods that were replaced.

    Excluded, since they change no value: hooks by which transformers records outputs, and methods that accelerate
    replaces to move weights.
    """
    from torch.nn.modules import module as torch_module

    every = [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]
    names = [f"every module: {_qualified(hook)}" for hook in every]
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks = [hook for hook in hooks if not _is_recorder(hook)] + _replaced_forward(module)
        names += [f"{name or 'model'}: {_qualified(hook)}" for hook in hooks]
    return tuple(names)


def _replaced_forward(module: torch.nn.Module) -> list[Any]:
    """Return the function that replaces the module's forward method, if any; accelerate's wrapper is looked through."""
    forward = vars(module).get("forward")
    if getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks":
        forward = vars(module).get("_old_forward")
    return [] if forward is None or getattr(forward, "__func__", None) is type(module).forward else [forward]


def _is_recorder(hook: Any) -> bool:
    """Return whether a hook is code of transformers or posleak; decorators may copy the name of a module."""
    module = str(getattr(hook, "__globals__", {}).get("__name__"))
    return module.startswith(("transformers.", "posleak.")) and not hasattr(hook, "__wrapped__")


def _qualified(function: Any) -> str:
    """Return the name of a function, of the function inside a partial, or of the class of a callable object."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def config_sha256(config: PreTrainedConfig) -> str:
    """Return the sha256 of the config: equal weights with another scaling, activation or window are another model.

    Excluded are the path it was loaded from, the version of transformers, the dtype, which is a field of its own, and
    what a forward pass returns.
    """
    fields = json.loads(config.to_json_string(use_diff=False))
    excluded = ("transformers_version", "dtype", "architectures", *OUTPUT_KEYS)
    kept = {name: value for name, value in fields.items() if not name.startswith("_") and name not in excluded}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def windows(text: PreTrainedConfig, where: str) -> tuple[int | None, ...]:
    """Return for each layer how many keys a query may see, None for all; `where` is the path for error messages."""
    types = _layer_types(text)
    if types is None:
        types = ("sliding_attention",) * _largest(text, "num_hidden_layers")
    return tuple(_window(text, layer_type, where) for layer_type in types)


def _window(text: PreTrainedConfig, layer_type: str, where: str) -> int | None:
    """Return the window of a layer type. Reject one that leaves a query no key, not even its own."""
    if layer_type == "sliding_attention" and getattr(text, "use_sliding_window", True) is False:
        return None
    stated = ((name, getattr(text, name, None)) for name in WINDOW_KEYS.get(layer_type, ()))
    name, window = next(((name, value) for name, value in stated if value), ("", None))  # 0 mostly means no window
    if window is None or (type(window) is int and window > 0):
        return window
    raise ModelError(
        "the config states a window that no model can have", where=where, got=f"{name} = {window!r:.80}",
        expected="an integer of 1 or more, or null if a layer sees all keys", remedy=f"correct {name}",
    )  # fmt: skip


def _layer_types(text: PreTrainedConfig) -> tuple[str, ...] | None:
    types = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)  # the latter of GPT-Neo
    return None if types is None else tuple(map(str, types))


def _largest(text: PreTrainedConfig, *names: str) -> int:
    """Return the first of `names` that the config has; the maximum of a list with one value per layer.

    Where layers differ (`is_heterogeneous`), transformers has no common value.
    """
    for name in names:
        value: Any
        if name != "num_hidden_layers" and getattr(text, "is_heterogeneous", False):
            value = [getattr(layer, name, None) for layer in text.per_layer_config]
        else:
            value = getattr(text, name, None)
        if value is not None:
            return max(int(item or 0) for item in value) if isinstance(value, list | tuple) else int(value)
    return 0


def _quantisation(config: PreTrainedConfig) -> str | None:
    """Return the quantisation method of the config (bitsandbytes, GPTQ, FP8, MXFP4 …)."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    fields: Mapping[str, Any] = stated if isinstance(stated, Mapping) else stated.to_dict()
    return str(getattr(fields.get("quant_method"), "value", fields.get("quant_method", "unknown method")))
