"""Record the results of a checkout on a reference set, and compare two recordings to the bit.

    python -m tools.reference models MODELS                  save the tiny models; once, for both checkouts
    python tools/reference.py make OUT --models MODELS       record; resumable; writes OUT/<case>.json and .npz
    python tools/reference.py compare OLD NEW                exit status 1 if a number differs or is missing

`make` records the posleak that is importable: set PYTHONPATH to the `src` folder of the checkout. It uses only the
command line and the files that commands write, so that modules of posleak may move. With `--real` it also measures
smollm2-135m, from the cache. MODELS has one folder per family of tests/support/families.py, and `<family>-text` with a
tokenizer for the families of `EDITED`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[Any]
Leaves = dict[str, Any]
"""Numbers, lists of numbers, arrays and texts by path."""

# A case is a list of commands without `posleak`, separated by semicolons. They run in a folder in which `models` is
# MODELS, with `--json`.

SIZE = "--length 64 --prompts 6 --out run"
FAMILY = {
    "measure-{}": f"measure models/{{}} {SIZE}",
    "trace-{}": f"trace models/{{}} {SIZE}",
    "origin-{}": "origin models/{} --length 64 --prompts 4 --tokens 64",
    "doctor-{}": "doctor models/{}",
}
"""Cases of every family."""

VOCABULARY = 304
"""Vocabulary of the models with a tokenizer, which has one token per byte."""

EDITED = ("llama", "gemma2", "gpt_neox", "mistral")
VARIANTS = {
    "measure-metrics-{}": f"measure models/{{}} {SIZE} --metrics all --loss",
    "measure-options-{}": "measure models/{} --length 80 --prompts 5 --batch 2 --seed 3 --origin 1 --density 2 "
    "--bos none --out run",
    "measure-bfloat16-{}": f"measure models/{{}} {SIZE} --dtype bfloat16",
    "measure-constant-{}": f"measure models/{{}} {SIZE} --inputs constant --loss",
    "measure-constant5-{}": f"measure models/{{}} {SIZE} --inputs constant:5 --metrics all",
    "measure-backcopy-{}": f"measure models/{{}} {SIZE} --inputs backcopy --metrics all --loss",
    "measure-text-{}": f"measure models/{{}}-text {SIZE} --inputs text:text.txt --metrics all --loss",
    "measure-stdlib-{}": f"measure models/{{}}-text {SIZE} --inputs text:stdlib --bos 7",
    "trace-metrics-{}": f"trace models/{{}} {SIZE} --by-layer --metrics all",
    "trace-text-{}": f"trace models/{{}}-text {SIZE} --inputs text:text.txt",
    "claims-{}": "claims models/{} --paper all --length 64 --prompts 16 --out run",
}
"""Cases of the families of `EDITED`, which also get one case per edit."""

EDITS = shlex.split(
    "dtype=bfloat16 dtype=float16 dtype=float64 context=borrowed context=borrowed@0-1 bos=zero bos=mean bos=noise "
    "bos=noise:3 bos=token:7 bos=none bos=random patch0=42 shift=0 shift=512 rope=ntk:4 rope=linear:2 rope=yarn:4 "
    "rope=base:500000 rope=none scale=logn scale=logn:32 window=8 window=8+sink window=8+sink4 window=off sink=cut "
    "sink=freeze sink=cut@1 sink=freeze@0-1,2.1 'bos=mean;rope=ntk:2;window=8;sink=cut@2.0' ring mask=off"
)
"""`measure` rejects the last two, and `window=off` in models without windows: then the exit status is compared."""

OTHERS = {
    "claims-text": "claims models/llama-text --inputs text:text.txt --length 64 --prompts 16 --out run",
    "claims-gpt_oss": "claims models/gpt_oss --paper all --length 64 --prompts 16 --out run",
    "advise-llama": f"advise models/llama-text {SIZE}",
    "advise-gemma2": f"advise models/gemma2-text {SIZE} --inputs text:text.txt --edit sink=cut,window=8",
    "sweep-collect": "sweep grid.yaml --out runs; collect runs",
    "sweep-architectures": "sweep architectures --model models/llama --model models/gemma2 --model models/gpt_neox "
    "--length 64 --prompts 4 --out runs",
    "sweep-knobs": "sweep knobs --model models/llama --model models/gemma2 --length 96 --prompts 4 --out runs",
    "sweep-first-token": "sweep first-token --model models/llama-text --model models/gemma2-text --length 64 "
    "--prompts 4 --out runs",
    "sweep-dtypes": "sweep dtypes --model models/mistral --length 64 --prompts 4 --out runs",
    "compare-report": f"measure models/llama {SIZE}/1 --metrics all --loss; "
    f"measure models/llama {SIZE}/2 --edit bos=zero; trace models/gemma2 {SIZE}/3; "
    "compare run/1 run/2 run/3; report run/1 run/2 run/3 --out page.html --assets assets",
    "report-claims": "claims models/llama --length 64 --prompts 16 --out run; "
    "report run --out page.html --assets tables",
}
REAL = {
    "real-measure": "measure smollm2-135m --out run",
    "real-trace": "trace smollm2-135m --out run",
    "real-claims": "claims smollm2-135m --length 128 --prompts 16 --out run",
}
"""Claims at the default length take more than five minutes; a verdict needs 16 prompts."""

INPUTS = {
    "text.txt": " ".join(f"the position of word {n * n % 97} in line {n}.\n"[: 12 + n % 31] for n in range(3000)),
    "grid.yaml": """
