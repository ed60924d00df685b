"""Writes runs in the formats of other tools, as files in a directory."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ebbench import __version__
from ebbench.analysis import trend
from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.metrics import LATENCIES, itl_ns, tpot_ns
from ebbench.analysis.summary import Summary, summarise
from ebbench.analysis.units import FIGURES, GateUnit, is_higher_better
from ebbench.analysis.verdict import GATED, gated_by_default
from ebbench.config.topology import PoolSpec, TopologySpec, parse_topology
from ebbench.errors import UsageError, check_known
from ebbench.foreign.documents import csv_cell
from ebbench.records import files
from ebbench.records.run import Run, find_runs
from ebbench.records.warnings import ESTIMATED
from ebbench.runs.stored import StoredRun, pack

# A run in the benchmark report format of llm-d, schema 0.2, as JSON (which is valid YAML).
#
# Request latencies count from the intended start. Unknown fields are left out.

VERSION = "0.2"
_LABEL = "engine-0"
_UNKNOWN = 0
"""Accelerator of an unknown device; the field is required, and llm-d writes the same value."""
_PERCENTILES = {
    "p0p1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99,
    "p99p9": 99.9,
}  # fmt: skip


def llm_d_report(run: Run, summary: Summary) -> dict[str, Any]:
    """The report of one run. Raises DataError if a file of the run is damaged."""
    columns = RequestColumns.of(run.table("requests", NEEDED))
    parts = _pool_parts(run)
    used = [{"component_label": part.label, "aggregate": use} for part in parts if (use := _engine_use(run, part))]
    m = run.manifest
    concurrency = m.max_concurrency or max((phase.max_concurrency for phase in m.phases), default=None)
    rate = m.facts.get("request_rate")
    standardized = _without_none({
        "tool": "ebbench",
        "tool_version": __version__,
        "source": "sampled" if m.source not in ("profile", "scenario") else "random",
        "input_seq_len": _length(columns.input_tokens),
        "output_seq_len": _length(columns.output_tokens[columns.ok]),
        "concurrency": concurrency or None,
        "rate_qps": float(rate) if isinstance(rate, int | float) and rate > 0 else None,
    })  # fmt: skip
    facts = {"workload": m.workload, "scenario": m.scenario, "seed": m.seed, "source": m.source, "plan": m.plan_hash}
    return {
        "version": VERSION,
        "run": _run(run, summary),
        "scenario": {
            "stack": [_engine(run, part) for part in parts],
            "load": {
                "metadata": {"cfg_id": m.plan_hash[:32], "description": f"{m.workload}, {m.scenario}"},
                "standardized": standardized,
                "native": {"config": facts},
            },
        },
        "results": {
            "request_performance": {"aggregate": _aggregate(summary, columns)},
            "observability": {"components": used} if used else {},
        },
    }


def _run(run: Run, summary: Summary) -> dict[str, Any]:
    m = run.manifest
    duration_s = summary.metrics.duration_s or 0.0
    start = datetime.fromtimestamp(m.anchor_unix_ns / 1e9, UTC)
    end = datetime.fromtimestamp(m.anchor_unix_ns / 1e9 + duration_s, UTC)
    marks = ["estimated tokens"] if summary.estimated_answers else []
    return {
        "uid": _hash([m.plan_hash, m.policy, m.device, m.anchor_unix_ns, run.path.name]),
        "eid": m.plan_hash[:32],
        "time": {"start": start.isoformat(), "end": end.isoformat(), "duration": f"PT{duration_s:.6f}S"},
        "description": f"{m.workload}, scenario {m.scenario}, policy {m.policy}, seed {m.seed}",
        "keywords": [m.policy, f"engine:{m.engine}", f"clock:{m.clock}", "valid" if m.valid else "INVALID", *marks],
    }


class _Part(NamedTuple):
    """A group of equal instances. ``gpus`` is per instance. ``units``: their units in the steps table; None is all."""

    label: str
    role: str
    replicas: int
    gpus: int
    parallelism: dict[str, int]
    units: range | None = None


def _pool_parts(run: Run) -> list[_Part]:
    m = run.manifest
    if m.engine == "endpoint":
        return [_Part(_LABEL, "replica", 1, _UNKNOWN, {})]
    if "topology" not in m.facts:
        return [_pool_part(_LABEL, "replica", PoolSpec(instances=int(m.facts.get("replicas", 1))))]
    topology = _topology(m.facts)
    if topology is None:
        return [_Part(_LABEL, "replica", 1, int(m.facts.get("gpus", _UNKNOWN)), {})]
    if topology.prefill is None or topology.decode is None:
        return [_pool_part(_LABEL, "replica", pool) for pool in topology.pools]
    first = topology.prefill.units  # the steps table numbers the units of the prefill pool first
    return [
        _pool_part("prefill-0", "prefill", topology.prefill, range(first)),
        _pool_part("decode-0", "decode", topology.decode, range(first, first + topology.decode.units)),
    ]


def _pool_part(label: str, role: str, pool: PoolSpec, units: range | None = None) -> _Part:
    parallelism = {"tp": pool.tp, "dp": pool.dp, "ep": pool.ep}
    return _Part(label, role, pool.instances, pool.tp * pool.dp, parallelism, units)


def _topology(facts: Mapping[str, Any]) -> TopologySpec | None:
    """The topology, if its label describes it completely; a topology from a file may have a custom name."""
    label = str(facts["topology"])
    try:
        topology = None if label.endswith(".toml") else parse_topology(label)
    except UsageError:
        return None
    return topology if topology is not None and topology.gpus == facts.get("gpus") else None


def _engine(run: Run, part: _Part) -> dict[str, Any]:
    m = run.manifest
    facts = {name: m.facts[name] for name in ("topology", "gpus", "dispatch") if name in m.facts}
    return {
        "metadata": {
            "label": part.label,
            "cfg_id": _hash([m.options, m.policy, m.device, m.model]),
            "description": m.device_provenance or f"engine {m.engine}",
        },
        "standardized": {
            "kind": "inference_engine",
            "tool": "vllm" if m.engine in ("vllm", "emulated") else f"ebbench-{m.engine}",
            "tool_version": str(m.versions.get("vllm") or m.facts.get("vllm_version") or m.versions.get("ebbench", "")),
            "role": part.role,
            "replicas": part.replicas,
            "model": {"name": m.model},
            "accelerator": {"model": m.device, "count": part.gpus, "parallelism": part.parallelism},
        },
        "native": {"args": {f"--{name.replace('_', '-')}": value for name, value in m.options.items()},
                   "config": {"scheduling_policy": m.policy} | facts},
    }  # fmt: skip


def _length(tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
    if not len(tokens):
        return {"distribution": "other", "value": 0}
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        return {"distribution": "fixed", "value": low}
    spread = {"std_dev": float(tokens.std()), "min": low, "max": high}
    return {"distribution": "other", "value": float(tokens.mean()), **spread}


def _aggregate(summary: Summary, columns: RequestColumns) -> dict[str, Any]:
    m, ok, generated = summary.metrics, columns.ok, columns.generated
    ttft = (columns.first_token - columns.intended)[generated] / 1e9
    e2el = (columns.last_token - columns.intended) / 1e9
    tpot = tpot_ns(columns, ok) / 1e9
    per_token = e2el[generated] / columns.output_tokens[generated]
    incomplete = sum(m.counts[name] for name in ("timed_out", "cancelled", "abandoned", "never_sent"))
    inputs = None if not m.duration_s else m.total_input_tokens / m.duration_s
    return {
        "requests": _without_none({
            "total": m.planned,
            "failures": m.counts["failed"],
            "incomplete": incomplete,
            "input_length": _statistics("count", columns.input_tokens[ok]),
            "output_length": _statistics("count", columns.output_tokens[ok]),
        }),
        "latency": _without_none({
            "time_to_first_token": _statistics("s", ttft),
            "time_per_output_token": _statistics("s/token", tpot),
            "inter_token_latency": _statistics("s/token", itl_ns(columns, ok) / 1e9),
            "normalized_time_per_output_token": _statistics("s/token", per_token),
            "request_latency": _statistics("s", e2el[ok]),
        }),
        "throughput": _without_none({
            "input_token_rate": _mean("tokens/s", inputs),
            "output_token_rate": _mean("tokens/s", m.output_throughput),
            "total_token_rate": _mean("tokens/s", m.total_token_throughput),
            "request_rate": _mean("queries/s", m.request_throughput),
        }),
    }  # fmt: skip


def _engine_use(run: Run, part: _Part) -> dict[str, Any]:
    names = ["kv_blocks_used", "kv_blocks_total", "running", "waiting"]
    steps = run.table("steps", ["instance", *names])
    if part.units is not None:
        numbers = steps["instance"]
        steps = steps.filter(pc.and_(pc.greater_equal(numbers, part.units.start), pc.less(numbers, part.units.stop)))
    if not steps.num_rows:
        return {}
    used, total, running, waiting = (steps[name].to_numpy() for name in names)
    return _without_none({
        "kv_cache_usage": _statistics("percent", 100 * used / np.maximum(total, 1)),
        "running_requests": _statistics("count", running),
        "waiting_requests": _statistics("count", waiting),
    })  # fmt: skip


def _statistics(units: str, values: npt.NDArray[Any]) -> dict[str, Any] | None:
    if not len(values):
        return None
    percentiles = zip(_PERCENTILES, np.percentile(values, list(_PERCENTILES.values())), strict=True)
    figures = {
        "mean": values.mean(),
        "stddev": values.std(),
        "min": values.min(),
        **dict(percentiles),
        "max": values.max(),
    }
    return {"units": units, **{name: float(value) for name, value in figures.items()}}


def _mean(units: str, value: float | None) -> dict[str, Any] | None:
    return None if value is None else {"units": units, "mean": value}


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


# A run as the result file of `vllm bench serve --save-detailed`.

_STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


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
        "label": f"{manifest.policy} (estimated tokens)" if summary.estimated_answers else manifest.policy,
        "model_id": manifest.facts.get("served_model", manifest.model),
        "tokenizer_id": (manifest.facts.get(ESTIMATED) or {}).get("by"),
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
    capped = manifest.max_concurrency is not None  # only then do requests wait before they are sent
    columns = {name: requests.column(name).to_pylist() for name in requests.column_names}
    intended, sent = columns["intended_ns"], columns["sent_ns"]
    ok = [status == "ok" for status in columns["status"]]
    texts = columns.get("text", [None] * len(ok))
    tokens = [n or 0 if good else 0 for n, good in zip(columns["output_tokens"], ok, strict=True)]
    lists: dict[str, list[Any]] = {
        "input_lens": [n or 0 for n in columns["input_tokens"]],
        "output_lens": tokens,
        "ttfts": [_since(n > 0, *row) for n, *row in zip(tokens, intended, columns["first_token_ns"], strict=True)],
        "itls": [
            [_seconds(g) for g in gaps or ()] if good else [] for gaps, good in zip(columns["itl_ns"], ok, strict=True)
        ],
        "latencies": [_since(*row) for row in zip(ok, intended, columns["last_token_ns"], strict=True)],
        "start_times": [_seconds(i or 0) for i in intended],
        "queue_times": [_since(capped, *row) for row in zip(intended, sent, strict=True)],
        "generated_texts": [text or "" for text in texts],
        "errors": [
            ": ".join(filter(None, pair)) for pair in zip(columns["error_class"], columns["error_body"], strict=True)
        ],
    }
    result |= lists | _peaks(lists)
    result["rtfx"] = 0.0  # seconds of audio per second
    result |= {f"{s}_{name}_ms": numbers[f"{s}_{name}_ms"] for name in LATENCIES for s in _STATISTICS}
    return result


def save_vllm_result(run: Run, summary: Summary, path: Path) -> None:
    """Write :func:`vllm_result` to ``path``. Raises RunError if it cannot be written."""
    files.write_text(json.dumps(vllm_result(run, summary), allow_nan=False) + "\n", path)


def _peaks(lists: Mapping[str, list[Any]]) -> dict[str, float | int]:
    """Most output tokens and most open requests in one second, counted as vLLM does: in whole seconds from the first
    start, a request being open in each second that it touches."""
    done = [row for row, latency in enumerate(lists["latencies"]) if latency > 0]
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start_s = np.array([lists["start_times"][row] for row in done])
    start_s -= start_s.min()
    latency_s = np.array([lists["latencies"][row] for row in done])
    gaps = [np.cumsum([lists["ttfts"][row], *lists["itls"][row]] if lists["output_lens"][row] else []) for row in done]
    token_s = np.concatenate([start + times for start, times in zip(start_s, gaps, strict=True)])
    opened, closed = start_s.astype(int), (start_s + latency_s).astype(int)
    change = np.bincount(opened, minlength=closed.max() + 2)
    change -= np.bincount(closed + 1, minlength=len(change))
    return {
        "max_output_tokens_per_s": float(np.bincount(token_s.astype(int), minlength=1).max()),
        "max_concurrent_requests": int(np.cumsum(change).max()),
    }


def _since(known: bool, start_ns: int | None, end_ns: int | None) -> float:
    """Seconds between two times; 0 if one is missing, since a server may finish a request whose first token was not
    seen."""
    return _seconds(end_ns - start_ns) if known and start_ns is not None and end_ns is not None else 0.0


def _seconds(ns: int) -> float:
    return ns / 1e9


# Exports runs over time as CSV for change-point detection (Apache Otava), one row per commit.
#
# A series is one policy in one environment, on one server, under one load and one set of limits, so that its rows are
# comparable. Several runs of one commit (seeds, restarts) form one row with their geometric mean, at the time of the
# first run. ebbench's commit says nothing of a server that it did not start: there a row is one measurement (runs
# that follow each other, no seed twice), and the commit is the version that the server names. A cell is empty if one
# of the runs lacks the figure.

TIME = "time"
ATTRIBUTES = ("commit", "policy", "environment", "server", "load", "limits", "seeds", "runs")


@dataclass(frozen=True)
class Series:
    """One CSV file: its name (a safe file stem), the figures that every row has, its text."""

    name: str
    figures: tuple[str, ...]
    csv: str


def otava_series(runs: Sequence[Run]) -> list[Series]:
    """One series per policy, environment, load and set of limits, rows in order of time. INVALID runs are left out.

    Raises DataError if no run is left.
    """
    return [_series(kind, points) for kind, points in trend.series_points(runs).items()]


def _series(kind: trend.SeriesKind, points: Sequence[trend.Point]) -> Series:
    gated = gated_by_default([unit for point in points for unit in point.units])
    names = FIGURES if gated == GATED else (*gated, *(name for name in FIGURES if name not in GATED))
    means = {name: [_geometric_mean(point.units, name) for point in points] for name in names}
    shown = {name: column for name, column in means.items() if any(value is not None for value in column)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([TIME, *ATTRIBUTES, *shown])
    for place, point in enumerate(points):
        values = ["" if (value := column[place]) is None else f"{value:.6g}" for column in shown.values()]
        seeds = " ".join(str(seed) for seed in sorted({unit.seed for unit in point.units}))
        attributes = [kind.policy, kind.environment, kind.server, kind.load, kind.limits, seeds, str(len(point.units))]
        when = datetime.fromtimestamp(point.begun_ns / 1e9, UTC).isoformat(timespec="seconds")
        writer.writerow(map(csv_cell, (when, point.commit, *attributes, *values)))
    whole = tuple(name for name, column in shown.items() if None not in column)
    return Series(kind.name, whole, text.getvalue())


def _geometric_mean(units: Sequence[GateUnit], name: str) -> float | None:
    """None if a unit lacks the figure; 0 if it is 0 for a unit."""
    values = [value for unit in units if (value := unit.figures[name]) is not None]
    if len(values) < len(units):
        return None
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if all(values) else 0.0


def otava_config(series: Sequence[Series]) -> str:
    """The Otava configuration for the CSV files, without columns that have empty cells, since Otava accepts only
    numbers."""
    text = "tests:\n"
    for one_series in series:
        metrics = "".join(
            f"      {name}:\n        column: {name}\n        direction: {1 if is_higher_better(name) else -1}\n"
            for name in one_series.figures
        )
        text += f"""  {one_series.name}:
    type: csv
    file: {one_series.name}.csv
    time_column: {TIME}
    attributes: [{", ".join(ATTRIBUTES)}]
    metrics:
{metrics}    csv_options:
      delimiter: ','
      quote_char: '"'
