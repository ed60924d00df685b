"""Collects finished requests during a run, reports progress, and converts them to the requests table."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.dialects import DraftCounts, OddNumber
from ebbench.client.messages import Batch, RequestRecord
from ebbench.records.plan import Observer, Progress
from ebbench.records.schema import DRAFT_COLUMNS, REQUESTS, REQUESTS_EXTRAS, SAME_TIME_NS, tokens_after_first_of

if TYPE_CHECKING:
    from ebbench.client.nodes import Senders

# Converts the workers' records to the requests table.

_PLAN_COLUMNS = ("request_id", "session", "turn", "phase")


def requests_table(
    records: Sequence[RequestRecord],
    plan: pa.Table,
    start_ns: int,
    texts: bool = False,
    thinking: bool = False,
    estimates: bool = False,
    drafts: bool = False,
) -> pa.Table:
    """Records in the REQUESTS schema, times relative to ``start_ns``.

    ``texts`` adds the column ``text``, ``thinking``, ``estimates`` and ``drafts`` those of REQUESTS_EXTRAS.
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
    if estimates:
        values = pa.array([r.estimated for r in records], pa.bool_())
        table = table.append_column(REQUESTS_EXTRAS.field("estimated_tokens"), values)
    if drafts:
        counts = [r.drafts or DraftCounts() for r in records]
        for field, values in zip(DRAFT_COLUMNS, zip(*counts, strict=True), strict=True):
            table = table.append_column(field, pa.array(values, field.type))
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
    times_of = [_each_token(record) for record in records]
    counts = np.array([len(times) for times in times_of], np.int64)
    ends = np.cumsum(counts)
    times = np.concatenate([*times_of, np.zeros(0, np.int64)])
    some = counts > 0
    first, last = np.zeros(len(records), np.int64), np.zeros(len(records), np.int64)
    first[some], last[some] = times[(ends - counts)[some]], times[ends[some] - 1]
    # Differences of all tokens, without those between the last token of a request and the first of the next one.
    gaps = np.delete(np.diff(times), ends[some][:-1] - 1)
    lengths = np.maximum(counts - 1, 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    short = np.concatenate([[0], np.cumsum(gaps < SAME_TIME_NS)])
    hidden = [r.status == "ok" and count < (r.output_tokens or 0) for r, count in zip(records, counts, strict=True)]
    bundled = pa.array(np.array(hidden) | (np.diff(short[offsets]) > 0), mask=~some)
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(gaps), mask=pa.array(~some))
    return first, last, lists, bundled


def _each_token(record: RequestRecord) -> npt.NDArray[np.int64]:
    """The time of each token, where several may have come in one message."""
    times = np.frombuffer(record.token_ns, np.int64)
    if not len(times) or not record.bundled:
        return times
    return np.repeat(times, _tokens_per_message(len(times), record.bundled, record.first_tokens))


def _tokens_per_message(messages: int, bundled: int, first: int) -> npt.NDArray[np.int64]:
    """How many tokens each message carried: ``first`` in the first one, the others divided evenly."""
    ends = np.linspace(first, messages + bundled, messages).astype(np.int64)
    ends[-1] = messages + bundled
    return np.diff(ends, prepend=0)


MOST_NAMES = 20
"""Names of other models that are counted one by one."""
_RECENT = 500  # requests that the running medians cover


