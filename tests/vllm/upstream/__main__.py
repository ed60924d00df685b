"""vLLM's own scheduler tests: on vLLM as it is, then with the plugin under each policy.

    make vllm-tests
    python -m tests.vllm.upstream [--policy POLICY ...] [--files NAME ...] [-k EXPRESSION] [--folder DIR] [--jobs N]

Each policy's tests run in a process of their own, one per CPU core at a time. Nine tenths of their time go to
test_priority_scheduler_random.py, which makes 20,000 steps under each of twelve settings.

Under policy v1 every test must have the same result as on vLLM as it is. Where a test has another result under another
policy, tests/vllm/differences.toml says why; any other difference is an error. Exit code 0: as expected, or skipped
because the tests cannot be fetched; 1: an unexpected difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.forked_command import ADDRESS, ForkedCommand
from tests.vllm.upstream import compare, models
from tests.vllm.upstream.fetch import FetchError, fetch

HERE = Path(__file__).parent
FILES = (
    "test_scheduler.py", "test_async_scheduler.py", "test_prefix_caching.py", "test_priority_scheduler_random.py",
    "test_scheduler_e2e.py", "test_reset_prefix_cache_e2e.py", "test_deferred_block_free.py", "test_prefix_replay.py",
    "test_priority_preemption_bug.py", "test_swa_inflight_window_free.py", "test_worker_slot_overflow.py",
    "test_mamba_align_chunk_split.py", "spec_decode/test_dynamic_sd.py",
)  # fmt: skip
"""Of tests/v1/core where no folder is named."""
POLICIES = (
    "v1", "v0", "deferred:k=2", "eb:theta=0.3", "ebplus", "marginal", "cadence:every=4", "delayer", "ppas:cap=64",
    "batchwait:iters=4,ratio=0.5", "slochunk:tpot=0.01,least=16",
)  # fmt: skip
STOCK = ""  # in place of a policy: vLLM's own scheduler
LONGEST_S = 4 * 3600.0  # of one policy: ten minutes on an idle core; more means that a test hangs
PYTHON_CODE = "EBBENCH_VLLM_PYTHON_CODE"
KEPT = Path(sys.prefix) / "vllm-tests"


def installed_version() -> str:
    """vLLM's, whatever its build is called."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def python_code() -> list[str]:
    """The folder of vLLM's Python code if it is not the installed one (see :mod:`tests.vllm.upstream.next`)."""
    return [folder] if (folder := os.environ.get(PYTHON_CODE)) else []


@dataclass(frozen=True)
class Result:
    """Outcomes of one policy's tests by test id, and how long they took."""

    outcomes: dict[str, compare.Outcome]
    took_s: float

    def count(self, outcome: str) -> int:
        """Number of tests with that outcome."""
        return sum(one.outcome == outcome for one in self.outcomes.values())


def run_each(
    root: Path, redirect: Path, policies: tuple[str, ...], files: tuple[str, ...], chosen: str, jobs: int
) -> Iterator[Result]:
    """Results under each policy, in their order; up to ``jobs`` policies run at the same time."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(lambda policy: run(root, redirect, policy, files, chosen), policies)
    finally:
        pool.shutdown(cancel_futures=True)


def run(root: Path, redirect: Path, policy: str, files: tuple[str, ...], chosen: str) -> Result:
    """Run the tests in these files under the policy, or STOCK. ``chosen``: an expression of pytest's ``-k``."""
    name = policy.partition(":")[0] or "stock"
    outcomes = root / f"{name}.jsonl"
    outcomes.unlink(missing_ok=True)
    environment = os.environ | {
        # vLLM's package of tests is called tests, as ours: Python finds it in the working directory.
        "PYTHONPATH": os.pathsep.join([*python_code(), str(HERE), str(HERE.parents[2] / "patches")]),
        "UPSTREAM_POLICY": policy, "UPSTREAM_OUTCOMES": str(outcomes),
        "VLLM_MODEL_REDIRECT_PATH": str(redirect), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    paths = [f"tests/v1/{file}" if "/" in file else f"tests/v1/core/{file}" for file in files]
    command = [
        sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", ".", "--tb=native", "-rf",
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "in_place", "-k", chosen,
        *[path for path in paths if (root / path).exists()],
    ]  # fmt: skip
    log = root / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as file:
        if ADDRESS in environment:  # with vLLM imported
            status = ForkedCommand(command, environment, file, file, root).wait(LONGEST_S)
        else:
            status = subprocess.run(
                command, cwd=root, env=environment, stdout=file, stderr=file, timeout=LONGEST_S, check=False
            ).returncode
    if status not in (0, 1) or not outcomes.exists():
        raise RuntimeError(f"pytest ended with exit code {status}: see {log}")
    return Result(compare.read_outcomes(outcomes), time.monotonic() - started)


def show(policy: str, found: compare.Comparison, took_s: float) -> None:
    """Print one line per policy, and one per unexpected difference."""
    print(
        f"{policy}: {found.passed} passed, {found.skipped} skipped, {found.failed_on_both} fail on stock, too, "
        f"{len(found.expected)} differ as listed, {len(found.unexpected)} otherwise ({took_s:.0f} s)",
        flush=True,
    )
    for test, what in found.unexpected.items():
        print(f"    {test}: {what}")
    for entry in found.unused:
        print(f"    listed, but no difference: {entry}")


def main(words: list[str] | None = None) -> int:
    """Fetch, run, compare, show."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", help="Default: one of each kind.")
    parser.add_argument(
        "--files", nargs="+", help="Of vLLM's tests/v1/core, or FOLDER/NAME. Default: those that use a scheduler."
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="As of pytest. Default: all tests.")
    parser.add_argument("--folder", type=Path, default=KEPT, help="Where they are kept.")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="Policies at a time. Default: one per CPU core."
    )
    options = parser.parse_args(words)
    version, files = installed_version(), tuple(options.files or FILES)
    try:
        root = fetch(version, options.folder)
    except FetchError as reason:
        print(f"SKIPPED: vLLM's tests cannot be fetched: {reason}")
        return 0
    expected = compare.read_expected(HERE.parent / "differences.toml")
    redirect = models.build(root / "models")
    policies = tuple(options.policy or POLICIES)
    results = run_each(root, redirect, (STOCK, *policies), files, options.k, options.jobs)
    stock = next(results)
    print(
        f"stock vLLM {version}: {stock.count(compare.PASSED)} passed, {stock.count(compare.FAILED)} failed, "
        f"{stock.count(compare.SKIPPED)} skipped ({stock.took_s:.0f} s)",
        flush=True,
    )
    good = stock.count(compare.PASSED) > 0
    for policy, ours in zip(policies, results, strict=True):
        found = compare.compare(stock.outcomes, ours.outcomes, expected, policy.partition(":")[0], version)
        show(policy, found, ours.took_s)
        good = good and found.good
    print(f"logs and outcomes: {root}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
