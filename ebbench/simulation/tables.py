"""Converts the state of a finished simulation to Arrow tables in the stored schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from ebbench.records.plan import Plan
from ebbench.records.schema import EARLIER_TURN_FAILED, REQUESTS, REQUESTS_EXTRAS, decisions_table
from ebbench.simulation.api_server import Failure
from ebbench.simulation.state import UNSET, Ints, RequestState
from vllm_eb.strategy import Record

_SLOTS_AT_ONCE = 1 << 16  # temporary arrays of 512 KiB, whose memory is used again; larger ones take new pages


def table_of_records(records: Sequence[tuple[int, Record]]) -> pa.Table:
    """DECISIONS, one row per record with its instance."""
    rows = [
        {
            "time_ns": round(record.time_s * 1e9),
            "step_id": record.step_id,
            "instance": instance,
            "kind": record.kind,
            "reason": record.reason,
            "mode": record.mode,
            "phase": record.phase,
        }
        | record.values
        for instance, record in records
    ]
    return decisions_table(rows)


def requests_table(plan: Plan, state: RequestState) -> pa.Table:
    """Table REQUESTS, one row per planned request; requests open at an interruption are cancelled or never sent."""
    count = state.count
    outputs = state.next_slot - state.first_slot
    ended = state.end_ns != UNSET
    has_token = outputs > 0
    token_ns = state.token_ns if state.client_ns is None else state.client_ns
    first_ns = np.where(has_token, token_ns[np.minimum(state.first_slot, len(token_ns) - 1)], UNSET)
    last_ns = np.where(has_token, token_ns[np.maximum(state.next_slot - 1, 0)], UNSET)
    end_ns = state.end_ns
    if state.client_ns is not None:  # a client's request ends when its last token has reached it
        end_ns = np.where(ended & (outputs == state.max_output), last_ns, end_ns)
    offsets, gap_values = np.concatenate([[0], np.cumsum(np.maximum(outputs - 1, 0))]), _gap_values(state, token_ns)
    status = np.where(ended, "ok", np.where(state.sent_ns != UNSET, "cancelled", "never_sent"))
    columns = {name: plan.table[name] for name in ("request_id", "session", "turn", "phase", "input_tokens")}
    columns |= {
        "output_tokens_planned": pa.array(state.max_output, pa.int32()),
        "output_tokens": pa.array(outputs, pa.int32()),
        "cached_tokens": pa.array(state.cached_tokens, pa.int32()),
        "status": pa.array(status, pa.string()),
        "finish_reason": pa.array(np.where(ended, "length", ""), pa.string(), mask=~ended),
        "itl_ns": pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(gap_values)),
        "bundled_tokens": pa.array(_together(gap_values, offsets)),
        "preemptions": pa.array(state.preemptions, pa.int32()),
        "error_class": pa.nulls(count, pa.string()),
        "error_body": pa.nulls(count, pa.string()),
        "http_status": pa.nulls(count, pa.int32()),
        "worker": pa.nulls(count, pa.int32()),
    }
    times = {
        "intended_ns": state.intended_ns,
        "sent_ns": state.sent_ns,
        "scheduled_ns": state.scheduled_ns,
        "first_byte_ns": first_ns,
        "first_token_ns": first_ns,
        "last_token_ns": last_ns,
        "end_ns": end_ns,
    }
    columns |= {name: pa.array(values, pa.int64(), mask=values == UNSET) for name, values in times.items()}
    table = pa.table({name: columns[name] for name in REQUESTS.names}, schema=REQUESTS)
    return _with_thinking(table, plan, state, token_ns) if "thinking_tokens" in plan.table.column_names else table


def _with_thinking(table: pa.Table, plan: Plan, state: RequestState, token_ns: Ints) -> pa.Table:
    """The table with REQUESTS_EXTRAS: how much of each output is thinking, and when its answer began."""
    planned = np.asarray(plan.table["thinking_tokens"].fill_null(0), np.int64)
    outputs = state.next_slot - state.first_slot
    answered = (planned > 0) & (outputs > planned)
    slots = np.minimum(state.first_slot + planned, max(len(token_ns) - 1, 0))
    thinking = pa.array(np.minimum(planned, outputs), pa.int32(), mask=planned == 0)
    table = table.append_column(REQUESTS_EXTRAS.field("thinking_tokens"), thinking)
    answers = pa.array(token_ns[slots], pa.int64(), mask=~answered)
    return table.append_column(REQUESTS_EXTRAS.field("first_answer_ns"), answers)


def with_failures(requests: pa.Table, failed: Mapping[int, Failure], never_sent: Sequence[int] = ()) -> pa.Table:
    """``requests`` with failures filled in, by row; rows after the plan's (warm-up requests) are left out.

    ``never_sent``: turns that were not sent because an earlier turn of their session failed.
    """
    if not failed:
        return requests
    columns = {
        name: requests[name].to_pylist()
        for name in ("status", "finish_reason", "error_class", "error_body", "http_status")
    }
    for row, (kind, message, status) in failed.items():
        if row < requests.num_rows:
            columns["status"][row], columns["finish_reason"][row] = "failed", None
            columns["error_class"][row], columns["error_body"][row], columns["http_status"][row] = kind, message, status
    for row in never_sent:
        columns["error_class"][row] = EARLIER_TURN_FAILED
    for name, values in columns.items():
        index = requests.column_names.index(name)
        requests = requests.set_column(
            index, requests.schema.field(index), pa.array(values, requests.schema.field(index).type)
        )
    return requests


def _together(gap_values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Per request whether several of its tokens came in one message, as accepted drafts do."""
    found = np.zeros(len(offsets) - 1, np.bool_)
    none = np.flatnonzero(gap_values == 0)
    found[np.searchsorted(offsets, none, side="right") - 1] = True
    return found


def _gap_values(state: RequestState, token_ns: Ints) -> np.ndarray:
    """All gaps between consecutive tokens of a request (ns), requests in plan order."""
    inner = token_ns[1:] != UNSET  # a request fills its slots from the first one on
    firsts = state.first_slot[(state.first_slot > 0) & (state.first_slot <= len(inner))]
    inner[firsts - 1] = False
    found = np.empty(np.count_nonzero(inner), np.int64)
    filled = 0
    for start in range(0, len(inner), _SLOTS_AT_ONCE):  # all differences at once would take as much memory again
        chosen = inner[start : start + _SLOTS_AT_ONCE]
        gaps = np.diff(token_ns[start : start + len(chosen) + 1])[chosen]
        found[filled : filled + len(gaps)] = gaps
        filled += len(gaps)
    return found
