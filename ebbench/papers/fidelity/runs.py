"""Runs published measurements on emulated devices and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.analysis.columns import Mask, RequestColumns
from ebbench.analysis.environment import API_SERVER
from ebbench.config.declare import declared_in
from ebbench.devices.base import Device
from ebbench.devices.costs import (
    DECODE_CONTEXT_TOKENS,
    DECODE_SEQS,
    PREFILL_TOKENS,
    decode_shape,
    prefill_shape,
    published_calibration,
)
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model, find_profile, list_models
from ebbench.engines.sim import SimEngine
from ebbench.papers.fidelity.case import FIT_ROWS, Case
from ebbench.papers.fidelity.cases import table3
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.papers.protocols import protocol_cells
from ebbench.papers.published import rows
from ebbench.records.plan import Plan
from ebbench.records.schema import PLAN
from ebbench.runs.execute import Task, make
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions, HostCosts
from vllm_eb.policy import parse_policy

Say = Callable[[str], None]
DIED = "our run ended in an out-of-memory error of the receiving store, the published one did not"
REPLAY = "llmservingsim/rtx4090_llama31_8b"


def run_cases(cases: Iterable[Case], seed: int, say: Say, host: HostCosts | None = None) -> list[PublishedFigure]:
    """Run every case and return its cells. Nothing is stored. ``host`` replaces the profiles' constants."""
    return cells_of(cases, cache(lambda run: make(Task(run)).figures), say, seed, host=host)


def runs_of_cases(cases: Iterable[Case], seed: int, repeats: int = 1, host: HostCosts | None = None) -> list[RunSpec]:
    """The runs behind cases; ``ebbench tables`` uses the same runs for the same figures."""
    return [run for case in cases for i in range(repeats) for run in case_runs(case, seed + i, host)]


def case_runs(case: Case, seed: int, host: HostCosts | None = None) -> tuple[RunSpec, ...]:
    """One run, or one per concurrency, whose figures are averaged; none for a case that is refused."""
    if case.refused:
        return ()
    runs = protocol_cells(case.protocol, case.device, case.model, seed=seed)
    of_server = {name: value for name, value in vars(case).items() if name in declared_in(EngineOptions)}
    return tuple(run.changed(host=host, **of_server) for run in runs)


