"""Wrong command lines of ``ebbench run``: one line with the cause and the remedy, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli import main

SERVER = ("--engine", "http://127.0.0.1:1")
OF_A_START = (
    ("--max-num-active-seqs", "8"),
    ("--max-num-queued-reqs", "9"),
    ("--max-num-queued-tokens", "99"),
    ("--long-prefill-token-threshold", "512"),
    ("--no-scheduler-reserve-full-isl",),
    ("--num-kv-blocks", "100"),
    ("--no-prefix-caching",),
    ("--no-async-scheduling",),
    ("--enforce-eager",),
    ("--quantization", "fp8"),
    ("--kv-cache-dtype", "fp8"),
    ("--calibration", "costs.json"),
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--request-rate", "1e-9"), "the last request would come after 355 years; give a higher rate"),
        (("--request-rate", "nan"), "--request-rate must be a finite number, not nan"),
        (("--policy", "marginal:tpot=50"), "for 50 ms write tpot=0.05"),
        (("--policy", "marginal:ttft=10000"), "for 10000 ms write ttft=10"),
        (("--policy", "v1,eb"), "give each policy its own --policy"),
        (("--tokenizer", "some/name"), "workload 'balanced' has none, leave it out"),
        (("--save-as-vllm", "/no/such/place.json", "-p", "v1"), "give a file in a directory that exists"),
        (("--max-num-active-seqs", "2000"), "above --max-num-seqs 1024, which vLLM refuses; give 1024 or less"),
        (("--max-num-active-seqs", "8", "-p", "eb:k=9"), "k exceeds --max-num-active-seqs 8"),
        (("-p", "ppas:cap=20000"), "its budget exceeds --max-num-batched-tokens 8192"),
        (("-p", "slochunk:tpot=0.05,least=9000"), "raise that to 9000 or more"),
        (("--max-num-queued-reqs", "0"), "--max-num-queued-reqs must be at least 1"),
        (("--long-prefill-token-threshold-adaptive",), "has no effect without a threshold"),
        (("--long-prefill-token-threshold", "50000"), "between 0 (off) and --max-model-len 40960"),
        (("--max-num-queued-tokens", "99", "--topology", "dp=2"), "simulated for one instance, not for dp=2"),
        (("--topology", "dp=2", "--link", "pcie"), "--link pcie changes nothing in dp=2: its GPUs share no model"),
        (
            ("--topology", "dp=2", "--decode-dispatch", "iqr"),
            "--decode-dispatch is for a decode pool, which dp=2 has not",
        ),
        (("--topology", "1p1d", "-p", "v1", "-p", "eb"), "nothing for policy eb to decide; use --policy v1"),
        (("--device", "H100"), "did you mean 'h100'?"),
        (("--device", "A100"), "did you mean 'a100'?"),
        *[((*SERVER, *words), f"{words[0]} is set where a server is started, and {SERVER[1]}") for words in OF_A_START],
        ((*SERVER, "--api-server", "datacenter"), "through a real one: leave it out"),
        ((*SERVER, "--ready-timeout", "nan"), "--ready-timeout must be a finite number"),
        ((*SERVER, "--idle-timeout", "inf"), "--idle-timeout must be a finite number"),
    ],
)
def test_refused_before_anything_runs(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main.app, ["run", "balanced", "-n", "20", "-c", "4", *options])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", OF_A_START, ids=lambda words: words[0])
def test_capacity_refuses_settings_of_a_running_server(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main.app, ["capacity", "balanced", "--goodput", "ttft:100", *SERVER, *words])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"{words[0]} is set where a server is started" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_trace_needs_a_file() -> None:
    done = CliRunner().invoke(main.app, ["run", "trace:", "--quiet"])
    assert (done.exit_code, done.stderr) == (2, "error: trace: names no file; write trace:FILE\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fake-server", "--ttft-ms", "nan"), "--ttft-ms must be a finite number, not nan"),
        (
            ("gateway", "-u", "http://127.0.0.1:1", "--network-ms", "nan"),
            "--network-ms must be a finite number, not nan",
        ),
        (("gateway", "-u", "http://127.0.0.1:1", "--health-interval", "0"), "--health-interval must be above 0, not 0"),
        (("client-check", "--rate", "nan"), "--rate, --seconds and --max-streams must be positive"),
        (("tables", "table3", "--seeds", "0", "--run"), "--seeds must be at least 1, not 0"),
        (("serve", "m", "--print", "--calibration", "BINARY"), "is not UTF-8 text"),
    ],
)
def test_other_commands_refuse_bad_arguments(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("BINARY").write_bytes(b"\xff\xfe")
    done = CliRunner().invoke(main.app, list(words))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
