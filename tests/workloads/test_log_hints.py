"""What a log's reader says of bad input: the line, what was expected and the remedy; and what it refuses to guess."""

import datetime as dt
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from ebbench.errors import InputFileError, UsageError
from ebbench.workloads import build_plan
from ebbench.workloads.log_report import describe_log
from ebbench.workloads.trace import read_trace

HEADER = "timestamp,input_tokens,output_tokens\n"
BAD = [
    ("timestamp;input_tokens;output_tokens\n0,134;1;1\n", 2, r"write decimals with a point, 0\.134"),
    (HEADER + "0.1,1,1\n,1,1\n", 3, "timestamp is empty; expected a number or ISO 8601; --columns time=- reads"),
    (
        "timestamp,input_tokens,output_tokens,note\n0.1,1,1\n",
        2,
        r"4 columns; if 'note' is empty, end the row with ','$",
    ),
    (HEADER + "0.1,1,1,9\n", 2, "3 columns; a cell that holds ',' needs quotes$"),
    (HEADER + "03/02/2026 09:00,1,1\n", 2, "which number is the month cannot be told"),
    (HEADER + "noon,1,1\n", 2, "such as 12.5 or 2026"),
    (HEADER + "1772000000,1,1\n1772000001,1,1\n1772000002500,1,1\n", 4, "Unix time in milliseconds, .* in seconds"),
    (HEADER + "2026-03-02T09:00:00Z,1,1\n2026-03-02T09:00:00Z,1,1\n5,1,1\n", 4, "some are numbers"),
    (HEADER + "2026-03-02T09:00:00Z,1,1\n2026-03-02T09:00:00,1,1\n", 3, "name their zone"),
    ("timestamp;input_tokens;output_tokens\n0.5;1,234;1\n", 2, "found '1,234'; write it without separators"),
    ('timestamp,input_tokens,output_tokens,n\n0.1,1,1,a\n0.2,1,1,"b\n0.3,1,1,c\n', 2, "a quote is not closed"),
    ("\n\n" + HEADER + "0.1,1,1\n0.2,1,x\n", 5, "expected a number of tokens in output_tokens, found 'x'$"),
    (HEADER + "0.1,1,5.5\n", 2, "found '5.5'$"),
    ("timestamp,prompt,response\n0.5,100,10\n1.75,90,12\n", 1, "no column with prompt tokens among .*prompt"),
    (HEADER + "0.1,1,1\n0.2,1,2000000000\n", 3, "expected 0 to 16,777,216 tokens in output_tokens"),
    (HEADER + "2026-03-02T09:00:00Z,1,1\n1970-01-01T00:00:00Z,1,1\n", None, "56 years, from line 3 to line 2"),
    (HEADER, None, "only a header"),
    ("0.5,12,9\n0.6,15,8\n", 1, "holds values; put a line with names above it"),
    ("city,population\nBern,1\n", 1, r"nearest format: table \(CSV, Parquet or JSON lines"),
    ("start,end,input_tokens,output_tokens\n0.5,2026-03-02T09:00:00Z,1,1\n", 2, "not written one way"),
]


@pytest.mark.parametrize(("content", "line", "message"), BAD)
def test_bad_rows_are_refused_with_their_line_and_a_remedy(
    tmp_path: Path, content: str, line: int | None, message: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(InputFileError, match=message) as caught:
        build_plan(f"log:{path}")
    assert caught.value.line == line


@pytest.mark.parametrize(
    "content",
    [
        "timestamp,input_tokens,output_tokens,note\n0.1,7,1,\n0.2,7,1,\n",
        "timestamp,input_tokens,output_tokens,\n0.1,7,1,\n0.2,7,1,\n",
        HEADER + "0.1,7,1,\n0.2,7,1,,\n",
    ],
)
def test_a_last_column_that_is_empty_is_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    assert build_plan(f"log:{path}").table["input_tokens"].to_pylist() == [7, 7]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04rest", "zip archive or an Excel sheet"),
        (b"\x28\xb5\x2f\xfdrest", "zstd -d"),
        ("timestamp,a\n".encode("utf-16"), "iconv -f utf-16 "),
        ("timestamp,a\n".encode("utf-16-be"), "iconv -f utf-16be "),
        ("timestamp,a\n".encode("utf-16-le"), "iconv -f utf-16le "),
        ("timestamp,Größe\n".encode("latin-1"), "iconv -f latin1"),
        (b"\x01\x00\x02\xff" * 9, "not UTF-8 text, nor Parquet"),
    ],
)
def test_files_that_are_not_text_are_refused_with_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=message):
        build_plan(f"log:{path}")


