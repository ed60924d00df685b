"""Tools' time apart from the user's: what logs and options say, in the plan, in both kinds of runs and in figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.sessions import SessionFigures, sessions_table
from ebbench.cli.main import app
from ebbench.client import drive
from ebbench.engines.sim import SimEngine
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.plan import Plan, with_plan_columns
from ebbench.records.schema import REQUESTS_EXTRAS
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.analysis.made_runs import MS, request, requests_table
from tests.simulation.worlds import device
from vllm_eb.policy import parse_policy

S = 1_000_000_000


def weka(folder: Path, *, told: bool) -> Path:
    """One session of four requests: a tool of 1 s, a user of 5 s, a tool of 2 s."""
    stops, starts = ("tool_use", "end_turn", "tool_use", "end_turn"), (0, 2, 8, 11)
    requests: list[dict[str, Any]] = [
        {"type": "n", "t": t, "in": 100 + 50 * place, "out": 10, "api_time": 1, "hash_ids": [1]}
        for place, t in enumerate(starts)
    ]
    if told:
        for entry, stop in zip(requests, stops, strict=True):
            entry["stop"] = stop
    path = folder / "weka.jsonl"
    path.write_text(json.dumps({"id": "a", "block_size": 64, "requests": requests}) + "\n")
    return path


def columns_log(folder: Path, *, told: bool) -> Path:
    """The same session as a log with columns, which has the reason why each response ended."""
    reasons, times = ("tool_calls", "stop", "tool_calls", "stop"), (0, 2, 8, 11)
    rows = [
        {"session_id": "a", "start_time": t, "duration_s": 1, "input_tokens": 100 + 50 * n, "output_tokens": 10}
        | ({"finish_reason": reason} if told else {})
        for n, (t, reason) in enumerate(zip(times, reasons, strict=True))
    ]
    path = folder / "columns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages_log(folder: Path, *, told: bool) -> Path:
    """The same session with its messages: the last one of a prompt is a tool's result or the user's text."""
    roles, times = ("user", "tool", "user", "tool"), (0, 2, 8, 11)
    rows: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for t, role in zip(times, roles, strict=True):
        messages = [*messages, {"role": role if told else "user", "content": "some words " * 40}]
        rows.append({"session_id": "a", "start_time": t, "duration_s": 1, "messages": messages, "output_tokens": 10})
        messages = [*messages, {"role": "assistant", "content": "more " * 10}]
    path = folder / "messages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spans(folder: Path, *, told: bool) -> Path:
    """The same session as OpenTelemetry spans."""
    reasons, times = (["tool_calls"], ["stop"], ["tool_calls"], ["stop"]), (0, 2, 8, 11)
    path = folder / "spans.jsonl"
    with path.open("w") as file:
        for number, (t, reason) in enumerate(zip(times, reasons, strict=True)):
            attributes: dict[str, Any] = {
                "gen_ai.operation.name": "chat", "gen_ai.conversation.id": "a",
                "gen_ai.usage.input_tokens": 100 + 50 * number, "gen_ai.usage.output_tokens": 10,
            }  # fmt: skip
            if told:
                attributes["gen_ai.response.finish_reasons"] = reason
            start, end = (f"2026-05-01T10:00:{second:02d}Z" for second in (t, t + 1))
            span = {"traceId": "t", "start_time": start, "end_time": end, "attributes": attributes}
            file.write(json.dumps(span) + "\n")
    return path


LOGS: list[Callable[..., Path]] = [weka, columns_log, messages_log, spans]
TIMES: dict[Callable[..., Path], dict[str, Any]] = {columns_log: {"time_unit": "s"}, messages_log: {"time_unit": "s"}}


@pytest.mark.parametrize("log", LOGS)
def test_a_log_tells_tools_from_users(log: Callable[..., Path], tmp_path: Path) -> None:
    table = build_plan(f"log:{log(tmp_path, told=True)}", **TIMES.get(log, {})).table
    assert table["pause_ns"].to_pylist() == [None, 1 * S, 5 * S, 2 * S]
    assert table["tool_ns"].to_pylist() == [None, 1 * S, 0, 2 * S]


@pytest.mark.parametrize("log", [weka, columns_log, spans])
def test_a_log_that_does_not_say_has_one_wait(log: Callable[..., Path], tmp_path: Path) -> None:
    table = build_plan(f"log:{log(tmp_path, told=False)}", **TIMES.get(log, {})).table
    assert table["pause_ns"].to_pylist() == [None, 1 * S, 5 * S, 2 * S]
    assert "tool_ns" not in table.column_names


def otlp(value: Any) -> dict[str, Any]:
    """A value as OTLP JSON writes it."""
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp(inner) for inner in value]}}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


ROLES = ("user", "tool", "user", "tool")
REASONS = ("tool_calls", "stop", "tool_calls", "stop")
MADE: dict[str, Callable[[int], dict[str, Any]]] = {
    "a list of reasons": lambda turn: {"gen_ai.response.finish_reasons": [REASONS[turn]]},
    "a completion's reason": lambda turn: {"gen_ai.completion.0.finish_reason": REASONS[turn]},
    "messages as JSON": lambda turn: {"gen_ai.input.messages": json.dumps([{"role": ROLES[turn], "parts": []}])},
    "results as parts": lambda turn: {
        "gen_ai.input.messages": json.dumps([
            {"role": "user", "parts": [{"type": "tool_call_response" if ROLES[turn] == "tool" else "text"}]}
        ])
    },
    "roles of OpenInference": lambda turn: {
        f"llm.input_messages.{n}.message.role": ROLES[turn] if n == 10 else "assistant" for n in range(11)
    },
    "roles of a prompt": lambda turn: {"gen_ai.prompt.0.role": "system", "gen_ai.prompt.1.role": ROLES[turn]},
}  # fmt: skip


@pytest.mark.parametrize("said", MADE)
def test_spans_in_otlp_tell_tools_from_users(said: str, tmp_path: Path) -> None:
    made = []
    for turn, t in enumerate((0, 2, 8, 11)):
        told = {"gen_ai.usage.input_tokens": 100 + 50 * turn, "gen_ai.usage.output_tokens": 10, **MADE[said](turn)}
        attributes = [{"key": key, "value": otlp(value)} for key, value in told.items()]
        times = {"startTimeUnixNano": str(1_800_000_000 * S + t * S), "endTimeUnixNano": str(1_800_000_001 * S + t * S)}
        made.append({"traceId": "a", **times, "attributes": attributes})
    path = tmp_path / "otlp.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}))
    table = build_plan(f"log:{path}").table
    assert table["tool_ns"].to_pylist() == [None, 1 * S, 0, 2 * S]


def test_a_table_of_spans_has_messages_as_lists(tmp_path: Path) -> None:
    path = tmp_path / "phoenix.jsonl"
    with path.open("w") as file:
        for turn, t in enumerate((0, 2, 8, 11)):
            cells = {
                "context.trace_id": "a", "span_kind": "LLM", "attributes.llm.token_count.prompt": 100 + 50 * turn,
                "attributes.llm.token_count.completion": 10,
                "attributes.llm.input_messages": [{"message.role": "user"}, {"message.role": ROLES[turn]}],
            }  # fmt: skip
            start, end = (f"2026-05-01T10:00:{second:02d}Z" for second in (t, t + 1))
            file.write(json.dumps({**cells, "start_time": start, "end_time": end}) + "\n")
    assert build_plan(f"log:{path}").table["tool_ns"].to_pylist() == [None, 1 * S, 0, 2 * S]


def responses(path: Path, *ends: dict[str, Any]) -> list[int | None] | None:
    """Time of tools in the plan of a log of responses that end so, one record for each; None: not told."""
    with path.open("w") as file:
        for turn, (t, end) in enumerate(zip((0, 2, 8, 11), ends, strict=True)):
            row = {"session_id": "a", "start_time": t, "duration_s": 1, "input_tokens": 100 + 50 * turn}
            file.write(json.dumps({**row, "output_tokens": 10, **end}) + "\n")
    table = build_plan(f"log:{path}", time_unit="s").table
    return table["tool_ns"].to_pylist() if "tool_ns" in table.column_names else None


def test_responses_say_how_they_ended(tmp_path: Path) -> None:
    path, tools = tmp_path / "log.jsonl", [None, 1 * S, 0, 2 * S]
    assert responses(path, *({"response": {"choices": [{"finish_reason": reason}]}} for reason in REASONS)) == tools
    assert responses(path, *({"response": {"stop_reason": reason}} for reason in REASONS)) == tools
    first_untold = [{}, *({"finish_reason": reason} for reason in REASONS[1:])]
    assert responses(path, *first_untold) == [None, None, 0, 2 * S]


@pytest.mark.parametrize("stop", ["###", ["Observation:"], "</s>"])
def test_sequences_that_stop_an_answer_are_no_reason(stop: object, tmp_path: Path) -> None:
    assert responses(tmp_path / "log.jsonl", *[{"stop": stop}] * 4) is None


def test_results_in_a_prompt_count_before_how_the_answer_ended(tmp_path: Path) -> None:
    path = weka(tmp_path, told=True)
    session = json.loads(path.read_text())
    session["requests"][2]["input_types"] = ["text", "tool_result"]
    path.write_text(json.dumps(session) + "\n")
    assert build_plan(f"log:{path}").table["tool_ns"].to_pylist() == [None, 1 * S, 5 * S, 2 * S]


def test_cut_and_faster_pauses_keep_their_kind(tmp_path: Path) -> None:
    log = f"log:{weka(tmp_path, told=True)}"
    cut = build_plan(log, scenario="saturated", max_concurrency=1, recorded_pauses=True, max_pause_s=1.5).table
    assert cut["tool_ns"].to_pylist() == [None, 1 * S, 0, 1.5 * S]
    assert build_plan(log, speed=2.0).table["tool_ns"].to_pylist() == [None, 0.5 * S, 0, 1 * S]


def wild(**options: object) -> Plan:
    return build_plan("wildchat", source="profile", **{"num_prompts": 30, **options})  # type: ignore[arg-type]


def test_options_say_which_pauses_are_tools() -> None:
    mixed = wild(think_time="60", tool_time="1", tool_share=0.5).table
    pauses = zip(mixed["pause_ns"].to_pylist(), mixed["tool_ns"].to_pylist(), strict=True)
    assert {*pauses} == {(None, None), (60 * S, 0), (1 * S, 1 * S)}
    assert set(wild(think_time="3").table["tool_ns"].to_pylist()) == {None, 0}
    assert set(wild(tool_time="3").table["tool_ns"].to_pylist()) == {None, 3 * S}
    assert "tool_ns" not in wild().table.column_names


def test_sub_agents_call_tools_between_their_requests() -> None:
    table = wild(think_time="60", tool_time="1", tool_share=0.0, sub_agents="count=2,turns=2,share=0.5").table
    assert {*table["tool_ns"].to_pylist()} == {None, 0, 1 * S}


def of_session(*waits: tuple[float, float | None], told: bool = True) -> dict[str, Any]:
    """The figures of a session whose requests take 10 ms each, after pauses of (ms, of which tools)."""
    at, made, tools = 0.0, [], []
    for number, (pause_ms, tool_ms) in enumerate([(0.0, 0.0), *waits]):
        at += pause_ms
        times = {
            "intended_ns": round(at * MS),
            "first_token_ns": round(at * MS),
            "last_token_ns": round((at + 10) * MS),
        }
        made.append(request(number, session=0, turn=number, **times))
        tools.append(None if tool_ms is None else round(tool_ms * MS))
        at += 10
    table = requests_table(made)
    if told:
        table = table.append_column(REQUESTS_EXTRAS.field("tool_ns"), pa.array(tools, pa.int64()))
    figures = sessions_table(RequestColumns.of(table))
    assert figures is not None
    [row] = figures.to_pylist()
    return dict(row)


def test_completion_is_model_tools_and_users() -> None:
    row = of_session((5, 5), (30, 0), (2, 2))
    assert (row["completion_ms"], row["model_ms"], row["wait_ms"]) == (77.0, 40.0, 37.0)
    assert (row["tool_ms"], row["think_ms"]) == (7.0, 30.0)


def test_one_pause_of_unknown_kind_leaves_one_wait() -> None:
    row = of_session((5, 5), (30, None))
    assert (row["wait_ms"], row["tool_ms"], row["think_ms"]) == (35.0, None, None)
    untold = of_session((5, 5), told=False)
    assert (untold["wait_ms"], untold["tool_ms"], untold["think_ms"]) == (5.0, None, None)


def test_shares_are_given_where_all_sessions_are_told_apart() -> None:
    made = [request(n, session=n // 2, turn=n % 2, intended_ns=n % 2 * 40 * MS) for n in range(4)]
    for tools, share in (([0, 20, 0, 25], 45 / 110), ([0, 20, 0, None], None)):
        column = pa.array([None if ms is None else ms * MS for ms in tools], pa.int64())
        table = requests_table(made).append_column(REQUESTS_EXTRAS.field("tool_ns"), column)
        sessions = sessions_table(RequestColumns.of(table))
        assert sessions is not None
        figures = SessionFigures.of(sessions)
        assert figures.tool_share == (None if share is None else pytest.approx(share))
        assert figures.tool.count == (2 if share is not None else 1)
        assert figures.to_dict()["mean_tool_ms"] == (22.5 if share is not None else 20.0)


def test_simulator_and_client_wait_alike(tmp_path: Path) -> None:
    plan = wild(num_prompts=6, think_time="0.2", tool_time="uniform:mean=0.05", tool_share=0.6, max_concurrency=3)
    plan = replace(plan, table=plan.table.slice(0, len(plan)))
    simulated = SimEngine().run(plan, parse_policy("v1"), device(), EngineOptions())
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=0.1)) as server:
        measured = drive(server.url, plan, ClientOptions(workers=0, metrics_interval_s=None), environ={})
    tables = []
    for result in (simulated, measured):
        table = sessions_table(RequestColumns.of(with_plan_columns(result.requests, plan.table)))
        assert table is not None
        tables.append(table.sort_by("session"))
    ours, theirs = tables
    assert ours["complete"].to_pylist() == theirs["complete"].to_pylist() == [True] * ours.num_rows
    assert ours["tool_ms"].to_pylist() == theirs["tool_ms"].to_pylist()
    assert sum(ours["tool_ms"].to_pylist()) > 0
    # Over HTTP the end of a response comes after its last token, and counts as the user's time.
    assert theirs["think_ms"].to_pylist() == pytest.approx(ours["think_ms"].to_pylist(), abs=1000)


def test_a_log_is_described_with_the_share_of_tools(tmp_path: Path) -> None:
    shown = []
    for told in (True, False):
        done = CliRunner().invoke(app, ["workloads", "show", f"log:{weka(tmp_path, told=told)}"])
        assert done.exit_code == 0, done.output
        shown.append(" ".join(done.output.split()))
    assert "mean 2.67 s, 67% of tools" in shown[0]
    assert "mean 2.67 s (tools or users)" in shown[1]