"""
    return text


_File = tuple[str, bytes]
"""Name and content of a file."""


def export(kinds: Sequence[str], runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write one file per run (``otava``: per series) of each kind; returns the paths.

    Raises UnknownNameError, RunError, and DataError for damaged runs.
    """
    for kind in kinds:
        check_known("export", kind, EXPORTS)
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for kind in kinds:
        for name, content in EXPORTS[kind](runs):
            written[path := directory / name] = content
            files.write_bytes(content, path)
    return list(written)


def export_stored(chosen: Sequence[StoredRun], kind: str | None, target: Path) -> list[Path]:
    """Write stored runs as one archive, or in another tool's format into a directory; returns the paths."""
    if kind is None:
        pack(chosen, target)
        return [target]
    return export([kind], [Run.load(path) for path in find_runs([run.path for run in chosen])], target)


def _documents(convert: Callable[[Run, Summary], dict[str, Any]], ending: str, runs: Sequence[Run]) -> Iterator[_File]:
    for name, run in zip(_names(runs), runs, strict=True):
        converted = json.dumps(convert(run, summarise(run)), indent=2, allow_nan=False)
        yield f"{name}.{ending}.json", converted.encode() + b"\n"


def _names(runs: Sequence[Run]) -> list[str]:
    """One unique name per run: the directory's, with its parent's or a number if several runs share it."""
    names: list[str] = []
    places = [run.path.resolve() for run in runs]
    for place in places:
        alone = sum(other.name == place.name for other in places) == 1
        wanted = place.name if alone else f"{place.parent.name}-{place.name}"
        numbered = (f"{wanted}-{number}" for number in itertools.count(2))
        names.append(next(name for name in itertools.chain([wanted], numbered) if name not in names))
    return names


def _otava(runs: Sequence[Run]) -> Iterator[_File]:
    series = otava_series(runs)
    yield from ((f"{one_series.name}.csv", one_series.csv.encode()) for one_series in series)
    yield "otava.yaml", otava_config(series).encode()


EXPORTS: Mapping[str, Callable[[Sequence[Run]], Iterator[_File]]] = {
    "llm-d": partial(_documents, llm_d_report, "llm-d"), "vllm": partial(_documents, vllm_result, "vllm"),
    "otava": _otava,
}  # fmt: skip
