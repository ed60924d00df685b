"""vLLM's own scheduler tests with the plugin in place of its scheduler: a part of them; all: ``make vllm-tests``."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.vllm.upstream import __main__ as command
from tests.vllm.upstream import compare
from tests.vllm.upstream.compare import FAILED, PASSED, Expected, Outcome
from tests.vllm.upstream.fetch import FetchError, fetch

TEST = "tests/v1/core/test_scheduler.py::test_schedule[True]"
BATCHES = Expected(("test_scheduler.py::test_schedule*",), ("v0", "eb"), "other batches", problem="assert 3 == 2")


def compared(stock: Outcome, ours: Outcome, kind: str = "v0") -> compare.Comparison:
    return compare.compare({TEST: stock}, {TEST: ours}, [BATCHES], kind, "0.32.0")


def test_a_listed_difference_is_expected_and_any_other_is_not() -> None:
    listed = compared(Outcome(PASSED), Outcome(FAILED, "AssertionError: assert 3 == 2"))
    assert listed.good
    assert listed.expected == {TEST: "other batches"}
    other = compared(Outcome(PASSED), Outcome(FAILED, "KeyError: 'r1'"))
    assert not other.good
    assert "KeyError" in other.unexpected[TEST]
    assert not compared(Outcome(PASSED), Outcome(FAILED, "AssertionError: assert 3 == 2"), kind="v1").good


def test_a_test_that_was_not_run_is_a_difference() -> None:
    found = compare.compare({TEST: Outcome(PASSED)}, {}, [], "v1", "0.32.0")
    assert list(found.unexpected) == [TEST]


def test_an_entry_that_nothing_needs_any_more_is_an_error() -> None:
    found = compared(Outcome(PASSED), Outcome(PASSED))
    assert not found.unexpected
    assert not found.good
    assert compared(Outcome(PASSED), Outcome(PASSED), kind="v1").good


def test_a_test_that_fails_on_stock_vllm_does_not_count_against_a_policy() -> None:
    found = compared(Outcome(FAILED, "OSError"), Outcome(FAILED, "OSError"), kind="v1")
    assert found.good
    assert found.failed_on_both == 1


def test_a_test_that_fails_at_its_end_has_failed(tmp_path: Path) -> None:
    rows = [{"test": TEST, "outcome": PASSED, "problem": ""}, {"test": TEST, "outcome": FAILED, "problem": "late"}]
    (tmp_path / "o.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert compare.read_outcomes(tmp_path / "o.jsonl") == {TEST: Outcome(FAILED, "late")}


def test_every_entry_of_the_file_says_why() -> None:
    entries = compare.read_expected(Path(__file__).with_name("differences.toml"))
    kinds = {policy.partition(":")[0] for policy in command.POLICIES}
    for entry in entries:
        assert entry.reason
        assert entry.tests
        assert set(entry.policies) <= kinds - {"v1"}


def test_policies_run_at_the_same_time_and_their_results_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)  # raises unless two runs are under way

    def run(root: Path, redirect: Path, policy: str, files: tuple[str, ...], chosen: str) -> command.Result:
        both.wait()
        return command.Result({policy: Outcome(PASSED)}, 1.0)

    monkeypatch.setattr(command, "run", run)
    policies = (command.STOCK, "v1", "v0", "eb")
    found = list(command.run_each(Path(), Path(), policies, (), "", jobs=2))
    assert [list(one.outcomes) for one in found] == [[policy] for policy in policies]


def test_after_a_run_that_could_not_be_made_no_other_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def run(root: Path, redirect: Path, policy: str, files: tuple[str, ...], chosen: str) -> command.Result:
        begun.append(policy)
        time.sleep(0.05)
        raise RuntimeError("pytest ended with exit code 4")

    monkeypatch.setattr(command, "run", run)
    policies = (command.STOCK, *(f"deferred:k={k}" for k in range(1, 40)))
    with pytest.raises(RuntimeError, match="exit code 4"):
        list(command.run_each(Path(), Path(), policies, (), "", jobs=1))
    assert len(begun) < 5


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_the_command_runs_vllms_tests_with_and_without_the_plugin(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, version = tmp_path_factory.mktemp("vllm-tests"), command.installed_version()
    try:
        kept = fetch(version, command.KEPT)
    except FetchError as reason:
        pytest.skip(str(reason))
    (folder / version).mkdir()
    (folder / version / "tests").symlink_to(kept / "tests")
    files = ["test_priority_preemption_bug.py", "test_swa_inflight_window_free.py"]
    code = command.main(["--folder", str(folder), "--files", *files, "--policy", "v1"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "0 failed" in shown.splitlines()[0]
    logs = [log.read_text(encoding="utf-8") for log in sorted(folder.glob("*/*.log"))]
    assert len(logs) == 2
    assert all(" passed" in log for log in logs)
