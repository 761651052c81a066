"""Adapters of PEFT: read their configs, reject what cannot be measured, and apply them to a loaded model.

An adapter folder has an adapter_config.json and no weights of a model. It names its base model. peft injects the
adapter's modules into the base model, so that the measured model is the base model's own object with other modules.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import FETCH_AGAIN, ModelError, UnsupportedError, translate_errors
from posleak.models import configs, hashing, pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
SAFETENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"

PROMPT = "adds virtual tokens or keys before the prompt, so that positions have another meaning"
WRAPPER = "computes outside the modules of the base model, in the forward pass of its wrapper"
INVOKED = "is active after certain tokens only"
REJECTED = {
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"), PROMPT),
    **dict.fromkeys(("ADAPTION_PROMPT", "CARTRIDGE"), PROMPT), **dict.fromkeys(("XLORA", "POLY"), WRAPPER),
}  # fmt: skip
"""Methods of PEFT that do more than change modules of the base model, and what they do."""
REMEDY = "check that the adapter belongs to this base model, and that peft is new enough for its method"


@dataclass(frozen=True)
class Adapter:
    """An adapter folder that passed all checks. `base`: the name of its base model, if its config states one."""

    folder: Path
    method: str
    weights: str
    base: str | None

    @classmethod
    def read(cls, folder: Path, *, allow_pickle: bool = False) -> Adapter:
        """Return the adapter in a folder; raise if it cannot be measured or its weights may run code."""
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise ModelError(
                "the folder contains no adapter", where=str(folder), got=f"no {CONFIG_FILE}",
                expected=f"a folder written by PEFT: {CONFIG_FILE} and {SAFETENSORS}",
                remedy="pass the folder that contains that file",
            )  # fmt: skip
        raw = configs.read_json_object(path)
        method, base = str(raw.get("peft_type")), raw.get("base_model_name_or_path")
        require_injected(method, str(path), raw)
        names = [name for name in (SAFETENSORS, PICKLE) if (folder / name).is_file()]
        if not names:
            raise ModelError(
                "the adapter has no weights", where=str(folder), got=f"{CONFIG_FILE} only", expected=SAFETENSORS,
                remedy="save or download the adapter again; the last save may have been interrupted",
            )  # fmt: skip
        if names == [PICKLE] and not allow_pickle:
            raise ModelError(
                "the adapter's weights are a pickle file, which can run code when it is read", where=str(folder),
                got=PICKLE, expected=SAFETENSORS,
                remedy="save it with safetensors, or pass --allow-pickle if you trust its author",
            )  # fmt: skip
        return cls(folder, method, names[0], base if isinstance(base, str) and base else None)

    @property
    def title(self) -> str:
        """The name of its folder, or its hub id."""
        cached = self.folder.parent.parent.name if self.folder.parent.name == "snapshots" else ""
        return cached.removeprefix("models--").replace("--", "/") or self.folder.name

    @property
    def name(self) -> str:
        """The name of the adapter inside the model; module names cannot contain dots."""
        return re.sub(r"[^\w-]", "_", self.title) or "adapter"

    @property
    def sha256(self) -> str:
        """The sha256 of its config and weights."""
        files = (CONFIG_FILE, self.weights)
        return hashing.joined_sha256({name: hashing.file_sha256(self.folder / name) for name in files})

    @contextmanager
    def naming_its_base(self, stated: str | None) -> Iterator[None]:
        """Add to an error about a base model that only the adapter's config names how to name another."""
        try:
            yield
        except ModelError as error:
            if stated is not None:
                raise
            raise type(error)(
                error.what, where=f"{self.folder / CONFIG_FILE}, base model {error.where}", got=error.got,
                expected=error.expected, remedy=f"name the base model with --base; or {error.remedy}",
            ) from error  # fmt: skip

    def base_of(self, stated: str | None) -> str:
        """Return the base model that the caller stated, or that of the adapter's config."""
        if (base := stated or self.base) is None:
            raise ModelError(
                "the adapter does not name its base model", where=str(self.folder / CONFIG_FILE),
                expected="base_model_name_or_path", remedy="name the base model with --base",
            )  # fmt: skip
        return base


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and not a model."""
    return (folder / CONFIG_FILE).is_file() and not pretrained.weight_files(folder, allow_pickle=True)


def require_injected(method: str, where: str, settings: dict[str, Any]) -> None:
    """Reject adapters that do more than change modules of the base model at all tokens."""
    why = INVOKED if settings.get("alora_invocation_tokens") else REJECTED.get(method)
    if why is not None:
        raise UnsupportedError(
            f"the adapter {why}", where=where, got=f"peft_type {method}",
            expected="an adapter that changes layers at all tokens, such as LoRA",
            remedy="measure the base model without it",
        )  # fmt: skip


def by_name(adapters: Sequence[Adapter]) -> dict[str, Adapter]:
    """Return adapters by the names that they have inside the model, which are unique."""
    named = dict[str, Adapter]()
    for adapter in adapters:
        named[adapter.name if adapter.name not in named else f"{adapter.name}-{len(named)}"] = adapter
    return named


def with_adapters(model: PreTrainedModel, named: Mapping[str, Adapter]) -> PreTrainedModel:
    """Inject adapters into a model, all active; raise if weights of an adapter are missing or do not fit."""
    adapters = list(named.values())
    try:
        with pretrained.offline_transformers():  # peft imports bitsandbytes, which would fetch a kernel from a hub
            import peft
    except ImportError as error:
        raise ModelError(
            "adapters need the package peft", where=str(adapters[0].folder), got=str(error),
            remedy="pip install peft, or merge the adapter into its base model where it was trained",
        ) from error  # fmt: skip
    names, place = list(named), ", ".join(str(adapter.folder) for adapter in adapters)
    about = translate_errors("peft cannot apply the adapter to this model", place, REMEDY)
    with about, warnings.catch_warnings(record=True) as caught, pretrained.offline_transformers():
        warnings.simplefilter("always")
        wrapped: Any = peft.PeftModel.from_pretrained(model, str(adapters[0].folder), adapter_name=names[0])
        for name, adapter in zip(names[1:], adapters[1:]):
            wrapped.load_adapter(str(adapter.folder), adapter_name=name)
        wrapped.base_model.set_adapter(names)
    if missing := [str(each.message) for each in caught if "missing adapter keys" in str(each.message).lower()]:
        raise ModelError(
            "the adapter does not contain all weights of its modules; peft would leave the others at random values",
            where=place, got=missing[0].splitlines()[0][:300], remedy=f"{REMEDY}; {FETCH_AGAIN}",
        )  # fmt: skip
    base: PreTrainedModel = wrapped.get_base_model()
    base.eval()
    base.requires_grad_(False)
    return base
