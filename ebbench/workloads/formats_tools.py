"""Logs with nested records: results of load generators, and sessions of agents.

Load generators: ``vllm bench serve --save-detailed``, GuideLLM's report, AIPerf's records. Schemas: vLLM 0.32
(``vllm/benchmarks/serve.py``), GuideLLM 0.8 (``benchmarks.json``, or the same as YAML) and AIPerf 0.13
(``profile_export.jsonl``), compared with the files that these versions write; the YAML is made from the JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec

from ebbench.errors import InputFileError
from ebbench.foreign.documents import json_value
from ebbench.records.warnings import RunWarning, warning
from ebbench.workloads.files import LogFile, LogRecord
from ebbench.workloads.log_columns import value_at
from ebbench.workloads.recorded import (
    Dropped,
    Reading,
    ReadOptions,
    Recorded,
    Rows,
    Stamp,
    TraceFormat,
    brings_results,
    calls_tools,
    converted,
    parse_stamp,
    read_stamp,
    read_tokens,
    read_turn,
    unusable,
)


def _has(*names: str, any_of: tuple[str, ...] = ()) -> Any:
    def recognises(log: LogFile) -> bool:
        first = log.sample[0].value
        return all(value_at(name)(first) is not None for name in names) and (
            not any_of or any(name in first for name in any_of)
        )

    return recognises


def _number(value: Any) -> Stamp | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return parse_stamp(value)
    except ValueError:
        return None


class _VllmResult(msgspec.Struct):
    """The lists of a result, with an entry per request."""

    input_lens: list[Any] | None = None
    output_lens: list[Any] | None = None
    start_times: list[float | None] | None = None
    errors: list[Any] | None = None
    ttfts: list[float | None] | None = None
    itls: list[list[float] | None] | None = None


class _GuideRequests(msgspec.Struct):
    """The requests of a benchmark of GuideLLM."""

    successful: list[dict[str, Any]] | None = None
    incomplete: list[Any] | None = None
    errored: list[Any] | None = None


def _request(
    log: LogFile,
    record: LogRecord,
    lengths: tuple[Any, Any],
    start: Any,
    end: Any = None,
    *,
    timed: bool = True,
    **more: Any,
) -> Recorded | Dropped:
    """One request with token counts as written; dropped if it has none, or in a ``timed`` file no start."""
    inputs = read_tokens(log, record, "the prompt's length", lengths[0])
    outputs = read_tokens(log, record, "the output's length", lengths[1])
    stamp = _number(start)
    if not inputs or not outputs:
        return Dropped(record.line, unusable(inputs, outputs))
    if stamp is None and timed:
        return Dropped(record.line, "never sent")
    return Recorded(record.line, stamp, inputs, outputs, end=_number(end), **more)


def _vllm(log: LogFile, options: ReadOptions) -> Reading:
    chosen = options.columns.get("benchmark")
    if len(log.sample) > 1 and chosen is None:  # vllm bench serve --append-result, SGLang's bench_serving
        raise InputFileError(log.path, "holds the results of several runs; choose one with --columns benchmark=1")
    return Reading(_vllm_rows(log, int(chosen or 1)), numbers_are="s")


def _vllm_rows(log: LogFile, number: int) -> Rows:
    for record in islice(log.records(), number - 1, number):
        result = converted(log, record.line, record.value, _VllmResult)
        columns: list[Any] = [result.input_lens, result.output_lens, result.start_times]
        timed = columns[2] is not None  # versions before start_times have the lengths only
        if not timed and isinstance(columns[0], list):
            columns[2] = [None] * len(columns[0])
        if not all(isinstance(column, list) for column in columns):
            problem = "holds no requests, only totals; run vllm bench serve with --save-result --save-detailed"
            raise InputFileError(log.path, problem, record.line)
        count = len(columns[0])
        errors = result.errors or [""] * count
        ttfts = result.ttfts or [0.0] * count
        gaps = result.itls or [[]] * count
        lists = {"output_lens": columns[1], "start_times": columns[2], "errors": errors, "ttfts": ttfts, "itls": gaps}
        for name, values in lists.items():
            if len(values) != count:
                problem = f"has {count} input_lens and {len(values)} {name}"
                raise InputFileError(log.path, problem, record.line)
        for inputs, outputs, start, error, ttft, itl in zip(*columns, errors, ttfts, gaps, strict=True):
            if error:
                yield Dropped(record.line, "an error")
            else:
                end = start + ttft + sum(itl or ()) if ttft and timed and start is not None else None
                yield _request(log, record, (inputs, outputs), start, end, timed=timed)


def _guidellm(log: LogFile, options: ReadOptions) -> Reading:
    record = log.sample[0]
    benchmarks = converted(log, record.line, record.value["benchmarks"], list[dict[str, Any]])
    chosen = options.columns.get("benchmark")
    if len(benchmarks) > 1 and chosen is None:
        kinds = ", ".join(_strategy(benchmark) for benchmark in benchmarks)
        problem = f"holds {len(benchmarks)} benchmarks ({kinds}); choose one with --columns benchmark=1"
        raise InputFileError(log.path, problem)
    number = int(chosen or 1)
    if not benchmarks or number > len(benchmarks):
        raise InputFileError(log.path, f"holds {len(benchmarks)} benchmarks; there is no --columns benchmark={number}")
    return Reading(_guidellm_rows(log, record, benchmarks[number - 1]), numbers_are="s")


def _strategy(benchmark: Mapping[str, Any]) -> str:
    strategy = value_at("config.strategy")(benchmark)
    if not isinstance(strategy, Mapping):
        return "?"
    rate = strategy.get("rate") or strategy.get("streams")
    return f"{strategy.get('type_', strategy.get('kind', '?'))}{f' {rate:g}' if isinstance(rate, int | float) else ''}"


def _guidellm_rows(log: LogFile, record: LogRecord, benchmark: Mapping[str, Any]) -> Rows:
    requests = benchmark.get("requests")
    if not isinstance(requests, Mapping):
        raise InputFileError(log.path, "its benchmark holds no requests", record.line)
    typed = converted(log, record.line, requests, _GuideRequests)
    for status in ("successful", "incomplete", "errored"):
        for request in getattr(typed, status) or []:
            if status != "successful":
                yield Dropped(record.line, f"status {status}")
                continue
            lengths = (_guidellm_tokens(request, "prompt"), _guidellm_tokens(request, "output"))
            start, end = (value_at(f"info.timings.request_{what}")(request) for what in ("start", "end"))
            session = value_at("info.conversation_id")(request)
            turn = read_turn(log, record.line, "turn_index", value_at("info.turn_index")(request))
            yield _request(log, record, lengths, start, end, session=session, turn=turn)


def _guidellm_tokens(request: Mapping[str, Any], side: str) -> Any:
    """The request's own figure, or the sum of its usage in files without the computed figures."""
    tokens = request.get(f"{side}_tokens")
    if tokens is not None:
        return tokens
    return value_at(f"{'input' if side == 'prompt' else 'output'}_metrics.text_tokens")(request)


