"""Name how a model's weights are quantised: method, bits and group size.

    quantisation        one line of text, from the layers or, for methods whose layers do not say, from the config
    require_packages    rejects a config whose method needs a package that is not installed
    stored_tensors      the tensors that hold the weights, as they are packed
    require_convertible rejects a conversion of packed weights to a dtype in which they do not compute

Layers of torchao, bitsandbytes and torch.ao describe themselves, so that a model that was quantised in memory has the
same name as one that was loaded. Other methods (GPTQ, AWQ, compressed-tensors, FP8 …) state it in the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError, UnsupportedError
from posleak.models import hashing
from posleak.text import one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

PACKAGES = {
    "aqlm": ("aqlm",), "auto-round": ("auto-round",), "awq": ("gptqmodel",), "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",), "fp_quant": ("fp_quant",), "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",), "quanto": ("optimum-quanto",), "quark": ("amd-quark",), "sinq": ("sinq",),
    "spqr": ("spqr_quant",), "torchao": ("torchao",), "vptq": ("vptq",),
}  # fmt: skip
"""Packages that transformers needs to load weights of a method, by their names for pip."""
MODULES = {"amd-quark": "quark", "optimum-quanto": "optimum.quanto"}
"""Modules whose names differ from those of their packages by more than a hyphen."""

KERNEL_REMEDY = (
    "install the package that the message names, load the checkpoint in the dtype in which it was saved (--dtype), or "
    "load the unquantised weights: some kernels need a GPU"
)

NAMES = {"awq": "AWQ", "gptq": "GPTQ"}
BITS = ("bits", "w_bit", "nbits", "num_bits", "weight_bits")
GROUP = ("group_size", "q_group_size", "weight_block_size")
FIXED = {
    "bitnet": "1.58 bits", "fbgemm_fp8": "8 bits, one scale per row", "fp8": "8 bits", "mxfp4": "4 bits, groups of 32",
    "nvfp4": "4 bits, groups of 16",
}  # fmt: skip
"""What the name of a method implies if its config does not state it."""
SCALES = {"channel": "one scale per row", "tensor": "one scale"}
"""Strategies of compressed-tensors without groups."""


def quantisation(model: PreTrainedModel) -> str | None:
    """Return how the weights are quantised, None if they are not.

    Example: `torchao int4 weight-only, groups of 128`
    """
    kinds = Counter(kind for module in model.modules() if (kind := _kind_of_layer(module)) is not None)
    if len(kinds) > 1:
        return "; ".join(f"{kind}, in {count} layers" for kind, count in kinds.most_common())
    return next(iter(kinds), None) or _stated(model.config)


def is_quantised(model: PreTrainedModel) -> bool:
    """Return whether the model has packed weights or a config with quantisation settings."""
    return quantisation(model) is not None


# -- from the layers --------------------------------------------------------------------------------------------------


def _kind_of_layer(module: torch.nn.Module) -> str | None:
    weight: Any = module._parameters.get("weight")
    if hashing.is_eager_quantised(module):
        return _torch_ao(module)
    if type(weight).__name__ == "Int8Params":
        threshold = vars(vars(module)["state"]).get("threshold") if "state" in vars(module) else None
        outliers = f", outliers of {threshold:g} or more in float" if threshold else ""
        return f"bitsandbytes int8 with quantised activations, one scale per row{outliers}"
    state = getattr(weight, "quant_state", None)
    if state is not None:
        double = ", double quantisation" if state.nested or weight.compress_statistics else ""
        return f"bitsandbytes {state.quant_type} (4 bits, blocks of {state.blocksize}{double})"
    if hasattr(weight, "__tensor_flatten__"):  # a subclass that wraps its data, as torchao's are
        return _wrapped(weight)
    return None


def _torch_ao(module: Any) -> str:
    import torch

    weight = module._weight_bias()[0]
    per_tensor = weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    activations = "dynamic activations" if ".dynamic." in type(module).__module__ else "static activations"
    name, scales = str(weight.dtype).removeprefix("torch.q"), "one scale" if per_tensor else "one scale per row"
    return f"torch.ao {name} weights, {activations}, {scales}"


def _wrapped(weight: Any) -> str:
    """Return the kind of a wrapper subclass: package, dtype, whether activations are quantised too, group size."""
    names, context = weight.__tensor_flatten__()
    stored, facts = getattr(weight, names[0]), context if isinstance(context, Mapping) else {}
    package, name = type(weight).__module__.partition(".")[0], type(weight).__name__
    dtype = str(facts.get("target_dtype", stored.dtype)).removeprefix("torch.")
    dtype = "int4" if name.startswith("Int4") else dtype
    block = facts.get("block_size") or getattr(weight, "block_size", None)
    activations = [value for key, value in facts.items() if key.startswith(("act_quant", "activation_quant"))]
    parts = "with quantised activations" if any(value is not None for value in activations) else "weight-only"
    if block is None:
        return f"{package} {dtype} {parts} ({name})"
    return f"{package} {dtype} {parts}, {_groups(block[-1], weight.shape[-1])}"


def _groups(size: int | list[int] | tuple[int, ...], width: int = 0) -> str:
    if not isinstance(size, int):
        return f"blocks of {' × '.join(map(str, size))}"
    return "one scale per row" if size in (-1, width) else f"groups of {size}"


# -- from the config --------------------------------------------------------------------------------------------------


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the quantisation settings of a config; {} if it has none."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return {}
    return dict(stated) if isinstance(stated, Mapping) else dict(stated.to_dict())


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the quantisation method in a config."""
    settings = _settings(config)
    method = settings.get("quant_method", "unknown method")
    return str(method.value if isinstance(method, Enum) else method) if settings else None


