"""Rebuilds an interrupted run from its shards, its plan and its preliminary manifest.

A rebuilt run is marked as interrupted and INVALID. Every planned request without a record appears as cancelled with
error class ``not_recorded``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure, steady_windows
from ebbench.analysis.validity import invalid_reasons
from ebbench.errors import DataError
from ebbench.records import files
from ebbench.records.manifest import Manifest, decode_manifest
from ebbench.records.plan import with_plan_columns
from ebbench.records.run import MANIFEST, PARTIAL, SCHEMAS, TAIL, Run, RunWriter, require_directory
from ebbench.records.schema import PLAN, REQUESTS
from ebbench.records.warnings import warning

NOT_RECORDED = "not_recorded"


@dataclass(frozen=True)
class Rebuilt:
    """The run, the number of planned requests with a record, and the shards left out as damaged."""

    run: Run
    recorded: int
    planned: int
    damaged: tuple[Path, ...]


def cut_off_runs(paths: Sequence[Path]) -> list[Path]:
    """Interrupted runs among ``paths`` and in directories among them. Raises DataError for a missing path."""
    for path in paths:
        require_directory(path)
    return unfinished_runs(paths)


def unfinished_runs(paths: Sequence[Path]) -> list[Path]:
    """Runs that go on or were interrupted, among ``paths`` and in directories among them."""
    begun = [child.parent for path in paths for child in (*path.glob(PARTIAL), *sorted(path.glob(f"*/{PARTIAL}")))]
    return [directory for directory in dict.fromkeys(begun) if not (directory / MANIFEST).exists()]


def rebuild(directory: Path, *, skip_damaged: bool = False) -> Rebuilt:
    """Rebuild an interrupted run in its own directory; its shards are removed only after the whole run is stored.

    Raises DataError if shards or plan are missing, and for a damaged shard unless ``skip_damaged``.
    """
    damaged: list[Path] = []
    manifest, shards, tables = _read(directory, damaged, skip=skip_damaged)
    recorded = tables["requests"]
    # All planned requests, in plan order.
    plan = tables["plan"]
    known = pc.is_in(plan["request_id"], value_set=recorded["request_id"].combine_chunks())
    lost = plan.filter(pc.invert(known))
    count = lost.num_rows
    given = {
        name: lost[name] for name in ("request_id", "session", "turn", "phase", "input_tokens") if name in PLAN.names
    }
    given |= {
        "output_tokens_planned": lost["output_tokens"],
        "status": pa.array(["cancelled"] * count, pa.string()),
        "error_class": pa.array([NOT_RECORDED] * count, pa.string()),
    }
    rows = pa.table([given.get(f.name, pa.nulls(count, f.type)) for f in REQUESTS], schema=REQUESTS)
    whole = pa.concat_tables([recorded, rows], promote_options="default").combine_chunks()
    order = pc.index_in(plan["request_id"], value_set=whole["request_id"].combine_chunks())
    unplanned = pc.invert(pc.is_in(whole["request_id"], value_set=plan["request_id"].combine_chunks()))
    whole = pa.concat_tables([whole.take(order), whole.filter(unplanned)])
    tables["requests"] = with_plan_columns(whole, plan)
    finished = RunWriter(directory).finish(_judged(manifest, tables, recorded.num_rows, damaged), tables)
    for shard in (shard for paths in shards.values() for shard in paths if ".part-" in shard.name):
        if shard not in damaged:
            with suppress(OSError):
                shard.unlink()
    for leftover in (directory / PARTIAL, *directory.glob(f"*{TAIL}"), *directory.glob(".*.tmp")):
        with suppress(OSError):
            leftover.unlink()
    return Rebuilt(finished, recorded.num_rows, tables["plan"].num_rows, tuple(damaged))


def so_far(directory: Path) -> Run:
    """A run that is going on: the requests that have ended. Nothing is written.

    Raises DataError if there is none, or none that can be read at this moment.
    """
    manifest, _, tables = _read(directory, [], skip=True)
    tables["requests"] = with_plan_columns(tables["requests"], tables["plan"])
    return Run(directory, msgspec.structs.replace(manifest, valid=True, interrupted=False, reasons=()), tables)


def _read(
    directory: Path, damaged: list[Path], *, skip: bool
) -> tuple[Manifest, dict[str, list[Path]], dict[str, pa.Table]]:
    """The preliminary manifest, the shards, and what they hold; each request once."""
    path = directory / PARTIAL
    if not path.exists():
        raise DataError(f"{directory}: nothing to rebuild; {PARTIAL} is missing")
    manifest = decode_manifest(files.read_stored(path), path)
    shards = {name: sorted(directory.glob(f"{name}.part-*.parquet")) for name in SCHEMAS}
    if not shards["plan"] and (directory / "plan.parquet").exists():
        shards["plan"] = [directory / "plan.parquet"]  # the run was being stored: its plan is complete
    tables = {name: _join_shards(name, paths, damaged, directory, skip=skip) for name, paths in shards.items()}
    if not tables["plan"].num_rows:
        raise DataError(f"{directory}: nothing to rebuild; the plan was not stored")
    requests = tables["requests"]
    if pc.count_distinct(requests["request_id"]).as_py() < requests.num_rows:  # the last one of those stored twice
        last = {request: row for row, request in enumerate(requests["request_id"].to_pylist())}
        tables["requests"] = requests.take(pa.array(sorted(last.values()), pa.int64()))
    return manifest, shards, tables


def _join_shards(name: str, paths: Sequence[Path], damaged: list[Path], directory: Path, *, skip: bool) -> pa.Table:
    """The shards of a table and the tail, which ends where the program was killed."""
    tables = []
    for path in paths:
        try:
            tables.append(files.read_table(path))
        except DataError as error:
            if not skip:
                raise DataError(f"{error}; --skip-damaged rebuilds the run without it") from None
            damaged.append(path)
    tail = files.read_stream(directory / f"{name}{TAIL}")
    if tail is not None:
        tables.append(tail)
    if not tables:
        return SCHEMAS[name].empty_table()
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def _judged(manifest: Manifest, tables: dict[str, pa.Table], recorded: int, damaged: Sequence[Path]) -> Manifest:
    columns = RequestColumns.of(tables["requests"])
    metrics = measure(columns, windows=steady_windows(columns, manifest.phases))
    invalid = invalid_reasons(tables["requests"], tables["plan"], columns, metrics, paced_sends=False)
    planned = tables["plan"].num_rows
    rebuilt = warning("rebuilt", recorded=recorded, planned=planned, damaged_shards=len(damaged))
    reasons = tuple(dict.fromkeys((*manifest.reasons, *invalid)))
    return msgspec.structs.replace(
        manifest,
        valid=False,
        interrupted=True,
        reasons=reasons or (warning("cut-off"),),
        warnings=(*manifest.warnings, rebuilt),
    )