@pytest.mark.parametrize("values", [("0.134", "0.5"), ("2026-03-02T09:00:00Z", "2026-03-02T09:00:01Z"), ("7", "9")])
def test_a_time_column_under_another_name_is_named(tmp_path: Path, values: tuple[str, str]) -> None:
    path = tmp_path / "a.csv"
    rows = "".join(f"{value},{place},9,4\n" for value, place in zip(values, "BA", strict=True))
    path.write_text("moment_of_it,place,input_tokens,output_tokens\n" + rows)
    with pytest.raises(UsageError, match="'moment_of_it' looks like its times: --columns time=moment_of_it"):
        build_plan(f"log:{path}")
    assert "time=moment_of_it" in describe_log(read_trace(path), None)["time_hint"]
    assert describe_log(read_trace(path, "time=-"), None)["time_hint"] == ""


def test_falling_numbers_are_not_taken_for_times(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("score,input_tokens,output_tokens\n9,9,4\n7,9,4\n")
    assert describe_log(read_trace(path), None)["time_hint"] == ""


@pytest.mark.parametrize(
    ("file", "columns", "message"),
    [
        ("servegen.csv", "input=input_tokens,output=input_tokens", "cannot be both input and output"),
        ("azure_2024.csv", "input=GeneratedTokens", "cannot be both input and output"),
        ("servegen.csv", "benchmark=2", "benchmark= has no effect"),
        ("servegen.csv", "block_tokens=16", "has no hash_ids"),
        ("weka.json", "input=in", "input= has no effect, since it is read as Weka sessions"),
        ("otlp.json", "time=start", "time= has no effect"),
        ("vllm_bench.json", "block_tokens=16", "block_tokens= has no effect"),
        ("guidellm.json", "input=a", "input= has no effect, .* it takes benchmark="),
    ],
)
def test_columns_without_effect_are_refused(data: Path, tmp_path: Path, file: str, columns: str, message: str) -> None:
    path = data / "logs" / file
    if file == "servegen.csv":
        path = tmp_path / file
        path.write_text(HEADER + "0.5,9,3\n0.9,8,4\n")
    with pytest.raises(UsageError, match=message):
        read_trace(path, columns)


def test_not_a_number_is_no_length_in_any_kind_of_file(tmp_path: Path) -> None:
    columns = {"timestamp": [0.5, 1.0, 1.5], "input_tokens": [9.0, 8.0, float("nan")], "output_tokens": [3, 4, 5]}
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "a.parquet")
    pc.write_csv(table, tmp_path / "a.csv")
    for name in ("a.parquet", "a.csv"):
        assert read_trace(tmp_path / name).collected.dropped == {"no prompt length": (1, 3 if "parquet" in name else 4)}


def test_truth_values_are_no_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 0.5, "input_tokens": true, "output_tokens": 4}\n')
    with pytest.raises(InputFileError, match="found 'True'"):
        read_trace(path)


def test_an_end_in_another_unit_than_the_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("start_s,end_ms,session,input_tokens,output_tokens\n0.5,900,a,9,3\n1.5,1900,a,30,4\n")
    with pytest.raises(UsageError, match="end_ms is in ms, start_s is not"):
        read_trace(path)
    assert len(read_trace(path, "end=-").requests) == 2


def test_ends_before_starts_are_said_and_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("start,end,session,input_tokens,output_tokens\n0.5,0.1,a,9,3\n1.5,1.75,a,30,4\n2.5,2.6,a,90,4\n")
    plan = build_plan(f"log:{path}")
    assert any("end before they start: 1 (first: line 2)" in warning for warning in map(str, plan.warnings))
    # The second request follows at once, as without ends; the third after the recorded pause.
    assert plan.table["pause_ns"].to_pylist() == [None, None, 750_000_000]


