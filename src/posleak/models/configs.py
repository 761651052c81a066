"""Read configs, and reject models that posleak must not load before their weights are read.

Parts of a folder that could run code, or fetch it from a hub, are rejected or removed:

auto_map                 code next to the model: only with trust_remote_code, and only from the folder itself
attention, experts       may name a kernel on a hub, which is compiled code: transformers' default is used instead
quantization_config      some methods fetch kernels when they compute: only with trust_remote_code
adapter_config.json      names another model as its base, and changes this one if peft is installed: rejected
transformers_weights     names other weights than those that are hashed: rejected
tokenizer_class          may name any class of transformers, even a model: it must be a tokenizer class
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, did_you_mean
from posleak.files import read_regular
from posleak.models import bounds, pretrained
from posleak.models.identity import SIBLING_MODEL_TYPE, windows
from posleak.models.library_errors import FETCH_AGAIN, escape_surrogates, translate_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_config.json"
KERNEL_METHODS = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Quantisation methods for which transformers fetches kernels if the package `kernels` is installed."""
TRUST_OPTION = "pass --trust-remote-code (trust_remote_code=True)"


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the folder's config; raise unless it is a decoder-only model that needs no untrusted code."""
    path = folder / "config.json"
    with translate_errors("config.json cannot be read as a model's config", path, f"correct it, or {FETCH_AGAIN}"):
        _require_no_adapter(folder)
        if not path.is_file():
            raise ModelError(
                "the folder holds no model", where=str(folder), got="no config.json",
                expected="a Hugging Face model folder: config.json and *.safetensors",
                remedy="name the folder that holds config.json, or a .gguf file, or a hub id",
            )  # fmt: skip
        raw = read_json_object(path)
        bounds.require_plausible(path, raw)
        _require_harmless(path, raw, trust_remote_code)
        _require_native_or_trusted(folder, raw, trust_remote_code)
        config = parse_config(folder, trust_remote_code=trust_remote_code)
        _require_decoder(folder, config)
        windows(config.get_text_config(decoder=True), str(path))
    return config


def parse_config(folder: Path, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> PreTrainedConfig:
    """Return transformers' config of a folder, or of a GGUF file alone in a folder, without references to code."""
    from transformers import AutoConfig

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    about = translate_errors("transformers cannot read the config", folder, pretrained.REMEDY)
    with about, pretrained.offline_transformers():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, **extra
        )
    disarm(config, trust_remote_code=trust_remote_code)
    config.name_or_path = str(folder)  # a config.json may name another place
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON file of limited size as a dict."""
    bounds.require_max_size(path, bounds.MAX_CONFIG)
    try:
        raw = json.loads(read_regular(path, bounds.MAX_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON", where=str(path), got=error, remedy=FETCH_AGAIN) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path.name} is not a JSON object", where=str(path), got=f"{raw!r:.80}", remedy=FETCH_AGAIN)
    return raw


def _require_native_or_trusted(folder: Path, raw: dict[str, Any], trusted: bool) -> None:
    """Reject architectures that transformers lacks, unless the folder has code and the user trusts it."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    kind = str(raw.get("model_type"))
    if kind == SIBLING_MODEL_TYPE:
        from posleak.models import siblings  # noqa: F401  registers them with transformers

        return
    has_code = "AutoModelForCausalLM" in (raw.get("auto_map") or {})
    if kind in causal or (has_code and trusted):
        return
    if has_code:
        raise ModelError(
            "the model needs code from its own repository, which is not run by default", where=str(folder),
            got=f"model_type {kind!r} with auto_map {raw['auto_map']}", expected="a class of transformers",
            remedy=f"read that code, then {TRUST_OPTION}",
        )  # fmt: skip
    if kind in CONFIG_MAPPING:
        raise _not_a_decoder(folder, f"model_type {kind!r}, which has no causal language model in transformers")
    raise ModelError(
        "the architecture is unknown to the installed transformers", where=str(folder), got=f"model_type {kind!r:.200}",
        expected=did_you_mean(kind[:200], causal) if kind != "None" else "a model_type",
        remedy="pip install --upgrade transformers, if the model is newer than it",
    )  # fmt: skip


