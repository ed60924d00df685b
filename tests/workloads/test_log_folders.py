"""Folders of Weka's session files, and YAML documents."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ebbench.errors import InputFileError
from ebbench.runs.key import result_key
from ebbench.spec.run import RunSpec
from ebbench.workloads import build_plan
from ebbench.workloads.options import PlanOptions
from tests.sweep.sweep_data import invoke


def session(name: str, start_s: float = 0.0, **more: object) -> dict[str, object]:
    requests = [
        {"t": start_s, "in": 130, "out": 20, "hash_ids": [1, 2, 3], "api_time": 2.0},
        {"t": start_s + 5.0, "in": 260, "out": 30, "hash_ids": [1, 2, 3, 4, 5], "api_time": 1.0},
    ]
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three sessions: a document, one more behind gzip, and JSON lines; and files of other kinds."""
    made = tmp_path / "traces"
    made.mkdir()
    (made / "a.json").write_text(json.dumps(session("a"), indent=1))
    (made / "b.json.gz").write_bytes(gzip.compress(json.dumps(session("b")).encode()))
    (made / "c.jsonl").write_text(json.dumps(session("c", 1.0)) + "\n")
    (made / "README.md").write_text("no trace")
    (made / "deeper").mkdir()
    return made


def test_a_folder_is_its_sessions(folder: Path, tmp_path: Path) -> None:
    lines = [session("a"), session("b"), session("c", 1.0)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan, one = build_plan(f"log:{folder}"), build_plan(f"log:{tmp_path / 'one.jsonl'}")
    assert plan.table.equals(one.table)
    assert plan.table["session"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert any("3 files" in warning and "begin together" in warning for warning in map(str, plan.warnings))
    shown = invoke("workloads", "show", f"log:{folder}")
    assert shown.exit_code == 0, shown.output
    assert "rows: 6, of which 6 are used" in shown.output


def test_an_error_names_the_file_of_the_folder(folder: Path) -> None:
    (folder / "b2.json").write_text(json.dumps(session("x", block_size=16)))
    with pytest.raises(InputFileError, match=r"b2\.json:1: has blocks of 16 tokens where the first session has 64"):
        build_plan(f"log:{folder}")
    (folder / "b2.json").write_text("{")
    with pytest.raises(InputFileError, match=r"b2\.json"):
        build_plan(f"log:{folder}")
    (folder / "b2.json").write_text(json.dumps({"id": "x", "requests": 3}))
    with pytest.raises(InputFileError, match=r"b2\.json:1: .*Expected 'array', got 'int' - at 'requests'"):
        build_plan(f"log:{folder}")


def test_folders_of_other_formats_and_empty_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="folder without files that end in"):
        build_plan(f"log:{tmp_path}")
    row = {"timestamp": 0, "input_length": 40, "output_length": 3}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"timestamp": 1000}) + "\n")
    with pytest.raises(InputFileError, match="is a folder, which only Weka sessions come in"):
        build_plan(f"log:{tmp_path}")


def test_a_changed_file_of_a_folder_makes_another_plan_and_another_key(folder: Path) -> None:
    cell = RunSpec(PlanOptions(f"log:{folder}"), "v1", "sim", "h200", "qwen3-8b")
    before, key = build_plan(f"log:{folder}").table, result_key(cell)
    changed = json.dumps(session("a"), indent=1).replace('"out": 20', '"out": 21')
    (folder / "a.json").write_text(changed)
    os.utime(folder / "a.json", ns=(1, 1))
    assert not build_plan(f"log:{folder}").table.equals(before)
    assert result_key(cell) != key


def test_yaml_that_is_broken_or_makes_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("metadata:\n  version: 2\nbenchmarks: [\n")
    with pytest.raises(InputFileError, match=r"b\.yaml:4: is not valid YAML"):
        build_plan(f"log:{path}")
    made = tmp_path / "made"
    path.write_text(f"metadata: !!python/object/apply:os.mkdir ['{made}']\nbenchmarks: []\n")
    with pytest.raises(InputFileError, match="is not valid YAML"):
        build_plan(f"log:{path}")
    assert not made.exists()


def test_a_table_with_one_column_and_a_colon_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time: s,input_tokens,output_tokens\n0,10,20\n1,30,40\n")
    plan = build_plan(f"log:{tmp_path / 't.csv'}", columns="time=time: s")
    assert plan.table["input_tokens"].to_pylist() == [10, 30]
