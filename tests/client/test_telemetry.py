"""OpenMetrics of the running client, and request spans sent to a collector."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ebbench.client import drive
from ebbench.errors import RunError, UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.records.plan import Progress
from ebbench.spec.client import ClientOptions
from tests.client.client_runs import plan_of, run

QUICK = FakeConfig(ttft_ms=5, itl_ms=2)
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "deployment" / "grafana-client.json"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(port: int) -> dict[str, Any]:
    """The samples of the client's page, by name and labels."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = answer.read().decode()
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values() if sample.name.endswith("_total")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_counts_what_has_ended_so_far() -> None:
    port, seen = free_port(), dict[str, Any]()

    class Reader:
        def update(self, progress: Progress) -> None:
            if progress.completed >= 8:
                seen.update(page(port), completed=progress)

    with FakeServerProcess(replace(QUICK, faults=(parse_fault("status:request=3,code=500"),))) as server:
        options = ClientOptions(workers=1, metrics_interval_s=None, metrics_port=port)
        drive(server.url, plan_of(12, output_tokens=6), options, Reader(), environ={})
    snapshot = seen["completed"]
    assert seen["ebbench_requests_total/ok"].value == snapshot.completed
    assert seen["ebbench_requests_total/failed"].value == 1
    assert seen["ebbench_output_tokens_total"].value == 6 * snapshot.completed
    assert seen["ebbench_ttft_seconds_count"].value == snapshot.completed
    assert seen["ebbench_open_requests"].value == snapshot.running
    with pytest.raises(OSError, match="refused"):
        page(port)  # the page ends with the run


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken, FakeServerProcess(QUICK) as server:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=f"--metrics-port {taken.getsockname()[1]}"):
            run(server.url, plan_of(2), metrics_port=taken.getsockname()[1])


def test_the_dashboard_asks_only_for_metrics_of_the_page() -> None:
    port, names = free_port(), set[str]()

    class Reader:
        def update(self, progress: Progress) -> None:
            names.update(page(port))

    with FakeServerProcess(QUICK) as server:
        options = ClientOptions(workers=1, metrics_interval_s=None, metrics_port=port)
        drive(server.url, plan_of(4), options, Reader(), environ={})
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    asked = {name for text in expressions for name in re.findall(r"ebbench_\w+", text)}
    assert len(asked) >= 8
    assert asked <= {name.partition("/")[0] for name in names}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector that keeps the spans it receives."""
    pb = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = pb.ExportTraceServiceRequest.FromString(body)
            if self.path == "/v1/traces":
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_request_that_was_sent_is_a_span(collector: tuple[str, list[Any]]) -> None:
    url, spans = collector
    before_ns = time.time_ns()
    with FakeServerProcess(replace(QUICK, faults=(parse_fault("status:request=2,code=500"),))) as server:
        result = run(server.url, plan_of(6, turns=2, concurrency=2), otlp_endpoint=url)
    rows = {row["request_id"]: row for row in result.requests.to_pylist() if row["sent_ns"] is not None}
    assert len(spans) == len(rows) == 11  # the turn after the failed one was not sent
    start_ns = None
    for span in spans:
        values = {one.key: one.value for one in span.attributes}
        row = rows.pop(values["ebbench.request_id"].string_value)
        assert span.end_time_unix_nano - span.start_time_unix_nano == row["end_ns"] - row["intended_ns"]
        start_ns = start_ns or span.start_time_unix_nano - row["intended_ns"]
        assert span.start_time_unix_nano - row["intended_ns"] == start_ns  # one clock for all
        events = {event.name: event.time_unix_nano - start_ns for event in span.events}
        if row["status"] == "ok":
            assert values["gen_ai.usage.output_tokens"].int_value == row["output_tokens"]
            assert events == {name: row[f"{name}_ns"] for name in ("sent", "first_token", "last_token")}
        else:
            assert values["error.type"].string_value == "http_500"
            assert span.status.code == 2
    assert start_ns is not None
    assert before_ns < start_ns < time.time_ns()
    assert not [warning for warning in map(str, result.warnings) if "spans" in warning]


def test_spans_that_are_not_accepted_are_said(collector: tuple[str, list[Any]]) -> None:
    url, _ = collector
    with FakeServerProcess(QUICK) as server:
        result = run(server.url, plan_of(3), otlp_endpoint=f"{url}/elsewhere")
    assert any("3 of 3 request spans were not accepted" in warning for warning in map(str, result.warnings))


def test_a_collector_that_is_not_there_is_an_error() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    with FakeServerProcess(QUICK) as server:
        with pytest.raises(RunError, match="no OpenTelemetry collector at"):
            run(server.url, plan_of(2), otlp_endpoint=f"http://127.0.0.1:{free_port()}")
        with pytest.raises(UsageError, match="is no URL"):
            run(server.url, plan_of(2), otlp_endpoint="collector")
