"""Load models with transformers' `from_pretrained`, and turn what transformers only warns about into errors.

transformers fills weights that a checkpoint lacks with random numbers and logs a table. A measurement of random weights
would look like any other, so that a missing or misshapen tensor is an error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posleak.errors import ModelError, PosleakWarning, translate_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
REMEDY = "fetch the files again if one is damaged; upgrade transformers if the architecture is newer than it"


def require_docstrings() -> None:
    """Raise under `python -OO`: transformers builds its classes from docstrings, and fails without them."""
    if sys.flags.optimize > 1:
        raise ModelError(
            "Python runs without docstrings, which transformers needs", where="python -OO",
            got=f"an optimization level of {sys.flags.optimize}", expected="0 or 1",
            remedy="unset PYTHONOPTIMIZE, and start Python without -OO",
        )  # fmt: skip


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and log tables, and restore the user's settings on exit."""
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
    """Let transformers read local files only: silently, without a hub, and without questions on the terminal."""
    from huggingface_hub import constants
    from transformers import dynamic_module_utils as dynamic

    offline, timeout = constants.HF_HUB_OFFLINE, dynamic.TIME_OUT_REMOTE_CODE
    constants.HF_HUB_OFFLINE, dynamic.TIME_OUT_REMOTE_CODE = True, 0  # 0 seconds to answer: rejected without asking
    try:
        with silence_transformers():
            yield
    finally:
        constants.HF_HUB_OFFLINE, dynamic.TIME_OUT_REMOTE_CODE = offline, timeout


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
    """Return a model with all of its weights, in evaluation mode and without gradients."""
    from transformers import AutoModelForCausalLM, GgufConfig

    extra: dict[str, Any] = {}
    if gguf_file:  # dequantised here: packed weights would need a kernel from a hub
        extra = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    about = translate_errors("transformers cannot load the model", folder / (gguf_file or ""), REMEDY)
    with about, offline_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), config=config, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_pickle or gguf_file else True, local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that all of them are reported below, instead of the first raising
            **extra,
        )  # fmt: skip
    model: PreTrainedModel = loaded[0]
    _require_complete(folder, loaded[1])
    _warn_of_untied(folder, model)
    model.eval()
    model.requires_grad_(False)
    return model


def _require_complete(folder: Path, report: dict[str, Any]) -> None:
    missing = [str(name) for name in sorted(report["missing_keys"])]
    mismatched = [f"{name} {tuple(stored)} for {tuple(built)}" for name, stored, built in report["mismatched_keys"]]
    if missing or mismatched or report.get("error_msgs"):
        raise ModelError(
            "the checkpoint does not hold all the weights; the rest would have been random numbers", where=str(folder),
            got=_sample("missing", missing) + _sample("of another shape", mismatched) or report["error_msgs"],
            expected="every parameter of the model that config.json describes",
            remedy="fetch the weights again, or correct config.json if it belongs to another checkpoint",
        )  # fmt: skip
    unexpected = [str(name) for name in sorted(report["unexpected_keys"])]
    if unexpected:
        message = f"{folder}: the checkpoint holds tensors that the model does not use:{_sample('', unexpected)}"
        warnings.warn(message, PosleakWarning, stacklevel=4)


def _sample(label: str, names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f" {len(names)} {label}: {', '.join(names[:limit])}{more}." if names else ""


def _warn_of_untied(folder: Path, model: PreTrainedModel) -> None:
    """Warn if the config ties tensors that differ in the checkpoint: transformers keeps both, and only logs it."""
    for name, tied_to in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name not in model.all_tied_weights_keys:
            message = (
                f"{folder}: the config ties {name} to {tied_to} (tie_word_embeddings), but the checkpoint holds "
                "different values for each; both are measured as stored. Set tie_word_embeddings to false in "
                "config.json, or fetch the weights again"
            )
            warnings.warn(message, PosleakWarning, stacklevel=4)


def require_dtype(dtype: object) -> None:
    """Reject an unknown name of a dtype, without importing torch."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ModelError("unknown dtype", where="dtype", got=repr(dtype), expected=", ".join(DTYPES))


def choose_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype | str:
    """Return a torch dtype or 'auto'; the default is float32 on a CPU, and the stored dtype elsewhere."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype or ("float32" if device == "cpu" else "auto")
    return "auto" if name == "auto" else cast("torch.dtype", getattr(torch, name))


def choose_device(device: str | torch.device | None) -> str:
    """Return the requested device if the machine has it; the default is an accelerator if any, else the CPU."""
    import torch

    has_mps = torch.backends.mps.is_available()
    if device is None:
        return "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        expected = "cpu, cuda, cuda:1, mps …"
        raise ModelError("unknown device", where="device", got=repr(device), expected=expected) from error
    has_cuda = (chosen.index or 0) < torch.cuda.device_count()
    if not {"cuda": has_cuda, "mps": has_mps}.get(chosen.type, True):
        raise ModelError("this machine has no such device", where="device", got=str(chosen), remedy="use --device cpu")
    return str(chosen)