def _aiperf_rows(log: LogFile) -> Rows:
    input_tokens, output_tokens = (value_at(f"metrics.{side}_sequence_length.value") for side in ("input", "output"))
    for record in log.records():
        about = converted(log, record.line, record.value.get("metadata") or {}, dict[str, Any])
        if about.get("benchmark_phase") == "warmup":
            yield Dropped(record.line, "warm-up")
        elif record.value.get("error") or about.get("was_cancelled"):
            yield Dropped(record.line, "an error" if record.value.get("error") else "status cancelled")
        else:
            yield _request(
                log, record, (input_tokens(record.value), output_tokens(record.value)), about.get("request_start_ns"),
                about.get("request_end_ns"), session=about.get("x_correlation_id"),
                turn=read_turn(log, record.line, "turn_index", about.get("turn_index")),
            )  # fmt: skip


def _only_totals(log: LogFile, options: ReadOptions) -> Reading:
    raise InputFileError(log.path, "holds AIPerf's totals; its requests are in profile_export.jsonl beside it")


TOOLS = (
    TraceFormat(
        "vllm bench serve",
        "the JSON of vllm bench serve --save-result --save-detailed",
        ("input_lens", "output_lens", "start_times"),
        _has("request_throughput", any_of=("input_lens", "mean_ttft_ms", "num_prompts")),
        _vllm,
        choices=("benchmark",),
    ),
    TraceFormat(
        "GuideLLM",
        "GuideLLM's benchmarks.json or benchmarks.yaml",
        ("metadata", "benchmarks"),
        _has("metadata", "benchmarks"),
        _guidellm,
        choices=("benchmark",),
    ),
    TraceFormat(
        "AIPerf",
        "AIPerf's profile_export.jsonl",
        ("metadata", "metrics"),
        _has("metadata.request_start_ns", "metrics"),
        lambda log, options: Reading(_aiperf_rows(log), numbers_are="ns"),
    ),
    TraceFormat("AIPerf totals", "", (), _has("aiperf_version", "request_throughput"), _only_totals),
)


# Agent sessions as logs: Weka's coding traces and OpenTelemetry spans with GenAI attributes.
#
# A session's requests wait for those that had ended when they started, so that sub-agents start and join as recorded.
# In a trace without the requests' durations a sub-agent is a session of its own that starts when it did. Schemas:
# kv-cache-tester's trace files (`id`, `block_size`, `requests`), and the GenAI semantic conventions of
# OpenTelemetry in OTLP JSON or one span, or one session of spans, per line.

