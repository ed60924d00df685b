"""Requests of a simulation: their state as parallel arrays, one entry per plan row, and the tables made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.records.plan import Plan, block_tokens, optional_ints
from ebbench.records.schema import REQUESTS, REQUESTS_EXTRAS, decisions_table
from vllm_eb.strategy import Record

# Kinds of events of the event loop, and their order at the same nanosecond.
#
# Events at the same nanosecond are taken in the order of their priority, then in the order they were made:
#
#      0  ARRIVAL   a session's first request reaches the front stage
#      1  RESUME    a pause before a request has ended
#      2  FOLLOW    the requests that ends have released are sent
#      3  DELIVERY  a dispatched request reaches its unit
#      4  ENTRY     the API server hands a request to its unit
#      5  TRANSFER  the KV of a request has arrived at its decode unit
#      6  DEPARTURE the last token of a request has left the API server
#      7  PASS      a forward pass has ended: the engine signals
#      8  SIGNAL    the signal reaches the dispatcher
#      9  NOTICE    the dispatcher learns which requests have ended
#     10  TIMER     the dispatcher asked to be polled
#     11  WAKE      an engine's oldest step has ended, or an arrival wakes it
#     12  HANG_UP   a client hangs up; tokens of this very moment still reach it
#
# A signal comes before its engine wakes. Without network delay a dispatcher can therefore still hand a batch to the
# step that is scheduled at this very moment; with a delay of `network_ns` each way it cannot.

ARRIVAL, RESUME, FOLLOW, DELIVERY, ENTRY, TRANSFER, DEPARTURE, PASS, SIGNAL, NOTICE, TIMER, WAKE, HANG_UP = range(13)

NEVER_NS = 1 << 62
TURNAROUND_NS = 1
"""Time from the end of a request until the requests that it releases are sent, unless they pause.

