"""Models that posleak must not measure, refused by name before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, did_you_mean
from posleak.models import hashing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The folder's config, if it names a decoder-only model that can be built without running unknown code."""
    raw = _raw_config(folder)
    _require_native_or_trusted(folder, raw, trust_remote_code)
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError("config.json cannot be read as a model's config", where=str(folder), got=error) from error
    _require_decoder(folder, config)
    return config


def _raw_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            "the folder holds no model",
            where=str(folder),
            got="no config.json",
            expected="a Hugging Face model folder: config.json and *.safetensors",
            remedy="name the folder that holds config.json, or a .gguf file, or a hub id",
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError("config.json is not JSON", where=str(path), got=error) from error
    return raw if isinstance(raw, dict) else {}


def _require_native_or_trusted(folder: Path, raw: dict[str, Any], trust: bool) -> None:
    """A class that transformers knows, or code in the model's repository that the user has said to run."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    kind = str(raw.get("model_type"))
    if kind in causal:
        return
    remote = "AutoModelForCausalLM" in raw.get("auto_map", {})
    if remote and trust:
        return
    if remote:
        raise ModelError(
            "the model needs code from its own repository, which is not run unless you say so",
            where=str(folder),
            got=f"model_type {kind!r} with auto_map {raw['auto_map']}",
            expected="a class of transformers",
            remedy="read that code, then pass --trust-remote-code (trust_remote_code=True)",
        )
    if kind in CONFIG_MAPPING:
        raise _not_a_decoder(folder, f"model_type {kind!r}, which has no causal language model in transformers")
    raise ModelError(
        "the architecture is unknown to the installed transformers",
        where=str(folder),
        got=f"model_type {kind!r}",
        expected=did_you_mean(kind, causal) if kind != "None" else "a model_type",
        remedy="pip install --upgrade transformers, if the model is newer than it",
    )


def _require_decoder(folder: Path, config: PreTrainedConfig) -> None:
    """An encoder is a family with a masked-language form whose config does not say `is_decoder`; some families that are
    decoders by construction (GPT-NeoX) leave that flag false."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as masked

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise _not_a_decoder(folder, f"{config.model_type}: an encoder-decoder")
    if getattr(text, "is_decoder", True) is False and text.model_type in masked:
        raise _not_a_decoder(folder, f"{config.model_type}: an encoder (is_decoder is false)")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise _not_a_decoder(folder, f"{config.model_type} with use_bidirectional_attention")


def _not_a_decoder(folder: Path, got: str) -> ModelError:
    return ModelError(
        "posleak measures causal masks, and this model has none",
        where=str(folder),
        got=got,
        expected="a decoder-only language model",
        remedy="choose a causal language model",
    )


def require_weights(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The weight files; pickles only where they are allowed, since reading a pickle can run code."""
    files = hashing.weight_files(folder, allow_pickle=allow_pickle)
    if files:
        return files
    pickles = [path.name for path in hashing.weight_files(folder, allow_pickle=True)]
    if pickles:
        raise ModelError(
            "the weights are pickles, which can run code when they are read",
            where=str(folder),
            got=", ".join(pickles),
            expected="*.safetensors",
            remedy="convert them to safetensors, or pass --allow-pickle (allow_pickle=True) if you trust their author",
        )
    raise ModelError(
        "the folder has a config but no weights",
        where=str(folder),
        got=", ".join(sorted(path.name for path in folder.iterdir())[:12]),
        expected="*.safetensors",
        remedy="fetch the weights again; an interrupted download or an unfinished save looks like this",
    )