_WEKA_BLOCK = 64
"""Block size of Weka's published traces, where a file states none."""
_LONGEST_S = 1e9
_BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


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
        if not inputs or not outputs:
            yield Dropped(record.line, unusable(inputs, outputs))
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
    id: Any
    parent: Any
    trace: Any
    start: Any
    end: Any
    attributes: Mapping[str, Any]
    failed: bool

    @property
    def key(self) -> str:
        """What tells the span from others: its id is unique in its trace."""
        return f"{self.trace}/{self.id}"


_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
_CACHED = ("gen_ai.usage.cache_read.input_tokens", "llm.token_count.prompt_details.cache_read")
_SESSION = ("gen_ai.conversation.id", "session.id")
_STOPS = ("gen_ai.response.finish_reasons", "llm.finish_reason", "gen_ai.completion.0.finish_reason")
_MESSAGES = ("gen_ai.input.messages", "llm.input_messages")
"""The prompt's messages as JSON or a list; others have attributes for each message, of which ``_ROLE`` is one."""
_ROLE = re.compile(r"(?:llm\.input_messages\.(\d{1,6})\.message|gen_ai\.prompt\.(\d{1,6}))\.role")
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


def _sums(log: LogFile) -> set[str]:
    """Spans with token counts of which others, within them, have their own: an agent's run, a proxy's request."""
    parents: dict[str, str] = {}
    counted: set[str] = set()
    for span in (span for record in log.records() for span in _spans(log, record)):
        if span.parent and span.parent != span.id:
            parents[span.key] = f"{span.trace}/{span.parent}"
        if _first(span.attributes, _INPUT) is not None:
            counted.add(span.key)
    outer: set[str] = set()
    for key in counted:
        while (key := parents.get(key, "")) and key not in outer:
            outer.add(key)
    return outer & counted


def _otel_rows(log: LogFile) -> Rows:
    sums = _sums(log)
    for record in log.records():
        for span in _spans(log, record):
            attributes = span.attributes
            operation = _first(attributes, _OPERATION)
            inputs, outputs = (_first(attributes, names) for names in (_INPUT, _OUTPUT))
            if str(operation).lower() in _OTHER_WORK or (operation is None and inputs is None):
                continue  # a tool, an agent or a span of another kind is no request
            if inputs is not None and span.key in sums:
                yield Dropped(span.line, "the sum of others within it")
                continue
            cached = _first(attributes, _CACHED)
            read = partial(read_tokens, log, record, "a span's token counts")
            inputs, outputs, cached = read(inputs), read(outputs), read(cached)
            unsent = str(span.start) == "0"  # what OTLP has for no time
            if span.failed or unsent or not inputs or not outputs:
                why = "an error" if span.failed else unusable(inputs, outputs) or "never sent"
                yield Dropped(span.line, why)
                continue
            try:
                start = read_stamp(span.start)
                end = None if span.end in (None, "") else read_stamp(span.end)
            except ValueError as error:
                raise InputFileError(log.path, f"a span's time {error}", span.line) from None
            session = _first(attributes, _SESSION) or span.trace
            yield Recorded(
                span.line, start, inputs, outputs, session=session, end=end, cached_tokens=cached,
                brings_results=_brings_results(attributes), calls_tools=calls_tools(_first(attributes, _STOPS)),
            )  # fmt: skip


def _brings_results(attributes: Mapping[str, Any]) -> bool | None:
    """Whether the prompt's messages end with a tool's results; None: the span does not have them."""
    messages = _first(attributes, _MESSAGES)
    if isinstance(messages, str):
        try:
            messages = json_value(messages.encode())
        except ValueError:
            return None
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        named = _attributes(messages[-1])
        return brings_results([{**messages[-1], "role": named.get("message.role", named.get("role"))}])
    matches = (_ROLE.fullmatch(key) for key in attributes)
    roles = [(int(match[1] or match[2]), attributes[match[0]]) for match in matches if match]
    return brings_results([{"role": max(roles, key=lambda role: role[0])[1]}]) if roles else None


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
            _first(span, ("spanId", "span_id")) or value_at("context.span_id")(span),
            _first(span, ("parentSpanId", "parent_span_id", "parent_id", "parentId")),
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
            attributes[str(pair.get("key"))] = _typed(pair["value"])
    return attributes


def _typed(value: Mapping[str, Any]) -> Any:
    """A value of OTLP JSON, which stands under the name of its type."""
    kind, inner = next(iter(value.items()), ("", None))
    if kind == "intValue":
        return inner or 0
    if kind in ("arrayValue", "kvlistValue"):
        values = inner.get("values") if isinstance(inner, Mapping) else None
        if kind == "kvlistValue":
            return _attributes(values)
        return [_typed(entry) for entry in values if isinstance(entry, Mapping)] if isinstance(values, list) else []
    return inner


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