def cells_of(
    cases: Iterable[Case], figures: Callable[[RunSpec], Mapping[str, Any]], say: Say, seed: int, repeats: int = 1,
    host: HostCosts | None = None,
) -> list[PublishedFigure]:  # fmt: skip
    """The cells of cases whose runs exist. ``figures`` returns those of a run under a summary's keys."""
    cells: list[PublishedFigure] = []
    for case in cases:
        made = [[figures(run) for run in case_runs(case, seed + i, host)] for i in range(repeats)]
        seeds = [list(map(_values, runs)) for runs in made]
        fitted = case.fitted or (case.sets_token_time and any(run.get(API_SERVER) for runs in made for run in runs))
        ours = {name: _mean([_mean([run[name] for run in runs]) for runs in seeds]) for name in METRICS}
        told = (caveat for run in made[0] for caveat in run.get("warnings") or () if isinstance(caveat, Mapping))
        codes = tuple(dict.fromkeys(caveat["code"] for caveat in told))
        cells += [
            PublishedFigure(
                number.source, case.device, case.model, case.name, case.scheduler, number.metric, number.value,
                ours[number.metric], fitted, number.scored and not isnan(ours[number.metric]),
                (case.refused or DIED) if isnan(ours[number.metric]) and not isnan(number.value) else number.note,
                codes,
            )
            for number in case.published
        ]  # fmt: skip
        first = cells[-len(case.published)]
        what = f"{case.device} {case.model} {case.name} {case.scheduler}"
        error = first.note if first.failed else f"{first.error:+.1%}"
        say(f"{first.source}: {what}: {first.metric} {error}")
    return cells


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing: a refused case has no runs."""
    return float(np.mean(values)) if values else float("nan")


_KEYS = {
    "tokens_per_s": ("total_token_throughput", 1.0),
    "requests_per_s": ("request_throughput", 1.0),
    "output_tokens_per_s": ("output_throughput", 1.0),
    "ttft_mean_s": ("mean_ttft_from_send_ms", 1e-3),  # as every client counts: a request that waits for one of its
    # client's connections has not been sent
    "tpot_mean_ms": ("mean_tpot_ms", 1.0),
    "itl_mean_ms": ("mean_itl_ms", 1.0),
    "tpot_p99_ms": ("p99_tpot_ms", 1.0),
}
METRICS = tuple(_KEYS)


def _values(figures: Mapping[str, Any]) -> Mapping[str, float]:
    """Figures by name, NaN if undefined or if the run ended with a full KV store."""
    known = {} if figures.get("dead") else figures
    scaled = {name: (known.get(key), scale) for name, (key, scale) in _KEYS.items()}
    return {name: float("nan") if value is None else float(value) * scale for name, (value, scale) in scaled.items()}


# --- the real run, replayed ------------------------------------------------------------------------------------


def replay_cells() -> list[PublishedFigure]:
    """The measured vLLM run on an RTX 4090, request by request; no constant was fitted on it."""
    replayed = rows(REPLAY)
    columns = {name: np.array([float(row[name]) for row in replayed]) for name in replayed[0] if name != "request_id"}
    # Arrivals use the client's clock, everything else the engine's: the fastest hand-over aligns the two.
    arrival = columns["arrival_time"] + (columns["queued_ts"] - columns["arrival_time"]).min()
    measured = latencies(arrival, columns["first_token_ts"], columns["last_token_ts"], columns["output_toks"])
    n = len(replayed)
    plan = timed_plan(
        arrival - arrival.min(), columns["input_toks"], columns["output_toks"], np.arange(n) + 1, ["replay"] * n
    )
    device = load_device("rtx-4090", "llama-3.1-8b", max_num_seqs=256, max_num_batched_tokens=2048, vllm_version="0.19")
    requests = simulated_requests(plan, device, EngineOptions(256, 2048, max_model_len=32_768, num_kv_blocks=2588))
    ours = latencies_of(requests, requests.phase == "replay")
    return [
        PublishedFigure(
            "RTX 4090 run", "rtx-4090", "llama-3.1-8b", "300 ShareGPT requests", "v1", name, measured[name], ours[name]
        )
        for name in measured
        if name != "tpot_p50_ms"
    ]


def simulated_requests(plan: Plan, device: Device, options: EngineOptions) -> RequestColumns:
    """The requests of a plan, carried out in simulation under v1."""
    result = SimEngine(figures_only=True).run(plan, parse_policy("v1"), device, options)
    return RequestColumns.of(result.uninterrupted().requests)


def latencies_of(requests: RequestColumns, rows: Mask) -> dict[str, float]:
    """The figures of :func:`latencies` of these requests."""
    start_s, first_s, last_s = (
        times_ns[rows] / 1e9 for times_ns in (requests.intended, requests.first_token, requests.last_token)
    )
    return latencies(start_s, first_s, last_s, requests.output_tokens[rows])


def latencies(start_s: Any, first_s: Any, last_s: Any, outputs: Any) -> dict[str, float]:
    """Figures of a run from the times of its requests (s) and their tokens."""
    several = outputs > 1
    tpot = ((last_s - first_s)[several] / (outputs[several] - 1)) * 1e3
    ttft = first_s - start_s
    return {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "tpot_mean_ms": float(tpot.mean()),
        "tpot_p50_ms": float(np.median(tpot)),
        "e2el_mean_s": float((last_s - start_s).mean()),
        "duration_s": float(last_s.max() - start_s.min()),
    }


def timed_plan(arrival_s: Any, inputs: Any, outputs: Any, contents: Any, phases: Sequence[str]) -> Plan:
    """Requests at given times; those of equal content begin with the same tokens."""
    n = len(arrival_s)
    table = pa.table(
        {
            "request_id": [str(row) for row in range(n)],
            "session": np.arange(n),
            "turn": np.zeros(n, np.int32),
            "phase": phases,
            "arrival_ns": np.rint(arrival_s * 1e9).astype(np.int64),
            "input_tokens": inputs.astype(np.int32),
            "output_tokens": outputs.astype(np.int32),
            "content": contents,
            "hash_ids": pa.nulls(n, PLAN.field("hash_ids").type),
            "prompt": pa.nulls(n, pa.string()),
        },
        schema=PLAN,
    )
    return Plan(table, (), {"workload": "replay"})


# --- step times ------------------------------------------------------------------------------------------------


def calibration_cells() -> list[PublishedFigure]:
    """Step times of the tables compared with the authors' fitted lines (eager mode). The time of one launch is
    fitted on the shortest decodes of the H200 (:mod:`ebbench.devices.launches`); none is on GPU time."""
    cells = []
    for name in ("rtx-pro-6000", "h200"):
        for model in list_models():
            published = published_calibration(find_profile(name), find_model(model))
            if published is None:
                continue
            cost = load_device(name, model, async_scheduling=False, eager=True).cost
            odd = "the source's coefficients are doubtful for this model" if model == "mistral-7b" else ""
            alpha, beta, context = published.alpha_d, published.beta_d, DECODE_CONTEXT_TOKENS
            times_s = [(f"decode of {n}", alpha + beta * n, decode_shape(n, context), odd) for n in DECODE_SEQS]
            alpha, beta = published.alpha_p, published.beta_p
            times_s += [(f"prefill of {n}", alpha + beta * n, prefill_shape(n), "") for n in PREFILL_TOKENS]
            cells += [
                PublishedFigure("calibration", name, model, case, "", "step_ms", line * 1e3, cost.step_s(shape) * 1e3,
                                name == "h200" and case == f"decode of {DECODE_SEQS[0]}", not note, note)
                for case, line, shape, note in times_s
            ]  # fmt: skip
    return cells


# Fits a device's three free constants on the rows of table 3 at c = 32 and 512 only.
#
# Gauss-Newton on the logarithms of throughput and TPOT of v1 and EB: host time per step, host time per sequence,
# scale of the mixed-attention excess. EB's row at c = 32 is not used: its TTFT is that of a refill at every free
# slot, which no threshold of the published rule gives.
#
# EB's TPOT is used too: its decode steps contain no prompts, so they separate the host time per sequence from the
# mixed excess, which v1's rows alone cannot.

Array = npt.NDArray[np.float64]

START = np.array([1.0, 10.0, 1.0])  # ms, us, 1
STEP = np.array([0.2, 2.0, 0.1])
ROUNDS = 4


def fit_host(device: str, say: Say, seed: int = 0) -> HostCosts:
    """The fitted constants of one device, from Qwen3-8B's rows."""
    used = {("v1", name) for name in FIT_ROWS} | {("eb", "c=512")}
    cases = [case for case in table3() if case.device == device and (case.scheduler, case.name) in used]

    def residuals(x: Array) -> Array:
        cells = run_cases(cases, seed, lambda _: None, _host(x))
        chosen = [cell for cell in cells if cell.metric in ("tokens_per_s", "tpot_mean_ms")]
        return np.log([cell.ours / cell.published for cell in chosen])

    return _host(_gauss_newton(residuals, say))


def _host(x: Array) -> HostCosts:
    step_ms, sequence_us, excess = (float(v) for v in np.round(x, 2))
    source = "fitted on table 3 of Zhang et al. (ICML 2026), rows c = 32 and c = 512, Qwen3-8B"
    return HostCosts(step_ms * 1e-3, sequence_us * 1e-6, excess, source)


def _gauss_newton(residuals: Callable[[Array], Array], say: Say) -> Array:
    x = START.copy()
    best, at = np.inf, x
    for round_number in range(ROUNDS):
        residual = residuals(x)
        norm = float(np.sqrt(np.mean(residual**2)))
        say(f"round {round_number}: {np.round(x, 3).tolist()}, rms error {norm:.2%}")
        if norm < best:
            best, at = norm, x.copy()
        slopes = np.array([(residuals(x + STEP * unit) - residual) / (STEP * unit).sum() for unit in np.eye(3)]).T
        move, *_ = np.linalg.lstsq(slopes, -residual, rcond=None)
        x = np.maximum(x + move, 0.0)
    return at
