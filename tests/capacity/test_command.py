"""``ebbench capacity`` as a user calls it: budget, resumption, limits that nothing meets, the JSON interface."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec import convert
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.records.run import read_manifest
from ebbench.records.warnings import RunWarning
from ebbench.render import numbers
from ebbench.sizing.sentences import load

WORKLOAD = (
    "capacity balanced --device l40s --model qwen3-8b --policy v1 --max-num-seqs 8 -n 150 --input-len 200 "
    "--output-len 20"
)


def capacity(folder: Path, *more: str, goodput: str = "ttft:2000") -> Result:
    precision = () if "--precision" in more else ("--precision", "0.1")
    words = [*WORKLOAD.split(), *precision, "-q", "-o", str(folder), "--goodput", goodput, *more]
    return CliRunner().invoke(app, words)


def answer(folder: Path, *more: str, goodput: str = "ttft:2000") -> dict[str, object]:
    done = capacity(folder, "--json", *more, goodput=goodput)
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_json_has_capacity_interval_and_run_directories(tmp_path: Path) -> None:
    found = answer(tmp_path / "search")
    fixed = {"policy", "capacity_requests_per_s", "low", "high", "attainment", "limited_by", "goodput_tokens_per_s"}
    assert {*fixed, "probes", "run_dirs"} <= found.keys()
    assert found["low"] <= found["capacity_requests_per_s"] <= found["high"]  # type: ignore[operator]
    assert found["probes"] == len(found["run_dirs"])  # type: ignore[arg-type]
    assert all((Path(run) / "manifest.json").is_file() for run in found["run_dirs"])  # type: ignore[attr-defined]
    assert load(tmp_path / "search") == [found]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_number_of_the_table_is_cut_off(tmp_path: Path, width: int) -> None:
    """At 80 columns 371 tok/s were printed as 37, beside a long name and "not reached"."""
    search = [*WORKLOAD.split(), "-p", "marginal:ttft=2,tpot=0.05", "-q", "-o", str(tmp_path), "--goodput", "ttft:2000"]
    done = CliRunner().invoke(app, [*search, "--max-probes", "1"], env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.output
    words = done.stdout.split()
    for row in load(tmp_path):
        for key in ("goodput_requests_per_s", "goodput_tokens_per_s"):
            assert numbers.rate(row[key]) in words
        assert numbers.percent(row["attainment"]).split()[0] in words
    assert all(len(line) <= width for line in done.stdout.split("Met, latencies")[0].splitlines())


def test_a_killed_search_goes_on_and_ends_with_the_same_answer(tmp_path: Path) -> None:
    whole = answer(tmp_path / "whole")
    stopped = answer(tmp_path / "killed", "--max-probes", "4")
    assert stopped["probes"] == 4
    assert stopped["stopped"] == {"code": "max_probes", "values": {"probes": 4}}
    last = Path(stopped["run_dirs"][-1])  # type: ignore[index]
    (last / "manifest.json").unlink()  # killed before the run was finished
    kept = {run: read_manifest(Path(run)).anchor_unix_ns for run in stopped["run_dirs"][:-1]}  # type: ignore[index]
    resumed = answer(tmp_path / "killed")
    assert {run: read_manifest(Path(run)).anchor_unix_ns for run in kept} == kept  # not measured again
    same = ("capacity_requests_per_s", "low", "high", "limited_by", "probes", "attainment")
    assert {name: resumed[name] for name in same} == {name: whole[name] for name in same}


def test_a_directory_of_another_search_is_refused(tmp_path: Path) -> None:
    answer(tmp_path / "search", "--max-probes", "2")
    done = capacity(tmp_path / "search", goodput="ttft:900")
    assert done.exit_code == 2
    assert "other settings" in done.output


def test_no_time_for_a_single_probe_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = capacity(tmp_path / "search", "--max-time", "0.000001")
    assert done.exit_code == 4
    assert "--max-time" in done.stderr
    assert "Traceback" not in done.output


def test_each_policy_gets_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first policy's search would use up all the time; the second is probed all the same."""
    clock = {"now": 0.0}

    def monotonic() -> float:
        clock["now"] += 1.0
        return clock["now"]

    monkeypatch.setattr("time.monotonic", monotonic)
    done = capacity(tmp_path / "search", "--policy", "eb", "--max-time", "20", "--json", "--precision", "0.001")
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)
    assert (first["stopped"]["code"], first["stopped"]["values"]["limit_s"]) == ("max_time", 20)
    assert second["probes"] > 0


