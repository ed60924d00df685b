"""Converts the plugin's records from a server to the stored tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.errors import DataError
from ebbench.records.schema import DECISIONS, REQUESTS, STEPS
from vllm_eb.recorder import read_frames

_STEP_FIELDS = (
    "step_id", "scheduled_ns", "start_ns", "end_ns", "mode", "prefill_tokens", "decode_seqs", "request_ids",
    "request_tokens", "kv_blocks_used", "waiting", "running", "preempted_ids", "k", "n_limit",
)  # fmt: skip
_WRAPPING = re.compile(r"^(?:chat)?cmpl-")


@dataclass(frozen=True)
class Recording:
    """Steps and decisions of one engine process; times in ns from the start of the run."""

    steps: pa.Table
    decisions: pa.Table
    pids: frozenset[int]
    policies: frozenset[str]


@dataclass
class _RecordReading:
    name_of: Callable[[str], str]
    start_ns: int
    since_ns: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, Any]] = field(default_factory=list)


def read_recording(folder: Path, name_of: Callable[[str], str], start_ns: int, since_ns: int = 0) -> Recording:
    """Read all shards of a record directory. ``name_of`` maps vLLM's request ids to the plan's.

    What was scheduled before ``since_ns`` (monotonic time) is left out: earlier runs of the same server. Steps are
    numbered from 0. Raises DataError for a file that is none, or when there is nothing.
    """
    reading = _RecordReading(name_of, start_ns, since_ns)
    for path in sorted(folder.glob("*.msgpack")):
        try:
            _read_shard(read_frames(path), reading)
        except ValueError as error:
            raise DataError(str(error)) from None
    if not reading.heads:
        raise DataError(f"{folder} holds no records of the scheduler plugin")
    if since_ns:
        _renumber(reading)
    return Recording(
        steps=pa.Table.from_pylist(reading.steps, schema=STEPS),
        decisions=pa.Table.from_pylist(reading.decisions, schema=DECISIONS),
        pids=frozenset(int(head["pid"]) for head in reading.heads),
        policies=frozenset(str(head["policy"]) for head in reading.heads),
    )


def _read_shard(frames: Sequence[Sequence[Any]], reading: _RecordReading) -> None:
    names: list[str] = []
    head: dict[str, Any] = {}
    for kind, *values in frames:
        if kind == "head":
            head = values[0]
            reading.heads.append(head)
        elif kind == "ids":
            names += [reading.name_of(name) for name in values[0]]
        elif kind == "step" and values[1] >= reading.since_ns:
            reading.steps.append(_step_row(values, names, head, reading))
        elif kind == "decision" and values[0] >= reading.since_ns:
            time_ns, step_id, what, reason, mode, phase, inputs = values
            row = {"time_ns": time_ns - reading.start_ns, "step_id": step_id, "instance": 0, "kind": what}
            reading.decisions.append(row | {"reason": reason, "mode": mode, "phase": phase} | inputs)


def _renumber(reading: _RecordReading) -> None:
    """Number the steps from 0; decisions follow the number of their step."""
    if not reading.steps:
        return
    first = min(row["step_id"] for row in reading.steps)
    for row in (*reading.steps, *reading.decisions):
        row["step_id"] = max(row["step_id"] - first, 0)


def _step_row(
    values: Sequence[Any], names: Sequence[str], head: dict[str, Any], reading: _RecordReading
) -> dict[str, Any]:
    row = dict(zip(_STEP_FIELDS, values, strict=True))
    row["request_ids"] = [names[number] for number in row["request_ids"]]
    row["request_tokens"] = row["request_tokens"] or [1] * len(row["request_ids"])
    row["preempted_ids"] = [reading.name_of(name) for name in row["preempted_ids"]]
    for name in ("scheduled_ns", "start_ns", "end_ns"):
        row[name] -= reading.start_ns
    decodes, prefills = row["decode_seqs"], row["prefill_tokens"]
    row["phase"] = "prefill" if not decodes else "mixed" if prefills else "decode"
    return row | {
        "instance": 0,
        "kv_blocks_total": head["kv_blocks_total"],
        "preemptions": len(row["preempted_ids"]),
    }


def planned_name(prefix: str, planned: Iterable[str]) -> Callable[[str], str]:
    """A function that removes what client and server add to a planned id: ``cmpl-<prefix><id>-0-<random>``.

    Ids that are not in the plan (warm-up) are returned unchanged.
    """
    known = set(planned)

    def name_of(wrapped: str) -> str:
        rest = _WRAPPING.sub("", wrapped).removeprefix(prefix)
        while rest not in known:
            rest, dash, _ = rest.rpartition("-")
            if not dash:
                return wrapped
        return rest

    return name_of


def joined_requests(requests: pa.Table, steps: pa.Table) -> pa.Table:
    """The requests table with what only the scheduler knows: first scheduling time and preemptions."""
    ids = pc.list_flatten(steps["request_ids"])
    step_of = pc.list_parent_indices(steps["request_ids"])
    first: dict[str, int] = {}
    times = np.asarray(steps["scheduled_ns"])
    for name, time_ns in zip(ids.to_pylist(), times[np.asarray(step_of)].tolist(), strict=True):
        first.setdefault(name, time_ns)
    preempted: dict[str, int] = {}
    for name in pc.list_flatten(steps["preempted_ids"]).to_pylist():
        preempted[name] = preempted.get(name, 0) + 1
    names = requests["request_id"].to_pylist()
    columns = {
        "scheduled_ns": [first.get(name) for name in names],
        "preemptions": [preempted.get(name, 0) if name in first else None for name in names],
    }
    for column, values in columns.items():
        position = requests.schema.get_field_index(column)
        requests = requests.set_column(position, REQUESTS.field(column), pa.array(values, REQUESTS.field(column).type))
    return requests
