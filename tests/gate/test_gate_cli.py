"""`ebbench gate` and `compare` from the command line: exit codes, files, messages."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

import msgspec
import pytest

from ebbench.gate.interleave import abba
from ebbench.records import files
from ebbench.records.run import MANIFEST, Run
from ebbench.records.warnings import RunWarning
from tests.gate.gate_data import SMALL, invoke


@pytest.fixture(autouse=True)
def _no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_the_same_code_passes(measured: Path) -> None:
    done = invoke("gate", measured / "v1", measured / "copy")
    assert done.exit_code == 0, done.output
    assert "PASS" in done.stdout
    assert "Minimum detectable loss" in done.stdout


def test_a_worse_scheduler_fails(measured: Path) -> None:
    done = invoke("gate", measured / "v1", measured / "v0")
    assert done.exit_code == 1
    assert "FAIL: " in done.stdout
    assert "the sides differ in policy: v1 against v0" in " ".join(done.stdout.split())


def test_a_run_on_both_sides_is_refused(measured: Path, tmp_path: Path) -> None:
    """It never differs from itself: a wrong variable in a CI script would give a green gate."""
    shutil.copytree(measured / "v1", tmp_path / "moved")
    invoke("gate", "--save-baseline", tmp_path / "stored.parquet", measured / "v1")
    sides = [(measured / "v1", measured / "v1" / ".." / "v1"), (measured / "v1", tmp_path / "moved")]
    for baseline, candidate in [*sides, (tmp_path / "stored.parquet", measured / "v1")]:
        done = invoke("gate", baseline, candidate)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"6 runs are on both sides, {candidate / 'v1-seed0'} first: a run never differs" in done.stderr
    one = measured / "v1" / "v1-seed0"
    done = invoke("gate", one, one)
    assert (done.exit_code, f"{one} is on both sides: a run never" in done.stderr) == (2, True)


def test_sides_that_store_in_one_directory_are_refused_before_measuring(tmp_path: Path) -> None:
    commands = ("--baseline-command", "no-such-program {out}", "--candidate-command", "no-such-program {out}")
    done = invoke("gate", tmp_path / "a", tmp_path / "b" / ".." / "a", *commands)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "both sides would store their runs in" in done.stderr


def test_too_few_pairs_are_inconclusive(measured: Path) -> None:
    done = invoke("gate", measured / "v1" / "v1-seed0", measured / "copy" / "v1-seed0")
    assert done.exit_code == 5
    assert "1 pair where the test needs 6" in done.stdout


def test_json_is_one_object(measured: Path) -> None:
    done = invoke("gate", measured / "v1", measured / "v0", "--json")
    document = json.loads(done.stdout)
    assert (document["outcome"], document["exit_code"], len(document["pairs"])) == ("fail", 1, 6)
    assert {entry["figure"] for entry in document["figures"] if entry["gated"]} == {
        "output_throughput", "median_ttft_ms", "median_tpot_ms",
    }  # fmt: skip
    assert [pair["seed"] for pair in document["pairs"]] == list(range(6))


@pytest.mark.parametrize(("other", "failures", "errors"), [("copy", 0, 0), ("v0", 1, 0)])
def test_junit_counts_failures_and_errors(
    measured: Path, tmp_path: Path, other: str, failures: int, errors: int
) -> None:
    invoke("gate", measured / "v1", measured / other, "--junit", tmp_path / "gate.xml")
    suite = Xml.parse(tmp_path / "gate.xml").getroot().find("testsuite")
    assert suite is not None
    assert len(suite.findall("testcase")) == int(suite.attrib["tests"]) >= 3
    assert len(suite.findall("testcase/failure")) == int(suite.attrib["failures"])
    assert bool(int(suite.attrib["failures"])) == bool(failures)
    assert int(suite.attrib["errors"]) == errors


def test_junit_of_an_inconclusive_gate_has_no_case_that_passes(measured: Path, tmp_path: Path) -> None:
    one, other = (measured / side / "v1-seed0" for side in ("v1", "copy"))
    invoke("gate", one, other, "--junit", tmp_path / "gate.xml")
    cases = Xml.parse(tmp_path / "gate.xml").getroot().findall("testsuite/testcase")
    assert cases
    assert all(case.find("error") is not None for case in cases)


def test_the_github_summary_is_appended(measured: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    invoke("gate", measured / "v1", measured / "copy", env={"GITHUB_STEP_SUMMARY": str(summary)})
    text = summary.read_text()
    assert text.startswith("before\n## ✅ PASS")
    assert "| tokens/s |" in text


def test_hostile_names_cannot_break_xml_or_markdown(measured: Path, tmp_path: Path) -> None:
    hostile = "</testcase><script>alert(1)</script>|\x00`"
    for name in ("one", "two"):
        shutil.copytree(measured / "v1" / "v1-seed0", tmp_path / name)
        manifest = Run.load(tmp_path / name).manifest
        policy = "v1" if name == "one" else hostile
        _rewrite(tmp_path / name, msgspec.structs.replace(manifest, policy=policy, model=hostile))
    xml, summary = tmp_path / "gate.xml", tmp_path / "summary.md"
    done = invoke("gate", tmp_path / "one", tmp_path / "two", "--junit", xml, "--summary", summary)
    assert done.exit_code == 5
    assert Xml.parse(xml).getroot().find(".//script") is None
    assert "<script>" not in summary.read_text()


def _rewrite(run: Path, manifest: object) -> None:
    files.write_bytes(msgspec.json.encode(manifest), run / MANIFEST)


def test_an_invalid_run_never_gates(measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured / "v1", tmp_path / "v1")
    bad = tmp_path / "v1" / "v1-seed3"
    why = RunWarning("", message="made so")
    _rewrite(bad, msgspec.structs.replace(Run.load(bad).manifest, valid=False, reasons=(why,)))
    for arguments in (("gate", tmp_path / "v1", measured / "copy"), ("gate", measured / "v1", tmp_path / "v1")):
        done = invoke(*arguments)
        assert done.exit_code == 3
        assert "v1-seed3: INVALID run (made so)" in done.stderr
    assert invoke("compare", tmp_path / "v1", measured / "v0").exit_code == 3


def test_other_plans_and_settings_are_refused_with_the_keys(measured: Path, tmp_path: Path) -> None:
    invoke(*SMALL, "--policy", "v1", "--seed", "9", "--output-dir", tmp_path / "seed9")
    invoke(*SMALL, "--policy", "v1", "--max-num-seqs", "8", "--device", "h200", "--output-dir", tmp_path / "other")
    one = measured / "v1" / "v1-seed0"
    done = invoke("gate", one, tmp_path / "seed9")
    assert (done.exit_code, "plan: " in done.stderr) == (3, True)
    for command in ("gate", "compare"):
        done = invoke(command, measured / "v0" / "v0-seed0", tmp_path / "other")
        assert done.exit_code == 3
        assert "device: " in done.stderr
        assert "options.max_num_seqs: " in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_missing_baseline_is_3(measured: Path, tmp_path: Path) -> None:
    for missing in (tmp_path / "nothing", tmp_path / "nothing.parquet"):
        done = invoke("gate", missing, measured / "v1")
        assert done.exit_code == 3
        assert "nothing" in done.stderr


def test_a_stored_baseline_gates_later_runs(measured: Path, tmp_path: Path) -> None:
    store = tmp_path / "baselines.parquet"
    done = invoke("gate", "--save-baseline", store, measured / "v1")
    assert done.exit_code == 0
    assert "stored 6 runs" in done.stderr
    assert invoke("gate", store, measured / "copy").exit_code == 0
    assert invoke("gate", store, measured / "v0").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "gate needs two arguments"),
        (("a", "b", "c"), "gate needs two arguments"),
        (("a", "b", "--margin", "none"), "between 0 and 100 (percent)"),
        (("a", "b", "--allow", "modell"), "did you mean 'model'"),
        (("a", "b", "--pairs", "2"), "needs both --baseline-command and"),
        (("a", "b", "--baseline-command", "x {out}"), "needs both --baseline-command and"),
        (("a", "b", "--pairs", "6", "--max-pairs", "9"), "not both"),
        (("a", "b", "--max-pairs", "0"), "at least 1"),
        (("a", "b", "--metric", "ttft-p98"), "did you mean 'ttft-p9"),
        (("a", "b", "--policy", "a", "--policy", "b", "--policy", "c"), "may be given twice"),
        (("a", "b", "--pairs", "2", "--baseline-command", "x {out}", "--candidate-command", "x"), "needs {out}"),
        (("a", "b", "--pairs", "0", "--baseline-command", "x {out}", "--candidate-command", "x {out}"), "at least 1"),
        (("--self-test", "--trials", "3"), "at least 20"),
        (("--save-baseline", "x.parquet"), "needs run directories"),
    ],
)
def test_bad_usage_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("gate", *arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr


def test_sides_alternate_in_abba_order() -> None:
    assert list(abba(3)) == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


def test_pairs_are_measured_back_and_forth_and_never_twice(tmp_path: Path, warm_python: str) -> None:
    command = f"{warm_python} -m ebbench {shlex.join(SMALL)} --policy v1 --seed {{seed}} --output-dir {{out}}"
    arguments = (
        "gate", tmp_path / "a", tmp_path / "b", "--pairs", 2, "--seed", 4, "--baseline-command", command,
        "--candidate-command", command,
    )  # fmt: skip
    first = invoke(*arguments)
    assert first.exit_code == 5, first.output
    runs = {side: [Run.load(tmp_path / side / f"pair-00{i}").manifest for i in (1, 2)] for side in "ab"}
    assert [m.seed for m in runs["a"]] == [m.seed for m in runs["b"]] == [4, 5]
    order = sorted((m.anchor_unix_ns, side) for side, ms in runs.items() for m in ms)
    assert [side for _, side in order] == ["a", "b", "b", "a"]
    again = invoke(*arguments)
    assert again.stderr.count("measured before\n") == 4  # a line of progress may quote it
    assert [Run.load(tmp_path / "a" / "pair-001").manifest.anchor_unix_ns] == [runs["a"][0].anchor_unix_ns]


def test_a_command_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    bad = f"{sys.executable} -c 'import sys; sys.exit(\"no device here\")' {{out}}"
    done = invoke(
        "gate", tmp_path / "a", tmp_path / "b", "--pairs", 1, "--baseline-command", bad, "--candidate-command", bad
    )
    assert done.exit_code == 4
    assert "no device here" in done.stderr
    missing = invoke(
        "gate", tmp_path / "c", tmp_path / "d", "--pairs", 1, "--baseline-command", "no-such-program {out}",
        "--candidate-command", "no-such-program {out}",
    )  # fmt: skip
    assert missing.exit_code == 2


def test_compare_says_how_much_and_how_surely(measured: Path) -> None:
    done = invoke("compare", measured / "v1", measured / "v0", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["baseline"] == "v1"
    (v0,) = document["policies"]
    figures = {entry["figure"]: entry for entry in v0["figures"]}
    slower = figures["output_throughput"]
    assert slower["low"] < slower["change"] < slower["high"]
    ratio = slower["value"] / slower["baseline"]
    assert slower["change"] == pytest.approx(ratio - 1)
    shown = invoke("compare", measured / "v1", measured / "v0").stdout
    assert "v0 against v1" in shown
    assert "use --repeats 7 or more" in " ".join(shown.split())


def test_compare_of_copies_shows_no_difference_and_labels_them_apart(measured: Path) -> None:
    done = invoke("compare", measured / "v1", measured / "copy", "--json")
    (copy,) = json.loads(done.stdout)["policies"]
    assert copy["policy"] == "v1 (copy)"
    assert all(entry["change"] == 0 and entry["p_adjusted"] == 1 for entry in copy["figures"])


def test_compare_of_single_runs_has_no_statistics(measured: Path) -> None:
    done = invoke("compare", measured / "v1" / "v1-seed0", measured / "v0" / "v0-seed0")
    assert done.exit_code == 0
    assert "One pair does not rule out chance" in " ".join(done.stdout.split())


def test_compare_of_one_policy_names_what_differs(measured: Path, tmp_path: Path) -> None:
    invoke(*SMALL, "--policy", "v1", "--device", "h200", "--seed", "9", "-o", tmp_path / "h200")
    done = invoke("compare", measured / "v1", tmp_path / "h200")
    assert done.exit_code == 3
    assert "are not comparable: device: rtx-pro-6000 against h200" in done.stderr
    done = invoke("compare", measured / "v1" / "v1-seed0", measured / "v1" / "v1-seed1")
    assert done.exit_code == 3
    assert "found only v1, whose 2 runs have different plans" in done.stderr


def test_compare_needs_two_policies_and_a_known_baseline(measured: Path) -> None:
    assert invoke("compare", measured / "v1").exit_code == 3
    done = invoke("compare", measured / "v1", measured / "v0", "--baseline", "v2")
    assert done.exit_code == 2
    assert "unknown baseline 'v2'" in done.stderr


def test_a_missing_library_is_one_line_with_the_command(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    done = invoke("gate", measured / "v1", measured / "copy")
    assert done.exit_code == 4
    assert done.stderr.endswith("an interval needs scipy; install it with: pip install ebbench\n")


def test_a_baseline_may_have_any_name(measured: Path, tmp_path: Path) -> None:
    assert invoke("gate", "--save-baseline", tmp_path / "main", measured / "v1").exit_code == 0
    done = invoke("gate", tmp_path / "main", measured / "copy")
    assert done.exit_code == 0, done.output


def test_a_pair_measured_after_one_was_cut_off_is_not_measured_again(measured: Path, tmp_path: Path) -> None:
    for name, source in (("a", "v1"), ("b", "copy")):
        (tmp_path / name / "pair-001").mkdir(parents=True)
        shutil.copytree(measured / source / "v1-seed0", tmp_path / name / "pair-001-2")
    command = "no-such-program {out}"
    done = invoke(
        "gate", tmp_path / "a", tmp_path / "b", "--pairs", 1, "--baseline-command", command, "--candidate-command",
        command,
    )  # fmt: skip
    assert done.exit_code == 5, done.output
    assert done.stderr.count("measured before\n") == 2


def test_compare_tells_three_runs_of_one_name_apart(measured: Path, tmp_path: Path) -> None:
    for name in "abc":
        shutil.copytree(measured / "v1" / "v1-seed0", tmp_path / name / "run")
    done = invoke("compare", *(tmp_path / name / "run" for name in "abc"), "--json")
    labels = [each["policy"] for each in json.loads(done.stdout)["policies"]]
    assert labels == ["v1 (run)", "v1 (c/run)"]
    again = invoke("compare", *[tmp_path / "a" / "run"] * 3, "--json")
    numbered = {each["policy"] for each in json.loads(again.stdout)["policies"]}
    assert len(numbered) == 2


def test_compare_says_which_figures_it_left_out(measured: Path, tmp_path: Path) -> None:
    def limited(name: str, *limits: str) -> Path:
        invoke(*SMALL, "--policy", name, "--goodput", *limits, "-o", tmp_path / f"{name}-{limits[0]}")
        return tmp_path / f"{name}-{limits[0]}"

    v1, v0 = limited("v1", "ttft:10000"), limited("v0", "ttft:20000")
    text = " ".join(invoke("compare", v1, v0).stdout.split())
    assert "goodput left out for v0: the runs were given different limits" in text
    unmet = limited("v0", "ttft:0.001")
    invoke(*SMALL, "--policy", "v1", "--goodput", "ttft:0.001", "-o", tmp_path / "strict")
    done = invoke("compare", unmet, tmp_path / "strict", "--json")
    (found,) = json.loads(done.stdout)["policies"]
    assert found["skipped"] == {"request_goodput": "zero"}


def test_compare_of_a_replayed_trace_counts_its_copies_once(tmp_path: Path) -> None:
    trace = Path(__file__).parents[1] / "data" / "mooncake.jsonl"
    done = invoke("run", f"trace:{trace}", "-p", "v1", "-p", "v0", "--repeats", 3, "-q", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "no spread" in done.stdout
    found = invoke("compare", tmp_path / "out")
    text = " ".join(found.stdout.split())
    assert "1 pair of runs on the same plan" in text
    assert "2 pairs left out as copies" in text
    assert ". 1 pair does not rule out chance." in text
    (other,) = json.loads(invoke("compare", tmp_path / "out", "--json").stdout)["policies"]
    assert other["copies"] == 2
    assert all(figure["p"] is None for figure in other["figures"])


def test_another_number_of_engines_is_another_environment(tmp_path: Path) -> None:
    for name in ("dp=2", "dp=4"):
        done = invoke(*SMALL, "--policy", "v1", "--topology", name, "-o", tmp_path / name)
        assert done.exit_code == 0, done.output
    done = invoke("gate", tmp_path / "dp=2", tmp_path / "dp=4")
    assert done.exit_code == 3
    assert "options.topology: dp=2 against dp=4" in done.stderr
    shown = invoke("show", tmp_path / "dp=2", tmp_path / "dp=4").stdout
    assert "No winner: these runs differ in topology" in " ".join(shown.split())
