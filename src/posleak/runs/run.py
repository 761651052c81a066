"""A run: what remains of a measurement, self-describing, in memory or on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr

from posleak.errors import RunError
from posleak.leakage import Summary, component, components, summarise, tidy
from posleak.leakage.summary import Numbers
from posleak.plain import plain

from .folder import HEADS, RECORD, RESULTS, read_record, sha256_of, verify_file, write_atomically
from .notebook import compact_html


@dataclass(frozen=True)
class Run:
    """`record` is run.json, `data` the labelled per-prompt arrays, `path` the folder (None: only in memory)."""

    record: dict[str, Any]
    data: xr.Dataset
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a finished run, checking every file against the sha256 in run.json."""
        folder = Path(path)
        record = read_record(folder)
        if record["status"] != "finished":
            raise RunError(
                "the run is not finished", where=str(folder), got=f"status {record['status']}",
                remedy="start the same `posleak measure` again: it resumes",
            )  # fmt: skip
        for name in (RESULTS, HEADS):
            verify_file(folder, name, record["files"].get(name, f"missing from {RECORD}"))
        with xr.open_dataset(folder / RESULTS, engine="h5netcdf") as data:
            return cls(record, data.load(), folder)

    @cached_property
    def summary(self) -> Summary:
        """All numbers with intervals."""
        return summarise(self.data, seed=self.record["spec"]["seed"])

    def parts(self) -> xr.DataArray:
        """Mean over prompts of every component: (component, layer, head, query, offset), in nats."""
        names = components(self.data)
        arrays = [component(self.data, name).mean("prompt") for name in names]
        return xr.concat(arrays, dim=xr.IndexVariable("component", list(names))).rename("leakage")

    def _repr_html_(self) -> str:
        """In a notebook: shares with intervals, compactly."""
        return compact_html(self)

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak measure --json` (docs/json.md)."""
        spec, summary = self.record["spec"], self.summary
        return {
            "model": self.record["identity"]["name"],
            "identity": self.record["identity"],
            "inputs": self.record["inputs"],
            "length": spec["length"],
            "prompts": spec["prompts"],
            "seed": spec["seed"],
            "edits": spec["edits"],
            "remainder": self.data.attrs["remainder"],
            "calibration": self.record["calibration"],
            "layers": [_layer(summary, layer) for layer in range(self.data.sizes["layer"])],
            "early": _numbers(summary.model["early"]),
            "all": _numbers(summary.model["all"]),
            "units": {"power": "nats²", "share": "1", "remainder": "nats", "sink_attention": "1"},
            "warnings": self.record["warnings"],
            "run": None if self.path is None else str(self.path),
        }

    def write_results(self, folder: Path) -> dict[str, str]:
        """Write results.nc and heads.parquet; their sha256 by name."""
        table = pa.Table.from_pylist(list(tidy(self.summary)))
        encoding = {name: {"zlib": True, "complevel": 4} for name in self.data.data_vars}
        netcdf = self.data.to_netcdf(engine="h5netcdf", encoding=encoding)
        write_atomically(folder / RESULTS, lambda path: path.write_bytes(netcdf))
        write_atomically(folder / HEADS, lambda path: pq.write_table(table, path, compression="zstd"))
        return {name: sha256_of(folder / name) for name in (RESULTS, HEADS)}


def _layer(summary: Summary, layer: int) -> dict[str, Any]:
    powers = {name: power[layer] for name, power in summary.layers["all"].power.items()}
    cells = {**powers, "sink_attention": summary.layer_sink_attention[layer]}
    values = {name: plain(cell.value) for name, cell in cells.items()}
    return {"layer": layer, **values, "ci": {name: plain([cell.low, cell.high]) for name, cell in cells.items()}}


def _numbers(numbers: Numbers) -> dict[str, Any]:
    return plain({"power": numbers.power, "share": numbers.share, "stabilisation": numbers.stabilisation})


def split(run: Run) -> xr.DataArray:
    """Labelled components of a run, mean over prompts: (component, layer, head, query, offset), in nats."""
    return run.parts()
