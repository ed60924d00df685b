"""Runs a sweep: stored cells are kept, missing ones are run and stored as soon as they finish."""

from __future__ import annotations

import json
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ebbench.analysis.environment import API_SERVER
from ebbench.analysis.explain import FIGURES as KV_FIGURES
from ebbench.errors import EbbenchError, InterruptedRunError, RunError, UnknownNameError, UsageError
from ebbench.network.credentials import HIDDEN, LONG, api_key, redacted, written_forms
from ebbench.records import files
from ebbench.records.files import sole_use
from ebbench.records.run import unused
from ebbench.records.warnings import counted, shown_text, told_columns
from ebbench.render.live import Work
from ebbench.runs.execute import Made, make
from ebbench.runs.file import plain, plain_type
from ebbench.runs.key import result_key
from ebbench.runs.pool import InProcess, Outcome, Pool, Processes, RayCluster
from ebbench.runs.store import Job, Measured, RunStore, run_cells
from ebbench.spec.run import RunSpec, known_settings, settings_of
from ebbench.spec.server import AUTO, OFF, is_server
from ebbench.sweep.spec import Sweep

EXECUTORS = ("process", "ray")

# Results of a sweep on disk; a sweep can be killed at any moment.
#
#     DIR/sweep.toml               the spec as it was last run
#     DIR/cells/<name>-<key>/      a finished cell (see runs.store): cell.json, and with keep_runs the run itself
#     DIR/failed/<key>.json        a failed one; tried again by the next sweep
#     DIR/results.parquet          all finished cells of the spec, one row each

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
    + [pa.field(declared.name, _TYPES[plain_type(declared.kind)]) for declared in known_settings().values()]
    + [pa.field(name, pa.float64()) for name in FIGURES]
    + [pa.field("valid", pa.bool_()), pa.field("reasons", pa.string()), pa.field("warnings", pa.string())]
    + [pa.field(name, pa.list_(pa.string())) for name in told_columns({"reasons": (), "warnings": ()})]
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
        secrets = filter(None, [*header_values([cell]), api_key()])
        content = {
            "key": result_key(cell), "settings": _stored_settings(cell),
            "error": redacted(str(error), written_forms(secrets)), "seconds": seconds,
        }  # fmt: skip
        files.write_bytes(msgspec.json.encode(content), self._failed / f"{result_key(cell)}.json")

    def succeeded(self, cell: RunSpec) -> None:
        """Remove the stored error of an earlier attempt."""
        with suppress(OSError):
            (self._failed / f"{result_key(cell)}.json").unlink(missing_ok=True)

    def load(self, cells: Sequence[RunSpec]) -> list[Finished]:
        """Finished cells among ``cells``, in their order. Raises DataError naming a damaged file."""
        return [Finished(cell, measured) for cell in cells if (measured := self.runs.get(cell)) is not None]

    def write_results(self, entries: Sequence[Finished]) -> Path:
        """Write all results as one table."""
        path = self.directory / RESULTS
        files.write_table(pa.Table.from_pylist([results_row(entry) for entry in entries], schema=SCHEMA), path)
        return path


def _without(spec: bytes, values: Iterable[str]) -> bytes:
    """The spec without these strings, however short: quoted as TOML quotes them, and anywhere if they are long."""
    given = [value for value in values if value]
    text = spec.decode("utf-8")
    for value in given:
        for quoted in (json.dumps(value, ensure_ascii=False), json.dumps(value), f"'{value}'"):
            text = text.replace(quoted, f'"{HIDDEN}"')
    text = redacted(text, written_forms(value for value in given if len(value) >= LONG))
    try:
        left = any(value in _strings(tomllib.loads(text)) for value in given)
    except tomllib.TOMLDecodeError:
        left = True
    return b"# Not stored: its headers are written in a form that could not be hidden.\n" if left else text.encode()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def header_values(cells: Iterable[RunSpec]) -> set[str]:
    """The values of the headers of all cells."""
    return {value for cell in cells for value in dict(settings_of(cell)["headers"]).values()}


def _stored_settings(cell: RunSpec) -> dict[str, Any]:
    """The stored settings: only the names of headers, whose values may be secret; None for what a server decides."""
    settings = settings_of(cell)
    own = [name for name, declared in known_settings().items() if declared.part == "server" and name != "warmup"]
    decided = dict.fromkeys(own) if is_server(cell.engine) else {}
    return settings | decided | {"headers": dict.fromkeys(settings["headers"], "")}


def results_row(entry: Finished) -> dict[str, Any]:
    """A finished cell as a row of SCHEMA; where a setting is ``auto`` for a simulation, what was simulated."""
    figures: Mapping[str, Any] = entry.measured.figures
    caveats = [caveat.to_dict(str(caveat)) for caveat in entry.measured.caveats]
    told = {"reasons": figures.get("reasons") or (), "warnings": caveats}
    settings = _stored_settings(entry.cell)
    simulated = {API_SERVER: figures.get(API_SERVER) or OFF} if settings[API_SERVER] == AUTO else {}
    return (
        {"key": result_key(entry.cell), "seconds": entry.measured.seconds, "worker": entry.measured.worker}
        | {name: plain(value) for name, value in (settings | simulated).items()}
        | {name: None if (value := figures.get(name)) is None else float(value) for name in FIGURES}
        | {name: figures.get(name) for name in ("valid", "plan_hash", "git_commit")}
        | {name: "; ".join(map(shown_text, caveat)) for name, caveat in told.items()}
        | told_columns(told)
    )


