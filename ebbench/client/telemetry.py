"""The running client seen from outside: an OpenMetrics page, and one OpenTelemetry span per request.

Both are fed in the parent process with the batches that the workers report, so they cost the workers nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from ebbench.client.dialects import DIALECTS
from ebbench.errors import RunError, UsageError
from ebbench.installation import need
from ebbench.records.schema import tokens_after_first_of
from ebbench.records.warnings import RunWarning, warning
from ebbench.spec.client import ClientOptions

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_CONNECT_S, _FLUSH_MS = 5.0, 10_000


class LiveMetrics:
    """Counters and histograms of the requests finished so far, on a page of this process."""

    def __init__(self, port: int, open_requests: Callable[[], int]) -> None:
        """Serve ``http://127.0.0.1:PORT/metrics``; 0 takes a free port. Raises RunError if the port is taken."""
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

        self.registry = registry = CollectorRegistry()
        self._requests = Counter("ebbench_requests", "Requests that ended, by status", ["status"], registry=registry)
        self._tokens = Counter("ebbench_output_tokens", "Output tokens of complete responses", registry=registry)
        self._prompts = Counter("ebbench_input_tokens", "Prompt tokens of complete responses", registry=registry)
        self._latencies = {
            name: Histogram(f"ebbench_{name}_seconds", text, registry=registry, buckets=buckets)
            for name, text, buckets in (
                ("ttft", "Intended start to first token", _SECONDS),
                ("tpot", "Mean time per output token after the first", _TOKEN_SECONDS),
                ("e2el", "Intended start to last token", _SECONDS),
                ("send_lag", "Intended start to actual send", _TOKEN_SECONDS),
            )
        }
        Gauge("ebbench_open_requests", "Requests sent and not ended", registry=registry).set_function(open_requests)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise RunError(f"--metrics-port {port}: {error.strerror or error}; give another port") from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self._server.server_port}/metrics"

    def add(self, requests: pa.Table) -> None:
        """Count finished requests."""
        after = tokens_after_first_of(requests)
        for row, later in zip(requests.drop_columns(["itl_ns"]).to_pylist(), after.tolist(), strict=True):
            self._requests.labels(row["status"]).inc()
            if row["sent_ns"] is not None and row["intended_ns"] is not None:
                self._observe("send_lag", row["sent_ns"] - row["intended_ns"])
            if row["status"] != "ok":
                continue
            self._tokens.inc(row["output_tokens"] or 0)
            self._prompts.inc(row["input_tokens"] or 0)
            self._observe("ttft", row["first_token_ns"] - row["intended_ns"])
            self._observe("e2el", row["last_token_ns"] - row["intended_ns"])
            if later:
                self._observe("tpot", (row["last_token_ns"] - row["first_token_ns"]) / later)

    def _observe(self, name: str, time_ns: float) -> None:
        self._latencies[name].observe(time_ns / 1e9)

    def close(self) -> None:
        """Close the page."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class RequestSpans:
    """Exports one span per request over OTLP/HTTP, with the attributes of OpenTelemetry's GenAI conventions."""

    def __init__(self, endpoint: str, model: str, operation: str, planned: int) -> None:
        """``endpoint``: ``http://HOST:4318``, or the full URL for traces. Raises RunError if nothing listens there."""
        sdk = need("opentelemetry.sdk.trace", "--otlp-endpoint", "otel")
        export = need("opentelemetry.sdk.trace.export", "--otlp-endpoint", "otel")
        otlp = need("opentelemetry.exporter.otlp.proto.http.trace_exporter", "--otlp-endpoint", "otel")
        resources = need("opentelemetry.sdk.resources", "--otlp-endpoint", "otel")
        self._trace = need("opentelemetry.trace", "--otlp-endpoint", "otel")
        _check_listening(endpoint)
        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create({"service.name": "ebbench"}), shutdown_on_exit=False
        )
        self._exporter = _Counting(otlp.OTLPSpanExporter(endpoint=url, timeout=5), export.SpanExportResult.SUCCESS)
        self._provider.add_span_processor(
            export.BatchSpanProcessor(self._exporter, max_queue_size=max(2048, planned), schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("ebbench")
        self._model, self._operation = model, operation
        self._endpoint, self._made = endpoint, 0
        self.wall_start_ns = 0  # wall-clock time (ns since 1970) of the run's start; set before the first span

    def add(self, requests: pa.Table) -> None:
        """Export finished requests; those that were never sent have no span."""
        for row in requests.drop_columns(["itl_ns"]).to_pylist():
            if row["sent_ns"] is not None:
                self._export(row)

    def _export(self, row: Mapping[str, Any]) -> None:
        begin_ns = self.wall_start_ns
        span = self._tracer.start_span(
            f"{self._operation} {self._model}",
            kind=self._trace.SpanKind.CLIENT,
            start_time=begin_ns + row["intended_ns"],
            attributes=self._attributes(row),
        )
        for name in ("sent", "first_token", "last_token"):
            if row[f"{name}_ns"] is not None:
                span.add_event(name, timestamp=begin_ns + row[f"{name}_ns"])
        if row["status"] not in ("ok", "abandoned"):
            span.set_status(self._trace.StatusCode.ERROR, row["error_class"] or row["status"])
        end_ns = row["end_ns"] if row["end_ns"] is not None else row["sent_ns"]
        span.end(end_time=begin_ns + end_ns)
        self._made += 1

    def _attributes(self, row: Mapping[str, Any]) -> dict[str, Any]:
        attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": row["output_tokens_planned"],
            "gen_ai.usage.input_tokens": row["input_tokens"],
            "gen_ai.usage.output_tokens": row["output_tokens"],
            "gen_ai.response.finish_reasons": [row["finish_reason"]] if row["finish_reason"] else None,
            "error.type": row["error_class"],
            "session.id": str(row["session"]),
            "ebbench.request_id": row["request_id"],
            "ebbench.turn": row["turn"],
            "ebbench.phase": row["phase"],
            "ebbench.status": row["status"],
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def close(self) -> tuple[RunWarning, ...]:
        """Send what is left; returns a warning if the endpoint did not accept every span."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
        lost = self._made - self._exporter.accepted
        return (warning("spans-lost", lost=lost, spans=self._made, endpoint=self._endpoint),) if lost else ()


class _Counting:
    """A span exporter that counts the spans which the endpoint accepted."""

    def __init__(self, exporter: Any, success: Any) -> None:
        self._exporter, self._success, self.accepted = exporter, success, 0
        self._lock = threading.Lock()

    def export(self, spans: Any) -> Any:
        """See SpanExporter."""
        result = self._exporter.export(spans)
        with self._lock:
            self.accepted += len(spans) * (result == self._success)
        return result

    def force_flush(self, timeout_millis: int = _FLUSH_MS) -> Any:
        """See SpanExporter."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._exporter.shutdown()


class Telemetry:
    """The parts that the options ask for. ``warnings``: known after the ``with`` block of :func:`telemetry`."""

    def __init__(self, spans: RequestSpans | None, page: LiveMetrics | None) -> None:
        self._spans, self._page = spans, page
        self.warnings: tuple[RunWarning, ...] = ()

    def add(self, requests: pa.Table, start_ns: int) -> None:
        """Pass finished requests of a run that started at ``start_ns`` (monotonic) on."""
        if self._spans is not None:
            if not self._spans.wall_start_ns:
                self._spans.wall_start_ns = time.time_ns() - time.monotonic_ns() + start_ns
            self._spans.add(requests)
        if self._page is not None:
            self._page.add(requests)


@contextmanager
def telemetry(
    options: ClientOptions, model: str, planned: int, open_requests: Callable[[], int]
) -> Iterator[Telemetry]:
    """Open what the options ask for; close it at the end, also after an error."""
    spans = page = None
    if options.otlp_endpoint is not None:
        spans = RequestSpans(options.otlp_endpoint, model, _operation(options), planned)
    try:
        if options.metrics_port is not None:
            page = LiveMetrics(options.metrics_port, open_requests)
        yield (collected := Telemetry(spans, page))
    finally:
        if page is not None:
            page.close()
        told = () if spans is None else spans.close()
    collected.warnings = told


def _operation(options: ClientOptions) -> str:
    """The name that OpenTelemetry's GenAI conventions have for requests of an endpoint, else the endpoint's."""
    dialect = DIALECTS[options.endpoint]
    return options.endpoint if dialect.whole else "chat" if dialect.thinks else "text_completion"


def _check_listening(endpoint: str) -> None:
    """Raise UsageError for what is no URL, RunError if nothing accepts a connection there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise UsageError(f"--otlp-endpoint {endpoint!r} is no URL; write http://HOST:4318")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_S).close()
    except OSError as error:
        raise RunError(f"no OpenTelemetry collector at {endpoint}: {error}") from None
