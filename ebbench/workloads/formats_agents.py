"""Agent sessions as logs: Weka's coding traces and OpenTelemetry spans with GenAI attributes.

A session's requests wait for those that had ended when they started, so that sub-agents start and join as recorded. In
a trace without the requests' durations a sub-agent is a session of its own that starts when it did. Schemas:
kv-cache-tester's trace files (``id``, ``block_size``, ``requests``), and the GenAI semantic conventions of
OpenTelemetry in OTLP JSON or one span, or one session of spans, per line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec

from ebbench.errors import InputFileError
from ebbench.records.warnings import RunWarning, warning
from ebbench.workloads.files import LogFile, LogRecord
from ebbench.workloads.log_columns import value_at
from ebbench.workloads.recorded import (
    Dropped,
    Reading,
    ReadOptions,
    Recorded,
    Rows,
    TraceFormat,
    calls_tools,
    converted,
    read_tokens,
    unusable,
)
from ebbench.workloads.trace_times import read_stamp

_WEKA_BLOCK = 64
_LONGEST_S = 1e9
_BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""Block size of Weka's published traces, where a file states none."""


def _is_weka(log: LogFile) -> bool:
    requests = log.sample[0].value.get("requests")
    return isinstance(requests, list) and bool(requests) and isinstance(requests[0], Mapping) and "t" in requests[0]


def _weka(log: LogFile, options: ReadOptions) -> Reading:
    size = converted(log, log.sample[0].line, _weka_block(log.sample[0]), _BlockTokens)
    return Reading(
        _weka_rows(log, size), numbers_are="s", block_tokens=int(size), notes=_weka_notes(log), ordered=False
    )


def _weka_block(record: LogRecord) -> Any:
    size = record.value.get("block_size")
    return _WEKA_BLOCK if size is None else size


def _weka_notes(log: LogFile) -> tuple[RunWarning, ...]:
    if len(log.parts) < 2:
        return ()
    return (warning("sessions-start-together", files=len(log.parts)),)


class _WekaRequest(msgspec.Struct):
    """What a request of a session has, of the kinds that are computed with."""

    t: float | None = None
    api_time: float | None = None
    hash_ids: list[int | str] | None = None
    requests: list[dict[str, Any]] | None = None
    input_types: list[str] | None = None


class _WekaSession(msgspec.Struct):
    requests: list[dict[str, Any]]