@dataclass(frozen=True)
class Failed:
    """A cell that could not be run, with the error."""

    cell: RunSpec
    error: EbbenchError


@dataclass(frozen=True)
class Result:
    """State of a sweep: finished cells in grid order, failed ones, and what this call did.

    ``kept``: cells stored before; ``done``: cells of this call, in ``elapsed_s``, also failed ones.
    ``kept_since_unix_s``: when the oldest cell from before was stored; None without such cells.
    """

    sweep: Sweep
    finished: tuple[Finished, ...]
    failed: tuple[Failed, ...]
    kept: int
    done: int
    elapsed_s: float
    interrupted: bool
    results: Path
    kept_since_unix_s: float | None = None

    @property
    def cells_per_s(self) -> float:
        """Cells per second of this call."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def invalid(self) -> tuple[Finished, ...]:
        """Finished cells whose runs are INVALID."""
        return tuple(entry for entry in self.finished if not entry.measured.valid)


def run_sweep(
    sweep: Sweep, store: SweepStore, pool: Pool, *, spec: bytes, work: Work | None = None, job: Job = make
) -> Result:
    """Run the missing cells; ``work`` is told how far it is. Ctrl-C ends it early with ``interrupted``; finished cells
    are kept.

    Cells on external servers run one at a time, after the others. Raises RunError if results cannot be stored,
    DataError if stored ones are damaged, UsageError if another sweep uses the directory.
    """
    work = work or Work("sweep")
    with sole_use(store.directory):
        store.open(spec, header_values(sweep.cells))
        todo = missing(sweep, store)
        kept_since = store.runs.stored_since(set(sweep.cells).difference(todo))
        work.total, work.kept = len(sweep.cells), len(sweep.cells) - len(todo)
        work.done, began_s = work.kept, time.monotonic()
        failed: list[Failed] = []

        def stored(cell: RunSpec, result: Measured | EbbenchError, outcome: Outcome[Made]) -> None:
            if isinstance(result, EbbenchError):
                store.failed(cell, result, outcome.seconds)
                failed.append(Failed(cell, result))
                work.doing = f"{len(failed)} failed"
            else:
                store.succeeded(cell)
            work.done += 1

        interrupted = False
        try:
            for on_server, chosen in ((False, pool), (True, InProcess())):
                if cells := [cell for cell in todo if is_server(cell.engine) is on_server]:
                    run_cells(cells, store.runs, chosen, whole=sweep.keep_runs, stored=stored, job=job)
        except KeyboardInterrupt:
            interrupted = True
        finished, elapsed_s = tuple(store.load(sweep.cells)), time.monotonic() - began_s
        results = store.write_results(finished)
    return Result(
        sweep, finished, tuple(failed), work.kept, work.done - work.kept, elapsed_s, interrupted, results, kept_since
    )


def missing(sweep: Sweep, store: SweepStore) -> list[RunSpec]:
    """Cells without a stored result, in the order of the grid."""
    absent = set(store.runs.missing(sweep.cells, whole=sweep.keep_runs))
    return [cell for cell in sweep.cells if cell in absent]


def summary_lines(errors: Iterable[str], limit: int = 5) -> list[str]:
    """Errors of failed cells with their numbers, the most frequent first."""
    lines = [f"{counted(count, 'cell')}: {error}" for error, count in Counter(errors).most_common()]
    return lines[:limit] + ([f"and {len(lines) - limit} other errors"] if len(lines) > limit else [])


def named(cells: Sequence[Finished], axes: Sequence[str]) -> list[tuple[str, str]]:
    """Names of finished cells, each with the reasons why it is INVALID."""
    problems = []
    for entry in cells:
        settings = settings_of(entry.cell)
        where = ", ".join(f"{name}={plain(settings[name])}" for name in axes) or "the only cell"
        problems.append((where, "; ".join(map(shown_text, entry.measured.figures.get("reasons") or ()))))
    return problems


def sweep_pool(grid: Sweep, workers: int | None, executor: str, ray_address: str | None, gpus: float | None) -> Pool:
    """The chosen pool. The vllm engine gets a GPU per cell on a cluster, and one cell at a time on this machine.

    ``gpus``: per cell on a cluster. Raises UnknownNameError, UsageError.
    """
    real = any(cell.engine in ("vllm", "auto") for cell in grid.cells)
    if executor == "ray":
        return RayCluster(ray_address, gpus=(1.0 if real else 0.0) if gpus is None else gpus, workers=workers)
    if executor != "process":
        raise UnknownNameError("executor", executor, EXECUTORS)
    if ray_address is not None or gpus is not None:
        raise UsageError("--ray-address and --gpus-per-cell need --executor ray")
    return Processes(workers if workers is not None or not real else 1)


def require_finished(grid: Sweep, store: SweepStore, result: Result) -> None:
    """Raise InterruptedRunError or RunError unless every cell is finished and valid."""
    if result.interrupted:
        raise InterruptedRunError(f"interrupted; {len(result.finished)} of {len(grid.cells)} cells are finished")
    if result.failed:
        raise RunError(
            f"{len(result.failed)} of {len(grid.cells)} cells failed; their errors are in {store.directory}/failed"
        )
    if result.invalid:
        raise RunError(f"{len(result.invalid)} of {len(grid.cells)} cells are INVALID; they are named above")
