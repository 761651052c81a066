"""Read configs and tokenizers, and reject models that posleak must not load before their weights are read.

Parts of a folder that could run code, or fetch it from a hub, are rejected or removed:

auto_map                 code next to the model: only with trust_remote_code, and only from the folder itself
attention, experts       may name a kernel on a hub, which is compiled code: transformers' default is used instead
quantization_config      some methods fetch kernels when they compute: only with trust_remote_code
adapter_config.json      next to a model: transformers would change the model if peft is installed: rejected
transformers_weights     names other weights than those that are hashed: rejected
tokenizer_class          may name any class of transformers, even a model: it must be a tokenizer class

A tokenizer is optional: measurements on random tokens need none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import FETCH_AGAIN, ModelError, did_you_mean, translate_errors
from posleak.files import read_regular
from posleak.models import memory, pretrained
from posleak.models.identity import SIBLING_MODEL_TYPE, windows
from posleak.text import escape_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

KERNEL_METHODS = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Quantisation methods for which transformers fetches kernels if the package `kernels` is installed."""
TRUST_OPTION = "pass --trust-remote-code"
PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "tekken.json")
"""Any of these files means that the folder has a tokenizer."""
EXTRA_PATTERNS = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
"""Other files that transformers reads for a tokenizer."""
TOKENIZER_REMEDY = "repair them, install the package that the message names, or remove them to measure without text"


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the folder's config; raise unless it is a decoder-only model that needs no untrusted code."""
    path = folder / "config.json"
    with translate_errors("config.json cannot be read as a model's config", path, f"correct it, or {FETCH_AGAIN}"):
        if (adapter := folder / "adapter_config.json").exists():
            raise ModelError(
                "the folder holds both a model and an adapter, and transformers would apply one to the other",
                where=str(adapter), expected="a model or an adapter",
                remedy="move the adapter to a folder of its own, and pass it with --adapter; or merge it "
                "(peft: merge_and_unload)",
            )  # fmt: skip
        if not path.is_file():
            raise ModelError(
                "the folder contains no model", where=str(folder), got="no config.json",
                expected="a Hugging Face model folder: config.json and *.safetensors",
                remedy="pass the folder that contains config.json, a .gguf file, or a hub id",
            )  # fmt: skip
        raw = read_json_object(path)
        memory.require_plausible(path, raw)
        _require_harmless(path, raw, trust_remote_code)
        _require_native_or_trusted(folder, raw, trust_remote_code)
        config = parse_config(folder, trust_remote_code=trust_remote_code)
        require_decoder(str(folder), config)
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
    memory.require_max_size(path, memory.MAX_CONFIG)
    try:
        raw = json.loads(read_regular(path, memory.MAX_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON", where=str(path), got=error, remedy=FETCH_AGAIN) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path.name} is not a JSON object", where=str(path), got=f"{raw!r:.80}", remedy=FETCH_AGAIN)
    return raw


def _require_native_or_trusted(folder: Path, raw: dict[str, Any], trusted: bool) -> None:
    """Reject architectures that transformers lacks, unless the folder has code and the user trusts it."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    model_type = str(raw.get("model_type"))
    if model_type == SIBLING_MODEL_TYPE:
        from posleak.models import siblings  # noqa: F401  registers them with transformers

        return
    has_code = "AutoModelForCausalLM" in (raw.get("auto_map") or {})
    if model_type in causal or (has_code and trusted):
        return
    if has_code:
        raise ModelError(
            "the model needs code from its own repository, which is not run by default", where=str(folder),
            got=f"model_type {model_type!r} with auto_map {raw['auto_map']}", expected="a class of transformers",
            remedy=f"read that code, then {TRUST_OPTION}",
        )  # fmt: skip
    if model_type in CONFIG_MAPPING:
        require_decoder(str(folder), parse_config(folder))
        raise _not_a_decoder(str(folder), model_type, "has no causal language model in transformers")
    raise ModelError(
        "the architecture is unknown to the installed transformers", where=str(folder),
        got=f"model_type {model_type!r:.200}",
        expected="a model_type" if model_type == "None" else did_you_mean(model_type[:200], causal),
        remedy="upgrade transformers (pip install --upgrade transformers) if the model is newer than it",
    )  # fmt: skip


def require_decoder(where: str, config: PreTrainedConfig, main_input: str = "input_ids") -> None:
    """Reject encoders and encoder-decoders, from a folder or in memory, and models that do not read tokens.

    An encoder is a family with a masked-language form and without a causal one, or whose config does not state
    `is_decoder`. Some families that are always decoders (GPT-NeoX) leave that flag false, but have no masked form.
    main_input: the name of the model's main input, if it is in memory
    """
    from transformers.models.auto import modeling_auto as auto

    text, kind = config.get_text_config(decoder=True), config.model_type
    masked, causal = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.is_encoder_decoder:
        raise _not_a_decoder(where, kind, "is an encoder-decoder")
    if getattr(text, "is_decoder", text.model_type in causal) is False and text.model_type in masked:
        flag = " (is_decoder is false)" if text.model_type in causal else ""
        raise _not_a_decoder(where, kind, f"is an encoder{flag}")
    if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and kind not in causal:
        raise _not_a_decoder(where, kind, "is the encoder of an encoder-decoder")
    if getattr(text, "causal", True) is False:
        raise _not_a_decoder(where, kind, "has causal=False")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise _not_a_decoder(where, kind, "has use_bidirectional_attention")
    if main_input != "input_ids":
        raise _not_a_decoder(where, kind, f"reads {main_input} instead of tokens")


def _not_a_decoder(where: str, kind: str, reason: str) -> ModelError:
    return ModelError(
        f"not a causal language model: {kind} {reason}", where=where,
        expected="a decoder-only language model: posleak measures causal masks",
        remedy="choose a causal language model",
    )  # fmt: skip


def _require_harmless(path: Path, raw: dict[str, Any], trust_remote_code: bool) -> None:
    """Reject keys of config.json that name other weights, code on a hub, or kernels."""
    from transformers.utils.import_utils import is_kernels_available

    if raw.get("transformers_weights") is not None:
        raise ModelError(
            "the config names other weights than those that are hashed", where=str(path),
            got=f"transformers_weights {raw['transformers_weights']!r}", expected="no such key",
            remedy="rename that file to model.safetensors, and remove the key",
        )  # fmt: skip
    if trust_remote_code:
        require_local_code(path, raw)
        return
    methods = [value.get("quant_method") for value in _nested(raw) if isinstance(value, dict)]
    fetched = [method for method in methods if method in KERNEL_METHODS]
    if fetched and is_kernels_available():
        raise ModelError(
            "transformers would fetch compiled code from a hub for these quantised weights", where=str(path),
            got=f"quant_method {fetched[0]!r}", expected="weights that need no kernels from a hub",
            remedy=f"use unquantised weights, uninstall the package kernels, or {TRUST_OPTION}",
        )  # fmt: skip


def require_local_code(path: Path, raw: dict[str, Any]) -> None:
    """Reject code outside the folder (`org/name--module`): trusted code must be readable and hashed."""
    foreign = [text for text in _nested(raw.get("auto_map")) if isinstance(text, str) and "--" in text]
    if foreign:
        raise ModelError(
            "the model uses code from another repository, which is not run", where=str(path), got=foreign[0],
            expected="code in the model's own folder",
            remedy="copy that code into the folder, read it, and remove everything up to -- from auto_map",
        )  # fmt: skip


def disarm(config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Remove references to code from a config and all configs inside it: kernels, and auto_map unless trusted."""
    from transformers import PreTrainedConfig

    names = ("fusion_config",) if trust_remote_code else ("fusion_config", "auto_map")
    for inner in _nested(config):
        if isinstance(inner, PreTrainedConfig):
            inner._attn_implementation_internal = None
            inner._experts_implementation_internal = None
            for name in names:
                vars(inner).pop(name, None)


def _nested(value: Any) -> Iterator[Any]:
    """Yield a value and all values inside it: items of dicts, lists and tuples, and attributes of configs."""
    from transformers import PreTrainedConfig

    seen, pending = set[int](), [value]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        inner = vars(value) if isinstance(value, PreTrainedConfig) else value
        if isinstance(inner, dict | list | tuple):
            pending += inner.values() if isinstance(inner, dict) else inner


def require_tokenizer_class(path: Path, name: Any) -> None:
    """Reject a `tokenizer_class` that is not a tokenizer: transformers would load a model or a processor with it."""
    import transformers

    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None or (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedTokenizerBase)):
        return
    raise ModelError(
        "tokenizer_class is not a tokenizer", where=str(path), got=f"tokenizer_class {escape_surrogates(name)!r}",
        expected="a tokenizer class of transformers", remedy="correct tokenizer_class, or download the file again",
    )  # fmt: skip


