"""A run as the result file of ``vllm bench serve --save-detailed``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ebbench.analysis.summary import Summary
from ebbench.records import files
from ebbench.records.run import Run

_STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def vllm_result(run: Run, summary: Summary) -> dict[str, Any]:
    """The result with the keys of vLLM 0.32 and no others; lists have one entry per request, in plan order.

    Latencies count from the intended start as everywhere in ebbench, while vLLM counts from the send. They therefore
    include the time that a request waited under a concurrency cap (``queue_times``, s). Times of requests are in s from
    the start of the run. A statistic with too few samples is null.
    """
    manifest, numbers = run.manifest, summary.to_dict()
    requests = run.requests
    closed = max((phase.max_concurrency for phase in manifest.phases), default=None)
    rate = manifest.facts.get("request_rate")
    result: dict[str, Any] = {
        "date": manifest.created.replace("-", "").replace(":", "").replace("T", "-").rstrip("Z"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": manifest.policy,
        "model_id": manifest.facts.get("served_model", manifest.model),
        "tokenizer_id": None,
        "num_prompts": requests.num_rows,
        "request_rate": rate if rate is not None else "inf",
        "burstiness": manifest.facts.get("burstiness", 1.0),
        "max_concurrency": manifest.max_concurrency or closed,
        "completed": numbers["completed"],
        "failed": requests.num_rows - numbers["completed"],
    }
    for key in ("duration", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
                "output_throughput", "total_token_throughput"):  # fmt: skip
        result[key] = numbers[key]
    lists = _lists(requests, capped=manifest.max_concurrency is not None)
    result |= lists | _peaks(lists)
    result["rtfx"] = 0.0  # seconds of audio per second
    result |= {f"{s}_{name}_ms": numbers[f"{s}_{name}_ms"] for name in _LATENCIES for s in _STATISTICS}
    return result


def save_vllm_result(run: Run, summary: Summary, path: Path) -> None:
    """Write :func:`vllm_result` to ``path``. Raises RunError if it cannot be written."""
    files.write_text(json.dumps(vllm_result(run, summary), allow_nan=False) + "\n", path)


def _lists(requests: pa.Table, *, capped: bool) -> dict[str, list[Any]]:
    """Lists with one entry per request. Requests wait before they are sent only under a cap (``capped``)."""
    columns = {name: requests.column(name).to_pylist() for name in requests.column_names}
    intended, sent = columns["intended_ns"], columns["sent_ns"]
    ok = [status == "ok" for status in columns["status"]]
    texts = columns.get("text", [None] * len(ok))
    return {
        "input_lens": [n or 0 for n in columns["input_tokens"]],
        "output_lens": [n or 0 if good else 0 for n, good in zip(columns["output_tokens"], ok, strict=True)],
        "ttfts": [_since(*row) for row in zip(ok, intended, columns["first_token_ns"], strict=True)],
        "itls": [
            [_seconds(g) for g in gaps or ()] if good else [] for gaps, good in zip(columns["itl_ns"], ok, strict=True)
        ],
        "latencies": [_since(*row) for row in zip(ok, intended, columns["last_token_ns"], strict=True)],
        "start_times": [_seconds(i or 0) for i in intended],
        "queue_times": [_since(capped, *row) for row in zip(intended, sent, strict=True)],
        "generated_texts": [text or "" for text in texts],
        "errors": [_error(*pair) for pair in zip(columns["error_class"], columns["error_body"], strict=True)],
    }


def _peaks(lists: Mapping[str, list[Any]]) -> dict[str, float | int]:
    """Most output tokens and most open requests in one second, counted as vLLM does: in whole seconds from the first
    start, a request being open in each second that it touches."""
    done = [row for row, latency in enumerate(lists["latencies"]) if latency > 0]
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start_s = np.array([lists["start_times"][row] for row in done])
    start_s -= start_s.min()
    latency_s = np.array([lists["latencies"][row] for row in done])
    gaps = [np.cumsum([lists["ttfts"][row], *lists["itls"][row]]) for row in done]
    token_s = np.concatenate([start + times for start, times in zip(start_s, gaps, strict=True)])
    opened, closed = start_s.astype(int), (start_s + latency_s).astype(int)
    change = np.bincount(opened, minlength=closed.max() + 2)
    change -= np.bincount(closed + 1, minlength=len(change))
    return {
        "max_output_tokens_per_s": float(np.bincount(token_s.astype(int)).max()),
        "max_concurrent_requests": int(np.cumsum(change).max()),
    }


def _since(known: bool, start_ns: int | None, end_ns: int | None) -> float:
    """Seconds between two times; 0 if one is missing, since a server may finish a request whose first token was not
    seen."""
    return _seconds(end_ns - start_ns) if known and start_ns is not None and end_ns is not None else 0.0


def _error(error_class: str | None, body: str | None) -> str:
    return ": ".join(part for part in (error_class, body) if part)


def _seconds(ns: int) -> float:
    return ns / 1e9
