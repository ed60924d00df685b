"""A run as the result file of ``vllm bench serve --save-detailed``, for tools that read those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from ebbench.analysis.summary import Summary
from ebbench.errors import RunError
from ebbench.records.run import Run

_STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def vllm_result(run: Run, summary: Summary) -> dict[str, Any]:
    """The result with that tool's keys; one entry a request in the lists, in plan order.

    Latencies count from the intended start, as everywhere in ebbench; that tool counts from the send. Times of
    requests are seconds from the run's start. A statistic that too few samples define is null.
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
    result |= _lists(requests)
    result |= {f"{s}_{name}_ms": numbers[f"{s}_{name}_ms"] for name in _LATENCIES for s in _STATISTICS}
    return result


def save_vllm_result(run: Run, summary: Summary, path: Path) -> None:
    """Write :func:`vllm_result` to ``path``. Raises RunError when it cannot be written."""
    try:
        path.write_text(json.dumps(vllm_result(run, summary), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _lists(requests: pa.Table) -> dict[str, list[Any]]:
    columns = {name: requests.column(name).to_pylist() for name in requests.column_names}
    intended, first = columns["intended_ns"], columns["first_token_ns"]
    itl = columns["itl_ns"]
    ok = [status == "ok" for status in columns["status"]]
    texts = columns.get("text", [None] * len(ok))
    return {
        "input_lens": columns["input_tokens"],
        "output_lens": [n or 0 if good else 0 for n, good in zip(columns["output_tokens"], ok, strict=True)],
        "ttfts": [_ttft(*row) for row in zip(ok, intended, first, strict=True)],
        "itls": [[_seconds(g) for g in gaps or ()] if good else [] for gaps, good in zip(itl, ok, strict=True)],
        "start_times": [None if i is None else _seconds(i) for i in intended],
        "generated_texts": [text or "" for text in texts],
        "errors": [_error(*pair) for pair in zip(columns["error_class"], columns["error_body"], strict=True)],
    }


def _ttft(ok: bool, intended: int | None, first: int | None) -> float:
    """0 where there is none; a server may call a request finished whose first token was never seen."""
    return _seconds(first - intended) if ok and intended is not None and first is not None else 0.0


def _error(error_class: str | None, body: str | None) -> str:
    return ": ".join(part for part in (error_class, body) if part)


def _seconds(ns: int) -> float:
    return ns / 1e9
