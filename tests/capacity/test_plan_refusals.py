"""``ebbench plan`` refuses what no candidate can do, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app


@pytest.mark.parametrize(
    ("workload", "goodput", "words"),
    [("trace:{folder}/no-lengths.jsonl", "ttft:100", "--columns"), ("sharegpt", "ttft:0.01", "ttft:")],
)
def test_a_plan_that_no_candidate_can_serve_is_refused_in_one_line(
    tmp_path: Path, workload: str, goodput: str, words: str
) -> None:
    (tmp_path / "no-lengths.jsonl").write_text('{"timestamp": 0}\n{"timestamp": 1}\n')
    source = [] if workload.startswith("trace:") else ["--source", "profile"]
    options = "--request-rate 5 --device h200 --tp 1 --policy v1 --max-num-seqs 8 --workers 1 -q"
    where = workload.format(folder=tmp_path)
    done = CliRunner().invoke(app, ["plan", where, *source, *options.split(), "--goodput", goodput])
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert done.stdout == ""


def test_a_rate_that_no_candidate_carries_is_no_success() -> None:
    """A script sees it as it sees limits that are missed one request at a time."""
    load = "--source profile --request-rate 100000 --goodput ttft:4000 tpot:200"
    options = f"{load} --device l40s --tp 1 --policy v1 --max-num-seqs 8 --workers 1 -q"
    done = CliRunner().invoke(app, ["plan", "sharegpt", *options.split()])
    assert done.exit_code == 2, done.output
    assert "No candidate carries this rate within the limits." in done.stdout
    assert "needs more than 512 replicas" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--device h200 --device h200", "--device h200 is given twice; give it once"),
        ("--device h200 --tp 2 --tp 1 --tp 2", "--tp 2 is given twice; give it once"),
        ("--max-num-seqs 8 --max-num-seqs 8", "--max-num-seqs 8 is given twice; give it once"),
        ("--device h200 --price h200=3 --price h200=4", "--price: h200 is given twice; give it once"),
        ("-p v1 -p v1", "policy v1 is given twice; give each policy once\n"),
    ],
)
def test_a_candidate_that_would_stand_there_twice_is_refused(options: str, words: str) -> None:
    done = CliRunner().invoke(app, ["plan", "sharegpt", *f"--request-rate 5 --goodput ttft:900 {options}".split()])
    assert done.exit_code == 2
    assert words in done.output


def test_a_rate_beyond_all_replicas_is_said_as_such() -> None:
    options = "--source profile --device h200 --tp 1 -p v1 --max-num-seqs 8 --workers 1 -q --goodput ttft:900"
    done = CliRunner().invoke(app, ["plan", "sharegpt", *options.split(), "--request-rate", "1e7"])
    assert done.exit_code == 2
    assert "1 candidate left out: needs more than 512 replicas (h200 tp1)." in done.output
    done = CliRunner().invoke(app, ["plan", "sharegpt", *options.split(), "--request-rate", "inf"])
    assert "--request-rate inf: give the sessions/s to serve, a finite rate" in done.output


@pytest.mark.parametrize("option", ["--max-num-seqs", "--max-num-batched-tokens"])
@pytest.mark.parametrize("number", ["0", "-4"])
def test_a_limit_out_of_range_is_refused_before_anything_runs(option: str, number: str) -> None:
    load = ["--request-rate", "5", "--goodput", "ttft:900", "--source", "profile", "--workers", "1"]
    done = CliRunner().invoke(app, ["plan", "sharegpt", *load, option, number])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option} must be at least 1, not {number}" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-p v1 --max-num-seqs 64 --max-num-batched-tokens 32", "32 is below --max-num-seqs 64, which vLLM refuses"),
        ("-p eb:k=9 --max-num-seqs 8", "policy eb:k=9: k exceeds --max-num-seqs 8"),
    ],
)
def test_a_candidate_that_vllm_or_its_policy_refuses_is_left_out(options: str, words: str) -> None:
    load = "--source profile --device h200 --tp 1 --workers 1 -q --goodput ttft:900 --request-rate 5"
    done = CliRunner().invoke(app, ["plan", "sharegpt", *load.split(), *options.split()])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
