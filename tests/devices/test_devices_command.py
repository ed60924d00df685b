"""``ebbench devices``: its tables, JSON and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.devices.profiles import list_devices, list_models
from ebbench.errors import EbbenchError, UnknownNameError, UsageError


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["devices", *arguments], standalone_mode=False, catch_exceptions=False)
    return result.stdout


def test_list_names_every_device_and_model() -> None:
    listed = json.loads(invoke("list", "--json"))
    assert [row["name"] for row in listed["devices"]] == list(list_devices())
    assert [row["name"] for row in listed["models"]] == list(list_models())
    assert "rtx-pro-6000" in invoke("list")


def test_no_name_is_cut_in_a_pipe() -> None:
    """Where it does not fit it goes on in the next line, so letters are counted column by column."""
    done = CliRunner().invoke(app, ["devices", "list"], env={"COLUMNS": "80"})
    assert "…" not in done.stdout
    column = "".join(line[28:44].strip() for line in done.stdout.splitlines())
    assert all(row["hf_id"] in column for row in json.loads(invoke("list", "--json"))["models"])


def test_show_tells_steps_capacity_crossover_and_sources() -> None:
    text = " ".join(invoke("show", "rtx-pro-6000", "--model", "qwen3-8b").split())
    for words in (
        "vLLM 0.32 with 92% of 102.0 GB: weights 16.4 GB, set aside 2.1 GB",
        "room for 511,136 tokens",
        "prefill",
        "crossover r = 0.",
        "aiconfigurator-core",
        "LLMServingSim",
    ):
        assert words in text


def test_show_as_json_has_units_in_its_names() -> None:
    facts = json.loads(invoke("show", "h200", "--model", "qwen3-30b-a3b", "--json"))
    assert facts["kv_capacity_tokens"] > 100_000
    assert facts["steps"][0]["step_s"] > 0
    assert 0 < facts["crossover_decode_share"] < 1
    parts = facts["weight_bytes"] + facts["reserve_bytes"] + facts["kv_capacity_tokens"] * facts["kv_bytes_per_token"]
    assert parts == int(0.92 * facts["memory_bytes"])
    assert facts["reserve_bytes"] > 1e9


def test_show_draws_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    invoke("show", "l40s", "--model", "qwen3-4b", "--plot", str(path))
    assert path.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["h2000"], UnknownNameError),
        (["h200", "--model", "qwen-8b"], UnknownNameError),
        (["l40s", "--model", "qwen3-30b-a3b"], UsageError),
        (["h200", "--cost", "guess"], UnknownNameError),
        (["h200", "--plot", "curve.doc"], UsageError),
    ],
)
def test_bad_usage_is_one_clear_error(arguments: list[str], kind: type[EbbenchError]) -> None:
    result = CliRunner().invoke(app, ["devices", "show", *arguments], standalone_mode=False)
    assert isinstance(result.exception, kind)
    assert "\n" not in str(result.exception)


def test_show_is_of_one_gpu_of_several_and_names_the_links() -> None:
    from typer.testing import CliRunner

    from ebbench.cli.main import app

    shown = [
        json.loads(CliRunner().invoke(app, ["devices", "show", "rtx-pro-6000", "--json", *more]).stdout)
        for more in ([], ["--tp", "2"], ["--tp", "2", "--link", "pcie-peer"], ["--quantization", "fp8"])
    ]
    alone, shared, peers, fp8 = shown
    assert list(alone["links"]) == ["pcie", "pcie-peer"]
    assert alone["steps"][0]["step_s"] > shared["steps"][0]["step_s"] > peers["steps"][0]["step_s"]
    assert shared["kv_capacity_tokens"] > 2 * alone["kv_capacity_tokens"]
    assert fp8["weight_bytes"] < 0.6 * alone["weight_bytes"]
    assert fp8["reserve_bytes"] == pytest.approx(alone["reserve_bytes"], rel=0.02)
    assert shared["reserve_bytes"] == pytest.approx(alone["reserve_bytes"], rel=0.1), "a smaller step, and collectives"


def test_a_link_of_one_gpu_is_refused() -> None:
    result = CliRunner().invoke(app, ["devices", "show", "h100", "--link", "nvlink"], standalone_mode=False)
    assert "give --tp too" in str(result.exception)
