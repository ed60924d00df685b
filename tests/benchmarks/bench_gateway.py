"""Time that the gateway adds to the TTFT, compared with the same fake servers without it.

    python tests/benchmarks/bench_gateway.py [--streams 200] [--itl-ms 25] [--dispatch sbs] [--repeats 3]

Fake servers with known timing, the project's load generator, closed loop. The transit time of a request is its TTFT at
the client minus its TTFT in the server's ledger: both directions and everything between. Printed for one server
without the gateway, for the gateway with two servers, and as the difference. Tests nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ebbench.client import drive
from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions
from ebbench.workloads import build_plan


def on_the_way_ms(url: str, servers: Sequence[FakeServerProcess], plan: Plan, workers: int) -> np.ndarray:
    """Milliseconds each request spent between client and server, to the first token. Raises when one failed."""
    for server in servers:
        server.clear_ledger()
    done = drive(url, plan, ClientOptions(workers=workers, metrics_interval_s=None, warmup=20, id_prefix="b"))
    rows = done.requests.to_pylist()
    failed = [row for row in rows if row["status"] != "ok"]
    assert not failed, f"{len(failed)} requests failed: {failed[0]['error_class']} {failed[0]['error_body']}"
    entries = {entry.request_id: entry for server in servers for entry in server.ledger()}
    spent = []
    # Without the first wave, which a closed loop sends all at once.
    for row in rows[plan.phases[0].max_concurrency :]:
        entry = entries["b" + row["request_id"]] if "b" + row["request_id"] in entries else _ending(entries, row)
        served_ns = (entry.first_token_ns or 0) - entry.received_ns
        spent.append((row["first_token_ns"] - row["sent_ns"] - served_ns) / 1e6)
    return np.sort(np.array(spent))


def _ending(entries: dict[str, LedgerEntry], row: dict[str, Any]) -> LedgerEntry:
    return next(entry for name, entry in entries.items() if name.endswith(row["request_id"]))


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=40.0)
    parser.add_argument("--itl-ms", type=float, default=25.0)
    parser.add_argument("--dispatch", default="least-outstanding")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    plan = build_plan(
        "balanced", num_prompts=args.requests, seed=0, max_concurrency=args.streams, input_len=128,
        output_len=args.tokens, source="profile",
    )  # fmt: skip
    config = FakeConfig(ttft_ms=args.ttft_ms, itl_ms=args.itl_ms)
    medians, p99s = [], []
    print(f"{args.streams} streams, {1000 / args.itl_ms * args.streams:,.0f} messages/s, dispatch {args.dispatch}")
    print(f"{'':14} {'median':>8} {'p90':>8} {'p99':>8} {'max':>8}   ms on the way to the first token")
    with FakeServerProcess(config) as one, FakeServerProcess(config) as two:
        settings = GatewaySettings(upstreams=(one.url, two.url), dispatch=args.dispatch, port=0)
        with GatewayProcess(settings) as gateway:
            for _ in range(args.repeats):
                direct = on_the_way_ms(one.url, (one,), plan, args.workers)
                before_s = cpu_s(gateway.pid)
                through = on_the_way_ms(gateway.url, (one, two), plan, args.workers)
                spent_us = (cpu_s(gateway.pid) - before_s) * 1e6
                print(f"gateway's CPU time: {spent_us / args.requests / args.tokens:.1f} us per message")
                for label, spent in (("direct", direct), ("gateway", through)):
                    q = [np.percentile(spent, p) for p in (50, 90, 99, 100)]
                    print(f"{label:14} " + " ".join(f"{value:8.3f}" for value in q))
                medians.append(np.percentile(through, 50) - np.percentile(direct, 50))
                p99s.append(np.percentile(through, 99) - np.percentile(direct, 99))
    print(f"added: median {statistics.median(medians):.3f} ms, p99 {statistics.median(p99s):.3f} ms")


if __name__ == "__main__":
    main()
