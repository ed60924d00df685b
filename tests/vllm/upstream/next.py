"""The plugin on the Python code of a vLLM version that has no CPU build yet.

    make vllm-next
    python -m tests.vllm.upstream.next [--version 0.33.0] [--folder DIR]

The scheduler, the KV cache manager and the engine core are Python; the emulated device computes nothing. So the tests
below run on the Python code of the source distribution with the packages of the installed version, and vLLM's own
scheduler tests do, as in ``make vllm-tests``. Kernels, workers and servers are not covered. Exit code 0: as expected,
or skipped because the distribution cannot be fetched; 1: a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.upstream.__main__ import PYTHON_CODE
from tests.vllm.upstream.fetch import FetchError, fetch_python_code

VERSION = "0.33.0"
ROOT = Path(__file__).parents[3]
OURS = (
    "test_cadence_native.py", "test_emulated.py", "test_sim_equals_emulated.py", "test_sessions_equal.py",
    "test_queue_limits.py", "test_empty_steps.py", "test_nothing_lost.py", "test_unusual_requests.py",
    "test_priorities.py", "test_fuzz_scheduler.py",
)  # fmt: skip
THEIRS = (
    "test_scheduler.py", "test_async_scheduler.py", "test_prefix_caching.py", "test_priority_scheduler_random.py",
    "test_priority_preemption_bug.py", "test_deferred_block_free.py",
)  # fmt: skip
POLICIES = ("v1", "eb:theta=0.3", "marginal")


def main(words: list[str] | None = None) -> int:
    """Fetch, run our tests, run vLLM's."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.upstream.next", description=__doc__.splitlines()[0])
    parser.add_argument("--version", default=VERSION)
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix) / "vllm-tests", help="Where it is kept.")
    options = parser.parse_args(words)
    try:
        code = fetch_python_code(options.version, options.folder)
    except FetchError as reason:
        print(f"SKIPPED: vLLM {options.version} cannot be fetched: {reason}")
        return 0
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(code), str(ROOT), str(ROOT / "patches")]), PYTHON_CODE: str(code),
    }  # fmt: skip
    ours = [str(ROOT / "tests/vllm" / name) for name in OURS]
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    theirs = ["--folder", str(options.folder), *policies, "--files", *THEIRS]
    commands = (["pytest", "-p", "no:xdist", *ours], ["tests.vllm.upstream", *theirs])
    codes = [subprocess.call([sys.executable, "-m", *words], cwd=ROOT, env=environment) for words in commands]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
