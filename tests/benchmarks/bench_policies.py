"""Every policy over the whole matrix of settings, devices and models: which is best where, and by how much.

    python -m tests.benchmarks.bench_policies [--traces FOLDER] [--results reports/policies.json] [--jobs 2]

Settings: closed loop at three concurrencies, four data sets, two shifts, a ramp, two kinds of bursts, long prompts, two
traces (those need the trace files), and the four-GPU settings of the EB paper's table 20. Open loops run at a share of
v1's measured saturation. Every policy gets the same plan. Where the best policy leads by less than 1 %, the contenders
run on two further seeds. Outcomes are stored after each cell, so a stopped run continues, and ``--again POLICY`` runs
one policy anew. ``python -m tests.benchmarks.policy_report`` writes the report from them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.policy_cells import MARGINAL, OWN, SLO, Job, all_jobs, run_job
from tests.benchmarks.policy_results import Outcomes, Results, best, rivals

RESULTS = Path("reports/policies.json")
FURTHER_SEEDS = (1, 2)
CLOSE = 0.01
"""A lead below this share is decided by further seeds."""


def contenders(found: Outcomes) -> list[str]:
    """Policies to run on further seeds: none if the best rival and ``marginal`` are clearly apart."""
    others = rivals(found)
    rival, figure = best(found, "tokens_per_s", others), "tokens_per_s"
    own = best(found, figure, [name for name in OWN if name != SLO])
    if abs(getattr(found[own], figure) / getattr(found[rival], figure) - 1.0) >= CLOSE:
        return []
    names = ["v1", MARGINAL, own, rival]
    if found["v1"].attained < 1.0 - CLOSE:
        names += [SLO, best(found, "attained", others)]
    return list(dict.fromkeys(names))


def run_all(jobs: Sequence[Job], results: Results, workers: int) -> None:
    """Run what is missing, and store it."""
    due = [
        replace(job, policies=missing) for job in jobs if (missing := results.missing(job.cell, job.seed, job.policies))
    ]
    print(f"{len(jobs) - len(due)} of {len(jobs)} runs are stored already", flush=True)
    with ProcessPoolExecutor(workers) as pool:
        for job, found in zip(due, pool.map(run_job, due), strict=True):
            results.add(job.cell, job.seed, found or {})
            print(job.cell, job.seed, len(found or {}), flush=True)


def main() -> None:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with the Azure and Mooncake trace files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="append", default=[], help="a policy to run anew; repeat for several")
    arguments = parser.parse_args()
    begun_s, results = time.perf_counter(), Results(arguments.results)
    results.forget(arguments.again)
    first = all_jobs(arguments.traces)
    run_all(first, results, arguments.jobs)
    found = dict(results.cells())
    close = [(job, contenders(found[job.cell])) for job in first if job.cell in found and job.setting.seeded]
    further = [replace(job, seed=seed, policies=names) for seed in FURTHER_SEEDS for job, names in close if names]
    run_all(further, results, arguments.jobs)
    print(
        f"{len(found)} cells, {len(further)} further runs of seeds, {time.perf_counter() - begun_s:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