@pytest.mark.parametrize("goodput", ["ttft:0.01", "tpot:p99:0.01"])
def test_limits_missed_even_alone_are_refused_with_the_least_possible(tmp_path: Path, goodput: str) -> None:
    done = capacity(tmp_path / "search", goodput=goodput)
    assert done.exit_code == 2
    assert "least that can be had" in done.stderr
    least = done.stderr.replace("\n", " ").split("about")[1].split(":")[1].split()[0]
    metric = goodput.partition(":")[0]
    reachable = capacity(tmp_path / "other", "--max-probes", "1", goodput=f"{goodput.rpartition(':')[0]}:{least}")
    assert reachable.exit_code == 0, reachable.output
    assert metric in reachable.stdout.lower()


def test_a_closed_loop_answers_in_open_sessions(tmp_path: Path) -> None:
    found = answer(tmp_path / "search", "--by", "concurrency", goodput="ttft:100")
    assert found["low"] <= found["capacity_concurrency"] <= found["high"]  # type: ignore[operator]


def test_a_closed_loop_that_always_meets_its_limits_ends(tmp_path: Path) -> None:
    found = answer(tmp_path / "search", "--by", "concurrency", goodput="tpot:1000")
    assert (found["limited_by"], found["high"]) == ("queue", None)
    shutil.rmtree(tmp_path / "search")


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    answer(tmp_path / "search", "--plot", str(tmp_path / "curve.svg"))
    text = (tmp_path / "curve.svg").read_text()
    assert "TTFT, p95 (ms)" in text
    assert "requests/s offered" in text


def test_the_report_of_a_search_has_its_curves_and_the_probe_at_capacity(tmp_path: Path) -> None:
    found = answer(tmp_path / "search", "--max-probes", "12")
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "search"), "-o", str(page)])
    assert done.exit_code == 0, done.output
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    rows = list(data["specs"]["search0"]["datasets"].values()) if "datasets" in data["specs"]["search0"] else []
    drawn = json.dumps(rows or data["specs"]["search0"])
    assert str(found["median_ttft_ms"])[:6] not in ("", "None")
    assert "requests/s offered" in json.dumps(data["specs"]["search0"])
    assert drawn.count('"series": "v1"') > 5
    assert len(data["runs"]) == 1


@pytest.mark.parametrize("workload", ["nosuch", "no-lengths.toml", "trace:none.csv"])
def test_a_workload_without_requests_is_refused_in_one_line(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("no-lengths.toml").write_text('name = "x"\ndescription = "y"\nnum_prompts = 10\n')
    done = CliRunner().invoke(app, ["capacity", workload, "--goodput", "ttft:100", "-o", "out"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert workload in done.stderr
    assert not Path("out").exists()


def test_the_caveats_of_the_device_are_said_once(tmp_path: Path) -> None:
    """The host of the L40S was never fitted: each run says so, and so does what is concluded from them all."""
    options = ("--max-probes", "2", "--no-async-scheduling")  # the host's time adds to every step
    found = answer(tmp_path / "search", *options)
    manifests = [json.loads((Path(run) / "manifest.json").read_text()) for run in found["run_dirs"]]  # type: ignore[attr-defined]
    warnings = [convert(one, RunWarning) for each in manifests for one in each["warnings"]]
    warnings = [one for one in warnings if one.code != "near-capacity"]  # of the load of a probe
    assert {one.code for one in warnings if one.about == "device"} == {"host-unfitted", "mixing-unmeasured"}
    device = {str(one) for one in warnings if one.about == "device"}
    begins = {text.partition(";")[0] for text in device}  # the rest is the size in each run
    said = [text for text in found["warnings"] if not text.startswith("the load is near")]  # type: ignore[attr-defined]
    assert sorted(text.partition(";")[0] for text in said) == sorted(begins)
    assert any("host's time per step on l40s was never fitted" in text for text in begins)
    shown = " ".join(capacity(tmp_path / "search", *options, "--policy", "eb").stdout.split())
    _, _, below = shown.partition(" Keep in mind ")
    assert [below.count(text) for text in begins] == [1] * len(begins)
    assert "v1: the host" not in below, "it holds for both policies; only v1 mixes batches"
    assert "p99" not in below  # a probe's number of requests is no matter of the device


def test_a_server_that_would_not_start_is_said_of_its_capacity_too(tmp_path: Path) -> None:
    found = answer(tmp_path / "search", "--max-probes", "1", "--max-model-len", "50000")
    assert any("a real server would not start" in text for text in found["warnings"])  # type: ignore[attr-defined]
