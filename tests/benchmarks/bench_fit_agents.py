"""How many requests of a session are open at once: a replayed log with sub-agents against the workload fitted to it.

    python tests/benchmarks/bench_fit_agents.py              # some 4 CPU minutes; the table of reports/fit.md

The logs are made up: two are simulated runs with ``--sub-agents``, one has sub-agents of random number and length, of
which some go on beside the session.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from ebbench.workloads.fit_log import as_toml, fit_workload
from ebbench.workloads.trace import read_trace
from vllm_eb.policy import parse_policy

SEEDS, SESSIONS = 3, 150
SIMULATED: dict[str, dict[str, object]] = {
    "3 sub-agents of 2 requests": {
        "sub_agents": "count=3,share=0.5,turns=2,input=1500,output=300",
        "think_time": "exponential:mean=5",
    },
    "5 sub-agents of 4 requests": {
        "sub_agents": "count=5,share=0.3,turns=4,input=800,output=150",
        "think_time": "lognormal:mean=8,std=12",
        "tool_time": "exponential:mean=1",
        "tool_share": 0.7,
    },
}
Row = tuple[float, float, int, int, int]


def simulate(workload: str, **options: object) -> pa.Table:
    """The table of requests of a run under vLLM's own scheduler."""
    plan = build_plan(workload, **options)  # type: ignore[arg-type]
    limits = EngineOptions(max_model_len=131_072)
    result = SimEngine(figures_only=True).run(plan, parse_policy("v1"), load_device("h200", "qwen3-8b"), limits)
    assert not result.invalid, result.invalid
    return result.requests


def described(requests: pa.Table) -> str:
    """Mean number of open requests of a session while any is open, share of that time with three, mean prompt."""
    session, start, end = (requests[name].to_numpy() for name in ("session", "intended_ns", "end_ns"))
    lasted = np.zeros(64)
    for one in np.unique(session):
        rows = session == one
        moments = np.concatenate([start[rows], end[rows]])
        order = np.argsort(moments, kind="stable")
        count = np.cumsum(np.repeat([1, -1], rows.sum())[order])[:-1]
        lasted += np.bincount(np.minimum(count, 63), np.diff(moments[order]), 64)
    shares = lasted[1:] / lasted[1:].sum()
    mean = float(shares @ np.arange(1, 64))
    prompts = requests["input_tokens"].to_numpy().mean()
    return f"{mean:.2f} open, {shares[2:].sum():.1%} three or more, prompts {prompts:,.0f}"


def write(path: Path, rows: Iterable[Row]) -> None:
    """A log of start, end, session, prompt and output tokens."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["start_time", "end_time", "session_id", "input_tokens", "output_tokens"])
        for start, end, *rest in rows:
            out.writerow([f"{1.7e9 + start:.6f}", f"{1.7e9 + end:.6f}", *rest])


def irregular() -> list[Row]:
    """Sessions with forks of one to seven sub-agents of one to five requests; three of ten forks are not joined."""
    rng, rows = np.random.default_rng(5), list[Row]()
    for session in range(SESSIONS):
        now, history = rng.uniform(0, 600), int(rng.lognormal(7, 0.6))
        for _ in range(rng.integers(3, 12)):
            now, history = _request(rng, rows, session, now, (history, 4.8, 0.7), 5.0)
            if rng.random() < 0.35:
                ends, begin = [], now + rng.exponential(0.2)
                for _ in range(min(7, rng.geometric(0.35))):
                    at, own = begin, int(rng.lognormal(6.5, 0.4))
                    for _ in range(rng.integers(1, 6)):
                        at, own = _request(rng, rows, session, at, (own, 4.3, 0.6), 5.0)
                        at += rng.exponential(0.7)
                    ends.append(at)
                    begin += rng.exponential(0.3)
                if rng.random() < 0.7:
                    now, history = max(ends), history + 200 * len(ends)
            now += rng.exponential(2.5)
    return sorted(rows)


def _request(
    rng: np.random.Generator, rows: list[Row], session: int, at: float, shape: tuple[int, float, float], added: float
) -> tuple[float, int]:
    """Append a request; returns its end and the prompt of the next one. ``shape``: prompt, lognormal output."""
    history, log_mean, log_std = shape
    output = int(rng.lognormal(log_mean, log_std)) + 1
    end = at + 0.3 + output * 0.02 * rng.lognormal(0, 0.2)
    rows.append((at, end, session, history, output))
    return end, history + output + int(rng.lognormal(added, 0.7))


def compare(name: str, path: Path) -> None:
    """Print the replay of a log and the workload fitted to it."""
    replay = simulate(f"log:{path}")
    print(f"{name} ({len(replay):,} requests): {described(replay)}", flush=True)
    toml = path.with_suffix(".toml")
    toml.write_text(as_toml(fit_workload(read_trace(path), "fitted"), path.name), encoding="utf-8")
    for seed in range(SEEDS):
        print(f"  fitted, seed {seed}: {described(simulate(str(toml), seed=seed))}", flush=True)


def main() -> None:
    """All logs, the simulated ones at two rates."""
    columns = ("intended_ns", "end_ns", "session", "input_tokens", "output_tokens")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agents.csv"
        for rate in (0.3, 1.0):
            for name, options in SIMULATED.items():
                run = simulate(
                    "wildchat", scenario="poisson", source="profile", num_prompts=SESSIONS, request_rate=rate, **options
                )
                rows = zip(*(run[column].to_pylist() for column in columns), strict=True)
                write(path, ((start / 1e9, end / 1e9, *rest) for start, end, *rest in rows))
                compare(f"{name}, {rate:g} sessions/s", path)
        write(path, irregular())
        compare("1 to 7 sub-agents of 1 to 5 requests", path)


if __name__ == "__main__":
    main()