length: 48
prompts: 4
resources: {cpus: 1}
grids:
  - {models: [models/llama, models/gemma2], edits: [none, window=8], metrics: all, loss: true}
  - {models: [models/mistral], kind: trace}
""",
}
"""Files in the folder of every case."""

IGNORED = {"seconds", "bytes", "guess", "memory", "machine", "versions", "threads", "attempts", "format_version"}
"""JSON keys that are ignored, with everything below them. Strings are ignored, too: paths, dates, hashes, messages."""

TEXTS = {"id", "verdict", "unit", "units"}
"""Keys of the strings that are compared. A difference is printed but does not change the exit status."""

HASH = re.compile(r"(?<=-)[0-9a-f]{10,64}$")
DATA = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)


def cases(models: Path, real: bool) -> dict[str, list[str]]:
    """Return the commands of every case, by name."""
    families = sorted(path.name for path in models.iterdir() if path.is_dir() and not path.name.endswith("-text"))
    lines = {name.format(family): line.format(family) for family in families for name, line in FAMILY.items()}
    for family in EDITED:
        lines |= {name.format(family): line.format(family) for name, line in VARIANTS.items()}
        for edit in EDITS:
            name = f"edit-{family}-{edit.replace(':', '-').replace(';', '+')}"
            lines[name] = f"measure models/{family} {SIZE} --edit {edit.replace(';', ' --edit ')}"
    lines |= OTHERS | (REAL if real else {})
    return {name: [f"{step.strip()} --json" for step in line.split(";")] for name, line in lines.items()}


def save_models(root: Path) -> int:
    """Save a tiny model of every family, and some with a tokenizer."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.families import FAMILIES, tiny
    from support.inputs_subject import byte_tokenizer

    torch.set_num_threads(1)
    for family in FAMILIES:
        tiny(family).save_pretrained(root / family)
    for family in EDITED:
        tiny(family, vocab_size=VOCABULARY).save_pretrained(root / f"{family}-text")
        byte_tokenizer().save_pretrained(root / f"{family}-text")
    return 0


def make(out: Path, models: Path, only: str, real: bool) -> int:
    """Run the cases that are missing in `out` and write the results of each."""
    import torch

    import posleak

    torch.set_num_threads(1)
    print(f"posleak in {posleak.__file__}", flush=True)
    out, models = out.resolve(), models.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name, steps in cases(models, real).items():
        target = out / f"{name}.json"
        if not fnmatch(name, only) or target.exists():
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("models").symlink_to(models)
            for file, text in INPUTS.items():
                Path(file).write_text(text, encoding="utf-8")
            leaves, errors = _record(steps)
        arrays = {key: leaves.pop(key) for key in list(leaves) if isinstance(leaves[key], np.ndarray)}
        np.savez_compressed(target.with_suffix(".npz"), allow_pickle=False, **arrays)
        text = json.dumps({"steps": steps, "errors": errors, "leaves": leaves}, indent=0, ensure_ascii=False)
        target.write_text(text, encoding="utf-8")
        statuses = [leaves[f"{place}/exit"] for place in range(len(steps))]
        print(f"{name}: exit {statuses}, {time.perf_counter() - start:.1f} s", flush=True)
    return 0


