"""Load models with transformers' `from_pretrained`, and turn what transformers only warns about into errors.

transformers fills weights that a checkpoint lacks with random numbers and logs a table. A measurement of random weights
would look like any other, so a missing or misshapen tensor is an error.

`weight_files` are the files that transformers will read, and exactly these are hashed. Their headers are checked before
any weight is read: safetensors itself rejects headers with lengths beyond the file, or with shapes that do not match
their bytes, so that no later code loops over them or allocates the memory that they state.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posleak.errors import FETCH_AGAIN, ModelError, translate_errors, warn
from posleak.files import read_regular, stays_in_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
REMEDY = "download the files again if one is damaged; upgrade transformers if the architecture is newer than it"

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files that transformers reads instead of model.safetensors if there are any."""
MAX_INDEX = 1 << 25
"""Bytes of an index: a model of 200,000 tensors needs about that many."""
CAST_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that from_pretrained(dtype=...) casts; 8-bit floats and integers keep theirs."""


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
    from logging import ERROR, getLogger

    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # accelerate logs that parameters are on the meta device, bitsandbytes that it cannot fetch a kernel
    before = {name: getLogger(name).level for name in ("accelerate.big_modeling", "bitsandbytes")}
    for name in before:
        getLogger(name).setLevel(ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            getLogger(name).setLevel(level)
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


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder, by their relative paths, and what their headers state.

    tensors    number of tensors; None for pickles, whose tensors cannot be counted without loading them
    elements   number of elements; for pickles an upper bound
    bytes      bytes of all tensors as stored
    cast       (bytes per element as stored, number of elements) of every tensor that is cast on loading
    """

    names: tuple[str, ...]
    tensors: int | None
    elements: int
    bytes: int
    cast: tuple[tuple[int, int], ...] = ()

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Return the bytes in memory after loading as `dtype` (None: as stored)."""
        if dtype is None:
            return self.bytes
        return self.bytes + sum((dtype.itemsize - stored) * elements for stored, elements in self.cast)


def read_headers(folder: Path, *, allow_pickle: bool = False) -> Weights:
    """Return the folder's weights. Reject pickles unless they are allowed: reading a pickle can run code."""
    names = weight_files(folder, allow_pickle=allow_pickle)
    if not names and (pickles := weight_files(folder, allow_pickle=True)):
        raise ModelError(
            "the weights are pickle files, which can run code when they are read", where=str(folder),
            got=", ".join(pickles), expected="*.safetensors",
            remedy="convert them to safetensors, or pass --allow-pickle if you trust their author",
        )  # fmt: skip
    if not names:
        raise ModelError(
            "the folder has a config but no weights", where=str(folder),
            got=", ".join(sorted(path.name for path in folder.iterdir())[:12]),
            expected=f"{SAFETENSORS}, or {SAFETENSORS_INDEX} and the files that it names",
            remedy="download or save the weights again; the last download or save may have been interrupted",
        )  # fmt: skip
    stored = sum((folder / name).stat().st_size for name in names)
    if not all(name.endswith(".safetensors") for name in names):
        return Weights(tuple(names), None, stored, stored)
    headers = [_read_header(folder / name) for name in names]
    counts = [(dtype, elements) for tensors, _ in headers for dtype, elements in tensors]
    total, tensor_bytes = sum(elements for _, elements in counts), stored - sum(size for _, size in headers)
    cast = tuple((CAST_BYTES[dtype], elements) for dtype, elements in counts if dtype in CAST_BYTES)
    return Weights(tuple(names), len(counts), total, tensor_bytes, cast)


