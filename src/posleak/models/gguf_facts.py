"""What a GGUF file says about itself, and what transformers would silently drop from it.

transformers reads the RoPE base from a GGUF file, but neither `rope.scaling.*` (for most families) nor the tensors that
carry Llama-3 and LongRoPE frequencies, nor a window that its config class does not know. Such a model loads and writes
text, but encodes positions otherwise than its author meant: the one thing that posleak must not get wrong. So the file
is compared with the config that transformers made of it, and refused if they differ.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posleak.errors import ModelError
from posleak.models import bounds, gguf_header
from posleak.models.gguf_header import Header
from posleak.models.library_errors import FETCH_AGAIN, translate_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PLAIN = ("F32", "F16", "BF16", "F64")
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Facts:
    """The metadata that matters here; `elements` counts all numbers in all tensors."""

    path: Path
    architecture: str
    file_type: str
    elements: int
    licence: str | None
    has_tokenizer: bool
    rope_base: float | None
    rope_scaling: str | None
    rope_tensors: tuple[str, ...]
    rotary_dim: int | None
    window: int | None

    @property
    def quantisation(self) -> str:
        """For the identity: what the weights were before they became float32."""
        verb = "converted" if self.file_type in PLAIN else "dequantised"
        return f"GGUF {self.file_type} ({verb} to float32)"


def read(path: Path) -> Facts:
    """The facts of a GGUF file; an error if the file is not GGUF, is cut short, or contradicts itself."""
    header = gguf_header.read(path)
    with translate_errors("the GGUF file's metadata cannot be read", path, FETCH_AGAIN):
        facts = _facts(path, header)
        _require_consistent(facts, header)
    return facts


def _facts(path: Path, header: Header) -> Facts:
    field = header.fields.get
    family = field("general.architecture")
    scaling = field(f"{family}.rope.scaling.type")
    window = field(f"{family}.attention.sliding_window")
    licence = field("general.license")
    return Facts(
        path=path,
        architecture=str(family),
        file_type=_file_type(field("general.file_type"), header),
        elements=sum(tensor.numbers for tensor in header.tensors),
        licence=None if licence is None else str(licence),
        has_tokenizer="tokenizer.ggml.model" in header.fields,
        rope_base=field(f"{family}.rope.freq_base"),
        rope_scaling=None if scaling in (None, "none") else str(scaling),
        rope_tensors=tuple(tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")),
        rotary_dim=field(f"{family}.rope.dimension_count"),
        window=window if isinstance(window, int) and window > 0 else None,
    )


def _require_consistent(facts: Facts, header: Header) -> None:
    """The number of blocks is that of the tensors; heads for speculative decoding may be counted apart."""
    stated = header.fields.get(f"{facts.architecture}.block_count", 0)
    extra = header.fields.get(f"{facts.architecture}.nextn_predict_layers", 0)
    blocks = len({found[1] for tensor in header.tensors if (found := _BLOCK.match(tensor.name))})
    if stated not in (blocks, blocks - extra):
        raise ModelError(
            "the GGUF file contradicts itself", where=str(facts.path),
            got=f"{facts.architecture}.block_count = {stated}",
            expected=f"{blocks}, the number of blocks in its tensors", remedy=FETCH_AGAIN,
        )  # fmt: skip
    sizes = {key: value for key, value in header.fields.items() if not key.startswith("tokenizer.")}
    bounds.require_sane(facts.path, sizes)


def _file_type(stated: Any, header: Header) -> str:
    """The quantisation scheme that the file names, else the commonest type of its matrices."""
    from gguf import GGMLQuantizationType, LlamaFileType

    if stated in LlamaFileType._value2member_map_:
        return LlamaFileType(stated).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    types = Counter(GGMLQuantizationType(tensor.kind).name for tensor in header.tensors if len(tensor.shape) > 1)
    return types.most_common(1)[0][0] if types else "unknown"


def require_positions_kept(facts: Facts, config: PreTrainedConfig) -> None:
    """Refuse a file whose positions transformers did not take over into `config`."""
    text = config.get_text_config(decoder=True)
    ropes = _ropes(getattr(text, "rope_parameters", None) or {})
    if facts.rope_tensors:
        raise _lost(facts, "the tensor " + ", ".join(facts.rope_tensors), "frequencies without them")
    if facts.rope_scaling and all(rope.get("rope_type", "default") == "default" for rope in ropes):
        raise _lost(facts, f"rope.scaling.type = {facts.rope_scaling}", "rope_type default")
    bases = [float(rope["rope_theta"]) for rope in ropes if "rope_theta" in rope]
    if facts.rope_base is not None and not any(math.isclose(facts.rope_base, base, rel_tol=1e-6) for base in bases):
        raise _lost(facts, f"rope.freq_base = {facts.rope_base}", f"rope_theta {bases}")
    if facts.window is not None and getattr(text, "sliding_window", None) != facts.window:
        raise _lost(facts, f"attention.sliding_window = {facts.window}", "no such window")
    if facts.rotary_dim is not None and facts.rotary_dim not in _rotary_dims(text, ropes):
        raise _lost(facts, f"rope.dimension_count = {facts.rotary_dim}", f"{_rotary_dims(text, ropes)} dimensions")


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """`rope_parameters`, flat or nested per layer type, as a list of flat ones."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or ([parameters] if parameters else [])


def _rotary_dims(text: PreTrainedConfig, ropes: list[dict[str, Any]]) -> list[int]:
    """How many dimensions of a head are rotated, by each spelling that the config may use."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    whole = getattr(text, "partial_rotary_factor", None) or 1.0
    dims = {int(head * rope.get("partial_rotary_factor", whole)) for rope in ropes or [{}]}
    latent = getattr(text, "qk_rope_head_dim", None)
    return sorted(dims | ({int(latent)} if latent else set()))


def _lost(facts: Facts, stated: str, got: str) -> ModelError:
    return ModelError(
        "transformers does not take over all that this GGUF file says about positions; the numbers would be wrong",
        where=str(facts.path),
        got=got,
        expected=f"{stated} (architecture {facts.architecture})",
        remedy="use the model's original safetensors: a hub id, or a folder",
    )
