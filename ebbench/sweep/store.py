"""Results of a sweep on disk: one file a finished cell, named by its key, so a sweep can be killed at any moment.

::

    DIR/sweep.toml            the spec as it was last run
    DIR/cells/<key>.json      a finished cell; never rewritten, never run again
    DIR/failed/<key>.json     a failed one; tried again by the next sweep
    DIR/runs/<key>/           its run directory, with keep_runs
    DIR/results.parquet       all finished cells of the spec, one row each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ebbench.errors import DataError, RunError
from ebbench.records import files
from ebbench.sweep.settings import Settings
from ebbench.sweep.spec import Cell
from ebbench.sweep.work import Outcome

RESULTS = "results.parquet"
TEXTS = frozenset({"quantization", "kv_cache_dtype",
                   "workload", "policy", "engine", "device", "model", "scenario", "source", "length_distribution",
                   "tokenizer", "time_unit", "cost", "goodput"})  # fmt: skip
FLAGS = frozenset({"drop_too_long", "enable_prefix_caching", "async_scheduling", "enforce_eager"})
REALS = frozenset({"request_rate", "burstiness", "speed", "duration_s", "gpu_memory_utilization"})
FIGURES = (
    "request_throughput", "output_throughput", "total_token_throughput", "request_goodput", "slo_attainment",
    "duration", "completed", "planned", "preemptions", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "p99_tpot_ms", "median_itl_ms", "p99_itl_ms", "median_e2el_ms", "p99_e2el_ms",
)  # fmt: skip


def _setting_type(name: str) -> pa.DataType:
    return (
        pa.string() if name in TEXTS else pa.bool_() if name in FLAGS else pa.float64() if name in REALS else pa.int64()
    )


SCHEMA = pa.schema(
    [pa.field("key", pa.string(), nullable=False)]
    + [pa.field(name, _setting_type(name)) for name in Settings.__struct_fields__]
    + [pa.field(name, pa.float64()) for name in FIGURES]
    + [pa.field("valid", pa.bool_()), pa.field("plan_hash", pa.string()), pa.field("git_commit", pa.string())]
    + [pa.field("seconds", pa.float64()), pa.field("worker", pa.string())]
)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A cell as it is stored. ``summary`` None and ``error`` not empty: it failed."""

    key: str
    settings: Settings
    summary: dict[str, Any] | None = None
    error: str = ""
    seconds: float = 0.0
    worker: str = ""


class Store:
    """One sweep's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._cells, self._failed = directory / "cells", directory / "failed"

    def open(self, spec: bytes) -> None:
        """Make the directory. Raises RunError when that cannot be."""
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
            self._failed.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {error.filename or self.directory}: {error.strerror or error}") from error
        files.write_bytes(spec, self.directory / "sweep.toml")

    def finished_keys(self) -> set[str]:
        """Keys of the cells that are there."""
        return {path.stem for path in self._cells.glob("*.json")}

    def run_dir(self, key: str) -> Path:
        """Where the run of a cell is kept."""
        return self.directory / "runs" / key

    def record(self, cell: Cell, outcome: Outcome) -> Finished:
        """Store what became of a cell, at once and for good. Raises RunError when the disk is full."""
        entry = Finished(
            key=cell.key,
            settings=cell.settings,
            summary=dict(outcome.summary) if outcome.summary is not None else None,
            error=outcome.error,
            seconds=outcome.seconds,
            worker=outcome.worker,
        )
        folder = self._failed if outcome.summary is None else self._cells
        files.write_bytes(msgspec.json.encode(entry), folder / f"{cell.key}.json")
        if outcome.summary is not None:
            with suppress(OSError):
                (self._failed / f"{cell.key}.json").unlink(missing_ok=True)
        return entry

    def load(self, cells: Sequence[Cell]) -> dict[str, Finished]:
        """Finished cells among ``cells``, by key. Raises DataError naming a damaged file."""
        found = {}
        for cell in cells:
            path = self._cells / f"{cell.key}.json"
            try:
                found[cell.key] = msgspec.json.decode(path.read_bytes(), type=Finished)
            except FileNotFoundError:
                continue
            except (OSError, msgspec.MsgspecError) as error:
                raise DataError(f"{path}: not a stored cell ({error}); remove it to run the cell again") from None
        return found

    def write_results(self, entries: Sequence[Finished]) -> Path:
        """Write all of them as one table."""
        path = self.directory / RESULTS
        files.write_table(pa.Table.from_pylist([row_of(entry) for entry in entries], schema=SCHEMA), path)
        return path


def row_of(entry: Finished) -> dict[str, Any]:
    """A finished cell as a row of SCHEMA."""
    summary: Mapping[str, Any] = entry.summary or {}
    return (
        {"key": entry.key, "seconds": entry.seconds, "worker": entry.worker}
        | {name: getattr(entry.settings, name) for name in Settings.__struct_fields__}
        | {name: _real(summary.get(name)) for name in FIGURES}
        | {name: summary.get(name) for name in ("valid", "plan_hash", "git_commit")}
    )


def _real(value: Any) -> float | None:
    return None if value is None else float(value)
