"""`ebbench run --speculative`: what the table, the JSON and the stored run say of drafted tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.records.run import Run
from ebbench.spec.run import make_spec
from ebbench.spec.server import served_drafts

SETTING = "method=eagle3,tokens=3,acceptance=0.8,0.6,0.4"
COMMAND = ("run", "balanced", "--num-prompts", "120", "--max-concurrency", "32", "--max-num-seqs", "16", "--quiet")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, [*COMMAND, *args], env={"COLUMNS": "160"})


def test_a_run_with_drafts_shows_tokens_per_step_and_acceptance(tmp_path: Path) -> None:
    done = invoke("--speculative", SETTING, "-p", "v1", "-p", "eb", "--json", "-o", str(tmp_path / "runs"))
    assert done.exit_code == 0, done.output
    for summary in json.loads(done.stdout):
        assert summary["mean_acceptance_length"] == pytest.approx(2.8, abs=0.1)
        assert summary["acceptance"] == pytest.approx([0.8, 0.6, 0.4], abs=0.05)
        assert summary["accepted_tokens"] < summary["drafted_tokens"]
    run = Run.load(tmp_path / "runs" / "v1")
    assert run.manifest.options["speculative"] == SETTING
    measured = tmp_path / "measured.json"
    shown = CliRunner().invoke(app, ["show", str(run.path), "--json"])
    measured.write_text(shown.stdout)
    again = invoke("--speculative", f"method=eagle3,acceptance={measured}", "-p", "v1", "-o", str(tmp_path / "again"))
    assert again.exit_code == 0, again.output
    said = " ".join(again.output.split())
    assert re.search(r"tokens per step with drafts \([\d.]+ % of the drafted tokens accepted, by position: 0\.", said)
    assert "steps with drafts are modelled, not measured" in said


def test_drafts_of_several_seeds_and_policies_are_said_once(tmp_path: Path) -> None:
    done = invoke("--speculative", SETTING, "-p", "v1", "-p", "eb", "--repeats", "2", "-o", str(tmp_path / "runs"))
    assert " ".join(done.output.split()).count("tokens per step with drafts (") == 1


def test_runs_with_other_drafts_are_not_compared(tmp_path: Path) -> None:
    for name, rate in (("a", "0.8"), ("b", "0.5")):
        drafts = f"method=eagle3,tokens=2,acceptance={rate}"
        done = invoke("--speculative", drafts, "-p", "v1", "-o", str(tmp_path / name))
        assert done.exit_code == 0, done.output
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")], env={"COLUMNS": "160"})
    said = " ".join(compared.output.split())
    assert compared.exit_code == 3
    assert "not comparable" in said
    assert "acceptance=0.8,0.64 against" in said


SERVER = ("balanced", "--device", "h200", "--quiet")
SIMULATES = {
    "run": ("run", *SERVER, "-n", "20"),
    "capacity": ("capacity", *SERVER, "--goodput", "tpot:50"),
    "plan": ("plan", *SERVER, "--request-rate", "4", "--goodput", "tpot:50", "--tp", "1", "-p", "v1"),
    "advise": ("advise", *SERVER, "-n", "20", "--seeds", "1"),
    "devices": ("devices", "show", "h200"),
}


@pytest.mark.parametrize("command", SIMULATES)
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("method=eagle3,tokens=3,acceptance=1.8", "position 1 must lie in [0, 1]"),
        ("method=eagle3,tokens=1,acceptance=0.8,0.7", "2 rates for 1 drafted tokens"),
        ("method=mtp,tokens=1,acceptance=0.8", "no layers for multi-token prediction"),
        ("method=eagle3,tokens=3,acceptance=nan", "position 1 must lie in [0, 1]"),
        ("method=eagle3,tokens=0,acceptance=0.8", "whole number from 1 to 32"),
        ("method=eagle3,tokens=2,acceptance=0.6,0.8", "cannot rise"),
    ],
)
def test_a_command_that_simulates_refuses_drafts_in_one_line(
    command: str, setting: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*SIMULATES[command], "--speculative", setting])
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.startswith("error: --speculative")
    assert done.output.count("\n") == 1


RATES_OF_FILES = {
    "an object": '{"acceptance": {"0.8": 1, "0.6": 2}}',
    "true": '{"acceptance": [true, 0.5]}',
    "text": '{"acceptance": ["0.8"]}',
    "none": '{"acceptance": []}',
    "no number": '{"acceptance": [NaN]}',
    "a huge number": '{"acceptance": [1' + 400 * "0" + "]}",
    "too many": '{"acceptance": [' + ",".join(33 * ["0.9"]) + "]}",
    "a bare list": "[0.8, 0.6]",
    "runs with other drafts": '[{"acceptance": [0.8, 0.6]}, {"acceptance": [0.7]}]',
}


@pytest.mark.parametrize("kind", RATES_OF_FILES)
def test_a_file_without_rates_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(RATES_OF_FILES[kind])
    done = invoke("--speculative", f"method=eagle3,acceptance={tmp_path / 'rates.json'}")
    assert done.exit_code == 2
    assert done.output.startswith("error: --speculative")
    assert done.output.count("\n") == 1


def test_a_sweep_refuses_drafts_that_the_model_cannot_make(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    common = 'workload = "balanced"\nspeculative = "method=mtp,tokens=1,acceptance=0.8"'
    grid.write_text(f'name = "x"\n[common]\n{common}\n[grid]\npolicy = ["v1", "eb"]\n')
    done = CliRunner().invoke(app, ["sweep", str(grid), "--quiet", "-o", str(tmp_path / "cells")])
    assert "no layers for multi-token prediction" in done.output
    assert not (tmp_path / "cells").exists()


@pytest.mark.usefixtures("fewer_sessions")
def test_a_plan_prices_the_drafts_in(tmp_path: Path) -> None:
    load = "--request-rate 20 --input-len 200 --output-len 30 --max-num-seqs 16 --goodput tpot:50"
    common = ("plan", *SERVER, *load.split(), "--tp", "1", "-p", "v1", "--json")
    found = {}
    for rate in ("0", "1"):
        done = CliRunner().invoke(app, [*common, "--speculative", f"method=eagle3,tokens=3,acceptance={rate}"])
        assert done.exit_code == 0, done.output
        found[rate] = json.loads(done.stdout)["deployments"][0]
    without = CliRunner().invoke(app, [*common])
    plain_ms = json.loads(without.stdout)["deployments"][0]["median_tpot_ms"]
    assert found["1"]["median_tpot_ms"] < plain_ms < found["0"]["median_tpot_ms"]
    assert any("steps with drafts are modelled" in said["text"] for said in found["0"]["caveats"])


def test_a_device_is_shown_with_a_state_per_drafted_token() -> None:
    model = str(Path(__file__).parents[2] / "reports" / "reference" / "kv_cache" / "models" / "qwen3.6-35b-a3b")
    common = ("devices", "show", "h200", "--model", model, "--assume-kernels")
    done = CliRunner().invoke(app, [*common, "--speculative", "method=eagle3,acceptance=0.8,tokens=3"])
    assert "4 times 64.4 MB per sequence" in " ".join(done.output.split())


def test_a_device_is_shown_with_the_drafts_of_its_decodes() -> None:
    shown = {}
    for options in ((), ("--speculative", "method=eagle3,tokens=3,acceptance=0.8")):
        done = CliRunner().invoke(app, ["devices", "show", "h200", "--json", *options])
        shown[len(options)] = json.loads(done.stdout)
    plain, drafting = ([row for row in shown[given]["steps"] if row["kind"] == "decode"] for given in (0, 2))
    assert [row["tokens"] for row in drafting] == [4 * row["tokens"] for row in plain]
    assert all(row["step_s"] > before["step_s"] for row, before in zip(drafting, plain, strict=True))


WAYS = (
    ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    ("-sc", '{"model": "[ngram]"}'),
    ("--speculative_config.method=ngram", "--speculative-config.num-speculative-tokens", "3"),
    ("--spec-method", "ngram", "--spec-tokens", "3"),
)


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_a_server_with_n_grams_is_not_asked_to_schedule_ahead(words: tuple[str, ...]) -> None:
    settings = {"workload": "balanced", "engine": "vllm", "model": "qwen3-8b"}
    assert not make_spec({**settings, "vllm_options": words}).server.async_scheduling
    for others in ((), ("--speculative-config", '{"method": "mtp"}'), ("--speculative-config", "[1]"), ("-sc",)):
        assert make_spec({**settings, "vllm_options": others}).server.async_scheduling


def test_the_draft_settings_of_a_server_are_read_in_any_form() -> None:
    expected = {"method": "ngram", "num_speculative_tokens": 3}
    assert [served_drafts(words) == expected for words in WAYS] == [True, False, True, True]