A server begins its next step as soon as one has ended, so a request that answers a last token is too late for that
step, however fast the client is. One nanosecond says this and no more; the API server's time comes on top.
"""
FRONT, BACK = 0, 1  # stages: the one that clients reach, and the one for decodes alone
Failure = tuple[str, str, int | None]
"""Error class, message and HTTP status of a request that failed."""
Ints = npt.NDArray[np.int64]

UNSET = -1


def token_slots(firsts: Ints, tokens: Ints) -> Ints:
    """The slots of ``tokens`` tokens each from the slots ``firsts`` on, one request after the other."""
    if len(tokens) == int(np.add.reduce(tokens)) == np.count_nonzero(tokens):
        return firsts
    starts = firsts - np.cumsum(tokens) + tokens
    slots: Ints = np.repeat(starts, tokens) + np.arange(int(np.add.reduce(tokens)))
    return slots


class RequestState:
    """Arrays indexed by plan row. Token counts have vLLM's meaning.

    ``computed``: tokens with KV computed or in flight (advanced when scheduled). ``target``: tokens that exist or will
    exist after the steps in flight; a running request has ``target - computed`` tokens to compute. ``last``: the value
    of ``computed`` at which the last output token has been sampled. Token times are in one flat array: request i owns
    ``token_ns[first_slot[i] : first_slot[i] + max_output[i]]``, filled up to ``next_slot[i]``. These are the
    engine's times; ``client_ns``, in the same form, are the times at which tokens left a simulated API server.
    """

    def __init__(self, plan: Plan) -> None:
        table = plan.table
        self.prompt: Ints = np.asarray(table["input_tokens"], dtype=np.int64)
        self.max_output: Ints = np.asarray(table["output_tokens"], dtype=np.int64)
        self.content: list[int] = table["content"].to_pylist()
        self.hash_ids: list[list[int] | None] | None = (
            None if table["hash_ids"].null_count == len(plan) else table["hash_ids"].to_pylist()
        )
        self.hash_tokens = block_tokens(table)
        """Prompt tokens per hash id."""
        count = len(plan)
        self.count = count
        self.computed: Ints = np.zeros(count, np.int64)
        self.target: Ints = self.prompt.copy()
        self.last: Ints = self.prompt + self.max_output - 1
        self.held_blocks: Ints = np.zeros(count, np.int64)
        self.partial: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.done: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.first_slot: Ints = np.concatenate([[0], np.cumsum(self.max_output)])[:-1].astype(np.int64)
        self.end_slot: Ints = self.first_slot + self.max_output
        self.next_slot: Ints = self.first_slot.copy()
        self.token_ns: Ints = np.full(int(self.max_output.sum()), UNSET, np.int64)
        self.client_ns: Ints | None = None
        self.intended_ns: Ints = np.full(count, UNSET, np.int64)
        self.sent_ns: Ints = np.full(count, UNSET, np.int64)
        self.scheduled_ns: Ints = np.full(count, UNSET, np.int64)
        self.end_ns: Ints = np.full(count, UNSET, np.int64)
        self.preemptions: Ints = np.zeros(count, np.int64)
        self.cached_tokens: Ints = np.zeros(count, np.int64)
        self.priority = optional_ints(table, "priority")
        self._last_of_content: list[bool] | None = None

    @property
    def last_of_content(self) -> list[bool]:
        """Per request: no later request shares its content."""
        # Not a cached_property: one makes a dictionary of the attributes, and Python 3.11 then takes twice as long to
        # read each of them, hundreds of thousands of times in a run.
        if self._last_of_content is None:
            last = np.zeros(self.count, np.bool_)
            last[self.count - 1 - np.unique(self.content[::-1], return_index=True)[1]] = True
            self._last_of_content = last.tolist()
        return self._last_of_content

    def intend(self, rows: Sequence[int], time_ns: int) -> None:
        """Note the intended start of requests, unless it is known."""
        for row in rows:
            if self.intended_ns[row] == UNSET:
                self.intended_ns[row] = time_ns

    def forget_token_times(self) -> None:
        """Free the times of all tokens, once the requests table has them."""
        self.token_ns = np.zeros(0, np.int64)
        self.client_ns = None

    def outputs(self, rows: Ints) -> Ints:
        """Output tokens delivered so far, one entry per row of ``rows``."""
        return self.next_slot[rows] - self.first_slot[rows]

    def block_keys(self, row: int, first: int, count: int, block_size: int) -> Iterable[int]:
        """Identities of KV blocks ``first .. first+count`` of a request: equal keys mean equal tokens up to there.

        A block of the prompt that lies within one hash id's tokens is identified by that id and its position; one that
        several ids cover by the last of them, which stands for all tokens before; all others by content stream and
        position.
        """
        stream = self.content[row] << 24
        hash_ids = self.hash_ids[row] if self.hash_ids is not None else None
        if not hash_ids:
            return range(stream + first, stream + first + count)
        named = min(int(self.prompt[row]), len(hash_ids) * self.hash_tokens) // block_size
        last = block_size - 1
        return (
            -((hash_ids[(block * block_size + last) // self.hash_tokens] << 24) + block) - 1
            if block < named
            else stream + block
            for block in range(first, first + count)
        )


class StoreFullError(Exception):
    """The receiving GPU is out of memory; holds the stored and the arriving bytes."""

    def __init__(self, unit: int, held_bytes: float, size_bytes: float, capacity_bytes: float) -> None:
        super().__init__(unit)
        self.unit, self.held_bytes, self.size_bytes = unit, held_bytes, size_bytes
        self.capacity_bytes = capacity_bytes


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


def _together(gap_values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Per request whether several of its tokens came in one message, as accepted drafts do."""
    together = np.zeros(len(offsets) - 1, np.bool_)
    none = np.flatnonzero(gap_values == 0)
    together[np.searchsorted(offsets, none, side="right") - 1] = True
    return together


def _gap_values(state: RequestState, token_ns: Ints) -> np.ndarray:
    """All gaps between consecutive tokens of a request (ns), requests in plan order."""
    inner = token_ns[1:] != UNSET  # a request fills its slots from the first one on
    firsts = state.first_slot[(state.first_slot > 0) & (state.first_slot <= len(inner))]
    inner[firsts - 1] = False
    kept = np.empty(np.count_nonzero(inner), np.int64)
    filled = 0
    for start in range(0, len(inner), _SLOTS_AT_ONCE):  # all differences at once would take as much memory again
        chosen = inner[start : start + _SLOTS_AT_ONCE]
        gaps = np.diff(token_ns[start : start + len(chosen) + 1])[chosen]
        kept[filled : filled + len(gaps)] = gaps
        filled += len(gaps)
    return kept
