"""How often the interval of ``ebbench capacity`` holds the capacity, in simulation.

``python -m tests.benchmarks.bench_capacity_coverage [--trials 40] [SETTING]`` repeats the search on one setting, a
small one or one of bench_capacity, with seeds of their own, and measures the truth by brute force: rates 2 % apart
around the median of the searches, ``--sweeps`` runs each, 32 times the sessions of the search's shortest probe. Each
sweep gives one crossing; their spread is the error of the truth. Prints the share of the intervals that hold the
truth, the searches' own spread beside the half interval that they state, and their bias.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from ebbench.sizing.limits import parse_limits
from tests.benchmarks.bench_capacity import SETTINGS as LARGE
from tests.benchmarks.bench_capacity import STEP, crossing, ebbench, measured_counts

SHORT_RUNS = "short runs"
SETTINGS = {
    SHORT_RUNS: "balanced --input-len 512 --output-len 8 --device h200 --policy v1 --max-num-seqs 64 "
    "--num-prompts 1000 --precision 0.04 --goodput ttft:100"
} | LARGE
SPAN, LONGER, FEWEST = 0.06, 32, 4000
FIRST_SEED = 1_000_000


def searches(options: list[str], trials: int) -> np.ndarray:
    """One row per search: capacity, low and high in sessions/s."""
    rows = []
    for trial in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            words = [*options, "--seed", str(1000 * trial), "-o", str(Path(folder) / "search")]
            (found,) = json.loads(ebbench("capacity", *words))
        per_session = found["requests_per_session"]
        rows.append([found["capacity_requests_per_s"] / per_session, found["low"], found["high"]])
        print(f"search {trial}: {rows[-1][0]:.4g} ({rows[-1][1]:.4g} to {rows[-1][2]:.4g})", flush=True)
    return np.array(rows)


def truths(options: list[str], limits_of: list[str], middle: float, sweeps: int) -> np.ndarray:
    """The crossing of each sweep, in sessions/s; ``options`` without limits."""
    sessions = LONGER * (int(options[options.index("--num-prompts") + 1]) if "--num-prompts" in options else FEWEST)
    searching = ("--num-prompts", "--precision")
    options = [
        word for before, word in zip(["", *options], options, strict=False) if not {before, word} & set(searching)
    ]
    limits, seed = parse_limits(limits_of, 0.95), FIRST_SEED
    loads = [float(load) for load in middle * np.exp(np.arange(-SPAN, SPAN + STEP / 2, STEP))]
    share, found = limits.requirements()[0].share, []
    for sweep in range(sweeps):
        counts = []
        for load in loads:
            counts.append(measured_counts(options, limits, load, sessions, seed)[0])
            seed += 1
        found.append(crossing(loads, counts, share))
        print(f"sweep {sweep}: {found[-1]:.4g}", flush=True)
    return np.array(found)


def main() -> None:
    """Print the searches, the sweeps, and the coverage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", nargs="?", default=SHORT_RUNS, choices=list(SETTINGS))
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--sweeps", type=int, default=6)
    given = parser.parse_args()
    options = SETTINGS[given.setting].split()
    start = options.index("--goodput")
    found = searches(options, given.trials)
    capacity, low, high = found.T
    sweeps = truths(options[:start], options[start + 1 :], float(np.median(capacity)), given.sweeps)
    truth, error = float(sweeps.mean()), float(sweeps.std(ddof=1) / np.sqrt(len(sweeps)))
    held = (low <= truth) & (truth <= high)
    stated = float(np.median((high - low) / 2 / truth))
    print(
        f"{given.setting}: {held.sum()} of {given.trials} intervals hold {truth:.4g} (standard error "
        f"{100 * error / truth:.2f} %); bias of the searches {100 * (capacity.mean() / truth - 1):+.2f} %, their "
        f"standard deviation {100 * capacity.std(ddof=1) / truth:.2f} %, median half interval {100 * stated:.2f} %; "
        f"within 2 %: {(np.abs(capacity / truth - 1) <= 0.02).sum()}"
    )


if __name__ == "__main__":
    main()
