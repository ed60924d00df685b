"""``ebbench capacity`` against brute force: python tests/benchmarks/bench_capacity.py [SETTING ...]

Brute force measures rates 1.5 % apart within 18 % of the search's result, four seeds each, with twice the search's
sessions, and interpolates the crossing of a non-increasing curve linearly. Prints both results and the number of
requests that each simulated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from ebbench.capacity.limits import LatencyLimits, parse_limits
from ebbench.capacity.probe import read_probe
from ebbench.cli.main import app
from ebbench.records.run import Run

SETTINGS = {
    "TTFT limits v1": "sharegpt --source profile --device h200 --policy v1 --max-num-seqs 256 --goodput ttft:120",
    "TPOT limits eb": "decode-heavy --device rtx-pro-6000 --policy eb --max-num-seqs 256 --goodput tpot:30",
    "both limit ebplus": "balanced --device l40s --policy ebplus --max-num-seqs 128 --goodput ttft:3000 tpot:60",
    "percentile, long prompts": "longbench --source profile --device h200 --policy v1 --goodput ttft:p90:3000",
}
SEEDS, STEP, SPAN = 4, 0.015, 0.18


def ebbench(*arguments: str) -> str:
    """Standard output of an ``ebbench`` command, carried out in this process."""
    done = CliRunner().invoke(app, [*arguments, "--engine", "sim", "--model", "qwen3-8b", "-q", "--json"])
    if done.exit_code:
        raise RuntimeError(f"ebbench {' '.join(arguments)}: exit code {done.exit_code}: {done.output}")
    return done.stdout


def planned(run: Path) -> int:
    """Requests of a stored run."""
    return int(json.loads((run / "manifest.json").read_text())["rows"]["requests"])


def brute_force(options: list[str], limits: LatencyLimits, middle: float, sessions: int) -> tuple[float, int]:
    """The load around ``middle`` at which a dense sweep crosses the required share, and the requests it simulated."""
    loads = middle * np.exp(np.arange(-SPAN, SPAN + STEP / 2, STEP))
    shares, total = [], 0
    for load in loads:
        met = counted = 0
        for seed in range(100, 100 + SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                where = Path(folder) / "run"
                rate = ["--request-rate", f"{load:.6g}", "--num-prompts", str(sessions), "--seed", str(seed)]
                ebbench("run", *options, *rate, "-o", str(where))
                count = read_probe(Run.load(where), float(load), limits).probe.counts[0]
                met, counted, total = met + count.met, counted + count.counted, total + planned(where)
        shares.append(met / counted)
    falling = np.minimum.accumulate(shares)
    target = limits.requirements()[0].share
    return float(np.interp(-target, -falling, loads)), total


def main() -> None:
    """Print one line per setting."""
    for name in sys.argv[1:] or SETTINGS:
        options = SETTINGS[name].split()
        start = options.index("--goodput")
        limits = parse_limits(options[start + 1 :], 0.95)
        with tempfile.TemporaryDirectory() as folder:
            (answer,) = json.loads(ebbench("capacity", *options, "-o", str(Path(folder) / "search")))
            sizes = [planned(Path(run)) for run in answer["run_dirs"]]
        found = answer["capacity_requests_per_s"] / answer["requests_per_session"]
        truth, swept = brute_force(options[:start], limits, found, 2 * max(sizes))
        print(
            f"{name}: search {found:.3f}/s ({answer['low']:.3f} to {answer['high']:.3f}, {answer['limited_by']}, "
            f"{len(sizes)} probes, {sum(sizes):,} requests), brute force {truth:.3f}/s ({swept:,} requests): "
            f"{100 * (found / truth - 1):+.1f} %, {sum(sizes) / swept:.1%} of the requests",
            flush=True,
        )


if __name__ == "__main__":
    main()