def test_prompts_of_anthropics_api_include_their_cached_tokens(tmp_path: Path) -> None:
    usage = '{"input_tokens": 12, "cache_creation_input_tokens": %s, "cache_read_input_tokens": %d, "output_tokens": 5}'
    path = tmp_path / "a.jsonl"
    path.write_text(
        f'{{"time": 0.5, "usage": {usage % (300, 0)}}}\n{{"time": 1.25, "usage": {usage % ("null", 4000)}}}\n'
    )
    plan = build_plan(f"log:{path}")
    assert plan.table["input_tokens"].to_pylist() == [312, 4012]
    assert any("Anthropic" in warning for warning in map(str, plan.warnings))
    assert build_plan(f"log:{path}", columns="input=usage.input_tokens").table["input_tokens"].to_pylist() == [12, 12]


def test_totals_that_include_cached_tokens_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"time": 0.5, "usage": {"prompt_tokens": 99, "cache_read_input_tokens": 64, "completion_tokens": 5}}\n'
    )
    assert build_plan(f"log:{path}").table["input_tokens"].to_pylist() == [99]


@pytest.mark.parametrize(
    "clock", ["02/Mar/2026:09:00:0{} +0000", "2026-03-02 09:00:0{} UTC", "2026-03-02 11:00:0{}+02"]
)
def test_clocks_of_servers_and_databases_are_read(tmp_path: Path, clock: str) -> None:
    path = tmp_path / "a.jsonl"
    row = '{"time_local": "%s", "prompt_tokens": 5, "completion_tokens": 3}\n'
    path.write_text("".join(row % clock.format(second) for second in (1, 4)))
    assert build_plan(f"log:{path}").table["arrival_ns"].to_pylist() == [0, 3_000_000_000]
    assert read_trace(path).stamps is not None
    assert read_trace(path).stamps.first == 1_772_442_001  # type: ignore[union-attr]


