"""``ebbench capacity`` against brute force: python tests/benchmarks/bench_capacity.py [--report FILE] [SETTING ...]

Brute force measures rates 2 % apart within 14 % of the search's result, two runs each, with twice the sessions of the
search's longest probe, so that a bias of short runs shows. Every run has a seed of its own: arrivals of one seed are
too dense or too sparse by the same share at all rates, which would shift the whole curve. The share of requests within
the limits is made non-increasing over the rate by isotonic regression, and its crossing with the required share is
interpolated linearly: once over all runs, and once over each half, which shows the error of brute force itself. Prints
one row per setting.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.records.run import Run
from ebbench.sizing.estimate import MetCounts
from ebbench.sizing.limits import LatencyLimits, parse_limits
from ebbench.sizing.probe import read_probe

SETTINGS = {
    "TTFT limit": "sharegpt --source profile --device h200 --policy v1 --max-num-seqs 256 --goodput ttft:120",
    "TPOT limit": "balanced --input-len 256 --output-len 128 --device rtx-pro-6000 --policy eb --max-num-seqs 64 "
    "--goodput tpot:18",
    "both limits": "balanced --device l40s --policy ebplus --max-num-seqs 128 --goodput ttft:3000 tpot:60",
    "percentile, long prompts": "longbench --source profile --device h200 --policy v1 --goodput ttft:p90:3000",
}
RUNS, STEP, SPAN = 2, 0.02, 0.14
HEADER = (
    "| setting | options | limited by | search | 95 % interval | probes | its requests | brute force (each half) | "
    "its requests | difference | requests | CPU s |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def ebbench(*arguments: str) -> str:
    """Standard output of an ``ebbench`` command, carried out in this process."""
    done = CliRunner().invoke(app, [*arguments, "--engine", "sim", "--model", "qwen3-8b", "-q", "--json"])
    if done.exit_code:
        raise RuntimeError(f"ebbench {' '.join(arguments)}: exit code {done.exit_code}: {done.output}")
    return done.stdout


def planned(run: Path) -> int:
    """Requests of a stored run."""
    return int(json.loads((run / "manifest.json").read_text())["rows"]["requests"])


@dataclass(frozen=True)
class Truth:
    """Sessions/s at which brute force crosses the required share: over all runs, and each half; requests simulated."""

    rate: float
    halves: tuple[float, ...]
    requests: int


def crossing(loads: Sequence[float], counts: Sequence[MetCounts], share: float) -> float:
    """The load at which a non-increasing curve through the shares falls below ``share``; NaN if it does not."""
    shares = np.array([each.share for each in counts])
    weights = np.array([each.counted for each in counts], float)
    falling = isotonic_regression(shares, weights=weights, increasing=False).x
    return float(np.interp(-share, -falling, loads)) if falling[0] >= share > falling[-1] else float("nan")


def measured_counts(
    options: Sequence[str], limits: LatencyLimits, load: float, sessions: int, seed: int
) -> tuple[MetCounts, int]:
    """Requests within the first limit in one run at ``load`` sessions/s, and the requests simulated."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        rate = [
            "--scenario",
            "poisson",
            "--request-rate",
            f"{load:.6g}",
            "--num-prompts",
            str(sessions),
            "--seed",
            str(seed),
        ]
        ebbench("run", *options, *rate, "-o", str(where))
        return read_probe(Run.load(where), load, limits).probe.counts[0], planned(where)


def brute_force(options: Sequence[str], limits: LatencyLimits, middle: float, sessions: int, seed: int) -> Truth:
    """A dense sweep of rates around ``middle``, for one requirement; ``seed``: of the first run."""
    loads = [float(load) for load in middle * np.exp(np.arange(-SPAN, SPAN + STEP / 2, STEP))]
    halves: list[list[MetCounts]] = [[] for _ in range(RUNS)]
    requests = 0
    for load in loads:
        for half in halves:
            counts, planned_requests = measured_counts(options, limits, load, sessions, seed)
            half.append(counts)
            requests, seed = requests + planned_requests, seed + 1
    share = limits.requirements()[0].share
    together = [
        MetCounts(sum(each.met for each in at), sum(each.counted for each in at)) for at in zip(*halves, strict=True)
    ]
    return Truth(crossing(loads, together, share), tuple(crossing(loads, half, share) for half in halves), requests)


def row_of(name: str) -> str:
    """Search and sweep one setting; a row of the table."""
    options = SETTINGS[name].split()
    start, begun = options.index("--goodput"), time.process_time()
    limits = parse_limits(options[start + 1 :], 0.95)
    found, sizes = searched(options)
    rate = found["capacity_requests_per_s"] / found["requests_per_session"]
    truth = brute_force(options[:start], limits, rate, 2 * max(sizes), 1000 * (1 + list(SETTINGS).index(name)))
    halves = ", ".join(f"{each:.4g}" for each in truth.halves)
    return (
        f"| {name} | `{SETTINGS[name]}` | {found['limited_by']} | {rate:.4g} | {found['low']:.4g} to "
        f"{found['high']:.4g} | {len(sizes)} | {sum(sizes):,} | {truth.rate:.4g} ({halves}) | {truth.requests:,} | "
        f"{100 * (rate / truth.rate - 1):+.1f} % | {sum(sizes) / truth.requests:.1%} | "
        f"{time.process_time() - begun:.0f} |"
    )


def searched(options: Sequence[str]) -> tuple[dict[str, Any], list[int]]:
    """The search's result, and the requests of each of its probes."""
    with tempfile.TemporaryDirectory() as folder:
        (found,) = json.loads(ebbench("capacity", *options, "-o", str(Path(folder) / "search")))
        return found, [planned(Path(run)) for run in found["run_dirs"]]


def main() -> None:
    """Print the table, and write it to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), help=f"of: {', '.join(SETTINGS)}")
    parser.add_argument("--report", type=Path, help="also write the table to this file")
    given = parser.parse_args()
    lines = [HEADER]
    print(HEADER, flush=True)
    for name in given.settings:
        lines.append(row_of(name))
        print(lines[-1], flush=True)
    if given.report:
        given.report.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