def _require_decoder(folder: Path, config: PreTrainedConfig) -> None:
    """Reject encoders: families with a masked-language form whose config does not state `is_decoder`.

    Some families that are always decoders (GPT-NeoX) leave that flag false, but have no masked-language form.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as masked

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise _not_a_decoder(folder, f"{config.model_type}: an encoder-decoder")
    if getattr(text, "is_decoder", True) is False and text.model_type in masked:
        raise _not_a_decoder(folder, f"{config.model_type}: an encoder (is_decoder is false)")
    if getattr(text, "causal", True) is False:
        raise _not_a_decoder(folder, f"{config.model_type} with causal=False")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise _not_a_decoder(folder, f"{config.model_type} with use_bidirectional_attention")


def _not_a_decoder(folder: Path, got: str) -> ModelError:
    return ModelError(
        "posleak measures causal masks, and this model has none", where=str(folder), got=got,
        expected="a decoder-only language model", remedy="choose a causal language model",
    )  # fmt: skip


def _require_no_adapter(folder: Path) -> None:
    if (folder / ADAPTER_FILE).exists():
        raise ModelError(
            "the folder holds an adapter, which is a change to another model", where=str(folder / ADAPTER_FILE),
            expected="a complete model", remedy="merge it into its base model (peft: merge_and_unload), and save that",
        )  # fmt: skip


def _require_harmless(path: Path, raw: dict[str, Any], trust_remote_code: bool) -> None:
    """Reject keys of config.json that name other weights, code on a hub, or kernels."""
    if raw.get("transformers_weights") is not None:
        raise ModelError(
            "the config names its weights itself, and they would not be the ones that are hashed", where=str(path),
            got=f"transformers_weights {raw['transformers_weights']!r}", expected="no such key",
            remedy="rename that file to model.safetensors, and remove the key",
        )  # fmt: skip
    if trust_remote_code:
        require_local_code(path, raw)
    elif (method := _kernel_method(raw)) is not None:
        raise ModelError(
            "transformers would fetch compiled code from a hub for these quantised weights", where=str(path),
            got=f"quant_method {method!r}", expected="weights that need no kernels from a hub",
            remedy=f"use unquantised weights, uninstall the package kernels, or {TRUST_OPTION}",
        )  # fmt: skip


def require_local_code(path: Path, raw: dict[str, Any]) -> None:
    """Reject code outside the folder (`org/name--module`): trusted code must be readable and hashed."""
    foreign = [reference for reference in _strings(raw.get("auto_map")) if "--" in reference]
    if foreign:
        raise ModelError(
            "the model names code in another repository, which is not run", where=str(path), got=foreign[0],
            expected="code in the model's own folder",
            remedy="copy that code into the folder, read it, and remove everything up to -- from auto_map",
        )  # fmt: skip


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _kernel_method(raw: dict[str, Any]) -> str | None:
    """Return the quantisation method if transformers would fetch kernels for it."""
    from transformers.utils.import_utils import is_kernels_available

    configs = [raw, raw.get("text_config")]
    stated = [config.get("quantization_config") for config in configs if isinstance(config, dict)]
    methods = [item.get("quant_method") for item in stated if isinstance(item, dict)]
    return next((method for method in methods if method in KERNEL_METHODS and is_kernels_available()), None)


def disarm(config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Remove what names code from a config and all configs inside it: kernels, and auto_map unless it is trusted."""
    names = ("fusion_config",) if trust_remote_code else ("fusion_config", "auto_map")
    for inner in _inner_configs(config):
        inner._attn_implementation_internal = None
        inner._experts_implementation_internal = None
        for name in names:
            vars(inner).pop(name, None)


def _inner_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config and all configs inside it."""
    from transformers import PreTrainedConfig

    seen, pending = set[int](), [config]
    while pending:
        value: Any = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, PreTrainedConfig):
            yield value
            pending += vars(value).values()
        elif isinstance(value, dict | list | tuple):
            pending += value.values() if isinstance(value, dict) else value


def require_tokenizer_class(path: Path, name: Any) -> None:
    """Reject names of other classes: transformers would load a model or a processor with them."""
    import transformers

    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None or (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedTokenizerBase)):
        return
    raise ModelError(
        "tokenizer_class is not a tokenizer", where=str(path), got=f"tokenizer_class {escape_surrogates(name)!r}",
        expected="a tokenizer class of transformers", remedy="correct tokenizer_class, or fetch the file again",
    )  # fmt: skip


def ran_local_code(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether code from the model's folder made the model, its config, its tokenizer or `generate`."""
    classes = (type(model), type(model.config), type(tokenizer))
    return any(cls.__module__.startswith("transformers_modules") for cls in classes) or "generate" in vars(model)


def code_files(folder: Path) -> list[str]:
    """Return the relative paths of the folder's Python files."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file())
