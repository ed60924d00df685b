"""Converts the workers' records to the requests table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.messages import RequestRecord
from ebbench.records.schema import REQUESTS, REQUESTS_EXTRAS
from ebbench.records.token_gaps import SAME_TIME_NS

_PLAN_COLUMNS = ("request_id", "session", "turn", "phase")


def requests_table(
    records: Sequence[RequestRecord], plan: pa.Table, start_ns: int, texts: bool = False, thinking: bool = False
) -> pa.Table:
    """Records in the REQUESTS schema, times relative to ``start_ns``.

    ``texts`` adds the column ``text``, ``thinking`` those of REQUESTS_EXTRAS.
    """
    rows = pa.array([r.row for r in records], pa.int64())
    planned = plan.select([*_PLAN_COLUMNS, "input_tokens", "output_tokens"]).take(rows)
    first, last, gaps, bundled = _token_columns(records)
    columns: dict[str, pa.Array] = {name: planned.column(name).combine_chunks() for name in _PLAN_COLUMNS}
    columns["output_tokens_planned"] = planned.column("output_tokens").combine_chunks()
    expected = planned.column("input_tokens").to_pylist()
    counted = [r.prompt_tokens for r in records]
    columns |= {
        "input_tokens": pa.array([e if c is None else c for e, c in zip(expected, counted, strict=True)], pa.int32()),
        "itl_ns": gaps,
        "bundled_tokens": bundled,
        "first_token_ns": _since(first, start_ns),
        "last_token_ns": _since(last, start_ns),
        "scheduled_ns": pa.nulls(len(records), pa.int64()),
        "preemptions": pa.nulls(len(records), pa.int32()),
    }
    for name in ("intended_ns", "sent_ns", "first_byte_ns", "end_ns"):
        columns[name] = _since(np.array([getattr(r, name) for r in records], np.int64), start_ns)
    for name in ("status", "output_tokens", "cached_tokens", "finish_reason", "error_class", "error_body",
                 "http_status", "worker"):  # fmt: skip
        columns[name] = pa.array([getattr(r, name) for r in records], REQUESTS.field(name).type)
    table = pa.Table.from_arrays([columns[f.name].cast(f.type) for f in REQUESTS], schema=REQUESTS)
    if thinking:
        values = pa.array([r.thinking_tokens for r in records], pa.int32())
        table = table.append_column(REQUESTS_EXTRAS.field("thinking_tokens"), values)
        answers = _since(np.array([r.first_answer_ns for r in records], np.int64), start_ns)
        table = table.append_column(REQUESTS_EXTRAS.field("first_answer_ns"), answers)
    if texts:
        table = table.append_column("text", pa.array([r.text for r in records], pa.string()))
    return table


def _since(times_ns: npt.NDArray[np.int64], start_ns: int) -> pa.Array:
    return pa.array(times_ns - start_ns, mask=times_ns == 0)


def _token_columns(
    records: Sequence[RequestRecord],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], pa.Array, pa.Array]:
    """First and last token time (0: none), the gaps between tokens in ns, and whether some tokens share a time.

    Tokens of one message have gaps of 0. Thinking tokens that were not sent have none.
    """
    first, last = np.zeros(len(records), np.int64), np.zeros(len(records), np.int64)
    pieces: list[npt.NDArray[np.int64]] = []
    lengths = np.zeros(len(records), np.int64)
    bundled: list[bool | None] = [None] * len(records)
    for index, record in enumerate(records):
        if not record.token_ns:
            continue
        times = np.frombuffer(record.token_ns, np.int64)
        first[index], last[index] = times[0], times[-1]
        if record.bundled:
            times = np.repeat(times, _tokens_per_message(len(times), record.bundled, record.first_tokens))
        gaps = np.diff(times)
        lengths[index] = len(gaps)
        pieces.append(gaps)
        hidden = record.status == "ok" and len(times) < (record.output_tokens or 0)
        bundled[index] = hidden or bool((gaps < SAME_TIME_NS).any())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = first == 0
    values = pa.array(np.concatenate(pieces) if pieces else np.zeros(0, np.int64))
    return first, last, pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(mask)), pa.array(bundled)


def _tokens_per_message(messages: int, bundled: int, first: int) -> npt.NDArray[np.int64]:
    """How many tokens each message carried: ``first`` in the first one, the others divided evenly."""
    ends = np.linspace(first, messages + bundled, messages).astype(np.int64)
    ends[-1] = messages + bundled
    return np.diff(ends, prepend=0)