def test_a_log_in_the_order_of_ends_has_no_warning_about_its_order(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    line = '- [02/Mar/2026:09:00:0{} +0000] "POST / HTTP/1.1" 200 prompt_tokens=5 completion_tokens=3 request_time={}\n'
    path.write_text(line.format(4, 1.0) + line.format(5, 4.5))
    plan = build_plan(f"log:{path}")
    assert plan.table["arrival_ns"].to_pylist() == [0, 2_500_000_000]
    assert plan.warnings == ()


def test_cached_tokens_are_reported_and_what_a_replay_shares_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    details = '"prompt_tokens_details": {"cached_tokens": %d}'
    row = '{"time": %s, "session": "%s", "usage": {"prompt_tokens": 100, "completion_tokens": 5, %s}}\n'
    path.write_text(row % (0.5, "a", details % 0) + row % (1.25, "b", details % 64))
    assert describe_log(read_trace(path), None)["cached_share"] == pytest.approx(0.32)
    assert any(
        "32.0 % of the prompt tokens were cached" in warning for warning in map(str, build_plan(f"log:{path}").warnings)
    )
    silent = read_trace(path, "cached=-")
    assert "cached_share" not in describe_log(silent, None)
    assert not any("cached" in warning for warning in map(str, silent.requests.warnings))


@pytest.mark.parametrize("remarks", ["# exported 2026-11-01\n", "# exported\n\n#\n"])
def test_remarks_above_the_header_are_no_header(remarks: str, tmp_path: Path) -> None:
    log = tmp_path / "remarks.csv"
    log.write_text(f"{remarks}#time,input_tokens,output_tokens\n1.5,10,20\n2.5,30,40\n")
    plan = build_plan(f"log:{log}", columns="time=#time").table
    assert plan["input_tokens"].to_pylist() == [10, 30]


ODD_CELLS: dict[str, tuple[str, dict[str, list[object]], str]] = {
    "sessions named as libraries write none": (
        "timestamp,session_id,input_tokens,output_tokens\n0.5,nan,7,1\n1.75,nan,7,1\n2.5,null,7,1\n",
        {"session": [0, 1, 2]},
        "",
    ),
    "a negative duration": (
        "timestamp,session,duration_s,input_tokens,output_tokens\n0.5,a,-1,7,1\n1.75,a,1,9,1\n9.5,a,1,90,1\n",
        {"pause_ns": [None, None, 6_750_000_000]},
        "end before they start: 1 (first: line 2)",
    ),
    "more cached than prompt tokens": (
        "timestamp,cached_tokens,input_tokens,output_tokens\n0.5,50,100,1\n1.75,500,100,1\n",
        {"input_tokens": [100, 100]},
        "more cached than prompt tokens: 1 (first: line 3)",
    ),
    "durations without a unit": (
        "timestamp,session,latency,input_tokens,output_tokens\n0.5,a,250,7,1\n3.25,a,300,9,1\n",
        {"session": [0, 0]},
        "latency are not used, since its name has no unit",
    ),
    "a cache beside the prompt (Bedrock's log)": (
        "timestamp,inputTokenCount,outputTokenCount,cacheReadInputTokenCount\n0.5,7,1,90\n1.75,7,1,0\n",
        {"input_tokens": [97, 7]},
        "prompts have inputTokenCount + cacheReadInputTokenCount tokens",
    ),
    "a cache beside the prompt (Bedrock)": (
        "timestamp,inputTokens,outputTokens,cacheReadInputTokens,cacheWriteInputTokens\n0.5,7,1,90,3\n1.75,7,1,,\n",
        {"input_tokens": [100, 7]},
        "prompts have inputTokens + cacheReadInputTokens + cacheWriteInputTokens tokens",
    ),
    "thinking beside the answer (Gemini)": (
        "timestamp,promptTokenCount,candidatesTokenCount,thoughtsTokenCount\n0.5,100,10,50\n1.75,100,10,\n",
        {"output_tokens": [60, 10]},
        "answers have candidatesTokenCount + thoughtsTokenCount tokens",
    ),
}


@pytest.mark.parametrize("name", ODD_CELLS)
def test_odd_cells_are_read_as_they_are_meant_or_said(tmp_path: Path, name: str) -> None:
    content, columns, said = ODD_CELLS[name]
    path = tmp_path / "a.csv"
    path.write_text(content)
    plan = build_plan(f"log:{path}")
    read = {"session": read_trace(path).requests.session.tolist(), **plan.table.to_pydict()}
    assert {column: read[column] for column in columns} == columns
    assert not said or any(said in warning for warning in map(str, plan.warnings))
    assert (read_trace(path).collected.cached_share or 0.0) <= 1.0


def test_chains_of_requests_are_sessions_in_any_order_of_rows(tmp_path: Path) -> None:
    links = [(4, 3), (3, 2), (7, 6), (2, 1), (1, -1), (6, -1), (9, 8)]  # 8 is not in the file
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            f'{{"chat_id": {own}, "parent_chat_id": {before}, "timestamp": {own}, "input_length": 20, '
            f'"output_length": {0 if own == 3 else 5}}}\n'
            for own, before in links
        )
    )
    requests = read_trace(path).timed()
    assert requests.session.tolist() == [0, 0, 0, 1, 1, 2]  # the failed 3 still links 4 to 2
    assert requests.arrival_s is not None
    assert requests.arrival_s.tolist() == [0, 5, 8]


@pytest.mark.parametrize(
    ("times", "column", "message"),
    [
        ((1700000000000, 1700000001500), "start_s", "Unix times in milliseconds, .* says seconds; .* ms or s"),
        ((45246.7609, 45246.761, 45246.7615), "timestamp", "spreadsheet's days"),
    ],
)
def test_times_that_cannot_be_in_their_unit_are_refused(
    tmp_path: Path, times: tuple[float, ...], column: str, message: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{column},input_tokens,output_tokens\n" + "".join(f"{time},7,1\n" for time in times))
    with pytest.raises(UsageError, match=message):
        read_trace(path).timed()
    assert read_trace(path).timed("s").facts["trace_span_s"] == pytest.approx(times[-1] - times[0])


def test_columns_of_decimal_numbers_and_of_days_are_times(tmp_path: Path) -> None:
    lengths = {"input_tokens": [7, 7], "output_tokens": [1, 1]}
    for values, span_s in (
        ([Decimal("0.5"), Decimal("1.75")], 1.25),
        ([dt.date(2026, 3, 1), dt.date(2026, 3, 2)], 86_400.0),
    ):
        path = tmp_path / f"{span_s}.parquet"
        pq.write_table(pa.table({"timestamp": values, **lengths}), path)
        assert read_trace(path).timed().facts["trace_span_s"] == span_s
    (yes := tmp_path / "a.jsonl").write_text('{"timestamp": true, "input_tokens": 7, "output_tokens": 1}\n')
    with pytest.raises(InputFileError, match="'True' is neither a number"):
        read_trace(yes)