def _read_header(path: Path) -> tuple[list[tuple[str, int]], int]:
    """Return dtype and number of elements of each tensor in a safetensors file, and the bytes of the header."""
    from safetensors import safe_open

    with translate_errors("a weight file is not a complete safetensors file", path, FETCH_AGAIN):
        with safe_open(path, framework="np") as file:
            slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118  not a dict
            tensors = [(str(part.get_dtype()), math.prod(part.get_shape())) for part in slices]
        with path.open("rb") as start:
            return tensors, 8 + int.from_bytes(start.read(8), "little")


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[str]:
    """Return the relative paths of the files that from_pretrained reads; [] if there are none that it may read."""
    shards = sorted(path.name for path in folder.iterdir() if DISTRIBUTED.fullmatch(path.name))
    if shards:
        raise ModelError(
            "the folder contains a distributed checkpoint, which transformers would read instead of its other weights",
            where=str(folder / shards[0]), expected=f"{SAFETENSORS}, or {SAFETENSORS_INDEX} and the files it names",
            remedy="save the model with save_pretrained, or move those files to another folder",
        )  # fmt: skip
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (PICKLE, PICKLE_INDEX))[: 2 if allow_pickle else 1]:
        if (folder / single).is_file():
            return [single]
        if (folder / index).is_file():
            return _indexed_files(folder, index)
    return []


def _indexed_files(folder: Path, index: str) -> list[str]:
    """Return the files that an index names; each must exist, inside the folder."""
    path = folder / index
    try:
        named = sorted(set(json.loads(read_regular(path, MAX_INDEX))["weight_map"].values()))
        outside = [name for name in named if not stays_in_folder(name)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(
            "the index of the weights cannot be read", where=str(path), got=f"{path.stat().st_size} bytes",
            expected="JSON with a weight_map from tensors to files", remedy=FETCH_AGAIN,
        ) from None  # fmt: skip
    if outside:
        raise ModelError(
            "the index names a file outside the model's folder, which is not read", where=str(path), got=outside[0],
            expected="names relative to the folder", remedy="download the index again, or correct it",
        )  # fmt: skip
    missing = [name for name in named if not (folder / name).is_file()]
    if missing or not named:
        raise ModelError(
            "weight files that the index names are missing", where=str(path),
            got=_first(missing) or "no names",
            remedy="download or save them again; the last download or save may have been interrupted",
        )  # fmt: skip
    return named


def read_model(
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | str = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    gguf_file: str | None = None,
    offload_folder: str | None = None,
    tensor_parallel: bool = False,
) -> PreTrainedModel:
    """Return a model with all of its weights, in evaluation mode and without gradients."""
    from transformers import AutoModelForCausalLM, GgufConfig

    extra: dict[str, Any] = {} if offload_folder is None else {"offload_folder": offload_folder}
    if tensor_parallel:
        from transformers.distributed.configuration_utils import DistributedConfig

        extra["distributed_config"], device_map = DistributedConfig(tp_plan="auto"), None
    if gguf_file:  # dequantised here: packed weights would need a kernel from a hub
        extra = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    about = translate_errors("transformers cannot load the model", folder / (gguf_file or ""), REMEDY)
    with about, offline_transformers(), redirect_stdout(sys.stderr):  # some packages print there on their import
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
    """Reject missing and misshapen weights; warn of unused ones. `report` is transformers' `loading_info`."""
    problems = {
        "missing": sorted(map(str, report["missing_keys"])),
        "of another shape": [f"{name} {tuple(a)} for {tuple(b)}" for name, a, b in report["mismatched_keys"]],
    }
    wrong = [f"{len(names)} {problem}: {_first(names)}" for problem, names in problems.items() if names]
    if wrong or report.get("error_msgs"):
        raise ModelError(
            "the checkpoint does not contain all weights; transformers would initialise the others at random",
            where=str(folder), got=". ".join(wrong) or report["error_msgs"],
            expected="every parameter of the model that config.json describes",
            remedy="download the weights again, or correct config.json if it belongs to another checkpoint",
        )  # fmt: skip
    if unexpected := sorted(map(str, report["unexpected_keys"])):
        warn(f"{folder}: the model does not use {len(unexpected)} tensors of the checkpoint: {_first(unexpected)}")


def _first(names: list[str], limit: int = 5) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _warn_of_untied(folder: Path, model: PreTrainedModel) -> None:
    """Warn if the config ties tensors that differ in the checkpoint: transformers keeps both, and only logs it."""
    for name, tied_to in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name not in model.all_tied_weights_keys:
            warn(
                f"{folder}: the config ties {name} to {tied_to} (tie_word_embeddings), but the checkpoint holds "
                "different values for each; both are measured as stored. Set tie_word_embeddings to false in "
                "config.json, or download the weights again"
            )


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
