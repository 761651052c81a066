"""What in a stranger's folder could run code or fetch it from a hub: refused, or put out of action.

auto_map                    code beside the model: only with trust_remote_code, and only from the folder itself
attention and experts       may name a kernel on a hub, which is compiled code: transformers' own choice is taken
quantization_config         some methods fetch kernels when they compute: only with trust_remote_code
adapter_config.json         names another model as its base, and changes this one if peft is installed: refused
transformers_weights        names other weights than those that are hashed: refused
tokenizer_class             may name any class of transformers, even a model's: it must be a tokenizer's

Besides, transformers reaches no hub and asks no questions while it reads a folder (`pretrained.offline_transformers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError
from posleak.models.library_errors import escape_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ADAPTER = "adapter_config.json"
KERNELS = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Methods of quantisation for which transformers fetches kernels, if the package `kernels` is installed."""
FLAG = "pass --trust-remote-code (trust_remote_code=True)"


def require_no_adapter(folder: Path) -> None:
    """An adapter is a change to another model; what it amounts to depends on the packages that are installed."""
    if (folder / ADAPTER).exists():
        raise ModelError(
            "the folder holds an adapter, which is a change to another model", where=str(folder / ADAPTER),
            expected="a whole model", remedy="merge it into its base model (peft: merge_and_unload), and save that",
        )  # fmt: skip


def require_harmless(path: Path, raw: dict[str, Any], *, trust_remote_code: bool) -> None:
    """Refuse keys of config.json that name other weights, code on a hub, or kernels."""
    if raw.get("transformers_weights") is not None:
        raise ModelError(
            "the config names its weights itself, and they would not be the ones that are hashed", where=str(path),
            got=f"transformers_weights {raw['transformers_weights']!r}", expected="no such key",
            remedy="rename that file to model.safetensors, and take the key out",
        )  # fmt: skip
    if trust_remote_code:
        require_own_code(path, raw)
    elif (method := _kernel_method(raw)) is not None:
        raise ModelError(
            "transformers would fetch compiled code from a hub for these quantised weights", where=str(path),
            got=f"quant_method {method!r}", expected="weights that need no kernels from a hub",
            remedy=f"use unquantised weights, uninstall the package kernels, or {FLAG}",
        )  # fmt: skip


def require_own_code(path: Path, raw: dict[str, Any]) -> None:
    """Code that is run must be in the folder, where it can be read and hashed; `org/name--` means another place."""
    foreign = [reference for reference in _texts(raw.get("auto_map")) if "--" in reference]
    if foreign:
        raise ModelError(
            "the model names code in another repository, which is not run", where=str(path), got=foreign[0],
            expected="code in the model's own folder",
            remedy="copy that code into the folder, read it, and take everything up to -- out of auto_map",
        )  # fmt: skip


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _kernel_method(raw: dict[str, Any]) -> str | None:
    """The method of quantisation, if transformers would fetch kernels for it."""
    from transformers.utils.import_utils import is_kernels_available

    parts = [raw, raw.get("text_config")]
    stated = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
    methods = [item.get("quant_method") for item in stated if isinstance(item, dict)]
    return next((method for method in methods if method in KERNELS and is_kernels_available()), None)


def disarm(config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Take out of a config, and all configs inside it, what names code: kernels, and auto_map unless it is trusted."""
    for part in _parts(config):
        part._attn_implementation_internal = None
        part._experts_implementation_internal = None
        kept = () if trust_remote_code else ("auto_map",)
        for name in ("fusion_config", *kept):
            vars(part).pop(name, None)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and all configs inside it."""
    from transformers import PreTrainedConfig

    seen, open_ends = set[int](), [config]
    while open_ends:
        value: Any = open_ends.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, PreTrainedConfig):
            yield value
            open_ends += vars(value).values()
        elif isinstance(value, dict | list | tuple):
            open_ends += value.values() if isinstance(value, dict) else value


def require_tokenizer_class(path: Path, name: Any) -> None:
    """transformers takes any of its classes by this name, and would load a model or a processor with it."""
    import transformers

    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if found is None or (isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)):
        return
    raise ModelError(
        "the tokenizer's class is none of a tokenizer", where=str(path), got=f"tokenizer_class {escape_surrogates(name)!r}",
        expected="a tokenizer class of transformers", remedy="correct tokenizer_class, or fetch the file again",
    )  # fmt: skip


def ran_code(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Did code from the model's folder make the model, its config, its tokenizer or its way to generate?"""
    made = (type(model), type(model.config), type(tokenizer))
    return any(kind.__module__.startswith("transformers_modules") for kind in made) or "generate" in vars(model)


def code(folder: Path) -> list[str]:
    """The folder's Python files, by their relative paths."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file())