def ran_local_code(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether code from the model's folder defines the model, its config, its tokenizer or `generate`."""
    classes = (type(model), type(model.config), type(tokenizer))
    return any(cls.__module__.startswith("transformers_modules") for cls in classes) or "generate" in vars(model)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder's tokenizer."""
    paths = {path for pattern in (*PATTERNS, *EXTRA_PATTERNS) for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())


def read_tokenizer(
    folder: Path, config: PreTrainedConfig, *, trust_remote_code: bool = False, required: bool = False
) -> PreTrainedTokenizerBase | None:
    """Return the folder's tokenizer, or None if it has none and none is required. Raise if it cannot be read.

    Huge files are rejected, and settings that name a class of another kind, or code in another repository.
    """
    if not any(next(folder.glob(pattern), None) for pattern in PATTERNS):
        if required:
            raise ModelError(
                "the folder contains no tokenizer", where=str(folder), expected="tokenizer.json, or tokenizer.model",
                remedy="pass the folder that contains the tokenizer's files",
            )  # fmt: skip
        return None
    from transformers import AutoTokenizer

    what, path = "the folder has tokenizer files that cannot be read", folder / "tokenizer_config.json"
    with translate_errors(what, lambda: _damaged_file(folder), TOKENIZER_REMEDY), pretrained.offline_transformers():
        for file in tokenizer_files(folder):
            memory.require_max_size(file, memory.MAX_TOKENIZER)
        settings = read_json_object(path) if path.is_file() else {}
        require_tokenizer_class(path, settings.get("tokenizer_class"))
        require_tokenizer_class(folder / "config.json", getattr(config, "tokenizer_class", None))
        if trust_remote_code:
            require_local_code(path, settings)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), config=config, trust_remote_code=trust_remote_code, local_files_only=True
        )
        prepended_ids(tokenizer)
    return tokenizer


def _damaged_file(folder: Path) -> Path:
    """Return the first file that is not valid JSON, or not a valid tokenizer; the folder if there is none."""
    from tokenizers import Tokenizer

    for path in (path for path in tokenizer_files(folder) if path.suffix == ".json"):
        try:
            with translate_errors("", path, ""):
                json.loads(path.read_bytes())
                if path.name == "tokenizer.json":
                    Tokenizer.from_file(str(path))
        except ModelError:
            return path
    return folder


def prepended_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text, found by encoding one with and without special tokens."""
    with pretrained.silence_transformers():
        full, bare = (list(tokenizer("The cat sat.", add_special_tokens=s)["input_ids"]) for s in (True, False))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
