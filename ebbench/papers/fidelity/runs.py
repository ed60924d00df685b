"""Repeat published measurements on emulated devices and lay the numbers side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import Metrics, measure
from ebbench.child import begin_pool_worker
from ebbench.config.topology import parse_topology
from ebbench.devices import Device, load_device
from ebbench.devices.fit import DECODE_CONTEXT_TOKENS, DECODE_SEQS, PREFILL_TOKENS, decode_shape, prefill_shape
from ebbench.devices.linear import published_calibration
from ebbench.devices.parallel import SINGLE, Parallel
from ebbench.devices.profiles import HostCosts, find_model, find_profile, list_models
from ebbench.devices.units import shape_of
from ebbench.engines.base import Engine, EngineOptions
from ebbench.engines.sim import SimEngine
from ebbench.papers.fidelity.cases import Case, reference_rows
from ebbench.papers.fidelity.scores import Cell
from ebbench.papers.protocols import ASYNC_SCHEDULING, build
from ebbench.records.plan import Plan
from ebbench.records.schema import PLAN
from vllm_eb.policy import parse_policy

Say = Callable[[str], None]
METRICS = ("tokens_per_s", "requests_per_s", "ttft_mean_s", "tpot_mean_ms", "tpot_p99_ms")
DIED = "our run ended in an out-of-memory error of the receiving store, the published one did not"
REPLAY = "llmservingsim/rtx4090_llama31_8b.csv"


def run_cases(
    cases: Iterable[Case], seed: int, say: Say, host: HostCosts | None = None, *, repeats: int = 1, workers: int = 1
) -> list[Cell]:
    """Run every case and return its cells: means over ``repeats`` seeds from ``seed`` on.

    ``host`` replaces the profiles' constants. ``workers`` are processes; what comes out is the same.
    """
    chosen = list(cases)
    wanted = [(case, seed + i, host) for case in chosen for i in range(repeats)]
    if workers == 1:
        return _cells(chosen, (run_case(*one) for one in wanted), repeats, say)
    with ProcessPoolExecutor(workers, initializer=begin_pool_worker) as pool:
        return _cells(chosen, pool.map(_run_one, wanted), repeats, say)


def _run_one(wanted: tuple[Case, int, HostCosts | None]) -> dict[str, float]:
    return run_case(*wanted)


def _cells(cases: Iterable[Case], results: Iterable[dict[str, float]], repeats: int, say: Say) -> list[Cell]:
    found = iter(results)
    cells: list[Cell] = []
    for case in cases:
        runs = list(islice(found, repeats))
        ours = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        cells += [
            Cell(
                number.source, case.device, case.model, case.name, case.scheduler, number.metric, number.value,
                ours[number.metric], case.fitted, number.scored and ours[number.metric] == ours[number.metric],
                number.note if ours[number.metric] == ours[number.metric] else DIED,
            )
            for number in case.published
        ]  # fmt: skip
        first = next(cell for cell in cells[-len(case.published) :])
        say(f"{case.group}: {case.device} {case.model} {case.name} {case.scheduler}: {first.metric} {first.error:+.1%}")
    return cells


def run_case(case: Case, seed: int, host: HostCosts | None = None) -> dict[str, float]:
    """One case: one simulation, or one per concurrency and their mean. Keys carry their units."""
    runs = [_values(_simulate(case, plan, seed, host)) for plan in case.protocol.plans()]
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def _simulate(case: Case, plan: Mapping[str, Any], seed: int, host: HostCosts | None) -> Metrics | None:
    """What one run gave; None where it ended in a full KV store."""
    how = case.protocol
    topology = parse_topology(case.topology) if case.topology else None
    shape = SINGLE if topology is None else shape_of(topology)
    device = _device(
        case.device, case.model, how.max_num_seqs, how.max_num_batched_tokens, host, shape, case.quantization
    )
    options = EngineOptions(
        how.max_num_seqs, how.max_num_batched_tokens, async_scheduling=ASYNC_SCHEDULING, warmup=how.warmup
    )
    built = _plan(json.dumps(plan, sort_keys=True), seed, how.shuffle)
    engine: Engine = SimEngine(topology)
    result = engine.run(built, parse_policy(how.policy), device, options, None)
    return None if result.invalid else measure(RequestColumns.of(result.requests))


@lru_cache(maxsize=64)
def _device(
    name: str, model: str, seqs: int, tokens: int, host: HostCosts | None, shape: Parallel, quantization: str | None
) -> Device:
    return load_device(
        name, model, max_num_seqs=seqs, max_num_batched_tokens=tokens, async_scheduling=ASYNC_SCHEDULING, host=host,
        parallel=shape, quantization=quantization,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _plan(arguments: str, seed: int, shuffle: bool) -> Plan:
    return build(json.loads(arguments), seed, shuffle=shuffle)


def _values(metrics: Metrics | None) -> Mapping[str, float]:
    """Figures by name, not a number where there are none."""

    def scaled(value: float | None, factor: float) -> float:
        return float("nan") if value is None else value * factor

    if metrics is None:
        return dict.fromkeys(METRICS, float("nan"))
    return {
        "tokens_per_s": scaled(metrics.total_token_throughput, 1.0),
        "requests_per_s": scaled(metrics.request_throughput, 1.0),
        "ttft_mean_s": scaled(metrics.ttft.mean, 1e-3),
        "tpot_mean_ms": scaled(metrics.tpot.mean, 1.0),
        "tpot_p99_ms": scaled(metrics.tpot.p99, 1.0),
    }


# --- the real run, replayed ------------------------------------------------------------------------------------


def replay_cells() -> list[Cell]:
    """The measured vLLM run on an RTX 4090, request by request; nothing was fitted on it."""
    rows = reference_rows(REPLAY)
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if name != "request_id"}
    # Arrivals are on the client's clock, all else on the engine's: the fastest hand-over joins the two.
    arrival = columns["arrival_time"] + (columns["queued_ts"] - columns["arrival_time"]).min()
    measured = _latencies(arrival, columns["first_token_ts"], columns["last_token_ts"], columns["output_toks"])
    result = SimEngine().run(
        _replay_plan(rows, arrival - arrival.min()),
        parse_policy("v1"),
        load_device("rtx-4090", "llama-3.1-8b", max_num_seqs=256, max_num_batched_tokens=2048),
        EngineOptions(256, 2048, max_model_len=32_768, num_kv_blocks=2588),
        None,
    )
    got = RequestColumns.of(result.requests)
    ours = _latencies(got.intended / 1e9, got.first_token / 1e9, got.last_token / 1e9, got.output_tokens)
    return [
        Cell(
            "RTX 4090 run", "rtx-4090", "llama-3.1-8b", "300 ShareGPT requests", "v1", name, measured[name], ours[name]
        )
        for name in measured
    ]


def _latencies(start: Any, first: Any, last: Any, outputs: Any) -> dict[str, float]:
    several = outputs > 1
    tpot = ((last - first)[several] / (outputs[several] - 1)) * 1e3
    ttft = first - start
    return {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "tpot_mean_ms": float(tpot.mean()),
        "e2el_mean_s": float((last - start).mean()),
        "duration_s": float(last.max() - start.min()),
    }


def _replay_plan(rows: list[dict[str, str]], arrival_s: Any) -> Plan:
    n = len(rows)
    table = pa.table(
        {
            "request_id": [row["request_id"] for row in rows],
            "session": np.arange(n),
            "turn": np.zeros(n, np.int32),
            "phase": ["replay"] * n,
            "arrival_ns": np.rint(arrival_s * 1e9).astype(np.int64),
            "input_tokens": np.array([int(row["input_toks"]) for row in rows], np.int32),
            "output_tokens": np.array([int(row["output_toks"]) for row in rows], np.int32),
            "content": np.arange(n) + 1,
            "hash_ids": pa.nulls(n, PLAN.field("hash_ids").type),
            "prompt": pa.nulls(n, pa.string()),
        },
        schema=PLAN,
    )
    return Plan(table, (), {"workload": "replay"})


# --- step times ------------------------------------------------------------------------------------------------


def calibration_cells() -> list[Cell]:
    """Step times of the tables against the authors' calibrated lines (eager mode; no constant fitted on GPU time)."""
    cells = []
    for name in ("rtx-pro-6000", "h200"):
        for model in list_models():
            published = published_calibration(find_profile(name), find_model(model))
            if published is None:
                continue
            cost = load_device(name, model, async_scheduling=False, eager=True).cost
            odd = "the source's coefficients are doubtful for this model" if model == "mistral-7b" else ""
            for seqs in DECODE_SEQS:
                line = published.alpha_d + published.beta_d * seqs
                ours = cost.step_s(decode_shape(seqs, DECODE_CONTEXT_TOKENS))
                cells.append(_step_cell(name, model, f"decode of {seqs}", line, ours, odd))
            for tokens in PREFILL_TOKENS:
                line = published.alpha_p + published.beta_p * tokens
                cells.append(
                    _step_cell(name, model, f"prefill of {tokens}", line, cost.step_s(prefill_shape(tokens)), "")
                )
    return cells


def _step_cell(device: str, model: str, case: str, published_s: float, ours_s: float, note: str) -> Cell:
    return Cell(
        "calibration", device, model, case, "", "step_ms", published_s * 1e3, ours_s * 1e3, scored=not note, note=note
    )
