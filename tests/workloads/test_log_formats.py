"""Every log format: what a small file of its published schema becomes, and what is refused with its line."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.errors import InputFileError, UsageError
from ebbench.workloads import build_plan
from ebbench.workloads.trace import read_trace


class Expected(NamedTuple):
    """Facts of a plan, rows in plan order."""

    format: str
    arrival_s: list[float | None]
    inputs: list[int]
    outputs: list[int]
    sessions: list[int]
    dropped: Mapping[str, int] = MappingProxyType({})


FILES = {
    "azure_2024.csv": Expected("Azure CSV", [0, 0.5, 2], [2162, 2399, 76], [5, 6, 15], [0, 1, 2]),
    "burstgpt.csv": Expected(
        "BurstGPT CSV", [0, 40, 113], [472, 1087, 417], [18, 230, 276], [0, 1, 2], {"no output token": 1}
    ),
    "bailian.jsonl": Expected("Bailian JSON lines", [0, None, 0.386], [33, 60, 20], [10, 8, 4], [0, 0, 1]),
    "servegen.csv": Expected("table", [0, 0.25, 2.5], [1200, 300, 80], [90, 40, 7], [0, 1, 2]),
    "timed_trace.jsonl": Expected("Mooncake JSON lines", [0, 0.5, 2.5], [40, 33, 16], [5, 6, 7], [0, 1, 2]),
    "weka.json": Expected(
        "Weka sessions", [0, None, None, None, None], [130, 70, 66, 100, 260], [20, 6, 5, 9, 30], [0] * 5
    ),
    "otel_spans.jsonl": Expected(
        "OpenTelemetry GenAI spans", [0, None, 6], [900, 1300, 40], [60, 80, 12], [0, 0, 1], {"an error": 1}
    ),
    "otlp.json": Expected("OpenTelemetry GenAI spans", [0, None], [512, 600], [33, 20], [0, 0]),
    "openinference.jsonl": Expected(
        "OpenTelemetry GenAI spans", [0, None, 6], [1200, 1700, 40], [60, 80, 12], [0, 0, 1], {"an error": 1}
    ),
    "vllm_bench.json": Expected("vllm bench serve", [0, 0.25, 3], [60] * 3, [12] * 3, [0, 1, 2], {"an error": 1}),
    "guidellm.json": Expected("GuideLLM", [0, 0.212028], [4, 4], [12, 12], [0, 1], {"status incomplete": 1}),
    "guidellm.yaml": Expected("GuideLLM", [0, 0.212028], [4, 4], [12, 12], [0, 1], {"status incomplete": 1}),
    "aiperf.jsonl": Expected(
        "AIPerf", [0, None, 0.264642, None], [60, 132, 60, 132], [12] * 4, [0, 0, 1, 1], {"an error": 1}
    ),
    "access.log": Expected("access log", [0, 5], [812, 77], [90, 31], [0, 1], {"no prompt length": 1, "status 503": 1}),
    "chat.jsonl": Expected("chat log", [0, 3], [230, 221], [12, 9], [0, 1], {"status 500": 1}),
}


@pytest.mark.parametrize("name", FILES)
def test_logs_of_published_schemas_are_recognised(logs: Path, name: str) -> None:
    expected = FILES[name]
    unit = {"timed_trace.jsonl": "s"}.get(name)
    plan = build_plan(f"log:{logs / name}", time_unit=unit)
    table = plan.table
    assert plan.facts["source_reason"] == expected.format
    assert table["input_tokens"].to_pylist() == expected.inputs
    assert table["output_tokens"].to_pylist() == expected.outputs
    assert table["session"].to_pylist() == expected.sessions
    found = [None if value is None else value / 1e9 for value in table["arrival_ns"].to_pylist()]
    assert [value is None for value in found] == [value is None for value in expected.arrival_s]
    times = [value for value in expected.arrival_s if value is not None]
    assert [value for value in found if value is not None] == pytest.approx(times, abs=2e-3)
    assert dict(plan.facts.get("rows_dropped", {})) == expected.dropped
    assert build_plan(f"trace:{logs / name}", time_unit=unit).table.equals(table)


def test_every_listed_format_has_a_file(logs: Path, data: Path) -> None:
    from ebbench.workloads.trace import FORMATS

    known = {each.name for each in FORMATS if each.expected}
    assert known == {expected.format for expected in FILES.values()}
    assert {path.name for path in logs.iterdir()} == {*FILES, "servegen_offline.jsonl"}


def test_openinference_spans_as_phoenix_exports_them(logs: Path, tmp_path: Path) -> None:
    """A page of the API, and a table of spans with a column per attribute."""
    spans = [json.loads(line) for line in (logs / "openinference.jsonl").read_text().splitlines()]
    page = tmp_path / "page.json"
    page.write_text(json.dumps({"data": spans, "next_cursor": None}, indent=2))
    columns: dict[str, list[Any]] = {
        "context.trace_id": [span["context"]["trace_id"] for span in spans],
        "span_kind": [span["span_kind"] for span in spans],
        "start_time": [datetime.fromisoformat(span["start_time"]) for span in spans],
        "end_time": [datetime.fromisoformat(span["end_time"]) for span in spans],
        "status_code": [span["status_code"] for span in spans],
        "attributes.session.id": ["chat-1"] * 4 + [None] * 2,
        "attributes.llm.token_count.prompt": [2900.0, 1200.0, None, 1700.0, 40.0, 40.0],
        "attributes.llm.token_count.completion": [140.0, 60.0, None, 80.0, None, 12.0],
    }
    table = tmp_path / "spans.parquet"
    pq.write_table(pa.table(columns), table)
    expected = build_plan(f"log:{logs / 'openinference.jsonl'}").table
    for path in (page, table):
        assert build_plan(f"log:{path}").table.equals(expected), path
    trace = read_trace(logs / "openinference.jsonl")
    assert trace.collected.cached_tokens == 1024


def test_results_of_vllm_before_start_times_give_lengths(logs: Path, tmp_path: Path) -> None:
    result = json.loads((logs / "vllm_bench.json").read_text())
    del result["start_times"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(result))
    plan = build_plan(f"log:{path}", "poisson", request_rate=2.0)
    assert plan.table["input_tokens"].to_pylist() == [60] * 3
    with pytest.raises(UsageError, match="has no times to replay"):
        build_plan(f"log:{path}")


def test_pauses_and_parallel_requests(logs: Path) -> None:
    plan = build_plan(f"log:{logs / 'otel_spans.jsonl'}").table
    assert plan["pause_ns"].to_pylist() == [None, 3_000_000_000, None]
    faster = build_plan(f"log:{logs / 'otel_spans.jsonl'}", speed=2).table
    assert faster["pause_ns"].to_pylist() == [None, 1_500_000_000, None]
    spans = [(0, 1, 100), (2, 5, 200), (3, 4, 150), (7, 8, 400), (7.5, 9, 20)]
    requests = _spans(spans)
    assert requests.after is not None
    assert list(requests.after) == [None, None, [0], [1, 2], [1, 2]]
    assert requests.pause_s is not None
    assert requests.pause_s.tolist()[1:] == pytest.approx([1, 2, 2, 2.5])


def _spans(spans: Sequence[tuple[float, float, int]]) -> Any:
    from ebbench.workloads.log_rows import Collected, arranged
    from ebbench.workloads.recorded import Recorded, Stamp

    rows = Collected()
    for line, (start, end, tokens) in enumerate(spans):
        rows.add(Recorded(line, Stamp(start, iso=False), tokens, 5, session="a", end=Stamp(end, iso=False)))
    return arranged(rows, np.array([start for start, _, _ in spans]), np.array([end for _, end, _ in spans]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), min_size=1, max_size=12))
def test_a_request_waits_only_for_ended_ones_and_starts_when_it_did(spans: list[tuple[int, int]]) -> None:
    spans = sorted(spans)
    requests = _spans([(start, start + lasted, 10) for start, lasted in spans])
    ends = [start + lasted for start, lasted in spans]
    for turn in range(1, len(spans)):
        waits = None if requests.after is None else requests.after[turn]
        waits = [turn - 1] if waits is None else waits
        assert all(ends[one] <= spans[turn][0] for one in waits)
        released = max((ends[one] for one in waits), default=spans[0][0])
        assert released + requests.pause_s[turn] == pytest.approx(spans[turn][0])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15), st.integers(1, 60)), min_size=1, max_size=12))
def test_requests_that_run_at_the_same_time_have_contents_of_their_own(spans: list[tuple[int, int, int]]) -> None:
    spans = sorted(spans)
    requests = _spans([(start, start + lasted, tokens) for start, lasted, tokens in spans])
    assert requests.content is not None
    content = requests.content.tolist()
    for later, (start, _, tokens) in enumerate(spans):
        for earlier in range(later):
            if content[earlier] == content[later]:
                assert spans[earlier][0] + spans[earlier][1] <= start
                assert tokens >= spans[earlier][2] + 5  # the prompt holds that prompt and its output


def test_sub_agents_start_and_join_as_recorded(logs: Path, tmp_path: Path) -> None:
    table = build_plan(f"log:{logs / 'weka.json'}").table
    assert table["after"].to_pylist() == [None, None, [0], [1], [2, 3]]
    assert table["pause_ns"].to_pylist() == [None, 1_000_000_000, 1_500_000_000, 1_000_000_000, 1_000_000_000]
    untimed = tmp_path / "untimed.json"
    untimed.write_text((logs / "weka.json").read_text().replace('"api_time": 3.0', '"api_time": null'))
    apart = build_plan(f"log:{untimed}").table
    assert apart["session"].to_pylist() == [0, 0, 1, 1, 2]
    assert apart["arrival_ns"].drop_null().to_pylist() == [0, 3_000_000_000, 3_500_000_000]


def test_texts_stay_out_of_the_plan_unless_asked_for(logs: Path) -> None:
    log = f"log:{logs / 'chat.jsonl'}"
    plan = build_plan(log)
    assert plan.table["prompt"].null_count == 2
    assert "Ada" not in str(plan.table.to_pylist()) + str(plan.facts)
    # The system prompt is the same: both prompts begin with the same blocks.
    assert plan.table["hash_ids"].to_pylist() == [[0, 1], [0, 1]]
    kept = build_plan(log, keep_text=True).table["prompt"].to_pylist()
    assert "Ada Example" in kept[0]
    with pytest.raises(UsageError, match="reads no texts, leave it out"):
        build_plan(log, keep_text=True, with_text=False)
    with pytest.raises(UsageError, match="holds no prompts"):
        build_plan(f"log:{logs / 'servegen.csv'}", keep_text=True)


def test_texts_without_counts_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(
        '{"time": 0.5, "messages": [{"role": "user", "content": "abcd"}], "response": "12345678"}\n'
        '{"time": 2.5, "messages": [{"role": "user", "content": [{"type": "text", "text": "abcdefgh"}]}],'
        ' "response": {"choices": [{"message": {"content": "1234"}}]}}\n'
    )
    plan = build_plan(f"log:{path}")
    assert plan.table["input_tokens"].to_pylist() == [3, 4]  # "user: abcd" has 10 bytes
    assert plan.table["output_tokens"].to_pylist() == [2, 1]
    assert "estimated" in plan.facts["token_counts"]
    assert any("estimated" in warning for warning in map(str, plan.warnings))


def rows() -> Iterator[dict[str, Any]]:
    for number in range(30):
        yield {"at": 100.25 + number, "req": {"in": 10 + number}, "made": 3 + number, "who": f"s{number % 7}"}


def test_named_columns_in_every_file_kind(tmp_path: Path) -> None:
    columns = "input=req.in,output=made,time=at,session=who"
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    array = tmp_path / "a.json"
    array.write_text(json.dumps(list(rows()), indent=1))
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows())), parquet)
    plans = [build_plan(f"log:{path}", columns=columns) for path in (lines, packed, array, parquet)]
    for separator in ",;\t|":
        table = tmp_path / f"a{ord(separator)}.csv"
        heading = separator.join(["at", "made", "who", "req.in"])
        table.write_text(
            "\ufeff" + heading + "\n"
            + "".join(separator.join(map(str, (r["at"], r["made"], r["who"], r["req"]["in"]))) + "\n" for r in rows())
        )  # fmt: skip
        plans.append(build_plan(f"log:{table}", columns=columns))
    assert plans[0].facts["sessions"] == 7
    for plan in plans[1:]:
        assert plan.table.equals(plans[0].table)


def test_names_are_recognised_in_any_spelling(tmp_path: Path) -> None:
    for number, names in enumerate(
        ["startTime,promptTokens,completionTokens", "arrival_time,Input Length,Output-Length", "ts,isl,osl"]
    ):
        path = tmp_path / f"{number}.csv"
        path.write_text(f"{names}\n0.5,10,3\n1.5,20,4\n")
        assert build_plan(f"log:{path}").table["input_tokens"].to_pylist() == [10, 20]


def test_units_in_names_decide(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("start_ms,input_tokens,output_tokens,session,latency_ms\n0,9,2,a,250\n1000,30,3,a,100\n")
    table = build_plan(f"log:{path}").table
    assert table["pause_ns"].to_pylist() == [None, 750_000_000]


BAD = [
    ("a.csv", "prompt_tokens,completion_tokens\n5,\n6,\n7,3\n", 2, "2 of 3 rows have no output length, column 'compl"),
    ("a.csv", "prompt_tokens,osl\n,5\n,6\n", 2, "have no prompt length, column 'prompt_tokens' is empty in them"),
    ("a.jsonl", '{"usage": {"isl": 5, "osl": null}}\n', 1, "no output length, column 'usage.osl' is empty in them"),
    ("a.csv", "prompt_tokens,osl\n0,5\n0,6\n", 2, "2 of 2 rows have no prompt token: expected"),
    ("a.csv", "session_id,prompt_tokens,completion_tokens\na,5,5\n", 1, "neither a time nor a turn orders them"),
    ("a.csv", "city,population\nBern,1\n", 1, r"no column with prompt tokens among city, population; nearest format"),
    ("a.csv", "time,prompt_tokens\n1,1\n", 1, "no column with output tokens"),
    ("a.csv", "time,prompt_tokens,completion_tokens\n1,2,3\n2,3\n", 3, "has 2 cells where the header names 3"),
    ("a.csv", "time,time,prompt_tokens\n1,2,3\n", 1, "two columns named 'time'"),
    ("a.json", '{"a": 1,\n "b": \n', 2, "is not valid JSON"),
    ("a.json", '{"request_throughput": 3.0, "num_prompts": 4}\n', 1, "--save-detailed"),
    ("a.json", '{"aiperf_version": "0.13.0", "request_throughput": {}}', None, "profile_export.jsonl"),
    ("a.csv", "Run Info,Run Info\nx,y\n", 1, "benchmarks.json"),
    ("a.gz", "\x1f\x8bxxxxxxxx", None, "cannot be unpacked"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "line", "message"), BAD)
def test_bad_input_is_named_in_one_line(
    tmp_path: Path, name: str, content: str, line: int | None, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputFileError, match=message) as caught:
        build_plan(f"log:{path}")
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


def test_times_that_run_backwards_are_said(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time,input_tokens,output_tokens\n0.5,1,1\n3.5,2,2\n1.5,3,3\n")
    plan = build_plan(f"log:{path}")
    assert plan.table["input_tokens"].to_pylist() == [1, 3, 2]
    assert any("rows earlier than the row before: 1 (first: line 4)" in warning for warning in map(str, plan.warnings))


def test_a_log_without_times_needs_a_scenario(logs: Path) -> None:
    log = f"log:{logs / 'servegen_offline.jsonl'}"
    with pytest.raises(UsageError, match="has no times to replay; give --scenario"):
        build_plan(log)
    assert build_plan(log, "saturated").table["output_tokens"].to_pylist() == [2370, 2031]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("input", "role=column pairs"),
        ("inputs=a", "did you mean 'input'|knows no 'inputs'"),
        ("input=nosuch", "has no column 'nosuch'"),
        ("block_tokens=x", "positive whole number"),
        ("input=a,input=b", "names input twice"),
    ],
)
def test_columns_that_cannot_be_used(logs: Path, columns: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_plan(f"log:{logs / 'servegen.csv'}", columns=columns)


def test_columns_belong_to_logs() -> None:
    with pytest.raises(UsageError, match="--columns is for log:FILE"):
        build_plan("sharegpt", columns="input=a")
    with pytest.raises(UsageError, match="log: names no file"):
        build_plan("log:")


def test_several_benchmarks_are_told_apart(logs: Path, tmp_path: Path) -> None:
    report = json.loads((logs / "guidellm.json").read_text())
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps({**report, "benchmarks": report["benchmarks"] * 2}))
    with pytest.raises(InputFileError, match=r"holds 2 benchmarks \(poisson 5, poisson 5\); choose one with --columns"):
        build_plan(f"log:{path}")
    assert len(build_plan(f"log:{path}", columns="benchmark=2")) == 2
    result = json.loads((logs / "vllm_bench.json").read_text())
    both = tmp_path / "appended.jsonl"
    both.write_text("".join(json.dumps({**result, "output_lens": [tokens] * 4}) + "\n" for tokens in (5, 9)))
    with pytest.raises(InputFileError, match="several runs; choose one with --columns benchmark=1"):
        build_plan(f"log:{both}")
    assert build_plan(f"log:{both}", columns="benchmark=2").table["output_tokens"].to_pylist() == [9] * 3


def test_a_span_without_a_start_is_left_out(logs: Path, tmp_path: Path) -> None:
    text = (logs / "otlp.json").read_text()
    first = re.search(r'"startTimeUnixNano": *"(\d+)"', text)
    assert first is not None
    path = tmp_path / "a.json"
    path.write_text(text.replace(first[1], "0", 1))
    whole, part = (read_trace(of).timed() for of in (logs / "otlp.json", path))
    assert len(part) == len(whole) - 1
    assert part.facts["rows_dropped"] == {"never sent": 1}


def test_a_span_that_sums_up_those_within_it_is_no_request(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    spans = [("c", "b", 100, "chat"), ("b", "a", None, None), ("d", "a", 200, "chat"), ("a", "", 300, None)]
    path.write_text(
        "".join(
            json.dumps({
                "trace_id": trace, "span_id": own, "parent_span_id": outer, "start_time": f"2026-03-01T10:00:0{at}Z",
                "attributes": {"gen_ai.operation.name": operation, "gen_ai.usage.input_tokens": tokens,
                               "gen_ai.usage.output_tokens": tokens and 9},
            }) + "\n"
            for trace in ("t1", "t2") for at, (own, outer, tokens, operation) in enumerate(spans)
        )
    )  # fmt: skip
    trace = read_trace(path)
    assert list(trace.collected.input_tokens) == [100, 200] * 2
    assert trace.collected.dropped == {"the sum of others within it": (2, 4)}
