"""The table of failed requests: each is counted once, with the server's message and a remedy."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.analysis.summary import summarise
from ebbench.analysis.validity import LONGEST_EXAMPLE, _causes, failures_by_cause, merge_failures
from ebbench.cli.main import app
from ebbench.fakeserver.config import FakeConfig, parse_fault
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.records.run import Run
from ebbench.render.report import failure_lines
from ebbench.report.page_data import report_page

OUT_OF_VOCABULARY = '{"error": {"message": "Token id 29783 is out of vocabulary", "code": 400}}'


def table(rows: Sequence[tuple[str, str | None, str | None]]) -> pa.Table:
    """Requests of (status, error class, error body)."""
    return pa.table(
        {
            "status": pa.array([row[0] for row in rows], pa.string()),
            "phase": pa.array(["main"] * len(rows), pa.string()),
            "error_class": pa.array([row[1] for row in rows], pa.string()),
            "error_body": pa.array([row[2] for row in rows], pa.string()),
        }
    )


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["ok", "failed", "timed_out", "cancelled", "never_sent"]),
        st.sampled_from([None, "http_400", "error_frame", "idle_timeout", "earlier_turn_failed", "odd"]),
        st.one_of(st.none(), st.sampled_from(["", OUT_OF_VOCABULARY, "{", '{"detail": []}']), st.text(max_size=300)),
    ),
    max_size=60,
)


@given(ROWS)
def test_every_failed_request_is_counted_once(rows: list[tuple[str, str | None, str | None]]) -> None:
    found = failures_by_cause(table(rows))
    by_class = Counter(error_class or status for status, error_class, _ in rows if status != "ok")
    counted = Counter[str]()
    for failure in found:
        counted[failure.error_class] += failure.count
        assert "\n" not in failure.example
        assert len(failure.example) <= LONGEST_EXAMPLE + 1
    assert counted == by_class
    twice = merge_failures([found, found])
    assert [(f.error_class, f.count) for f in twice] == [(f.error_class, 2 * f.count) for f in found]


def test_two_causes_under_one_class_are_told_apart() -> None:
    rows = [("failed", "http_400", OUT_OF_VOCABULARY)] * 3 + [("ok", None, None)]
    rows += [("failed", "http_400", '{"detail": "This model\'s maximum context length is 512 tokens"}')] * 2
    one, other = failures_by_cause(table(rows))
    assert (one.count, one.example) == (3, "Token id 29783 is out of vocabulary")
    assert "--vocab-size" in one.remedy
    assert (other.count, other.example) == (2, "This model's maximum context length is 512 tokens")
    assert "--max-model-len" in other.remedy


@pytest.mark.parametrize(
    ("error_class", "body", "remedy"),
    [
        ("http_404", "The model `x` does not exist.", "--model"),
        ("http_404", "Not Found", "--endpoint"),
        ("http_401", "Unauthorized", "EBBENCH_API_KEY"),
        ("http_429", "slow down (Retry-After: 3)", "--request-rate"),
        ("http_400", "no chat template is allowed", "--endpoint completions"),
        ("connect_error", "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "--ca-file"),
        ("connect_error", "All connection attempts failed", "server runs"),
        ("client_limit", "[Errno 24] Too many open files", "ulimit -n"),
        ("client_limit", "[Errno 99] Cannot assign requested address", "no free port"),
        ("client_limit", "[Errno 1] Operation not permitted", "of this machine"),
        ("long_output", "64 tokens where at most 8 were asked for", "--max-tokens-field max_tokens"),
        ("not_a_stream", "(Content-Type: text/html) <html><form>log in", "a log-in page"),
        ("http_308", "(Location: /v1/completions/) ", "a slash at the end"),
        ("http_307", "(Location: http://other/v1) ", "give that one as --engine"),
        ("http_400", "Extra inputs are not permitted (priority)", "a server started with --scheduling-policy priority"),
        ("http_400", "Unrecognized request argument supplied: ignore_eos", "--no-ignore-eos: the server"),
        ("http_400", '{"error": {"message": "Extra inputs", "param": "ignore_eos"}}', "--no-ignore-eos: the server"),
        ("http_422", '{"detail": [{"loc": ["body", "ignore_eos"], "msg": "Extra inputs"}]}', "--no-ignore-eos: the"),
        ("http_400", "Unsupported value: 'temperature' does not support 0", "--temperature 1"),
        ("http_400", "Unknown parameter: stream_options", '{"stream_options": null}'),
        ("http_400", "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'", "--max-tokens-field"),
        ("http_400", "Extra inputs are not permitted", "try --no-ignore-eos"),
        ("http_400", "'max_tokens' exceeds the maximum context length", "--max-model-len"),
        ("http_400", "", "--no-request-ids"),
        (
            "http_500",
            "13 validation errors: ('body', 'prompt', 'str') Input should be a valid string",
            "--endpoint chat",
        ),
        ("no_usage", "the server reported no usage", "--tokenizer"),
        ("not_json", "<html>", "--endpoint"),
        ("idle_timeout", "nothing received for 2 s", "--idle-timeout"),
        ("short_output", "3 tokens where 5 were asked for, finish reason 'stop'", "--no-ignore-eos"),
        ("short_output", "3 tokens where 5 were asked for, finish reason 'length'", "--max-model-len"),
        ("http_400", "request (529 tokens) exceeds the available context size (512 tokens)", "--max-model-len"),
        ("error_frame", "engine died", "log"),
        ("something_new", "", ""),
    ],
)
def test_each_class_of_failure_has_its_remedy(error_class: str, body: str | None, remedy: str) -> None:
    [failure] = failures_by_cause(table([("failed", error_class, body)]))
    assert remedy in failure.remedy
    assert ("->" in str(failure)) == bool(remedy)


def test_messages_are_read_from_lists_and_behind_headers() -> None:
    detail = {"detail": [{"loc": ["body", "top_k"], "msg": "not known"}, {"loc": [], "msg": "second"}, 3]}
    bodies = [json.dumps(detail), '(Retry-After: 3; Location: /x) {"error": "slow down"}', '{"a":' * 5000]
    found = [failures_by_cause(table([("failed", "http_400", body)]))[0].example for body in bodies]
    assert found[:2] == ["not known (top_k); second", "(Retry-After: 3; Location: /x) slow down"]


def test_no_cause_is_looked_for_again_from_every_place_of_a_message() -> None:
    """A pattern that begins with a look at the whole message took half a minute for a body of 25 kB: it is anchored."""
    assert [pattern for _, pattern, _ in _causes() if pattern.startswith("(?=.*")] == []
    assert any(pattern.startswith("^(?=.*") for _, pattern, _ in _causes())


def test_failures_that_follow_from_others_are_listed_last() -> None:
    rows = [("never_sent", "earlier_turn_failed", None)] * 9 + [("failed", "error_frame", "engine died")]
    assert [failure.error_class for failure in failures_by_cause(table(rows))] == ["error_frame", "earlier_turn_failed"]


def test_terminal_json_and_page_of_a_run_that_failed_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = (parse_fault("status:code=429,every=3"), parse_fault("error-frame:every=2,after=1"))
    directory = tmp_path / "run"
    arguments = ["-n", "12", "-c", "4", "--input-len", "20", "--output-len", "5", "--json", "-q"]
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, faults=faults)) as server:
        arguments = ["run", "balanced", "--engine", server.url, *arguments, "--output-dir", str(directory)]
        with pytest.raises(SystemExit) as ended:
            app(arguments, standalone_mode=True)
    assert ended.value.code == 4
    [shown] = json.loads(capsys.readouterr().out)
    assert [(failure["error_class"], failure["count"]) for failure in shown["failures"]] == [
        ("error_frame", 4),
        ("http_429", 4),
    ]
    run = Run.load(directory)
    summary = summarise(run)
    lines = failure_lines([summary])
    assert lines == [str(failure) for failure in summary.failures]
    assert "4 x error_frame: engine died ->" in lines[0]
    [found] = [each for each in report_page([run]).tables if each.title == "Requests that did not complete"]
    assert [[cell.text for cell in row][1:4] for row in found.rows] == [
        ["4", "error_frame", "engine died"],
        ["4", "http_429", "fault: status 429"],
    ]
    with pytest.raises(SystemExit):
        app(["show", str(directory)], standalone_mode=True)
    assert "4 x error_frame: engine died ->" in " ".join(capsys.readouterr().out.split())
