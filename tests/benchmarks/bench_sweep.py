"""CPU seconds of a sweep's cells, and an estimate for the whole sweep.

    python tests/benchmarks/bench_sweep.py [SPEC] [EVERY]

Runs every EVERY-th cell of SPEC (default: every 37th of the paper's grid) in this process as a worker does, and prints
CPU seconds per workload and the estimate for all cells. Other processes change CPU time less than wall time, but a busy
machine increases it too. Tests nothing.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path

from ebbench.runs.execute import Task, make
from ebbench.runs.key import directory_name
from ebbench.runs.pool import attempt
from ebbench.sweep.spec import load_sweep

GRID = Path(__file__).parents[2] / "reports" / "sweeps" / "paper-grid.toml"


def main() -> None:
    """Measure and print."""
    spec = Path(sys.argv[1]) if len(sys.argv) > 1 else GRID
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 37
    cells = load_sweep(spec).cells
    spent: dict[str, list[float]] = defaultdict(list)
    for cell in cells[every // 2 :: every]:
        start_s = time.process_time()
        outcome = attempt(make, Task(cell))
        if outcome.error:
            sys.exit(f"{directory_name(cell)}: {outcome.error}")
        spent[cell.plan.workload].append(time.process_time() - start_s)
    print(f"{'workload':14} {'cells':>6} {'CPU s/cell':>11} {'max':>7}")
    for workload, seconds in spent.items():
        print(f"{workload:14} {len(seconds):6} {sum(seconds) / len(seconds):11.2f} {max(seconds):7.2f}")
    every_s = [second for seconds in spent.values() for second in seconds]
    print(f"all {len(cells)} cells: about {sum(every_s) / len(every_s) * len(cells) / 60:.1f} CPU-minutes")


if __name__ == "__main__":
    main()
