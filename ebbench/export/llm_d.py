"""A run in the benchmark report format of llm-d, schema 0.2, as JSON (which is valid YAML).

Request latencies count from the intended start. Unknown fields are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ebbench import __version__
from ebbench.analysis.columns import NEEDED, RequestColumns
from ebbench.analysis.metrics import itl_ns, tpot_ns
from ebbench.analysis.summary import Summary
from ebbench.config.topology import PoolSpec, TopologySpec, parse_topology
from ebbench.errors import UsageError
from ebbench.records.run import Run

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
    parts = _parts(run)
    used = [{"component_label": part.label, "aggregate": use} for part in parts if (use := _engine_use(run, part))]
    return {
        "version": VERSION,
        "run": _run(run, summary),
        "scenario": {"stack": [_engine(run, part) for part in parts], "load": _load(run, columns)},
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
    return {
        "uid": _hash([m.plan_hash, m.policy, m.device, m.anchor_unix_ns, run.path.name]),
        "eid": m.plan_hash[:32],
        "time": {"start": start.isoformat(), "end": end.isoformat(), "duration": f"PT{duration_s:.6f}S"},
        "description": f"{m.workload}, scenario {m.scenario}, policy {m.policy}, seed {m.seed}",
        "keywords": [m.policy, f"engine:{m.engine}", f"clock:{m.clock}", "valid" if m.valid else "INVALID"],
    }


class _Part(NamedTuple):
    """A group of equal instances. ``gpus`` is per instance. ``units``: their units in the steps table; None is all."""

    label: str
    role: str
    replicas: int
    gpus: int
    parallelism: dict[str, int]
    units: range | None = None


def _parts(run: Run) -> list[_Part]:
    m = run.manifest
    if m.engine == "endpoint":
        return [_Part(_LABEL, "replica", 1, _UNKNOWN, {})]
    if "topology" not in m.facts:
        return [_part(_LABEL, "replica", PoolSpec(instances=int(m.facts.get("replicas", 1))))]
    topology = _topology(m.facts)
    if topology is None:
        return [_Part(_LABEL, "replica", 1, int(m.facts.get("gpus", _UNKNOWN)), {})]
    if topology.prefill is None or topology.decode is None:
        return [_part(_LABEL, "replica", pool) for pool in topology.pools]
    first = topology.prefill.units  # the steps table numbers the units of the prefill pool first
    return [
        _part("prefill-0", "prefill", topology.prefill, range(first)),
        _part("decode-0", "decode", topology.decode, range(first, first + topology.decode.units)),
    ]


def _part(label: str, role: str, pool: PoolSpec, units: range | None = None) -> _Part:
    parallelism = {"tp": pool.tp, "dp": pool.dp, "ep": pool.ep}
    return _Part(label, role, pool.instances, pool.tp * pool.dp, parallelism, units)


def _topology(facts: Mapping[str, Any]) -> TopologySpec | None:
    """The topology, if its label describes it completely; a topology from a file may have a custom name."""
    label = str(facts["topology"])
    try:
        found = None if label.endswith(".toml") else parse_topology(label)
    except UsageError:
        return None
    return found if found is not None and found.gpus == facts.get("gpus") else None


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


def _load(run: Run, columns: RequestColumns) -> dict[str, Any]:
    m = run.manifest
    concurrency = m.max_concurrency or max((phase.max_concurrency for phase in m.phases), default=None)
    rate = m.facts.get("request_rate")
    standardized: dict[str, Any] = {
        "tool": "ebbench",
        "tool_version": __version__,
        "source": "sampled" if m.source not in ("profile", "scenario") else "random",
        "input_seq_len": _length(columns.input_tokens),
        "output_seq_len": _length(columns.output_tokens[columns.ok]),
    }
    standardized |= {"concurrency": concurrency} if concurrency else {}
    standardized |= {"rate_qps": float(rate)} if isinstance(rate, int | float) and rate > 0 else {}
    facts = {"workload": m.workload, "scenario": m.scenario, "seed": m.seed, "source": m.source, "plan": m.plan_hash}
    return {
        "metadata": {"cfg_id": m.plan_hash[:32], "description": f"{m.workload}, {m.scenario}"},
        "standardized": standardized,
        "native": {"config": facts},
    }


def _length(tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
    if not len(tokens):
        return {"distribution": "other", "value": 0}
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        return {"distribution": "fixed", "value": low}
    return {
        "distribution": "other",
        "value": float(tokens.mean()),
        "std_dev": float(tokens.std()),
        "min": low,
        "max": high,
    }


def _aggregate(summary: Summary, columns: RequestColumns) -> dict[str, Any]:
    m, ok = summary.metrics, columns.ok
    ttft = (columns.first_token - columns.intended)[ok] / 1e9
    e2el = (columns.last_token - columns.intended)[ok] / 1e9
    tpot = tpot_ns(columns, ok) / 1e9
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
            "normalized_time_per_output_token": _statistics("s/token", e2el / np.maximum(columns.output_tokens[ok], 1)),
            "request_latency": _statistics("s", e2el),
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
    percentiles = np.percentile(values, list(_PERCENTILES.values()))
    return {
        "units": units,
        "mean": float(values.mean()),
        "stddev": float(values.std()),
        "min": float(values.min()),
        **{name: float(value) for name, value in zip(_PERCENTILES, percentiles, strict=True)},
        "max": float(values.max()),
    }


def _mean(units: str, value: float | None) -> dict[str, Any] | None:
    return None if value is None else {"units": units, "mean": value}


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]
