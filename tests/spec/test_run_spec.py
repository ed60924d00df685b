"""A run's settings are declared once: command line, files, keys and --dry-run know the same ones."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app, load_command
from ebbench.records.run import Run
from ebbench.runs.execute import Task, execute, make
from ebbench.runs.file import plain_type, spec_of_file
from ebbench.runs.key import result_key
from ebbench.runs.prepare import prepare
from ebbench.spec.run import RunSpec, as_dict, known_settings, make_spec, settings_of

OTHER: dict[str, Any] = {
    "workload": "sharegpt", "policy": "eb", "engine": "emulated", "headers": {"x-team": "a"},
    "extra_body": {"top_p": 0.5},
    "vllm_options": ("--x",), "endpoint": "chat", "connections": "on-demand", "time_unit": "ms", "tool_share": 0.5,
    "prefix_share": 0.5, "cache_hit_rate": 0.5, "topology": "dp=2", "prefix_groups": 2, "goodput": "ttft:5",
    "speculative": "method=eagle3,tokens=2,acceptance=0.8,0.5", "scheduling_policy": "priority",
    "moe_backend": "marlin",
}  # fmt: skip
"""A value other than the default, where any would not do."""


def other(name: str) -> Any:
    one = known_settings()[name]
    if name in OTHER:
        return OTHER[name]
    kind = plain_type(one.kind)
    if kind is bool:
        return not one.default
    return "other" if kind is str else kind((one.default or 1) + 1)


def small(**settings: Any) -> RunSpec:
    return make_spec({"workload": "balanced", "num_prompts": 20, "max_concurrency": 4, "source": "profile", **settings})


@pytest.mark.parametrize("name", [name for name in known_settings() if name != "prefix_groups"])
def test_every_setting_but_labels_is_part_of_the_key(name: str) -> None:
    given = {"workload": "balanced"} | {name: other(name)}
    spec = make_spec(given)
    assert settings_of(spec)[name] == other(name)
    a_label = known_settings()[name].part == "labels"  # labels change no result
    assert (result_key(spec) == result_key(make_spec({"workload": "balanced"}))) == a_label


def test_the_options_of_run_are_the_declared_ones_with_their_defaults() -> None:
    options = {param.name: param for param in load_command("run").params}
    for name, one in known_settings().items():
        if one.option is None:
            assert name in {"workload", "goodput", "vllm_options"} or name not in options
            continue
        assert options[name].help == one.about.help
        if name not in ("engine", "api_server") and one.option.text is None and not one.option.turns_off:
            assert options[name].default == one.default


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["run", *words], env={"COLUMNS": "200"})


SMALL = ("--source", "profile", "-n", "20", "-c", "4", "--device", "h200", "--policy", "eb:theta=0.4")


def test_a_dry_run_writes_the_file_that_makes_the_same_run(tmp_path: Path) -> None:
    asked = ("balanced", *SMALL, "--no-prefix-caching", "--goodput", "ttft:500", "tpot:50")
    dry = run(*asked, "--dry-run", "-o", str(tmp_path / "first"))
    assert dry.exit_code == 0, dry.stderr
    assert not (tmp_path / "first").exists()
    file = tmp_path / "bench.toml"
    file.write_text(dry.stdout)
    assert tomllib.loads(dry.stdout)["enable_prefix_caching"] is False
    assert run(*asked, "-q", "-o", str(tmp_path / "first")).exit_code == 0
    assert run(str(file), "-q", "-o", str(tmp_path / "second")).exit_code == 0
    first, second = Run.load(tmp_path / "first"), Run.load(tmp_path / "second")
    assert first.requests.equals(second.requests)
    assert (first.manifest.policy, first.manifest.options, first.manifest.slo) == (
        second.manifest.policy, second.manifest.options, second.manifest.slo,
    )  # fmt: skip


def test_options_replace_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text('workload = "balanced"\npolicy = ["v1", "eb"]\nnum_prompts = 20\nmax_num_seqs = 8\nrepeats = 2\n')
    dry = run(str(file), "--max-num-seqs", "16", "--policy", "v0", "--dry-run")
    written = tomllib.loads(dry.stdout)
    assert (written["max_num_seqs"], written["policy"], written["repeats"]) == (16, ["v0"], 2)
    assert dry.stdout.startswith("# 2 runs: v0\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_num_sqs = 8", "did you mean 'max_num_seqs'"),
        ("max_num_seqs = 'many'", "max_num_seqs"),
        ("max_num_seqs = 0", "--max-num-seqs must be at least 1, not 0"),
        ("connections = 'often'", "connections"),
        ("engine = 'http://127.0.0.1:9'\nenforce_eager = true", "--enforce-eager is set where a server is started"),
    ],
)
def test_what_a_file_says_is_checked_as_on_the_command_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bench.toml"
    file.write_text(f'workload = "balanced"\n{line}\n')
    refused = run(str(file), "--dry-run")
    assert refused.exit_code == 2
    assert message in refused.stderr


@pytest.mark.parametrize("option", [("--temperature", "0"), ("--ignore-eos",), ("--header", "a=b")])
def test_options_of_the_load_generator_are_refused_where_nothing_is_sent(option: tuple[str, ...]) -> None:
    refused = run("balanced", *SMALL, *option, "--engine", "sim", "--dry-run")
    assert refused.exit_code == 2
    assert f"{option[0]} is for sending requests, which engine sim does not do" in refused.stderr


def test_a_workload_file_is_still_a_workload(tmp_path: Path) -> None:
    bundled = Path(__file__).parents[2] / "workloads" / "balanced.toml"
    (tmp_path / "own.toml").write_text(bundled.read_text())
    assert run(str(tmp_path / "own.toml"), *SMALL, "--dry-run").exit_code == 0


def test_a_stored_run_and_one_kept_in_memory_have_the_same_figures(tmp_path: Path) -> None:
    spec = small(policy="eb:theta=0.4", device="h200")
    stored = execute(prepare(spec), tmp_path / "run").summary.to_dict()
    figures = dict(make(Task(spec)).figures)
    for name in ("run_dir", "plan_hash", "git_commit"):
        stored.pop(name, None), figures.pop(name, None)
    assert figures == stored


def test_headers_are_not_written_beside_results() -> None:
    spec = spec_of_file({"workload": "balanced", "engine": "http://127.0.0.1:9", "headers": {"x-key": "secret"}})
    assert "secret" in str(as_dict(spec))
    from ebbench.spec.run import stored_form

    assert "secret" not in str(stored_form(spec))
