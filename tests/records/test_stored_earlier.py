"""Results stored when a part of the warnings were sentences: a run against a server, and a cell of a sweep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.records.run import Run
from ebbench.records.warnings import RunWarning
from ebbench.runs.key import directory_name
from ebbench.runs.store import RunStore
from ebbench.spec.run import make_spec

STORED = Path(__file__).parents[1] / "data" / "stored"
LOG = Path(__file__).parents[1] / "data" / "logs" / "aiperf.jsonl"


def test_a_run_with_sentences_is_shown_with_the_codes_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(STORED / "http_run", run)
    shown = CliRunner().invoke(app, ["show", str(run)])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "75 % of the output tokens came together with others, in one message or one read" in text
    assert "--tokenizer no/such-model is not available here" in text
    assert "1 of 3 requests failed or timed out, more than 1%" in text
    (told,) = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).stdout)
    assert [each["code"] for each in told["warnings"]] == [
        "engine", "engine", "engine", "policy-is-a-label", "few-requests", "short-steady-window"
    ]  # fmt: skip
    assert told["reasons"] == [
        {
            "code": "many-failed",
            "values": {"failed": 1, "planned": 3, "after_failed_turns": 0, "limit": 0.01},
            "text": "1 of 3 requests failed or timed out, more than 1%",
        }
    ]
    assert told["warnings"][0]["text"].startswith("the server counts prompt tokens otherwise than the plan in 2 of 2")


def test_a_cell_of_a_sweep_with_sentences_is_read(tmp_path: Path) -> None:
    cell = make_spec({"workload": "balanced"})
    store = RunStore(tmp_path)
    shutil.copytree(STORED / "cell", tmp_path / directory_name(cell))
    measured = store.get(cell)
    assert measured is not None
    (caveat,) = measured.caveats
    assert caveat == RunWarning("", message=caveat.message)
    assert str(caveat).startswith("attention of mixed batches was not measured on l40s")


def test_how_a_log_was_read_can_be_grouped_by_code(tmp_path: Path) -> None:
    asked = ["run", f"log:{LOG}", "--scenario", "trace", "-p", "v1", "-q", "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    said = "1 of 5 rows left out: 1 with an error (first: line 5)"
    assert said in " ".join(done.output.split())
    (found,) = (one for one in Run.load(tmp_path / "run").manifest.warnings if one.code == "rows-left-out")
    assert found.about == "plan"
    assert found.values == {"rows": 5, "dropped": {"an error": {"rows": 1, "first_line": 5}}, "kept_with": ""}
    path = tmp_path / "run" / "summary.parquet"
    rows = pq.read_table(path).to_pylist()
    assert said in rows[0]["warnings"]
    grouped = f"select code, count(*) from '{path}', unnest(warning_codes) as t(code) group by code"
    codes = duckdb.execute(grouped).fetchall()
    assert ("rows-left-out", 1) in codes
