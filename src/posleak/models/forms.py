"""Find the model of transformers inside a wrapper, and reject forms in which a probe would see something else.

torch.compile(model), DataParallel, DistributedDataParallel     unwrapped: the model inside is measured
PeftModel                                                       unwrapped: adapters are modules of the model inside
FSDP2 (fully_shard), tensor parallel                            parallel.py
layers compiled in place, FSDP1, autocast                       rejected
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posleak.errors import UnsupportedError
from posleak.models import adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INNER = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Attribute that holds the wrapped model, by the name of the wrapper's class."""


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers of torch and peft; any other object unchanged."""
    while True:
        kinds = {cls.__name__ for cls in type(model).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise UnsupportedError(
                "the model is wrapped by FSDP1, which hides its parameters from the code that measures",
                where=type(model).__name__, expected="FSDP2 (torch.distributed.fsdp.fully_shard) or a complete model",
                remedy="shard it with fully_shard, or load a saved checkpoint in one process",
            )  # fmt: skip
        if "PeftModel" in kinds or "PeftMixedModel" in kinds:
            for config in model.peft_config.values():
                method = getattr(config.peft_type, "value", config.peft_type)
                adapters.require_injected(str(method), type(model).__name__, vars(config))
            model = model.base_model.model
        elif inner := next((INNER[kind] for kind in kinds if kind in INNER), None):
            model = getattr(model, inner)
        else:
            return model


def require_eager(model: PreTrainedModel, where: str) -> None:
    """Reject layers that are compiled in place: compiled code bypasses the attention function and the hooks."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None:
            raise UnsupportedError(
                "a module of the model is compiled in place: compiled code keeps the attention that it was traced with",
                where=where, got=f"{name or 'the model'} ({type(module).__name__})",
                expected="modules that run eagerly, or torch.compile(model), which is unwrapped",
                remedy="load the model again without compiling its layers",
            )  # fmt: skip


def require_no_autocast(device: str) -> None:
    """Reject a measurement inside torch.autocast, which computes in another dtype than the one that is recorded."""
    import torch

    for kind in {"cpu", device}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            raise UnsupportedError(
                "autocast is on, so that the model computes in another dtype than the one that would be recorded",
                where=f"torch.autocast({kind!r})", got=str(torch.get_autocast_dtype(kind)),
                remedy="measure outside the autocast context, and load the model in the dtype to be measured",
            )  # fmt: skip
