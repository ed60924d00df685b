"""Results of a sweep on disk; a sweep can be killed at any moment.

::

    DIR/sweep.toml               the spec as it was last run
    DIR/cells/<name>-<key>/      a finished cell (see runs.store): cell.json, and with keep_runs the run itself
    DIR/failed/<key>.json        a failed one; tried again by the next sweep
    DIR/results.parquet          all finished cells of the spec, one row each
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ebbench.analysis.kv_pressure import FIGURES as KV_FIGURES
from ebbench.errors import EbbenchError, RunError
from ebbench.network.credentials import HIDDEN, LONG, api_key, forms_of, redacted
from ebbench.records import files
from ebbench.records.run import unused
from ebbench.runs.key import key_of
from ebbench.runs.settings import plain, plain_type
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec, known_settings, settings_of
from ebbench.spec.server import is_server

RESULTS, SPEC = "results.parquet", "sweep.toml"
FIGURES = (
    "request_throughput", "output_throughput", "total_token_throughput", "request_goodput", "slo_attainment",
    "duration", "completed", "planned", "preemptions", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "p99_tpot_ms", "median_itl_ms", "p99_itl_ms", "median_e2el_ms", "p99_e2el_ms",
    *KV_FIGURES,
)  # fmt: skip
_TYPES = {str: pa.string(), bool: pa.bool_(), float: pa.float64(), int: pa.int64()}

SCHEMA = pa.schema(
    [pa.field("key", pa.string(), nullable=False)]
    + [pa.field(one.name, _TYPES[plain_type(one.kind)]) for one in known_settings().values()]
    + [pa.field(name, pa.float64()) for name in FIGURES]
    + [pa.field("valid", pa.bool_()), pa.field("reasons", pa.string()), pa.field("warnings", pa.string())]
    + [pa.field("plan_hash", pa.string()), pa.field("git_commit", pa.string())]
    + [pa.field("seconds", pa.float64()), pa.field("worker", pa.string())]
)


@dataclass(frozen=True)
class Finished:
    """A cell of a sweep with its result."""

    cell: RunSpec
    measured: Measured


class SweepStore:
    """The directory of one sweep."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs = RunStore(directory / "cells")
        self._failed = directory / "failed"

    def open(self, spec: bytes, headers: Iterable[str] = ()) -> None:
        """Create the directory; the stored spec has no values of ``headers``. Raises RunError if that fails."""
        self.runs.open()
        try:
            self._failed.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {error.filename or self._failed}: {error.strerror or error}") from error
        files.write_bytes(_without(spec, headers), self.directory / SPEC)

    def set_aside(self) -> Path | None:
        """Move the results so far to a directory beside this one, named by their date.

        Returns it, None if there are none. Raises RunError if that fails.
        """
        stored = [path for path in (self.directory / RESULTS, self.directory / SPEC) if path.exists()]
        if not stored:
            return None
        last = datetime.fromtimestamp(max(path.stat().st_mtime for path in stored), UTC)
        directory = self.directory.resolve()
        kept = unused(directory.with_name(f"{directory.name}-{last:%Y%m%dT%H%M%SZ}"))
        try:
            kept.mkdir()
            for path in (self.runs.root, self._failed, directory / RESULTS, directory / SPEC):
                if path.exists():
                    path.rename(kept / path.name)
        except OSError as error:
            raise RunError(f"cannot move {self.directory} to {kept}: {error.strerror or error}") from error
        return kept

    def failed(self, cell: RunSpec, error: EbbenchError, seconds: float) -> None:
        """Store why a cell failed. Raises RunError if the disk is full."""
        content = {
            "key": key_of(cell),
            "settings": _shown(cell),
            "error": self._redacted(cell, error),
            "seconds": seconds,
        }
        files.write_bytes(msgspec.json.encode(content), self._failed / f"{key_of(cell)}.json")

    def _redacted(self, cell: RunSpec, error: EbbenchError) -> str:
        key = api_key()
        return redacted(str(error), forms_of([*header_values([cell]), *([key] if key else [])]))

    def succeeded(self, cell: RunSpec) -> None:
        """Remove the stored error of an earlier attempt."""
        with suppress(OSError):
            (self._failed / f"{key_of(cell)}.json").unlink(missing_ok=True)

    def load(self, cells: Sequence[RunSpec]) -> list[Finished]:
        """Finished cells among ``cells``, in their order. Raises DataError naming a damaged file."""
        return [Finished(cell, found) for cell in cells if (found := self.runs.get(cell)) is not None]

    def write_results(self, entries: Sequence[Finished]) -> Path:
        """Write all results as one table."""
        path = self.directory / RESULTS
        files.write_table(pa.Table.from_pylist([row_of(entry) for entry in entries], schema=SCHEMA), path)
        return path


def _without(spec: bytes, values: Iterable[str]) -> bytes:
    """The spec without these strings, however short: quoted as TOML quotes them, and anywhere if they are long."""
    given = [value for value in values if value]
    text = spec.decode("utf-8")
    for value in given:
        for quoted in (json.dumps(value, ensure_ascii=False), json.dumps(value), f"'{value}'"):
            text = text.replace(quoted, f'"{HIDDEN}"')
    text = redacted(text, forms_of(value for value in given if len(value) >= LONG))
    try:
        left = any(value in _strings(tomllib.loads(text)) for value in given)
    except tomllib.TOMLDecodeError:
        left = True
    return b"# Not stored: its headers are written in a form that could not be hidden.\n" if left else text.encode()


def _strings(value: Any) -> Iterator[str]:
    """All strings in a decoded TOML file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def header_values(cells: Iterable[RunSpec]) -> set[str]:
    """The values of the headers of all cells."""
    return {value for cell in cells for value in dict(settings_of(cell)["headers"]).values()}


def _shown(cell: RunSpec) -> dict[str, Any]:
    """The stored settings: only the names of headers, whose values may be secret; None for what a server decides."""
    found = settings_of(cell)
    own = [name for name, one in known_settings().items() if one.part == "server" and name != "warmup"]
    decided = dict.fromkeys(own) if is_server(cell.engine) else {}
    return found | decided | {"headers": dict.fromkeys(found["headers"], "")}


def row_of(entry: Finished) -> dict[str, Any]:
    """A finished cell as a row of SCHEMA."""
    figures: Mapping[str, Any] = entry.measured.figures
    return (
        {"key": key_of(entry.cell), "seconds": entry.measured.seconds, "worker": entry.measured.worker}
        | {name: plain(value) for name, value in _shown(entry.cell).items()}
        | {name: _real(figures.get(name)) for name in FIGURES}
        | {name: figures.get(name) for name in ("valid", "plan_hash", "git_commit")}
        | {"reasons": "; ".join(figures.get("reasons") or ()), "warnings": "; ".join(entry.measured.caveats)}
    )


def _real(value: Any) -> float | None:
    return None if value is None else float(value)
