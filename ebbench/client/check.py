"""Measure how much load this client can generate accurately, on a fake server that records its own times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.client.load_generator import DriveResult, drive
from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN
from ebbench.spec.client import LAG_FLOOR_MS, ClientOptions

LEVELS = (32, 64, 128, 256, 512, 1024, 2048)
_TTFT_MS = 50.0
_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class LoadLevel:
    """One load and the client's accuracy at it. Lags and errors are 99th percentiles in ms, those named p50 medians.

    ``ttft_error_*``: TTFT measured by the client from the actual send, minus the server's own TTFT. ``server_late_ms``:
    lateness of the fake server; if it is large, the server limits this measurement. ``lost``: requests without a
    complete response.
    """

    streams: int
    tokens_per_s: float
    cpu_us_per_token: float
    send_lag_ms: float
    loop_lag_ms: float
    ttft_error_p50_ms: float
    ttft_error_ms: float
    server_late_ms: float
    lost: int
    trustworthy: bool
    reason: str


def measure_levels(
    rate: float,
    seconds: float,
    workers: int | None,
    streams_to_try: Sequence[int] = LEVELS,
) -> Iterator[LoadLevel]:
    """Measure one number of concurrent streams after the other, each stream at ``rate`` tokens/s, for about ``seconds``
    per level. Yields one level per number; the first untrustworthy level is the last."""
    for streams in streams_to_try:
        with FakeServerProcess(FakeConfig(ttft_ms=_TTFT_MS, itl_ms=1000.0 / rate)) as server:
            options = ClientOptions(workers=workers, metrics_interval_s=None, id_prefix="", reset_prefix_cache=False)
            result = drive(server.url, steady_plan(streams, rate, seconds), options)
            level = load_level(streams, result, server.ledger())
        yield level
        if not level.trustworthy:
            return


def steady_plan(streams: int, rate: float, seconds: float) -> Plan:
    """A closed loop of ``streams`` sessions; each slot serves two requests, one after the other."""
    requests, tokens = 2 * streams, max(2, round(rate * seconds / 2))
    columns = {
        "request_id": [f"c{i}" for i in range(requests)],
        "session": list(range(requests)),
        "turn": [0] * requests,
        "phase": ["check"] * requests,
        "arrival_ns": [None] * requests,
        "input_tokens": [_PROMPT_TOKENS] * requests,
        "output_tokens": [tokens] * requests,
        "content": list(range(requests)),
        "hash_ids": [None] * requests,
        "prompt": [None] * requests,
    }
    return Plan(pa.table(columns, schema=PLAN), (ClosedPhase("check", requests, streams),), {})


def load_level(streams: int, result: DriveResult, ledger: Sequence[LedgerEntry]) -> LoadLevel:
    """Compare the client's measurements with the server's ledger."""
    errors_ms = ttft_errors_ms(result.requests, ledger)
    tokens = sum(entry.tokens for entry in ledger)
    duration_s = max(1e-9, float(np.max(result.requests.column("end_ns").drop_null().to_numpy())) / 1e9)
    lost = result.requests.num_rows - len(errors_ms)
    send_lag_ms = float(result.facts["send_lag_p99_ms"])
    if lost:
        reason = f"{lost} requests without a complete answer"
    elif send_lag_ms > LAG_FLOOR_MS:
        reason = f"requests went out late: p99 {send_lag_ms:.1f} ms"
    else:
        reason = "; ".join(map(str, result.invalid))
    return LoadLevel(
        streams=streams,
        tokens_per_s=tokens / duration_s,
        cpu_us_per_token=float(result.facts["client_cpu_s"]) / max(1, tokens) * 1e6,
        send_lag_ms=send_lag_ms,
        loop_lag_ms=float(result.facts["loop_lag_p99_ms"]),
        ttft_error_p50_ms=_percentile(errors_ms, 50),
        ttft_error_ms=_percentile(errors_ms, 99),
        server_late_ms=_percentile(np.array([entry.late_ns / 1e6 for entry in ledger]), 99),
        lost=lost,
        trustworthy=not reason,
        reason=reason,
    )


def ttft_errors_ms(requests: pa.Table, ledger: Sequence[LedgerEntry]) -> npt.NDArray[np.float64]:
    """TTFT errors in ms, one per complete response: the client's TTFT from the send minus the server's.

    Request ids in ``requests`` and ``ledger`` must be the same.
    """
    truth = {e.request_id: (e.first_token_ns - e.received_ns) for e in ledger if e.first_token_ns is not None}
    names = ("request_id", "status", "sent_ns", "first_token_ns")
    rows = zip(*(requests.column(name).to_pylist() for name in names), strict=True)
    errors = [(first - sent - truth[name]) / 1e6 for name, status, sent, first in rows if status == "ok"]
    return np.array(errors, dtype=np.float64)


def _percentile(values: npt.NDArray[np.float64], q: float) -> float:
    return float(np.percentile(values, q)) if values.size else float("nan")
