"""SPEC.toml: the grid it stands for, the keys of its cells, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.errors import EbbenchError, InputFileError
from ebbench.runs.file import spec_of_file
from ebbench.runs.key import result_key, with_absolute_paths
from ebbench.spec.server import EngineOptions
from ebbench.sweep.spec import load_sweep
from tests.sweep.sweep_data import TINY, invoke, spec_file

REPORTS = Path(__file__).resolve().parents[2] / "reports" / "sweeps"


def test_every_combination_is_a_cell_and_repeats_are_seeds(tmp_path: Path) -> None:
    text = TINY.replace("[common]", "max_num_batched_tokens = [256, 512, 1024]\nseed = [10, 20]\n[common]")
    sweep = load_sweep(spec_file(tmp_path, text))
    settings = {(c.policy, c.server.max_num_batched_tokens, c.plan.seed) for c in sweep.cells}
    assert settings == {(p, b, s) for p in ("v1", "eb") for b in (256, 512, 1024) for s in (10, 11, 20, 21)}
    assert len(sweep.cells) == len({result_key(cell) for cell in sweep.cells}) == 24
    assert set(sweep.axes) == {"policy", "max_num_batched_tokens", "seed"}
    assert {cell.plan.num_prompts for cell in sweep.cells} == {40}


def test_cells_of_one_plan_are_neighbours(tmp_path: Path) -> None:
    sweep = load_sweep(spec_file(tmp_path, TINY))
    assert [cell.plan.seed for cell in sweep.cells] == [0, 0, 1, 1]


def test_the_papers_grid_has_1440_cells() -> None:
    sweep = load_sweep(REPORTS / "paper-grid.toml")
    assert len(sweep.cells) == 1440
    asked = {(cell.plan.workload == "wildchat", cell.plan.num_prompts) for cell in sweep.cells}
    assert asked == {(False, 4000), (True, 430)}  # conversations of 9.3 requests
    sample = load_sweep(REPORTS / "paper-grid-sample.toml")
    assert len(sample.cells) == 192
    assert {result_key(cell) for cell in sample.cells} < {result_key(cell) for cell in sweep.cells}


def test_two_spellings_of_a_policy_are_one_cell(tmp_path: Path) -> None:
    text = TINY.replace('"v1", "eb"', '"eb:theta=0.5", "eb: theta=0.50"')
    assert len(load_sweep(spec_file(tmp_path, text)).cells) == 2


def test_a_key_is_the_content_of_settings_and_files(tmp_path: Path) -> None:
    cell = spec_of_file({"workload": "balanced"})
    assert result_key(cell) == result_key(spec_of_file({"workload": "balanced", "policy": "v1"}))
    assert result_key(cell) != result_key(spec_of_file({"workload": "balanced", "seed": 1}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    traced = spec_of_file({"workload": f"trace:{trace}"})
    before = result_key(traced)
    assert result_key(traced) == before
    trace.write_text('{"timestamp": 0, "input_length": 6, "output_length": 5}\n')
    assert result_key(traced) != before


def test_files_are_named_absolutely_for_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    moved = with_absolute_paths(spec_of_file({"workload": "trace:trace.jsonl", "model": "qwen3-8b"}))
    assert moved.plan.workload == f"trace:{tmp_path / 'trace.jsonl'}"
    assert moved.model == "qwen3-8b"


def test_overrides_change_the_cells_they_name(tmp_path: Path) -> None:
    text = TINY + '[[overrides]]\nwhen = { policy = "eb" }\nset = { max_num_seqs = 8, num_prompts = 20 }\n'
    cells = load_sweep(spec_file(tmp_path, text)).cells
    found = {(c.policy, c.server.max_num_seqs, c.plan.num_prompts) for c in cells}
    assert found == {("v1", 16, 40), ("eb", 8, 20)}


def test_overrides_know_every_spelling_of_a_policy(tmp_path: Path) -> None:
    text = TINY.replace('"eb"', '"eb:theta=0.50"')
    text += '[[overrides]]\nwhen = { policy = "eb: theta=0.5" }\nset = { num_prompts = 20 }\n'
    text += "[[overrides]]\nwhen = { num_prompts = 20 }\nset = { num_prompts = 30 }\n"
    found = {(c.policy, c.plan.num_prompts) for c in load_sweep(spec_file(tmp_path, text)).cells}
    assert found == {("v1", 40), ("eb:theta=0.5", 30)}


def test_an_override_sets_a_policy_in_any_spelling(tmp_path: Path) -> None:
    text = TINY.replace('policy = ["v1", "eb"]', 'workload = ["balanced", "sharegpt"]')
    text = text.replace('workload = "balanced"\n', "")
    text += '[[overrides]]\nwhen = { workload = "sharegpt" }\nset = { policy = "eb: theta=0.50" }\n'
    assert {c.policy for c in load_sweep(spec_file(tmp_path, text)).cells} == {"v1", "eb:theta=0.5"}


@pytest.mark.parametrize(
    ("keys", "scenario"),
    [
        ("request_rate = 5", "poisson"),
        ("request_rate = 5\nburstiness = 0.5", "gamma"),
        ('request_rate = 5\nscenario = "constant"', "constant"),
        ("", None),
    ],
)
def test_a_rate_means_the_scenario_that_run_takes(tmp_path: Path, keys: str, scenario: str | None) -> None:
    cells = load_sweep(spec_file(tmp_path, TINY + keys)).cells
    assert {cell.plan.scenario for cell in cells} == {scenario}


def test_a_dry_run_says_which_cells_cannot_run(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, TINY.replace("[common]", "max_num_batched_tokens = [8, 64]\n[common]"))
    shown = " ".join(invoke("sweep", spec, "--dry-run").stdout.split())
    assert "these cannot run: 4 cells: --max-num-batched-tokens 8 is below --max-num-seqs 16" in shown
    cells = json.loads(invoke("sweep", spec, "--dry-run", "--json").stdout)["cells"]
    assert sorted(cell["problem"] is None for cell in cells) == [False] * 4 + [True] * 4


def test_a_dry_run_shows_what_overrides_change(tmp_path: Path) -> None:
    text = TINY + '[[overrides]]\nwhen = { policy = "eb" }\nset = { num_prompts = 20 }\n'
    shown = invoke("sweep", spec_file(tmp_path, text), "--dry-run").stdout
    assert "num_prompts: 40 (2 cells), 20 (2 cells)" in shown
    assert "engine: sim" in shown
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("policy = ", "polcy = "), r"unknown key 'polcy' in \[grid\]; did you mean 'policy'"),
        (("num_prompts", "num_promts"), "did you mean 'num_prompts'"),
        (("repeats", "repeat"), "did you mean 'repeats'"),
        (("repeats = 2", "repeats = 0"), "repeats must be at least 1"),
        (('["v1", "eb"]', "[]"), "empty list"),
        (('["v1", "eb"]', '["v1", "v1"]'), "lists 'v1' twice"),
        (('["v1", "eb"]', '"v1"'), "Expected"),
        (('["v1", "eb"]', '["v2"]'), "unknown policy 'v2'"),
        (('["v1", "eb"]', '["deferred"]'), "write deferred:k=32"),
        (("[common]", '[common]\npolicy = "v1"'), r"policy is in both \[grid\] and \[common\]"),
        (('workload = "balanced"\n', ""), "no workload"),
        (('"balanced"', '"ballanced"'), "did you mean 'balanced'"),
        (('"balanced"', '"trace:nowhere.jsonl"'), "no such file"),
        (("[common]", '[common]\nengine = "simm"'), "did you mean 'sim'"),
        (("[common]", '[common]\ndevice = "h20"'), "unknown device 'h20'"),
        (("[common]", '[common]\nmodel = "qwen"'), "unknown model 'qwen'"),
        (("[common]", '[common]\nscenario = "stormy"'), "unknown scenario 'stormy'"),
        (("num_prompts = 40", 'num_prompts = "40"'), "Expected"),
        (("repeats = 2", "repeats = 2\n[[overrides]]\nwhen = {}\nset = { seed = 1 }"), "needs both"),
        (
            ("repeats = 2", 'repeats = 2\n[[overrides]]\nwhen = { seed = 1 }\nset = { policy = "v0" }'),
            "the grid varies",
        ),
        (("repeats = 2", "repeats = 2\n[[overrides]]\nwen = { seed = 1 }"), "did you mean 'when'"),
        (
            ("repeats = 2", 'repeats = 2\n[[overrides]]\nwhen = { policy = "ebplus" }\nset = { num_prompts = 9 }'),
            "an override is for policy = 'ebplus', which no cell has",
        ),
        (
            ("repeats = 2", 'repeats = 2\n[[overrides]]\nwhen = { policy = "ebb" }\nset = { num_prompts = 9 }'),
            "unknown policy 'ebb'",
        ),
        (
            ("[common]", "[common]\nmax_num_batched_tokens = 8"),
            "no cell of the grid can run: --max-num-batched-tokens 8",
        ),
        (("[common]", '[common]\ngoodput = "foo:500"'), "unknown metric of --goodput 'foo'"),
        (('name = "tiny"', "name = "), "not valid TOML"),
        (("[grid]", "[grid]\nseed = [" + ",".join(map(str, range(600_000))) + "]"), "more than 1,000,000"),
    ],
)
def test_a_bad_spec_is_refused_with_what_to_write(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in TINY
    with pytest.raises(EbbenchError, match=message) as raised:
        load_sweep(spec_file(tmp_path, TINY.replace(*change)))
    assert raised.value.exit_code == 2


def test_a_missing_sweep_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="cannot be read"):
        load_sweep(tmp_path / "nothing.toml")
    assert invoke("sweep", tmp_path / "nothing.toml").exit_code == 2


def test_a_length_limit_holds_for_the_plan_and_the_engine() -> None:
    def limits(**settings: object) -> tuple[int | None, int]:
        cell = spec_of_file({"workload": "balanced", "max_concurrency": 8, **settings})
        return cell.plan.max_model_len, cell.server.max_model_len

    default = EngineOptions.max_model_len
    assert limits(max_model_len=2048) == (2048, 2048)
    assert limits() == (default, default)
    assert limits(engine="http://127.0.0.1:9")[0] is None, "the server knows its limit"
    assert limits(engine="http://127.0.0.1:9", max_model_len=2048)[0] == 2048
