"""Helpers for the tests of sweeps: folders of tiny models, manifests, and sweeps in a separate process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from posleak.sweeps.state import Tracker
from posleak.sweeps.storage import Storage
from posleak.sweeps.work import Worker
from support.families import tiny

SMALL: dict[str, Any] = {"length": 48, "prompts": 4, "resources": {"cpus": 1}}
SLOW: dict[str, Any] = {"length": 64, "prompts": 120, "batch": 1, "resources": {"cpus": 1}}
"""A cell with many batches, which takes some seconds."""


def tiny_models(root: Path, *names: str) -> list[str]:
    """Save tiny models with different weights and return their folders."""
    made = []
    for number, name in enumerate(names):
        model = tiny("llama", num_hidden_layers=2, scale=1.0 + number)
        model.save_pretrained(root / name)
        made.append(str(root / name))
    return made


def written(path: Path, **said: Any) -> Path:
    path.write_text(yaml.safe_dump(said), encoding="utf-8")
    return path


def started(manifest: Path, root: Path, *options: str) -> subprocess.Popen[str]:
    """Start `posleak sweep` in a separate process."""
    command = [sys.executable, "-m", "posleak", "sweep", str(manifest), "--out", str(root), "--json", *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        preexec_fn=_with_ctrl_c,
    )  # fmt: skip


def _with_ctrl_c() -> None:
    """Restore SIGINT, which processes in the background of a shell ignore, with all their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(process: subprocess.Popen[str], status: int = 0) -> dict[str, Any]:
    """Wait for the sweep and return the JSON that it printed."""
    output, errors = process.communicate(timeout=900)
    assert process.returncode == status, errors[-3000:] + output[-2000:]
    found: dict[str, Any] = json.loads(output)
    return found


def worker_at_work(root: Path, batches: int = 2, not_by: int | None = None) -> tuple[int, Path]:
    """Wait for a cell with at least this many batches; return its process and its folder.

    not_by      id of a dead process whose lock file may still exist
    """
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for lock in root.glob("cells/*/.lock"):
            try:
                found = re.match(r"process (\d+) on", lock.read_text())
            except OSError:
                continue
            written = len(list(lock.parent.glob("batches/*.npz")))
            if found is not None and int(found[1]) != not_by and written >= batches:
                return int(found[1]), lock.parent
        time.sleep(0.02)
    raise AssertionError("no cell was started")


def numbers(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files with results, by their path below the root."""
    found = {}
    for path in sorted(root.glob("cells/**/*")):
        if path.is_file() and path.suffix in (".nc", ".parquet", ".npz"):
            found[path.relative_to(root).as_posix()] = path.read_bytes()
    return found


def states(found: dict[str, Any]) -> list[str]:
    return [cell["state"] for cell in found["cells"]]


class Here:
    """An engine in this process, written as a plugin would be."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker(threads=1, **options)

    def run(self, storage: Storage, tracker: Tracker) -> None:
        for cell in tracker.open:
            tracker.started(cell)
            tracker.ended(self.worker.run(storage, cell, expected=cell.id))
