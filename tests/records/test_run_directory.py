"""The run directory: what is written comes back, nothing half-written passes for a run."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.analysis.metrics import METRICS
from ebbench.analysis.rebuild import cut_off_runs
from ebbench.engines.base import EngineResult
from ebbench.errors import DataError, RunError, UsageError
from ebbench.foreign.documents import visible
from ebbench.records import files
from ebbench.records.manifest import (
    LIMITS,
    SCHEMA_VERSION,
    Manifest,
    decode_manifest,
    encode_manifest,
    plan_hash,
)
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.run import Journal, Run, RunWriter, default_run_dir, find_runs, slug, unused
from ebbench.records.warnings import RunWarning
from ebbench.spec.server import EngineOptions
from tests.analysis.made_runs import MadeEngine, device_of, plan_of
from vllm_eb.policy import parse_policy


@pytest.fixture
def result() -> EngineResult:
    return MadeEngine().run(plan_of(30), parse_policy("ebplus"), device_of(), EngineOptions(), None)


def manifest() -> Manifest:
    return Manifest(
        versions={"ebbench": "0"},
        anchor_unix_ns=1_700_000_000_000_000_000,
        workload="made-up",
        scenario="saturated",
        seed=3,
        source="profile",
        plan_hash="00",
        policy="ebplus",
        engine="sim",
        device="made-gpu",
        model="made-model",
        warnings=(RunWarning("w", message="So it is.", remedy="Do that."),),
    )


def tables(result: EngineResult) -> dict[str, pa.Table]:
    return {
        "plan": plan_of(30).table,
        "requests": result.requests,
        "steps": result.steps,
        "decisions": result.decisions,
    }


def stored(path: Path, result: EngineResult) -> Run:
    with RunWriter.create(path) as writer:
        return writer.finish(manifest(), tables(result))


def test_a_run_comes_back_as_it_was_written(tmp_path: Path, result: EngineResult) -> None:
    written = stored(tmp_path / "run", result)
    loaded = Run.load(tmp_path / "run")
    assert loaded.manifest == written.manifest
    assert loaded.manifest.rows == {"plan": 30, "requests": 30, "steps": 10, "decisions": 4}
    for name, table in tables(result).items():
        assert loaded.table(name).equals(table)  # type: ignore[arg-type]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "decisions.parquet",
        "manifest.json",
        "plan.parquet",
        "requests.parquet",
        "steps.parquet",
    ]


def test_some_columns_can_be_read_alone(tmp_path: Path, result: EngineResult) -> None:
    stored(tmp_path / "run", result)
    assert Run.load(tmp_path / "run").table("steps", ["mode"]).column_names == ["mode"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 7))
def test_a_table_written_in_parts_has_the_same_rows_in_the_same_groups(sizes: list[int], group: int) -> None:
    whole = pa.table({"phase": ["eb" if row % 3 else "mb" for row in range(sum(sizes))], "k": range(sum(sizes))})
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "ROW_GROUP_ROWS", group)
        paths = [Path(folder) / name for name in ("whole", "parts")]
        files.write_table(whole, paths[0])
        files.write_parts((whole.slice(at, size) for at, size in zip(starts, sizes, strict=True)), paths[1])
        found = [pq.ParquetFile(path) for path in paths]
        assert found[0].read().equals(found[1].read())
        rows = [[one.metadata.row_group(at).num_rows for at in range(one.num_row_groups)] for one in found]
        assert list(filter(None, rows[0])) == rows[1]


def test_shards_join_in_order_and_disappear(tmp_path: Path, result: EngineResult) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        for start in range(0, 30, 7):
            shard = writer.append("requests", result.requests.slice(start, 7))
            assert files.read_footer(shard)[1] == min(7, 30 - start)  # readable at once: a kill loses no shard
        run = writer.finish(manifest(), {"steps": result.steps})
    assert Run.load(run.path).requests.equals(result.requests)
    assert not list(run.path.glob("*part*"))
    assert Run.load(run.path).decisions.num_rows == 0


def test_an_existing_directory_is_never_written_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists; give another --output-dir"):
        RunWriter.create(tmp_path)


def test_leaving_without_results_leaves_nothing_behind(tmp_path: Path, result: EngineResult) -> None:
    with pytest.raises(KeyboardInterrupt), RunWriter.create(tmp_path / "run"):
        raise KeyboardInterrupt
    assert not (tmp_path / "run").exists()
    with RunWriter.create(tmp_path / "run") as writer:
        writer.append("requests", result.requests)  # and no finish: the engine died
    assert (tmp_path / "run" / "requests.part-0000.parquet").exists()


def test_a_cut_off_run_is_no_run_but_says_how_to_recover(tmp_path: Path, result: EngineResult) -> None:
    writer = RunWriter.create(tmp_path / "run")
    writer.append("requests", result.requests)
    with pytest.raises(DataError, match=r"manifest\.json: missing; the run did not finish; `ebbench recover`"):
        Run.load(tmp_path / "run")


@pytest.mark.parametrize("name", ["plan", "requests", "steps", "decisions"])
@pytest.mark.parametrize("damage", ["truncate", "garbage", "remove", "empty"])
def test_damaged_tables_are_named(tmp_path: Path, result: EngineResult, name: str, damage: str) -> None:
    stored(tmp_path / "run", result)
    path = tmp_path / "run" / f"{name}.parquet"
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": content[: len(content) // 2], "garbage": b"no", "empty": b""}[damage])
    with pytest.raises(DataError, match=rf"{name}\.parquet: (missing|not a readable Parquet file)"):
        Run.load(tmp_path / "run")


def test_damage_inside_a_column_is_found_when_it_is_read(tmp_path: Path, result: EngineResult) -> None:
    stored(tmp_path / "run", result)
    path = tmp_path / "run" / "requests.parquet"
    content = bytearray(path.read_bytes())
    content[60] ^= 1  # the footer, at the end, stays whole
    path.write_bytes(bytes(content))
    run = Run.load(tmp_path / "run")
    with pytest.raises(DataError, match=r"requests\.parquet: not a readable Parquet file"):
        run.requests.validate(full=True)


def test_a_replaced_table_is_found_out(tmp_path: Path, result: EngineResult) -> None:
    stored(tmp_path / "run", result)
    files.write_table(result.requests.slice(0, 5), tmp_path / "run" / "requests.parquet")
    with pytest.raises(DataError, match=r"requests\.parquet: 5 rows where the manifest says 30"):
        Run.load(tmp_path / "run")
    files.write_table(pa.table({"x": [1]}), tmp_path / "run" / "requests.parquet")
    with pytest.raises(DataError, match=r"requests\.parquet: lacks the columns request_id"):
        Run.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("requests", "first_token_ns", pa.array(["x"] * 30)),
        ("requests", "itl_ns", pa.array([5] * 30)),
        ("requests", "status", pa.array([1] * 30)),
        ("plan", "input_tokens", pa.array([0.5] * 30)),
        ("requests", "itl_ns", pa.array([["x"]] * 30)),
    ],
)
def test_a_column_of_another_type_is_named(
    tmp_path: Path, result: EngineResult, name: str, column: str, values: pa.Array
) -> None:
    stored(tmp_path / "run", result)
    table = tables(result)[name]
    changed = table.set_column(table.column_names.index(column), column, values)
    files.write_table(changed, tmp_path / "run" / f"{name}.parquet")
    with pytest.raises(DataError, match=rf"{name}\.parquet: column {column} is .* where ebbench stores "):
        Run.load(tmp_path / "run")


def test_wider_integers_and_strings_of_other_tools_are_accepted(tmp_path: Path, result: EngineResult) -> None:
    stored(tmp_path / "run", result)
    wide = result.requests.cast(
        pa.schema(
            pa.field(f.name, {pa.int32(): pa.int64(), pa.string(): pa.large_string()}.get(f.type, f.type))
            for f in result.requests.schema
        )
    )
    files.write_table(wide, tmp_path / "run" / "requests.parquet")
    assert Run.load(tmp_path / "run").requests["session"].type == pa.int64()


def test_an_unknown_limit_is_named(tmp_path: Path) -> None:
    content = json.loads(encode_manifest(manifest()))
    content["slo"] = {"ttft": 5.0, "itl": 1.0}
    with pytest.raises(
        DataError, match=r"manifest\.json: unknown limit 'itl' in slo; it can limit ttft, tpot, e2el, ttfat"
    ):
        decode_manifest(json.dumps(content).encode(), tmp_path / "manifest.json")
    assert tuple(METRICS) == LIMITS


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"schema_version": "one"}', b"\xff\xfe"])
def test_damaged_manifests_are_named(tmp_path: Path, result: EngineResult, content: bytes) -> None:
    stored(tmp_path / "run", result)
    (tmp_path / "run" / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json: not a manifest"):
        Run.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("options", "max_num_seqs", "1024"), ("options", "max_num_active_seqs", {}), ("options", "block_size", [16]),
     ("options", "gpu_memory_utilization", "most"), ("facts", "gpus", "two"), ("facts", "request_rate", [1.0])],
)  # fmt: skip
def test_a_number_of_another_kind_is_named(part: str, name: str, value: object) -> None:
    content = json.loads(encode_manifest(manifest()))
    content[part][name] = value
    with pytest.raises(DataError, match=rf"not a manifest \(Expected.*\$\.{part}\.{name}"):
        decode_manifest(json.dumps(content).encode(), Path("m"))


def test_the_kind_of_every_number_among_the_options_is_checked() -> None:
    numbers = {name for name, kind in get_type_hints(EngineOptions).items() if {int, float} & {kind, *get_args(kind)}}
    content = json.loads(encode_manifest(manifest()))
    for name in numbers:
        damaged = json.dumps(content | {"options": {name: "many"}}).encode()
        with pytest.raises(DataError, match=name):
            decode_manifest(damaged, Path("m"))


def test_a_newer_manifest_asks_for_a_newer_ebbench(tmp_path: Path) -> None:
    newer = json.dumps({"schema_version": SCHEMA_VERSION + 1, "unheard_of": True}).encode()
    with pytest.raises(DataError, match="newer ebbench"):
        decode_manifest(newer, tmp_path / "manifest.json")


def test_a_manifest_with_an_added_field_still_reads(tmp_path: Path) -> None:
    content = json.loads(encode_manifest(manifest()))
    content["added_later"] = 1
    assert decode_manifest(json.dumps(content).encode(), tmp_path) == manifest()


def test_a_manifest_of_schema_version_1_is_read_and_its_sentences_shown(tmp_path: Path) -> None:
    content = json.loads(encode_manifest(manifest()))
    told = {"code": "device", "message": "Never fitted.", "remedy": "Fit it."}
    content |= {"schema_version": 1, "warnings": [told]}
    [warning] = decode_manifest(json.dumps(content).encode(), tmp_path).warnings
    assert (str(warning), warning.sentence, warning.way_out) == ("Never fitted. Fit it.", "Never fitted.", "Fit it.")


def test_a_warning_whose_values_are_damaged_is_shown_by_its_code() -> None:
    assert str(RunWarning("few-requests", {"completed": "x"})).startswith("few-requests {")
    assert str(RunWarning("of a newer version", {"n": 1})) == "of a newer version {'n': 1}"


SHOWN = st.text().map(visible)  # of what a manifest holds, the characters that a terminal would obey are made visible


VALUES = st.dictionaries(SHOWN, SHOWN | st.integers(0, 2**40) | st.booleans() | st.none())


@given(st.builds(RunWarning, SHOWN, VALUES, SHOWN, SHOWN), SHOWN, st.integers(0, 2**60))
def test_manifests_round_trip(warning: RunWarning, name: str, seed: int) -> None:
    made = msgspec.structs.replace(manifest(), warnings=(warning,), policy=name, seed=seed, facts={name: [seed]})
    assert decode_manifest(encode_manifest(made), Path("m")) == made


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such run directory"):
        Run.load(tmp_path / "nowhere")


def test_a_file_in_place_of_a_run_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    for read in (Run.load, lambda path: cut_off_runs([path])):
        with pytest.raises(DataError, match=r"manifest\.json is a file; give the directory of the run"):
            read(path)


def test_a_run_that_begins_leaves_what_recovery_needs(tmp_path: Path, result: EngineResult) -> None:
    with RunWriter.create(tmp_path / "cut") as writer:
        writer.begin(manifest(), plan_of(30).table)
        journal = Journal(writer, "requests", rows=8, interval_s=1e9)
        for start in range(0, 21, 3):
            journal.add(result.requests.slice(start, 3))
    names = sorted(p.name for p in (tmp_path / "cut").iterdir())
    shards = [f"requests.part-000{number}.parquet" for number in range(3)]
    assert names == ["manifest.partial.json", "plan.part-0000.parquet", *shards]
    assert [files.read_footer(tmp_path / "cut" / shard)[1] for shard in shards] == [9, 9, 3]
    with pytest.raises(DataError, match="ebbench recover"):
        Run.load(tmp_path / "cut")


def test_a_run_that_ends_replaces_its_shards_by_the_whole_tables(tmp_path: Path, result: EngineResult) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        writer.begin(manifest(), plan_of(30).table)
        journal = Journal(writer, "requests", rows=1)
        journal.add(result.requests.slice(0, 12))
        journal.add(result.requests.slice(0, 0))
        writer.finish(manifest(), tables(result))
    run = Run.load(tmp_path / "run")
    assert run.requests.equals(result.requests)
    assert run.manifest.rows["plan"] == 30
    assert sorted(p.suffix for p in run.path.iterdir()) == [".json"] + [".parquet"] * 4


def test_a_run_that_begins_and_measures_nothing_leaves_nothing(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        writer.begin(manifest(), plan_of(30).table)
    assert not (tmp_path / "run").exists()


def test_old_batches_are_stored_though_few(tmp_path: Path, result: EngineResult) -> None:
    writer = RunWriter.create(tmp_path / "run")
    journal = Journal(writer, "requests", interval_s=0.0)
    journal.add(result.requests.slice(0, 2))
    assert (writer.path / "requests.part-0000.parquet").exists()


def test_a_full_disk_is_a_run_error_and_keeps_earlier_shards(
    tmp_path: Path, result: EngineResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "run")
    first = writer.append("requests", result.requests)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        writer.append("requests", result.requests)
    assert files.read_footer(first)[1] == 30
    assert [p.name for p in (tmp_path / "run").iterdir()] == [first.name]


def test_a_table_that_lacks_a_column_is_refused(tmp_path: Path, result: EngineResult) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        with pytest.raises(RunError, match="requests table lacks status"):
            writer.append("requests", result.requests.drop_columns(["status"]))
        with pytest.raises(RunError, match="does not fit its schema"):
            writer.append("requests", result.requests.set_column(1, "session", pa.array(["x"] * 30)))


def test_extra_columns_are_kept(tmp_path: Path, result: EngineResult) -> None:
    more = result.requests.append_column("logprob", pa.array([0.5] * 30))
    with RunWriter.create(tmp_path / "run") as writer:
        run = writer.finish(manifest(), {"requests": more})
    assert Run.load(run.path).requests["logprob"].to_pylist() == [0.5] * 30


def test_equal_plans_hash_equal_and_every_difference_shows() -> None:
    plan = plan_of(20)
    assert plan_hash(plan) == plan_hash(plan_of(20))
    chunked = pa.concat_tables([plan.table.slice(0, 7), plan.table.slice(7)])
    assert plan_hash(Plan(chunked, plan.phases, {}, None)) == plan_hash(plan)
    others = [
        plan_of(21),
        plan_of(20, output_tokens=21),
        plan_of(20, concurrency=9),
        plan_of(20, phases=[ClosedPhase("all", 10, 8), ClosedPhase("b", 10, 8)]),
        Plan(plan.table, (), {}, None),
        Plan(plan.table, (), {}, 8),
    ]
    assert len({plan_hash(other) for other in [plan, *others]}) == len(others) + 1
    assert len(plan_hash(plan)) == len(hashlib.sha256().hexdigest())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eb:theta=0.5", "eb-theta-0.5"),
        ("ebplus:margin=1e-05,estimator=censored", "ebplus-margin-1e-05-estimator-censored"),
        ("../../etc/passwd", "etc-passwd"),
        ("/", "run"),
        ("..", "run"),
        ("", "run"),
        (".hidden", "hidden"),
        ("a/../b", "a-.-b"),
        ("x" * 300, "x" * 80),
    ],
)
def test_a_slug_keeps_letters_digits_and_dots(text: str, expected: str) -> None:
    assert slug(text) == expected


@given(st.text())
def test_a_slug_is_one_name_inside_its_directory(text: str) -> None:
    name = slug(text)
    assert name
    assert ".." not in name
    assert not name.startswith(".")
    assert Path("runs", name).resolve().parent == Path("runs").resolve()


def test_default_directories_name_time_workload_and_policy(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    now = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
    made = default_run_dir("trace:/data/azure.csv", "eb:k=4", root=tmp_path, now=now)
    assert made == tmp_path / "20260504T030201Z-trace-azure-eb-k-4"
    made.mkdir()
    assert unused(made).name == made.name + "-2"


def test_a_directory_of_runs_stands_for_them(tmp_path: Path, result: EngineResult) -> None:
    for name in ("b", "a"):
        stored(tmp_path / "all" / name, result)
    assert find_runs([tmp_path / "all"]) == [tmp_path / "all" / "a", tmp_path / "all" / "b"]
    assert find_runs([tmp_path / "all" / "b"]) == [tmp_path / "all" / "b"]
    twice = find_runs([tmp_path / "all", tmp_path / "all" / "b", tmp_path / "all" / "a" / ".." / "b"])
    assert twice == [tmp_path / "all" / "a", tmp_path / "all" / "b"], "shown as a second measurement of the same plan"
    assert find_runs([tmp_path / "none"]) == [tmp_path / "none"]