def _inner(log: LogFile, record: LogRecord, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = converted(log, record.line, request, _WekaRequest).requests or []
    return requests


def _weka_rows(log: LogFile, size: Any) -> Rows:
    ids: dict[tuple[int, int], int] = {}
    records = ((file, record) for file in log.files() for record in file.records())
    for number, (file, record) in enumerate(records):
        if (other_size := _weka_block(record)) != size:
            problem = f"has blocks of {other_size} tokens where the first session has {size}; replay them apart"
            raise InputFileError(file.path, problem, record.line)
        yield from _weka_session(file, record, number, ids)


def _weka_session(log: LogFile, record: LogRecord, number: int, ids: dict[tuple[int, int], int]) -> Rows:
    """The requests of session ``number``. ``ids`` numbers blocks by scope and hash id, over all sessions."""
    scope = -1 if record.value.get("hash_id_scope") == "global" else number
    requests = converted(log, record.line, record.value, _WekaSession).requests
    for request in (inner for outer in requests for inner in (outer, *_inner(log, record, outer))):
        converted(log, record.line, request, _WekaRequest)
    chains = list(_weka_requests(requests))
    timed = all(isinstance(request.get("api_time"), int | float) for _, request in chains)
    for chain, request in chains:
        blocks = [ids.setdefault((scope, inner), len(ids)) for inner in request.get("hash_ids") or ()]
        inputs, outputs = (read_tokens(log, record, name, request.get(name)) for name in ("in", "out"))
        reason = unusable(inputs, outputs)
        if reason or inputs is None or outputs is None:
            yield Dropped(record.line, reason)
            continue
        took = request.get("api_time")
        try:
            start = read_stamp(request.get("t"))
        except ValueError as error:
            raise InputFileError(log.path, f"the time t of a request {error}", record.line) from None
        yield Recorded(
            record.line, start, inputs, outputs, blocks or None,
            number if timed else (number, *chain),
            duration_s=float(took) if isinstance(took, int | float) and 0.0 <= took < _LONGEST_S else None,
            brings_results="tool_result" in kinds if (kinds := request.get("input_types")) else None,
            calls_tools=calls_tools(request.get("stop")),
        )  # fmt: skip


def _weka_requests(requests: list[Any]) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Requests with the chain they belong to: () for the main one, else the sub-agent's place."""
    for place, request in enumerate(requests):
        if request.get("type") != "subagent":
            yield (), request
            continue
        inner = request.get("requests") or []
        start = request.get("t") or 0.0
        # The definition counts inner times from the sub-agent's start; published files count from the session's.
        shift = start if inner and (inner[0].get("t") or 0.0) < start else 0.0
        for inner_request in inner:
            yield (place,), {**inner_request, "t": (inner_request.get("t") or 0.0) + shift}


class _Span(NamedTuple):
    line: int
    trace: Any
    start: Any
    end: Any
    attributes: Mapping[str, Any]
    failed: bool


_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
_CACHED = ("gen_ai.usage.cache_read.input_tokens", "llm.token_count.prompt_details.cache_read")
_SESSION = ("gen_ai.conversation.id", "session.id")
_STOPS = ("gen_ai.response.finish_reasons", "llm.finish_reason")
_OPERATION = ("gen_ai.operation.name", "openinference.span.kind")
_OTHER_WORK = (
    "invoke_agent", "execute_tool", "embeddings", "create_agent",
    "chain", "agent", "tool", "retriever", "embedding", "reranker", "guardrail", "evaluator", "prompt", "unknown",
)  # fmt: skip
"""Operations (GenAI conventions) and kinds of spans (OpenInference, in lower case) that are no request."""
_KNOWN = ("gen_ai.", "llm.token_count.", "openinference.")
"""What names of attributes begin with by which spans are recognised."""
_LOOKED_AT = 50
"""Spans of a record in which such names are looked for."""


def _is_otel(log: LogFile) -> bool:
    if "resourceSpans" in log.sample[0].value or isinstance(log.sample[0].value.get("spans"), list):
        return True
    records = [
        record
        for record in log.sample
        if not isinstance(record.value.get("data"), list)
        or all(isinstance(entry, dict) for entry in record.value["data"])
    ]
    spans = (span for record in records for span in islice(_spans(log, record), _LOOKED_AT))
    return any(str(key).startswith(_KNOWN) for span in spans for key in span.attributes)


def _otel(log: LogFile, options: ReadOptions) -> Reading:
    # Only OTLP JSON writes times as numbers, and those are ns (startTimeUnixNano).
    return Reading(_otel_rows(log), numbers_are="ns" if "resourceSpans" in log.sample[0].value else None)


def _otel_rows(log: LogFile) -> Rows:
    for record in log.records():
        for span in _spans(log, record):
            attributes = span.attributes
            operation = _first(attributes, _OPERATION)
            inputs, outputs = (_first(attributes, names) for names in (_INPUT, _OUTPUT))
            if str(operation).lower() in _OTHER_WORK or (operation is None and inputs is None):
                continue  # a tool, an agent or a span of another kind is no request
            cached = _first(attributes, _CACHED)
            counts = [read_tokens(log, record, "a span's token counts", value) for value in (inputs, outputs, cached)]
            reason = "an error" if span.failed else unusable(*counts[:2])
            if reason or counts[0] is None or counts[1] is None:
                yield Dropped(span.line, reason)
                continue
            try:
                start = read_stamp(span.start)
                end = None if span.end in (None, "") else read_stamp(span.end)
            except ValueError as error:
                raise InputFileError(log.path, f"a span's time {error}", span.line) from None
            session = _first(attributes, _SESSION) or span.trace
            yield Recorded(
                span.line, start, counts[0], counts[1], session=session, end=end, cached_tokens=counts[2],
                calls_tools=calls_tools(_first(attributes, _STOPS)),
            )  # fmt: skip


class _Scope(msgspec.Struct):
    spans: list[dict[str, Any]] | None = None


class _Resource(msgspec.Struct):
    scopeSpans: list[_Scope] | None = None  # noqa: N815 - the name in the file


class _Otlp(msgspec.Struct):
    resourceSpans: list[_Resource] | None = None  # noqa: N815 - the name in the file


_SPAN_LISTS = ("spans", "data")
"""Keys under which a record holds a list of spans; ``data`` in the pages of Phoenix's API."""
_STATUS = ("status.code", "status.status_code", "status_code")
_COLUMN = "attributes."


def _spans(log: LogFile, record: LogRecord) -> Iterator[_Span]:
    value = record.value
    nested: Iterator[Any]
    if "resourceSpans" in value:
        resources = converted(log, record.line, value, _Otlp).resourceSpans or []
        nested = (span for resource in resources for scope in resource.scopeSpans or [] for span in scope.spans or [])
    else:
        lists = [value[name] for name in _SPAN_LISTS if isinstance(value.get(name), list)]
        nested = iter(converted(log, record.line, lists[0], list[dict[str, Any]]) if lists else [value])
    outer = _first(value, ("trace_id", "traceId", "session_id"))
    for span in nested:
        columns = {key[len(_COLUMN) :]: cell for key, cell in span.items() if str(key).startswith(_COLUMN)}
        # Phoenix has the kind beside the attributes, which are columns there; others keep OpenTelemetry's own kinds.
        kind = span.get("span_kind")
        known = {_OPERATION[1]: kind} if kind == "LLM" or str(kind).lower() in _OTHER_WORK else {}
        yield _Span(
            record.line,
            _first(span, ("trace_id", "traceId")) or value_at("context.trace_id")(span) or outer,
            _first(span, ("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")),
            _first(span, ("endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime")),
            known | _attributes(columns) | _attributes(span.get("attributes")),
            any(value_at(name)(span) in (2, "ERROR", "STATUS_CODE_ERROR") for name in _STATUS),
        )


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as a mapping, nested ones with dots; OTLP JSON writes them as a list of keys and typed values."""
    if isinstance(value, Mapping):
        attributes = {}
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                attributes.update({f"{key}.{name}": inner_value for name, inner_value in _attributes(inner).items()})
            else:
                attributes[key] = inner
        return attributes
    if not isinstance(value, list):
        return {}
    attributes = {}
    for pair in value:
        if isinstance(pair, Mapping) and isinstance(pair.get("value"), Mapping):
            kind, inner = next(iter(pair["value"].items()), ("", None))
            attributes[str(pair.get("key"))] = (inner or 0) if kind == "intValue" else inner
    return attributes


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


AGENTS = (
    TraceFormat(
        "Weka sessions",
        "a session per line, file or file of a folder: id, block_size, requests with t, in, out and hash_ids",
        ("id", "block_size", "requests"),
        _is_weka,
        _weka,
        in_folders=True,
    ),
    TraceFormat(
        "OpenTelemetry GenAI spans",
        "OTLP JSON, or one span or session of spans per line, with gen_ai.usage.input_tokens and output_tokens, or "
        "OpenInference's llm.token_count.prompt and completion",
        ("traceId", "startTimeUnixNano", "attributes"),
        _is_otel,
        _otel,
    ),
)
