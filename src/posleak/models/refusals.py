"""Models that posleak must not measure, refused by name before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, did_you_mean
from posleak.files import read_regular
from posleak.models import bounds, pretrained, trust
from posleak.models.identity import SIBLING_MODEL_TYPE, windows
from posleak.models.library_errors import FETCH_AGAIN, translate_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The folder's config, if it names a decoder-only model that can be built without running unknown code."""
    path = folder / "config.json"
    with translate_errors("config.json cannot be read as a model's config", path, f"correct it, or {FETCH_AGAIN}"):
        trust.require_no_adapter(folder)
        raw = raw_json(path) if path.is_file() else None
        if raw is None:
            raise _no_model(folder)
        bounds.require_sane(path, raw)
        trust.require_harmless(path, raw, trust_remote_code=trust_remote_code)
        _require_native_or_trusted(folder, raw, trust_remote_code)
        config = pretrained.read_config(folder, trust_remote_code=trust_remote_code)
        _require_decoder(folder, config)
        windows(config.get_text_config(decoder=True), str(path))
    return config


def raw_json(path: Path) -> dict[str, Any]:
    """A JSON file of a size that a person could read, as it stands."""
    bounds.require_size(path, bounds.MOST_CONFIG)
    try:
        raw = json.loads(read_regular(path, bounds.MOST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON", where=str(path), got=error, remedy=FETCH_AGAIN) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path.name} is no JSON object", where=str(path), got=f"{raw!r:.80}", remedy=FETCH_AGAIN)
    return raw


def _no_model(folder: Path) -> ModelError:
    return ModelError(
        "the folder holds no model",
        where=str(folder),
        got="no config.json",
        expected="a Hugging Face model folder: config.json and *.safetensors",
        remedy="name the folder that holds config.json, or a .gguf file, or a hub id",
    )


def _require_native_or_trusted(folder: Path, raw: dict[str, Any], trusted: bool) -> None:
    """A class that transformers knows, or code in the model's repository that the user has said to run."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    kind = str(raw.get("model_type"))
    if kind == SIBLING_MODEL_TYPE:
        from posleak.models import siblings  # noqa: F401  makes them known to transformers

        return
    if kind in causal:
        return
    remote = "AutoModelForCausalLM" in (raw.get("auto_map") or {})
    if remote and trusted:
        return
    if remote:
        raise ModelError(
            "the model needs code from its own repository, which is not run unless you say so",
            where=str(folder),
            got=f"model_type {kind!r} with auto_map {raw['auto_map']}",
            expected="a class of transformers",
            remedy=f"read that code, then {trust.FLAG}",
        )
    if kind in CONFIG_MAPPING:
        raise _not_a_decoder(folder, f"model_type {kind!r}, which has no causal language model in transformers")
    raise ModelError(
        "the architecture is unknown to the installed transformers",
        where=str(folder),
        got=f"model_type {kind!r:.200}",
        expected=did_you_mean(kind[:200], causal) if kind != "None" else "a model_type",
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
    if getattr(text, "causal", True) is False:
        raise _not_a_decoder(folder, f"{config.model_type} with causal=False")
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
