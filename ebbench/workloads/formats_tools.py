"""Results of load generators as logs: ``vllm bench serve --save-detailed``, GuideLLM's report, AIPerf's records.

Schemas: vLLM 0.32 (``vllm/benchmarks/serve.py``), GuideLLM 0.8 (``benchmarks.json``, or the same as YAML) and AIPerf
0.13 (``profile_export.jsonl``), compared with the files that these versions write; the YAML is made from the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ebbench.errors import InputFileError
from ebbench.workloads.files import LogFile, LogRecord
from ebbench.workloads.log_columns import value_at
from ebbench.workloads.recorded import (
    Dropped,
    Reading,
    ReadOptions,
    Recorded,
    Rows,
    TraceFormat,
    converted,
    read_tokens,
    read_turn,
    unusable,
)
from ebbench.workloads.trace_times import Stamp, parse_stamp


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
    reason = unusable(inputs, outputs)
    stamp = _number(start)
    if reason or inputs is None or outputs is None:
        return Dropped(record.line, reason)
    if stamp is None and timed:
        return Dropped(record.line, "never sent")
    return Recorded(record.line, stamp, inputs, outputs, end=_number(end), **more)


def _vllm_rows(log: LogFile) -> Rows:
    for record in log.records():
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
        lambda log, options: Reading(_vllm_rows(log), numbers_are="s"),
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
