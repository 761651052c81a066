"""The one place that calls transformers' `from_pretrained` for models. What transformers only warns about is an error.

transformers fills weights that a checkpoint lacks with random numbers and logs a table. A measurement of random weights
would look like any other, so that a missing or misshapen tensor is an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, PosleakWarning
from posleak.models import trust
from posleak.models.library_errors import translate_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
REMEDY = "fetch the files again if one is damaged; upgrade transformers if the architecture is newer than it"


def require_docstrings() -> None:
    """Refuse to run under `python -OO`: transformers builds its classes from docstrings, and fails without them."""
    if sys.flags.optimize > 1:
        raise ModelError(
            "Python runs without docstrings, which transformers needs", where="python -OO",
            got=f"an optimization level of {sys.flags.optimize}", expected="0 or 1",
            remedy="unset PYTHONOPTIMIZE, and start Python without -OO",
        )  # fmt: skip


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and log tables, and restore the user's settings afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def offline_transformers() -> Iterator[None]:
    """Let transformers read what is on this machine: quietly, without a hub, and without a question on the terminal."""
    from huggingface_hub import constants
    from transformers import dynamic_module_utils as dynamic

    offline, patience = constants.HF_HUB_OFFLINE, dynamic.TIME_OUT_REMOTE_CODE
    constants.HF_HUB_OFFLINE, dynamic.TIME_OUT_REMOTE_CODE = True, 0  # 0 seconds to answer: refused, not asked
    try:
        with silence_transformers():
            yield
    finally:
        constants.HF_HUB_OFFLINE, dynamic.TIME_OUT_REMOTE_CODE = offline, patience


def read_config(folder: Path, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> PreTrainedConfig:
    """The config of a folder, or of a GGUF file alone in a folder, without what names code that nobody asked for."""
    from transformers import AutoConfig

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    with translate_errors("transformers cannot read the config", folder, REMEDY), offline_transformers():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, **extra
        )
    trust.disarm(config, trust_remote_code=trust_remote_code)
    config.name_or_path = str(folder)  # a config.json may name another place
    return config


def read_model(
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | str = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """A model with all of its weights, in eval mode and without gradients."""
    from transformers import AutoModelForCausalLM, GgufConfig

    extra: dict[str, Any] = {}
    if gguf_file:  # unpacked here: packed weights would need a kernel from a hub
        extra = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    with (
        translate_errors("transformers cannot load the model", folder / gguf_file if gguf_file else folder, REMEDY),
        offline_transformers(),
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_pickle or gguf_file else True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that all of them are reported below, instead of the first raising
            **extra,
        )
    model, report = loaded
    _require_complete(folder, report)
    _warn_of_untied(folder, model)
    return _frozen(model)


def _require_complete(folder: Path, report: dict[str, Any]) -> None:
    missing = [str(name) for name in sorted(report["missing_keys"])]
    mismatched = [f"{name} {tuple(stored)} for {tuple(built)}" for name, stored, built in report["mismatched_keys"]]
    if missing or mismatched or report.get("error_msgs"):
        raise ModelError(
            "the checkpoint does not hold all the weights; the rest would have been random numbers",
            where=str(folder),
            got=_sample("missing", missing) + _sample("of another shape", mismatched) or report["error_msgs"],
            expected="every parameter of the model that config.json describes",
            remedy="fetch the weights again, or correct config.json if it belongs to another checkpoint",
        )
    unexpected = [str(name) for name in sorted(report["unexpected_keys"])]
    if unexpected:
        message = f"{folder}: the checkpoint holds tensors that the model does not use:{_sample('', unexpected)}"
        warnings.warn(message, PosleakWarning, stacklevel=4)


def _warn_of_untied(folder: Path, model: PreTrainedModel) -> None:
    """Warn where the config ties tensors that differ in the checkpoint: transformers keeps both, and only logs it."""
    for name, tied_to in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name not in model.all_tied_weights_keys:
            message = (
                f"{folder}: the config ties {name} to {tied_to} (tie_word_embeddings), but the checkpoint holds other "
                "numbers for each; both are measured as stored. Set tie_word_embeddings to false in config.json "
                "or fetch the weights again"
            )
            warnings.warn(message, PosleakWarning, stacklevel=4)


def _sample(label: str, names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f" {len(names)} {label}: {', '.join(names[:most])}{more}." if names else ""


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()
    model.requires_grad_(False)
    return model


def require_dtype(dtype: object) -> None:
    """Refuse a name of a dtype that is none; needs no torch."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ModelError("unknown dtype", where="dtype", got=repr(dtype), expected=", ".join(DTYPES))


def pick_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype | str:
    """A torch dtype or 'auto'; by default float32 on a CPU, where it costs little, and as stored elsewhere."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype or ("float32" if device == "cpu" else "auto")
    chosen: torch.dtype | str = name if name == "auto" else getattr(torch, name)
    return chosen


def pick_device(device: str | torch.device | None) -> str:
    """The device asked for, or an error if the machine lacks it; by default an accelerator if any, else the CPU."""
    import torch

    if device is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ModelError(
            "unknown device", where="device", got=repr(device), expected="cpu, cuda, cuda:1, mps …"
        ) from error
    cuda = (asked.index or 0) < torch.cuda.device_count()
    here = {"cpu": True, "cuda": cuda, "mps": torch.backends.mps.is_available()}
    if not here.get(asked.type, True):
        raise ModelError("the device is not on this machine", where="device", got=str(asked), remedy="use --device cpu")
    return str(asked)