def _record(steps: list[str]) -> tuple[Leaves, list[str]]:
    """Run the commands in the current folder; return the leaves of outputs and files, and standard error."""
    leaves: Leaves = {}
    printed, errors = "", []
    for place, step in enumerate(steps):
        leaves[f"{place}/exit"], output, error = _run(shlex.split(step))
        printed += output
        errors.append(error[-2000:])
        with contextlib.suppress(json.JSONDecodeError):  # its results are then missing
            _add(leaves, f"{place}/stdout", json.loads(output))
    for path, name in _files(printed):
        _read(leaves, f"files/{name}", path)
    return leaves, errors


def _run(argv: list[str]) -> tuple[int, str, str]:
    """Run one command in this process; return its exit status, output and errors."""
    from posleak.__main__ import main as posleak_main

    output, error, before, status = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["posleak", *argv]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            posleak_main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return status, output.getvalue(), error.getvalue()


def _files(printed: str) -> Iterator[tuple[Path, str]]:
    """Yield each file with a name in which digests are replaced by numbers, in the order in which they were printed."""
    paths = [path for path in Path().rglob("*") if path.is_file() and path.parts[0] not in ("models", *INPUTS)]
    hashed = {part for path in paths for part in path.parts if HASH.search(part)}
    order = sorted(hashed, key=lambda part: (part not in printed, printed.find(part), part))
    stable = {part: HASH.sub(str(place), part) for place, part in enumerate(order)}
    for path in sorted(paths):
        if not (path.suffix == ".parquet" and path.with_suffix(".csv").exists()):
            yield path, "/".join(stable.get(part, part) for part in path.parts)