def _stated(config: PreTrainedConfig) -> str | None:
    """Return method, bits and group size as the config states them; groups of layers with other settings too."""
    method, settings = method_of(config), _settings(config)
    if method is None:
        return None
    groups = settings.get("config_groups")  # of compressed-tensors
    described = dict.fromkeys(map(_scheme, groups.values())) if isinstance(groups, Mapping) else [_bits(settings)]
    facts = ", ".join(filter(None, [FIXED.get(method), "; ".join(filter(None, described))]))
    return f"{NAMES.get(method, method)} {facts}".rstrip()


def _bits(fields: Mapping[str, Any]) -> str:
    """Return `4 bits, groups of 128`, as far as the fields state it."""
    bits = next((f"{value} bits" for name, value in _flat(fields) if name in BITS), fields.get("weights"))
    size = next((_groups(value) for name, value in _flat(fields) if name in GROUP and value is not None), None)
    return ", ".join(fact for fact in (bits, size) if isinstance(fact, str))


def _scheme(scheme: Mapping[str, Any]) -> str:
    """Return the facts of one group of layers of compressed-tensors, such as `int4 weight-only, groups of 128`."""
    weights = scheme.get("weights") or {}
    parts = "with quantised activations" if scheme.get("input_activations") else "weight-only"
    size, strategy = weights.get("group_size"), str(weights.get("strategy"))
    scales = SCALES.get(strategy) if size is None else _groups(size)
    return ", ".join(filter(None, [f"{weights.get('type')}{weights.get('num_bits')} {parts}", scales]))


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of nested mappings, outer ones first."""
    yield from fields.items()
    for value in fields.values():
        if isinstance(value, Mapping):
            yield from _flat(value)


def require_packages(config: PreTrainedConfig, where: str) -> None:
    """Reject a config whose weights need a package that is not installed."""
    method = method_of(config) or ""
    missing = [name for name in PACKAGES.get(method, ()) if not _is_installed(name)]
    if missing:
        raise ModelError(
            f"the weights are quantised by {NAMES.get(method, method)}, which needs a package that is not installed",
            where=where, got=f"no package {' and no package '.join(missing)}",
            remedy=f"pip install {' '.join(missing)}, or load the unquantised weights",
        )  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        return find_spec(MODULES.get(package, package.replace("-", "_"))) is not None
    except ModuleNotFoundError:  # the package above it
        return False


# -- sizes and conversion ---------------------------------------------------------------------------------------------


def stored_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the tensors of all parameters and buffers as they are packed; offloaded ones without their data."""
    return (tensor for _, tensor in hashing.tensors(model, offloaded=False))


def largest_unpacked(model: torch.nn.Module) -> int:
    """Return the elements of the largest packed linear layer, whose kernel may unpack its weights in a pass."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "in_features")]
    return max((layer.in_features * layer.out_features for layer in layers if not _is_dense(layer)), default=0)


def _is_dense(layer: torch.nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and weight.is_floating_point() and not hashing.is_packed(weight)


def require_convertible(
    model: torch.nn.Module, dtype: torch.dtype | None, where: str, remedy: str = "edit the unquantised model instead"
) -> None:
    """Reject a conversion of the parameters to a dtype (None: no conversion) in which packed weights do not compute.

    Integers are not converted; wrappers such as torchao's are. One layer of each kind is tried.
    """
    import torch

    layers: list[Any] = [module for module in (model.modules() if dtype else ()) if hasattr(module, "in_features")]
    packed = {_kind_of_layer(layer) or type(layer).__name__: layer for layer in layers if not _is_dense(layer)}
    for kind, layer in packed.items():
        weight: Any = layer._parameters.get("weight")
        device = next((tensor.device for tensor in stored_tensors(layer)), None)
        try:
            x = torch.zeros(1, 1, layer.in_features, dtype=dtype, device=device)
            with torch.no_grad():
                is_wrapper = hasattr(weight, "__tensor_flatten__")
                torch.nn.functional.linear(x, weight.data.to(dtype)) if is_wrapper else layer.forward(x)
        except (RuntimeError, AssertionError) as error:
            raise UnsupportedError(
                "packed weights cannot be converted: their kernel does not compute in "
                + str(dtype).removeprefix("torch."), where=f"{where}, {kind}", got=one_line(error), remedy=remedy,
            ) from error  # fmt: skip