class Tally:
    """Collects the records of all workers. ``start_ns`` must be set before the first record comes."""

    def __init__(
        self,
        plan: pa.Table,
        observer: Observer | None,
        on_batch: Callable[[pa.Table], None] | None,
        label: str,
        keep_text: bool,
        thinking: bool = False,
        estimates: bool = False,
    ) -> None:
        self._plan, self._observer, self._on_batch, self._label = plan, observer, on_batch, label
        self._keep_text, self._thinking, self._estimates = keep_text, thinking, estimates
        self._drafts = False  # whether an answer told of its drafts
        self._tables: list[pa.Table] = []
        self._rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self._seen = np.zeros(plan.num_rows, dtype=np.bool_)
        self._failures: Counter[str] = Counter()
        self.other_models: Counter[str] = Counter()
        """Complete responses by the models that they name, where these are not the one asked for."""
        self._recent: deque[tuple[float, float | None]] = deque(maxlen=_RECENT)
        self._open: dict[int, int] = {}
        self._completed = self._output_tokens = self._input_tokens = 0
        self.followers: list[Callable[[pa.Table, int], None]] = []
        """Called with finished requests and the run's start (monotonic ns)."""
        self.odd_numbers: dict[str, OddNumber] = {}
        self.first_on_connection: list[int] = []
        """Rows of the requests before which no response had come on their connection."""
        self.start_ns = 0
        self.interrupted = False

    @property
    def open_requests(self) -> int:
        """Requests that are open in all workers, as last reported."""
        return sum(self._open.values())

    def add(self, worker: int, batch: Batch) -> None:
        """Add a worker's batch of finished requests."""
        self._open[worker] = batch.open_requests
        self._keep(batch.records)
        if self._observer is not None:
            self._observer.update(self._progress())

    def complete(self, senders: Senders) -> pa.Table:
        """All requests in plan order; ``senders`` gives the status of those without a record."""
        missing = senders.missing(self._seen)
        self._keep(missing)
        table = pa.concat_tables(self._tables, promote_options="default")
        rows = pa.array(np.argsort(np.concatenate(self._rows), kind="stable"))
        return table.take(rows).combine_chunks()

    def _keep(self, records: list[RequestRecord]) -> None:
        if not records:
            return
        self._drafts = self._drafts or any(record.drafts for record in records)
        table = requests_table(
            records, self._plan, self.start_ns, self._keep_text, self._thinking, self._estimates, self._drafts
        )
        self._tables.append(table)
        self._rows.append(np.array([r.row for r in records], np.int64))
        for record, later in zip(records, tokens_after_first_of(table).tolist(), strict=True):
            self._count(record, later)
        for follower in self.followers:
            follower(table, self.start_ns)
        if self._on_batch is not None:
            self._on_batch(table.select([n for n in table.column_names if n != "text"]))

    def _count(self, record: RequestRecord, later_tokens: int) -> None:
        self._seen[record.row] = True
        for field, value in (record.odd_numbers or {}).items():
            known = self.odd_numbers.get(field, OddNumber(0, value))
            self.odd_numbers[field] = OddNumber(known.answers + 1, known.first)
        if record.first_on_connection:
            self.first_on_connection.append(record.row)
        if record.status != "ok":
            self._failures[record.error_class or record.status] += 1
            return
        self._completed += 1
        if (name := record.other_model) is not None:
            counted = name in self.other_models or len(self.other_models) < MOST_NAMES
            self.other_models[name if counted else "others"] += 1
        self._output_tokens += record.output_tokens or 0
        self._input_tokens += record.prompt_tokens or 0
        times = np.frombuffer(record.token_ns, np.int64)
        tpot_ms = float(times[-1] - times[0]) / later_tokens / 1e6 if later_tokens else None
        self._recent.append((float(times[0] - record.intended_ns) / 1e6, tpot_ms))

    def _progress(self) -> Progress:
        ttfts = [ttft for ttft, _ in self._recent]
        tpots = [tpot for _, tpot in self._recent if tpot is not None]
        return Progress(
            policy=self._label,
            completed=self._completed,
            planned=self._plan.num_rows,
            output_tokens=self._output_tokens,
            total_tokens=self._output_tokens + self._input_tokens,
            time_s=max(0.0, (time.monotonic_ns() - self.start_ns) / 1e9),
            mode="",
            running=self.open_requests,
            waiting=0,
            failures=dict(self._failures),
            ttft_ms=float(np.median(ttfts)) if ttfts else None,
            tpot_ms=float(np.median(tpots)) if tpots else None,
        )
