from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbench.errors import InputFileError, UsageError
from ebbench.workloads import build_plan

SECONDS = 1_000_000_000


def test_azure_csv_is_replayed_in_an_open_loop(data: Path) -> None:
    plan = build_plan(f"trace:{data / 'azure.csv'}")
    table = plan.table
    assert not plan.closed_loop
    assert plan.facts["scenario"] == "trace"
    assert plan.facts["source_reason"] == "Azure CSV"
    assert table["arrival_ns"].to_numpy() / 1e9 == pytest.approx([0, 0.052, 1.5], abs=1e-6)
    assert table["input_tokens"].to_pylist() == [4808, 3180, 110]
    assert table["output_tokens"].to_pylist() == [10, 8, 27]
    assert table["hash_ids"].null_count == 3


@pytest.mark.parametrize(
    "stamps",
    [
        ["2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:02+00:00", "2024-05-10 00:00:02.509930+00:00"],
        ["2024-05-10T00:00:00.00993", "2024-05-10T00:00:02", "2024-05-10T00:00:02.50993"],
    ],
)
def test_azure_times_with_zone_and_without_decimals(tmp_path: Path, stamps: list[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{s},10,20\n" for s in stamps))
    times = build_plan(f"trace:{path}").table["arrival_ns"].to_numpy() / 1e9
    assert times == pytest.approx([0, 1.99007, 2.5], abs=1e-6)


def test_mooncake_keeps_hash_ids(data: Path) -> None:
    table = build_plan(f"trace:{data / 'mooncake.jsonl'}").table
    assert table["arrival_ns"].to_pylist() == [0, 400_000_000, 2 * SECONDS, 2 * SECONDS]
    assert table["hash_ids"].to_pylist() == [[0, 1, 2], [0, 1], [0, 3], None]
    assert table["input_tokens"].to_pylist() == [1300, 1024, 513, 90]
    assert len(set(table["content"].to_pylist())) == 4


def test_speed_cap_and_number(data: Path) -> None:
    path = f"trace:{data / 'mooncake.jsonl'}"
    plan = build_plan(path, speed=4, num_prompts=3, max_concurrency=2)
    assert plan.table["arrival_ns"].to_pylist() == [0, SECONDS // 10, SECONDS // 2]
    assert plan.max_concurrency == 2
    assert plan.facts["speed"] == 4


def test_a_log_is_read_again_where_more_sessions_are_asked_for(data: Path) -> None:
    plan = build_plan(f"trace:{data / 'mooncake.jsonl'}", num_prompts=10)
    note = "10 sessions are taken from a log of 4: it is read again, each time with new contents"
    assert [str(each) for each in plan.warnings] == [note]
    assert plan.facts["log_sessions"] == 4
    assert plan.table["input_tokens"].to_pylist() == [1300, 1024, 513, 90] * 2 + [1300, 1024]
    assert len(set(plan.table["content"].to_pylist())) == 10
    times = plan.table["arrival_ns"].to_numpy() / 1e9
    assert times[:4] == pytest.approx(times[4:8] - times[4])
    assert times[4] == pytest.approx(2 + 2 / 3)
    hashes = plan.table["hash_ids"].to_pylist()
    blocks = [{h for row in rows for h in row or ()} for rows in (hashes[:4], hashes[4:8], hashes[8:])]
    assert not blocks[0] & blocks[1]
    assert not blocks[1] & blocks[2]
    assert hashes[4][0] == hashes[5][0] == hashes[6][0]
    assert hashes[7] is None


def test_a_part_that_is_redrawn_begins_where_the_seed_says(data: Path) -> None:
    path = f"trace:{data / 'mooncake.jsonl'}"
    plans = [build_plan(path, "poisson", request_rate=1, num_prompts=3, redraw=True, seed=seed) for seed in range(8)]
    parts = {tuple(plan.table["input_tokens"].to_pylist()) for plan in plans}
    log = [1300, 1024, 513, 90, 1300, 1024]
    assert [str(each) for each in plans[0].warnings] == [
        "3 of the log's 4 sessions are taken, from a place that the seed draws"
    ]
    assert parts == {tuple(log[start : start + 3]) for start in range(4)}
    replays = [build_plan(path, num_prompts=3, redraw=True, seed=seed) for seed in range(8)]
    assert {tuple(plan.table["input_tokens"].to_pylist()) for plan in replays} == parts
    assert all(plan.table["arrival_ns"][0].as_py() == 0 for plan in replays)


def test_recorded_times_are_scaled_to_a_rate(data: Path, tmp_path: Path) -> None:
    path = f"trace:{data / 'mooncake.jsonl'}"
    own = build_plan(path).table["arrival_ns"].to_numpy()
    scaled = build_plan(path, "trace", request_rate=6.0)
    assert scaled.table["arrival_ns"].to_numpy() == pytest.approx(own / scaled.facts["speed"], abs=1)
    many = build_plan(path, "trace", request_rate=6.0, num_prompts=400).table["arrival_ns"].to_numpy()
    assert 399 / (many[-1] / 1e9) == pytest.approx(6.0, rel=0.01)
    at_once = tmp_path / "at_once.jsonl"
    at_once.write_text('{"timestamp": 1, "input_length": 5, "output_length": 5}\n' * 3)
    with pytest.raises(UsageError, match="no rate to scale; use --scenario poisson"):
        build_plan(f"log:{at_once}", "trace", request_rate=6.0)


def test_pauses_within_sessions_stay_when_starts_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "turns.csv"
    rows = ((0.5, 1.0, "a"), (4.5, 5.0, "a"), (10.5, 11.0, "b"))
    path.write_text("time,end,input_tokens,output_tokens,session_id\n" + "".join(
        f"{start},{end},20,5,{session}\n" for start, end, session in rows
    ))  # fmt: skip
    pauses = [build_plan(f"log:{path}", "trace", **more).table["pause_ns"].to_pylist()[1] for more in (
        {}, {"request_rate": 4.0}, {"speed": 2.0}
    )]  # fmt: skip
    assert pauses == [3.5e9, 3.5e9, 1.75e9]


def test_unordered_rows_are_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(
        f'{{"timestamp": {t}, "input_length": {n}, "output_length": 1, "hash_ids": [{n}]}}\n'
        for t, n in [(500, 1), (100, 2), (500, 3), (300, 4)]
    ))  # fmt: skip
    table = build_plan(f"trace:{path}").table
    assert table["input_tokens"].to_pylist() == [2, 4, 1, 3]
    assert table["hash_ids"].to_pylist() == [[2], [4], [1], [3]]
    assert table["arrival_ns"].to_numpy() / 1e9 == pytest.approx([0, 0.2, 0.4, 0.4])


def scenario(tmp_path: Path, replay: str) -> str:
    path = tmp_path / "replay.toml"
    path.write_text(f'name = "replay"\ndescription = "x"\nloop = "trace"\n[replay]\n{replay}\n')
    return str(path)


def test_slices_and_repetitions(data: Path, tmp_path: Path) -> None:
    trace = f"trace:{data / 'mooncake.jsonl'}"
    plan = build_plan(trace, scenario(tmp_path, "start_s = 0.3\nduration_s = 2.0"))
    assert plan.table["arrival_ns"].to_numpy() / 1e9 == pytest.approx([0.1, 1.7, 1.7])
    plan = build_plan(trace, scenario(tmp_path, "duration_s = 1.0\nrepeat = 3\nspeed = 2.0"))
    assert plan.table["arrival_ns"].to_numpy() / 1e9 == pytest.approx([0, 0.2, 0.5, 0.7, 1.0, 1.2])
    hashes = plan.table["hash_ids"].to_pylist()
    assert hashes[:2] == [[0, 1, 2], [0, 1]]
    assert not {h for row in hashes[:2] for h in row} & {h for row in hashes[2:4] for h in row}
    whole = build_plan(trace, scenario(tmp_path, "repeat = 2"))
    times = whole.table["arrival_ns"].to_numpy() / 1e9
    assert times[4] == pytest.approx(2 + 2 / 3)
    with pytest.raises(UsageError, match=r"slice from 99 s; it is 2 s long"):
        build_plan(trace, scenario(tmp_path, "start_s = 99"))


def test_recorded_lengths_under_other_scenarios(data: Path) -> None:
    trace = f"trace:{data / 'mooncake.jsonl'}"
    closed = build_plan(trace, "saturated")
    assert closed.phases[0].sessions == 4
    assert closed.table["input_tokens"].to_pylist() == [1300, 1024, 513, 90]
    assert closed.table["hash_ids"][0].as_py() == [0, 1, 2]
    timed = build_plan(trace, "constant", request_rate=2, num_prompts=3)
    assert timed.table["arrival_ns"].to_pylist() == [SECONDS // 2, SECONDS, 3 * SECONDS // 2]
    own = build_plan(trace, "distribution-shift", num_prompts=30)
    assert len(own) == 30
    short = build_plan(trace, "constant", request_rate=2, num_prompts=9)
    assert short.table["input_tokens"].to_pylist() == [1300, 1024, 513, 90] * 2 + [1300]
    assert "9 sessions are taken from a log of 4: it is read again" in str(short.warnings[0])


def test_a_table_in_another_encoding_says_how_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("time,input_tokens,output_tokens,user\n1.5,2,3,Müller\n".encode("latin-1"))
    with pytest.raises(InputFileError, match="iconv"):
        build_plan(f"log:{path}")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4808,10\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5}\n'


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("", None, "is empty"),
        ("time,in,out\n1,2,3\n", 1, "no column with prompt tokens among time, in, out; nearest format"),
        ("time,input_tokens\n1,2\n", 1, "no column with output tokens among time, input_tokens; nearest format: table"),
        ("TIMESTAMP,ContextTokns,GeneratedTokens\n1,2,3\n", 1, "'ContextTokns' looks like it; nearest format: Azure"),
        (AZURE + "2023-11-16 18:17:03.9,x,10\n", 3, "expected a number of tokens in ContextTokens, found 'x'"),
        (AZURE + "\nyesterday,3,10\n", 4, "TIMESTAMP 'yesterday' is neither a number nor ISO 8601"),
        (AZURE + "2023-11-16 18:17:03.9,3\n", 3, "has 2 cells where the header names 3"),
        (AZURE.splitlines()[0] + "\n2023-11-16 18:17:03.9,3,0\n", 2, "1 of 1 rows have no output token"),
        (AZURE.splitlines()[0], None, "holds no requests"),
        (MOONCAKE + '{"timestamp": 0,\n', 2, "is not valid JSON"),
        (MOONCAKE + "[3]\n", 2, "expected an object"),
        (MOONCAKE + '{"timestamp": 0, "input_length": -6, "output_length": 5}', 2, "found -6"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 6.5, "output_length": 5}', 2, "found '6.5'"),
        (MOONCAKE + '{"input_length": 6, "output_length": 5}', 2, "expected a time in timestamp, found none"),
        (
            MOONCAKE + '{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":["a",1.5]}',
            2,
            "list of whole numbers",
        ),
        (MOONCAKE + '{"timestamp":0,"input_length":6,"output_length":5,"hash_ids":[1,2,3,4]}', 2, "too many for 6"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, line: int | None, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(InputFileError, match=message) as caught:
        build_plan(f"trace:{path}")
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request_rate": 3}, "leave --request-rate 3 out to replay it; --request-rate 3 --scenario trace scales"),
        ({"request_rate": 3, "speed": 2, "scenario": "trace"}, "both scale recorded times"),
        ({"request_rate": float("inf")}, "--scenario saturated sends"),
        ({"input_len": 3}, "a trace brings its own lengths"),
        ({"source": "hub"}, "its own source"),
        ({"speed": 0}, "--speed must be above 0"),
        ({"speed": 1e-12}, "give a higher --speed"),
        ({"tokenizer": "words"}, "has token counts, leave it out"),
        ({"saturation_rate": 5}, "leave out --saturation-rate"),
    ],
)
def test_options_that_a_trace_does_not_take_are_refused(data: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_plan(f"trace:{data / 'azure.csv'}", **arguments)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        build_plan(f"trace:{tmp_path / 'none.csv'}")


def test_order_of_time_is_the_order_of_the_plan(data: Path) -> None:
    for name in ("azure.csv", "mooncake.jsonl"):
        assert (np.diff(build_plan(f"trace:{data / name}").table["arrival_ns"].to_numpy()) >= 0).all()
