"""`show` and `compare` in Markdown and CSV: the same figures as in JSON."""

import csv
import io
import json
from pathlib import Path

import pytest

from ebbench.cli.main import app


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([*map(str, arguments)], standalone_mode=True)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("formats") / "runs"
    arguments = ["run", "balanced", "--engine", "sim", "-p", "v1", "-p", "eb", "-n", "60", "-c", "16", "--json", "-q"]
    with pytest.raises(SystemExit):
        app([*arguments, "--device", "h200", "--repeats", "2", "-o", str(directory)], standalone_mode=True)
    return directory


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_show_as_csv_has_the_figures_of_json(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    summaries = json.loads(call(capsys, "show", runs, "--json")[1])
    rows = rows_of(call(capsys, "show", runs, "--format", "csv")[1])
    assert [row["policy"] for row in rows] == ["v1", "eb"]
    for row in rows:
        ours = [summary for summary in summaries if summary["policy"] == row["policy"]]
        for name in ("output_throughput", "input_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms"):
            mean = sum(summary[name] for summary in ours) / len(ours)
            assert float(row[name]) == pytest.approx(mean), name


def test_compare_as_csv_has_the_figures_of_json(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    text = call(capsys, "compare", runs, "--json")[1]
    rows = rows_of(call(capsys, "compare", runs, "-f", "csv")[1])
    assert [row["figure"] for row in rows][:1] == ["output_throughput"]
    assert {(row["baseline"], row["policy"]) for row in rows} == {("v1", "eb")}
    for row in rows:
        assert row["change"] in text
        assert float(row["value"]) > 0


@pytest.mark.parametrize("command", ["show", "compare"])
def test_markdown_is_a_table_with_its_notes(capsys: pytest.CaptureFixture[str], runs: Path, command: str) -> None:
    code, out, _ = call(capsys, command, runs, "--format", "markdown")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("# qwen3-8b on h200")
    [rule] = [line for line in lines if set(line) <= set("|-: ") and "---" in line]
    columns = rule.count("|")
    table = [line for line in lines if line.startswith("|")]
    assert len(table) >= 4
    assert {line.count("|") for line in table} == {columns}
    assert any(line.startswith("- ") for line in lines)


@pytest.mark.parametrize("command", ["show", "compare"])
def test_unknown_and_contradicting_formats_are_refused(
    capsys: pytest.CaptureFixture[str], runs: Path, command: str
) -> None:
    code, _, err = call(capsys, command, runs, "--format", "cvs")
    assert (code, "did you mean 'csv'" in err) == (2, True)
    code, _, err = call(capsys, command, runs, "--format", "csv", "--json")
    assert (code, "--json" in err) == (2, True)


def test_compare_says_the_caveats_of_the_device_in_every_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The host of the L40S was never fitted; the H200's was."""
    arguments = ["run", "balanced", "--engine", "sim", "-p", "v1", "-p", "eb", "-n", "20", "--json", "-q"]
    arguments += ["--no-async-scheduling"]  # the host's time adds to every step
    for device in ("l40s", "h200"):
        assert call(capsys, *arguments, "--device", device, "-o", tmp_path / device)[0] == 0
    text = "the host's time per step on l40s was never fitted"
    for style in ("table", "markdown"):
        out = " ".join(call(capsys, "compare", tmp_path / "l40s", "-f", style)[1].split())
        assert out.count(text) == 1, out
    alone = json.loads(call(capsys, "compare", tmp_path / "l40s", "--json")[1])
    assert sum(said.startswith(text) for said in alone["warnings"]) == 1
    assert alone["cases"][0]["warnings"] == alone["warnings"]
    both = json.loads(call(capsys, "compare", tmp_path / "l40s", tmp_path / "h200", "--json")[1])
    assert sum(said.startswith("l40s") and text in said for said in both["warnings"]) == 1
    assert [any(text in said for said in case["warnings"]) for case in both["cases"]] == [True, False]
