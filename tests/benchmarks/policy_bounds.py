"""The throughput that no scheduler passes, in every cell of the policy matrix.

python -m tests.benchmarks.policy_bounds [--traces FOLDER] [--output reports/policies-bounds.json] [--jobs 2]

Bounds that the output has already are kept: name a new file to compute all. What the search finds depends on the
processor's arithmetic: two machines gave bounds that differ by up to 1.6 %.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow.compute as pc

from ebbench.records.files import write_bytes
from tests.benchmarks.policy_cells import Job, all_jobs, device_of, plan_of
from tests.benchmarks.throughput_bound import bound

BOUNDS = Path("reports/policies-bounds.json")
UNITS = 4


def bound_of(job: Job) -> tuple[float, str] | None:
    """The bound in tokens/s (input and output) and its reason; None where the model does not fit."""
    device = device_of(job)
    if device is None:
        return None
    plan = plan_of(job, device)
    units = UNITS if job.setting.topology else 1
    found = bound(plan, device.cost, device.kv_capacity_tokens, job.setting.options, units)
    tokens = pc.sum(plan.table["input_tokens"]).as_py() + pc.sum(plan.table["output_tokens"]).as_py()
    return tokens / found.seconds, found.reason


def main() -> None:
    """Compute all bounds; those already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with the Azure and Mooncake trace files")
    parser.add_argument("--output", type=Path, default=BOUNDS)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    known = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    jobs = all_jobs(arguments.traces)
    due = [job for job in jobs if job.cell not in known]
    print(f"{len(jobs) - len(due)} of {len(jobs)} bounds are in {arguments.output} already", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for job, found in zip(due, pool.map(bound_of, due), strict=True):
            if found is None:
                continue
            known[job.cell] = {"tokens_per_s": float(f"{found[0]:.6g}"), "reason": found[1]}
            write_bytes(json.dumps(known, indent=1, sort_keys=True).encode() + b"\n", arguments.output)
            print(job.cell, known[job.cell], flush=True)


if __name__ == "__main__":
    main()
