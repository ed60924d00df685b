"""Errors of TTFT under long prompts: python tests/benchmarks/bench_long_prompts.py --streams 256 --tokens 50000

Closed loop against the fake server on this machine, whose times are the truth. Each round sends the same load twice, in
alternating order: prompts of ``--tokens``, and prompts of 16 tokens as a control. What the control shows as well is not
due to the prompts but to this machine, its load and the number of streams.

Columns: the 99th percentile of the send lag, of the TTFT error and its parts: ``upload``, from the send to the last
byte of the body at the server (the network's and the server's, too), and ``back``, from the first token's write at the
server to its time at the client; ``late``: how late the server itself wrote tokens. Times in ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ebbench.client import DriveResult, drive
from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.schema import PLAN
from ebbench.spec.client import ClientOptions

CONTROL_TOKENS = 16


@dataclass(frozen=True)
class Asked:
    """The load: concurrent streams, requests per stream, tokens per answer, seconds of ramp-up, client processes."""

    streams: int
    requests: int
    output: int
    ramp_s: float
    workers: int
    ttft_ms: float
    itl_ms: float


def plan_of(asked: Asked, prompt_tokens: int) -> Plan:
    """A closed loop of single requests, all of one length."""
    count = asked.streams * asked.requests
    columns = {
        "request_id": [f"c{i}" for i in range(count)],
        "session": list(range(count)),
        "turn": [0] * count,
        "phase": ["all"] * count,
        "arrival_ns": [None] * count,
        "input_tokens": [prompt_tokens] * count,
        "output_tokens": [asked.output] * count,
        "content": list(range(count)),
        "hash_ids": [None] * count,
        "prompt": [None] * count,
    }
    return Plan(pa.table(columns, schema=PLAN), (ClosedPhase("all", count, asked.streams),), {})


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(np.asarray(values), 99))


def figures(result: DriveResult, ledger: Sequence[LedgerEntry]) -> dict[str, float]:
    """The columns of one run."""
    rows = {row["request_id"]: row for row in result.requests.to_pylist() if row["status"] == "ok"}
    start_ns = result.facts["start_monotonic_ns"]
    pairs = [(rows[e.request_id], e) for e in ledger if e.request_id in rows and e.first_token_ns is not None]
    upload = [(e.received_ns - start_ns - row["sent_ns"]) / 1e6 for row, e in pairs]
    back = [(row["first_token_ns"] - (e.first_token_ns or 0) + start_ns) / 1e6 for row, e in pairs]
    return {
        "ok": len(rows),
        "lag": p99([(row["sent_ns"] - row["intended_ns"]) / 1e6 for row in rows.values()]),
        "loop": float(result.facts["loop_lag_p99_ms"]),
        "upload": p99(upload),
        "back": p99(back),
        "error": p99([a + b for a, b in zip(upload, back, strict=True)]),
        "late": p99([e.late_ns / 1e6 for e in ledger]),
        "cpu_s": float(result.facts["client_cpu_s"]),
    }


def measure(asked: Asked, prompt_tokens: int) -> dict[str, float]:
    """One run against a new server."""
    options = ClientOptions(
        workers=asked.workers, metrics_interval_s=None, id_prefix="", reset_prefix_cache=False,
        slot_spacing_s=asked.ramp_s / asked.streams,
    )  # fmt: skip
    with FakeServerProcess(FakeConfig(ttft_ms=asked.ttft_ms, itl_ms=asked.itl_ms)) as server:
        return figures(drive(server.url, plan_of(asked, prompt_tokens), options), server.ledger())


def main() -> None:
    """Print one line per run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens per prompt")
    parser.add_argument("--requests", type=int, default=3, help="requests per stream")
    parser.add_argument("--output", type=int, default=100, help="tokens per answer")
    parser.add_argument("--ramp-up", type=float, default=5.0, help="seconds over which the streams begin")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--itl-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asked = Asked(
        given.streams, given.requests, given.output, given.ramp_up, given.workers, given.ttft_ms, given.itl_ms
    )
    shown = ("lag", "loop", "upload", "back", "error", "late")
    print(f"{'tokens':>7}  {'ok':>5}  " + "  ".join(f"{name:>7}" for name in (*shown, "cpu s")))
    for number in range(given.rounds):
        lengths = [given.tokens, CONTROL_TOKENS]
        for tokens in lengths if number % 2 == 0 else reversed(lengths):
            f = measure(asked, tokens)
            times = "  ".join(f"{f[name]:7.2f}" for name in shown)
            print(f"{tokens:>7}  {f['ok']:>5.0f}  {times}  {f['cpu_s']:7.2f}", flush=True)


if __name__ == "__main__":
    main()