def _read(leaves: Leaves, at: str, path: Path) -> None:
    """Add the leaves of one file."""
    if path.suffix == ".json":
        _add(leaves, at, json.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".html":
        _add(leaves, at, [json.loads(data) for data in DATA.findall(path.read_text(encoding="utf-8"))])
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            leaves |= {f"{at}/{name}": arrays[name] for name in arrays.files}
    elif path.suffix == ".nc":
        with h5py.File(path) as file:
            _variable(leaves, at, file)
            file.visititems(lambda name, item: _variable(leaves, f"{at}/{name}", item))
    elif path.suffix in (".csv", ".parquet"):
        csv = path.suffix == ".csv"
        table = pd.read_csv(path, dtype=str, keep_default_na=False) if csv else pd.read_parquet(path)
        for name in table:
            column = table[name].to_numpy()
            with contextlib.suppress(ValueError):
                column = np.array([float(cell or "nan") for cell in column]) if csv and name not in TEXTS else column
            if name in TEXTS:
                leaves[f"{at}/{name}"] = " | ".join(sorted(set(map(str, column))))
            elif column.dtype.kind in "biuf":
                leaves[f"{at}/{name}"] = column


def _variable(leaves: Leaves, at: str, item: Any) -> None:
    """Add a variable of a netCDF file, or the file itself: values, numeric attributes, units."""
    if b"not a netCDF variable" in item.attrs.get("NAME", b""):
        return
    if isinstance(item, h5py.Dataset) and item.dtype.kind in "biuf":
        leaves[at] = np.asarray(item[()])
    for key, value in item.attrs.items():
        if key in TEXTS:
            leaves[f"{at}@{key}"] = str(value)
        elif not key.startswith("_") and np.asarray(value).dtype.kind in "biuf":
            leaves[f"{at}@{key}"] = np.asarray(value)


def _add(leaves: Leaves, at: str, value: Any) -> None:
    """Add the leaves of a JSON document; a list of numbers is one leaf."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in IGNORED:
                _add(leaves, f"{at}/{key}", item)
    elif isinstance(value, list) and not (value and all(isinstance(item, int | float) for item in value)):
        for place, item in enumerate(value):
            _add(leaves, f"{at}/{place}", item)
    elif isinstance(value, int | float | list) or (
        isinstance(value, str) and at.rpartition("/")[2] in TEXTS and not HASH.search(f"-{value}")
    ):
        leaves[at] = value


def compare(old: Path, new: Path, only: str, renames: list[str]) -> int:
    """Print what differs between two recordings; return 1 if a number differs or is missing."""
    names = sorted({path.stem for folder in (old, new) for path in folder.glob("*.json") if fnmatch(path.stem, only)})
    compared = leaves = failures = 0
    for name in names:
        one, two = _load(old, name, renames), _load(new, name, [])
        if not one or not two:
            print(f"{name}: MISSING in {new if one else old}")
            failures += 1
            continue
        lines, notes, count = [], [], 0
        for key in sorted(one.keys() | two.keys()):
            before, after = one.get(key), two.get(key)
            if isinstance(before, str) or isinstance(after, str):
                notes += [f"  text differs: {key}: {before!r} -> {after!r}\n"] if before != after else []
            elif before is None or after is None:
                lines.append(f"  only in {new if before is None else old}: {key}\n")
            else:
                count, leaves = count + before.size, leaves + 1
                lines += [f"  {key}: {difference}\n"] if (difference := _difference(before, after)) else []
        print(f"{name}: {count} numbers, {f'{len(lines)} LEAVES DIFFER' if lines else 'same'}")
        print("".join(lines + notes), end="")
        compared, failures = compared + count, failures + bool(lines)
    print(f"{len(names)} cases, {leaves} leaves, {compared} numbers compared, {failures} cases differ or are missing")
    return int(failures > 0 or not compared)


def _load(folder: Path, name: str, renames: list[str]) -> Leaves:
    """Read a case, with paths renamed; return {} if there is none."""
    if not (folder / f"{name}.json").exists():
        return {}
    leaves = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["leaves"]
    arrays = {key: value if isinstance(value, str) else np.asarray(value, float) for key, value in leaves.items()}
    with np.load(folder / f"{name}.npz") as stored:
        arrays |= {key: stored[key] for key in stored.files}
    for pattern, _, text in (rename.rpartition("=") for rename in renames):
        arrays = {re.sub(pattern, text, key): value for key, value in arrays.items()}
    return arrays


def _difference(old: Array, new: Array) -> str:
    """Describe how two arrays differ, to the bit except for NaN; empty if they do not."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype}{list(old.shape)} -> {new.dtype}{list(new.shape)}"
    differs = (old != new) & ~((old != old) & (new != new))
    if old.dtype.kind == "f":
        differs |= (np.signbit(old) != np.signbit(new)) & (old == old)
    if not differs.any():
        return ""
    before, after = old[differs], new[differs]
    gap = np.abs(after.astype(float) - before.astype(float))
    worst = int(np.argmax(np.nan_to_num(gap, nan=np.inf)))
    return f"{differs.sum()} of {old.size}, at worst {before[worst]} -> {after[worst]}, max |diff| {gap[worst]:.3g}"


def main() -> int:
    """Parse the command line and run the subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    saving, making, comparing = (commands.add_parser(name) for name in ("models", "make", "compare"))
    saving.add_argument("models", type=Path, help="folder for the tiny models")
    making.add_argument("out", type=Path)
    making.add_argument("--models", type=Path, required=True, help="folder of the tiny models")
    making.add_argument("--real", action="store_true", help="also smollm2-135m, from the cache")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--rename", action="append", default=[], metavar="REGEX=TEXT", help="rename paths of OLD")
    for each in (making, comparing):
        each.add_argument("--only", default="*", metavar="GLOB", help="only cases whose names match")
    options = parser.parse_args()
    if options.command == "models":
        return save_models(options.models)
    if options.command == "make":
        return make(options.out, options.models, options.only, options.real)
    return compare(options.old, options.new, options.only, options.rename)


if __name__ == "__main__":
    sys.exit(main())
