"""``ebbench capacity`` against brute force: python tests/benchmarks/bench_capacity.py [SETTING ...]

Brute force measures rates 1.5 % apart over +-18 % around the search's answer, four seeds each with twice the search's
sessions, and takes the crossing of a curve that never rises, by linear interpolation. Prints both answers and how many
requests each simulated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SETTINGS = {
    "TTFT limits v1": "sharegpt --source profile --device h200 --policy v1 --max-num-seqs 256 --goodput ttft:120",
    "TPOT limits eb": "decode-heavy --device rtx-pro-6000 --policy eb --max-num-seqs 256 --goodput tpot:30",
    "both limit ebplus": "balanced --device l40s --policy ebplus --max-num-seqs 128 --goodput ttft:3000 tpot:60",
    "percentile, long prompts": "longbench --source profile --device h200 --policy v1 --goodput ttft:p90:3000",
}
SEEDS, STEP, SPAN = 4, 0.015, 0.18


def search(options: list[str], folder: Path) -> tuple[dict[str, object], int]:
    """The command's answer, and the requests of its probes."""
    command = [sys.executable, "-m", "ebbench", "capacity", *options, "--engine", "sim", "--model", "qwen3-8b"]
    done = subprocess.run([*command, "-q", "--json", "-o", str(folder)], capture_output=True, text=True, check=True)
    (answer,) = json.loads(done.stdout)
    return answer, sum(planned(Path(run)) for run in answer["run_dirs"])


def planned(run: Path) -> int:
    """Requests of a stored run."""
    return int(json.loads((run / "manifest.json").read_text())["rows"]["requests"])


def brute_force(options: list[str], answer: dict[str, object], sessions: int) -> tuple[float, int]:
    """The load at which a dense sweep crosses the required share, and the requests it simulated."""
    from ebbench.capacity.limits import parse_limits
    from ebbench.capacity.probe import read_probe
    from ebbench.records.run import Run

    start = options.index("--goodput")
    limits = parse_limits(options[start + 1 :], 0.95)
    middle = float(answer["capacity_requests_per_s"]) / float(answer["requests_per_session"])  # type: ignore[arg-type]
    loads = middle * np.exp(np.arange(-SPAN, SPAN + STEP / 2, STEP))
    shares, total = [], 0
    for load in loads:
        met = counted = 0
        for seed in range(100, 100 + SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                where = Path(folder) / "run"
                command = [sys.executable, "-m", "ebbench", "run", *options[:start], "--engine", "sim"]
                command += ["--model", "qwen3-8b", "--request-rate", f"{load:.6g}", "--seed", str(seed)]
                command += ["--num-prompts", str(sessions), "-q", "--json", "-o", str(where)]
                subprocess.run(command, capture_output=True, check=True)
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
        with tempfile.TemporaryDirectory() as folder:
            answer, searched = search(options, Path(folder) / "search")
            largest = max(planned(Path(str(run))) for run in answer["run_dirs"])  # type: ignore[attr-defined]
        truth, swept = brute_force(options, answer, 2 * largest)
        found = float(answer["capacity_requests_per_s"]) / float(answer["requests_per_session"])  # type: ignore[arg-type]
        print(
            f"{name}: search {found:.3f}/s ({answer['low']:.3f} to {answer['high']:.3f}, {answer['limited_by']}, "
            f"{answer['probes']} probes, {searched:,} requests), brute force {truth:.3f}/s ({swept:,} requests): "
            f"{100 * (found / truth - 1):+.1f} %, {searched / swept:.1%} of the requests",
            flush=True,
        )


if __name__ == "__main__":
    main()
