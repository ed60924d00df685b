"""vLLM's own scheduler tests: on vLLM as it is, then with the plugin under each policy.

    make vllm-tests
    python -m tests.vllm.upstream [--policy POLICY ...] [--files NAME ...] [--folder DIR]

Under policy v1 every test must have the same result as on vLLM as it is. Where a test has another result under another
policy, tests/vllm/differences.toml says why; any other difference is an error. Exit code 0: as expected, or skipped
because the tests cannot be fetched; 1: an unexpected difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.upstream import compare, models
from tests.vllm.upstream.fetch import FetchError, fetch

HERE = Path(__file__).parent
FILES = (
    "test_scheduler.py", "test_async_scheduler.py", "test_prefix_caching.py", "test_priority_scheduler_random.py",
    "test_scheduler_e2e.py", "test_reset_prefix_cache_e2e.py", "test_deferred_block_free.py", "test_prefix_replay.py",
    "test_priority_preemption_bug.py", "test_swa_inflight_window_free.py", "test_worker_slot_overflow.py",
)  # fmt: skip
POLICIES = (
    "v1", "v0", "deferred:k=2", "eb:theta=0.3", "ebplus", "marginal", "cadence:every=4", "delayer", "ppas:cap=64",
    "batchwait:iters=4,ratio=0.5", "slochunk:tpot=0.01,least=16",
)  # fmt: skip
LONGEST_S = 1800.0
PYTHON_CODE = "EBBENCH_VLLM_PYTHON_CODE"


def installed_version() -> str:
    """vLLM's, whatever its build is called."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def python_code() -> list[str]:
    """The folder of vLLM's Python code if it is not the installed one (see :mod:`tests.vllm.upstream.next`)."""
    return [folder] if (folder := os.environ.get(PYTHON_CODE)) else []


def run(root: Path, redirect: Path, policy: str, files: tuple[str, ...]) -> dict[str, compare.Outcome]:
    """Outcomes of the tests in these files under the policy; empty: on vLLM as it is."""
    name = policy.partition(":")[0] or "stock"
    outcomes = root / f"{name}.jsonl"
    outcomes.unlink(missing_ok=True)
    environment = os.environ | {
        # vLLM's package of tests is called tests, as ours: Python finds it in the working directory.
        "PYTHONPATH": os.pathsep.join([*python_code(), str(HERE), str(HERE.parents[2] / "patches")]),
        "UPSTREAM_POLICY": policy, "UPSTREAM_OUTCOMES": str(outcomes),
        "VLLM_MODEL_REDIRECT_PATH": str(redirect), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    tests = [f"tests/v1/core/{file}" for file in files if (root / "tests/v1/core" / file).exists()]
    command = [
        sys.executable, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", ".", "--tb=native", "-rf",
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "in_place", *tests,
    ]  # fmt: skip
    log = root / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST_S, check=False
        )
    if done.returncode not in (0, 1) or not outcomes.exists():
        raise RuntimeError(f"pytest ended with exit code {done.returncode}: see {log}")
    return compare.read_outcomes(outcomes)


def show(policy: str, found: compare.Comparison) -> None:
    """Print one line per policy, and one per unexpected difference."""
    print(
        f"{policy}: {found.passed} passed, {found.skipped} skipped, {found.failed_on_both} fail on stock, too, "
        f"{len(found.expected)} differ as listed, {len(found.unexpected)} otherwise",
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
    parser.add_argument("--files", nargs="+", help="Of vLLM's tests/v1/core. Default: those that use a scheduler.")
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix) / "vllm-tests", help="Where they are kept.")
    options = parser.parse_args(words)
    version, files = installed_version(), tuple(options.files or FILES)
    try:
        root = fetch(version, options.folder)
    except FetchError as reason:
        print(f"SKIPPED: vLLM's tests cannot be fetched: {reason}")
        return 0
    expected = compare.read_expected(HERE.parent / "differences.toml")
    redirect = models.build(root / "models")
    stock = run(root, redirect, "", files)
    counts = [sum(one.outcome == kind for one in stock.values()) for kind in ("passed", "failed", "skipped")]
    print(f"stock vLLM {version}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped", flush=True)
    good = counts[0] > 0
    for policy in options.policy or POLICIES:
        ours = run(root, redirect, policy, files)
        found = compare.compare(stock, ours, expected, policy.partition(":")[0], version)
        show(policy, found)
        good = good and found.good
    print(f"logs and outcomes: {root}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
