"""How long ``ebbench capacity`` takes on a server, and how often its interval holds the capacity.

``python -m tests.benchmarks.bench_capacity_server [--trials 60]`` searches servers that are modelled: slots, first
come, first served, each answer taking ``TTFT + tokens * ITL``. Time is counted, not waited for: the arrivals and the
drain of each probe, and 1.5 s beside. The truth is that of runs of 400,000 requests. Prints one row per server.
"""

from __future__ import annotations

import argparse
import heapq
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from ebbench.analysis.columns import Ints
from ebbench.records.plan import ClosedPhase
from ebbench.records.schema import REQUESTS, STEPS
from ebbench.sizing import command, drive
from ebbench.sizing.drive import SearchBudget, SearchConfig
from ebbench.sizing.estimate import Floats
from ebbench.sizing.limits import LatencyLimits, parse_limits
from ebbench.sizing.probe import FEWEST_PER_OPEN, ProbeReading, ProbeTables, read_measured

BESIDE_S = 1.5
SHARE = 0.95


@dataclass(frozen=True)
class Server:
    """``slots`` answers at a time, of ``shortest`` to ``longest`` tokens; TTFT limit in s; about its capacity per s."""

    slots: int
    ttft_s: float
    itl_s: float
    shortest: int
    longest: int
    limit_s: float
    about: float

    def requests(self, load: float, count: int, rng: np.random.Generator) -> tuple[Floats, Ints, Floats]:
        """When requests arrive and start (s), and their tokens; at a load of 0 one at a time."""
        tokens = rng.integers(self.shortest, self.longest + 1, count)
        lasting = self.ttft_s + self.itl_s * (tokens - 1)
        if not load:
            arrivals = np.concatenate([[0.0], np.cumsum(lasting)[:-1]])
            return arrivals, tokens, arrivals
        arrivals = np.cumsum(rng.exponential(1 / load, count))
        free, starts = [0.0] * self.slots, np.empty(count)
        for at, (arrival, seconds) in enumerate(zip(arrivals.tolist(), lasting.tolist(), strict=True)):
            starts[at] = max(arrival, free[0])
            heapq.heapreplace(free, starts[at] + seconds)
        return arrivals, tokens, starts

    def capacity(self) -> float:
        """The load at which 95 % of the requests of long runs keep the limit."""
        loads, logits = self.about * np.exp(np.linspace(-0.03, 0.03, 7)), []
        for at, load in enumerate(loads):
            arrivals, _, starts = self.requests(float(load), 400_000, np.random.default_rng([5, at]))
            met = float(np.mean((starts + self.ttft_s - arrivals)[1000:] <= self.limit_s))
            logits.append(math.log(met / (1 - met)))
        slope, level = np.polyfit(np.log(loads), logits, 1)
        return float(math.exp((math.log(SHARE / (1 - SHARE)) - level) / slope))


SERVERS = {
    "eight slots, 0.37 s, TTFT 0.3 s": Server(8, 0.05, 0.01, 16, 48, 0.3, 17.5),
    "eight slots, 0.37 s, TTFT 0.1 s": Server(8, 0.05, 0.01, 16, 48, 0.1, 12.4),
    "one slot, 0.07 s, TTFT 0.3 s": Server(1, 0.02, 0.01, 4, 8, 0.3, 9.74),
    "sixteen slots, 3.2 s, TTFT 1 s": Server(16, 0.2, 0.03, 50, 150, 1.0, 3.85),
}


@dataclass
class Prober:
    """Stands for the prober of a search; ``wall_s``: how long its probes would have taken."""

    server: Server
    trial: int
    wall_s: float = 0.0
    first: Any = field(default=None)

    def alone(self, sessions: int) -> Any:
        """Requests one at a time."""
        self.first = self._run(0.0, sessions, 99_999)
        return self.first

    def probe(self, load: float, sessions: int, seed: int) -> Any:
        """Requests at a load per s."""
        return self._run(load, sessions, seed)

    def _run(self, load: float, count: int, seed: int) -> Any:
        rng = np.random.default_rng([self.trial, seed, int(load * 1e6)])
        arrivals, tokens, starts = self.server.requests(load, count, rng)
        table = as_table(arrivals, tokens, starts + self.server.ttft_s, self.server.itl_s)
        self.wall_s += float((starts + self.server.ttft_s + self.server.itl_s * tokens).max()) + BESIDE_S
        phases = () if load else (ClosedPhase("all", count, 1),)
        manifest = SimpleNamespace(valid=True, phases=phases)
        tables = ProbeTables(table, STEPS.empty_table(), phases, seed)
        return SimpleNamespace(tables=tables, requests=table, manifest=manifest, path="")


def as_table(arrivals: Floats, tokens: Ints, first: Floats, itl_s: float) -> pa.Table:
    """The requests table of a run; times in s."""
    count, last = len(arrivals), first + itl_s * (tokens - 1)
    intended, begun, ended = (np.round(1e9 * times).astype(np.int64) for times in (arrivals, first, last))
    gaps = pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), pa.array(ended - begun))
    known: dict[str, Any] = {
        "request_id": np.arange(count), "session": np.arange(count), "turn": np.zeros(count, int),
        "phase": ["all"] * count, "input_tokens": np.full(count, 20), "output_tokens": tokens, "status": ["ok"] * count,
        "intended_ns": intended, "sent_ns": intended, "first_token_ns": begun, "last_token_ns": ended, "end_ns": ended,
        "itl_ns": gaps, "bundled_tokens": [True] * count,
    }  # fmt: skip
    columns = [
        pa.array(known[one.name]).cast(one.type) if one.name in known else pa.nulls(count, one.type) for one in REQUESTS
    ]
    return pa.Table.from_arrays(columns, schema=REQUESTS)


def searched(server: Server, trial: int) -> list[float]:
    """Capacity, low and high of one search with the defaults for a server, its probes, and how long it took (s)."""
    limits = parse_limits([f"ttft:{1000 * server.limit_s:g}"], SHARE)
    config = SearchConfig(
        limits, False, command._FEWEST["real"], command._PROBE_S["real"], 0.02, 0, real_time=True,
        longest=command._LONGEST["real"], coarse=command._COARSE["real"],
    )  # fmt: skip
    prober: Any = Prober(server, trial)

    def read(run: Any, load: float, limits: LatencyLimits, per_open: int = FEWEST_PER_OPEN) -> ProbeReading:
        return read_measured(run.tables, load, limits, per_open)

    loaded = SimpleNamespace(load=lambda _path: prober.first)
    with mock.patch.object(drive, "read_probe", read), mock.patch.object(drive, "Run", loaded):
        outcome = drive.search_capacity(config, prober, SearchBudget(40))
    found = outcome.estimate
    return [found.capacity or math.nan, found.low, found.high, float(len(outcome.readings)), prober.wall_s]


def main() -> None:
    """Print one row per server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=60)
    trials = parser.parse_args().trials
    print("| server | capacity | hold it | standard deviation | half interval | probes | minutes |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for name, server in SERVERS.items():
        truth = server.capacity()
        capacity, low, high, probes, wall_s = np.array([searched(server, 1 + trial) for trial in range(trials)]).T
        held = int(((low <= truth) & (truth <= high)).sum())
        print(
            f"| {name} | {truth:.4g}/s | {held} of {trials} | {100 * np.nanstd(capacity) / truth:.1f} % | "
            f"{50 * np.median(high - low) / truth:.1f} % | {probes.mean():.0f} | {np.median(wall_s) / 60:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
