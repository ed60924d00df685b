"""Collects steps and token times while an engine runs, cheaply, and turns them into the stored tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.records.plan import Plan
from ebbench.records.schema import DECISIONS, REQUESTS, STEPS
from vllm_eb.controller import Record

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step row holds beside its requests. Times in ns."""

    scheduled_ns: int
    start_ns: int
    end_ns: int
    mode: str
    prefill_tokens: int
    decode_seqs: int
    kv_blocks_used: int
    kv_blocks_total: int
    waiting: int
    running: int
    preempted_ids: Sequence[str]
    k: int | None = None
    n_limit: int | None = None

    @property
    def phase(self) -> str:
        """Named by what the step holds."""
        if self.decode_seqs == 0:
            return "prefill"
        return "mixed" if self.prefill_tokens else "decode"


class StepLog:
    """Rows of steps.parquet. Requests are kept as row numbers of the plan: four bytes each, not a string."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        self._row_of = {request_id: row for row, request_id in enumerate(ids)}
        self._facts: list[StepFacts] = []
        self._rows: list[npt.NDArray[np.int32]] = []
        self._tokens: list[npt.NDArray[np.int32] | None] = []
        self._last_ids: Sequence[str] = ()
        self._last_rows = np.empty(0, dtype=np.int32)

    def rows_of(self, ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Plan rows of request ids. The array of the call before is shared when the ids are the same."""
        if ids != self._last_ids:
            self._last_ids = ids
            self._last_rows = np.fromiter(map(self._row_of.__getitem__, ids), np.int32, len(ids))
        return self._last_rows

    def add(self, facts: StepFacts, ids: Sequence[str], tokens: Sequence[int] | None) -> None:
        """Append a step; ``tokens`` None means one each."""
        self._facts.append(facts)
        self._rows.append(self.rows_of(ids))
        self._tokens.append(None if tokens is None else np.array(tokens, dtype=np.int32))

    def table(self) -> pa.Table:
        """The rows in the STEPS schema."""
        count = len(self._facts)
        lengths = np.array([len(rows) for rows in self._rows], dtype=np.int64)
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        rows = np.concatenate([*self._rows, np.empty(0, np.int32)])
        tokens = [
            np.ones(len(r), np.int32) if t is None else t for r, t in zip(self._rows, self._tokens, strict=True)
        ]
        columns: dict[str, object] = {
            "step_id": np.arange(count),
            "instance": np.zeros(count, np.int32),
            "request_ids": pa.ListArray.from_arrays(offsets, pa.array(self._ids, pa.string()).take(pa.array(rows))),
            "request_tokens": pa.ListArray.from_arrays(
                offsets, pa.array(np.concatenate([*tokens, np.empty(0, np.int32)]))
            ),
            "preemptions": [len(facts.preempted_ids) for facts in self._facts],
            "preempted_ids": [sorted(facts.preempted_ids, key=self._row_of.__getitem__) for facts in self._facts],
        }
        for field in STEPS:
            if field.name not in columns:
                columns[field.name] = [getattr(facts, field.name) for facts in self._facts]
        return pa.table([_column(columns[field.name], field.type) for field in STEPS], schema=STEPS)


def _column(values: object, kind: pa.DataType) -> pa.Array:
    return values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)


class TokenTimes:
    """When each output token of each request of a plan came, in ns, in one flat array."""

    def __init__(self, output_tokens: npt.NDArray[np.int32]) -> None:
        self._begin = np.concatenate(([0], np.cumsum(output_tokens, dtype=np.int64)))
        self._next = self._begin[:-1].copy()
        self._times: Ints = np.zeros(int(self._begin[-1]), dtype=np.int64)

    def add(self, rows: npt.NDArray[np.int32], time_ns: int) -> None:
        """Each of the requests in ``rows`` (no repeats) got one token."""
        self._times[self._next[rows]] = time_ns
        self._next[rows] += 1

    def counts(self) -> Ints:
        """Tokens so far per request."""
        return self._next - self._begin[:-1]

    def times(self, row: int) -> Ints:
        """Times of a request's tokens."""
        return self._times[self._begin[row] : self._next[row]]


@dataclass(frozen=True)
class RequestFacts:
    """Per row of the plan, -1 for what did not happen. Times in ns."""

    intended_ns: Ints
    scheduled_ns: Ints
    ended: npt.NDArray[np.bool_]
    cached_tokens: Ints
    preemptions: Ints


def request_table(plan: Plan, facts: RequestFacts, tokens: TokenTimes) -> pa.Table:
    """The rows of requests.parquet for an engine whose client is perfect: sent when intended."""
    rows = [_request_row(plan, row, facts, tokens) for row in range(len(plan))]
    copied = plan.table.select(["request_id", "session", "turn", "phase", "input_tokens"]).to_pydict()
    copied["output_tokens_planned"] = plan.table["output_tokens"].to_pylist()
    columns = [
        copied[field.name] if field.name in copied else [row.get(field.name) for row in rows] for field in REQUESTS
    ]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, REQUESTS, strict=True)], schema=REQUESTS
    )


def _request_row(plan: Plan, row: int, facts: RequestFacts, tokens: TokenTimes) -> dict[str, object]:
    intended = int(facts.intended_ns[row])
    times = tokens.times(row)
    out: dict[str, object] = {"bundled_tokens": False, "preemptions": int(facts.preemptions[row])}
    if intended < 0:
        return out | {"status": "never_sent"}
    out |= {"intended_ns": intended, "sent_ns": intended, "output_tokens": len(times)}
    if facts.scheduled_ns[row] >= 0:
        out |= {"scheduled_ns": int(facts.scheduled_ns[row]), "cached_tokens": int(facts.cached_tokens[row])}
    if len(times):
        first, last = int(times[0]), int(times[-1])
        out |= {"first_byte_ns": first, "first_token_ns": first, "last_token_ns": last}
        out["itl_ns"] = np.diff(times)
    if facts.ended[row]:
        return out | {"status": "ok", "finish_reason": "length", "end_ns": int(times[-1])}
    return out | {"status": "cancelled"}


def decision_table(records: Sequence[Record]) -> pa.Table:
    """The rows of decisions.parquet from a controller's records."""
    rows = [
        {
            "time_ns": round(record.time_s * 1e9),
            "step_id": record.step_id,
            "instance": 0,
            "kind": record.kind,
            "reason": record.reason,
            "mode": record.mode,
            "phase": record.phase,
        }
        | _known(record.values)
        for record in records
    ]
    return pa.Table.from_pylist(rows, schema=DECISIONS)


def _known(values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    unknown = set(values) - set(DECISIONS.names)
    if unknown:
        raise KeyError(f"decision values without a column: {sorted(unknown)}")
    return dict(values)
