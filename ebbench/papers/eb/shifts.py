"""Traffic levels and shifts: tables 3 and 18 of the EB paper, and adaptation inside a run (ours)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from ebbench.analysis.documents import Column, Section, Value, labels, relative
from ebbench.analysis.phases import Recovery, Surface, recoveries, run_surfaces
from ebbench.analysis.summary import summarise_phases
from ebbench.errors import UsageError
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import MEAN_OUTPUT, protocol_cells, table3_protocol
from ebbench.papers.published import GPUS, MAIN_MODEL, METRICS, gpu_title, pick
from ebbench.papers.table import (
    PaperTable,
    Published,
    changes,
    each,
    mean_figure,
    of_all,
    ours,
    policy_columns,
    policy_row,
)
from ebbench.records.run import Run
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated
from vllm_eb.policies.deferred import DeferredModel, exact_chain

# Table 3 of the EB paper: three traffic levels and two shifts; throughput, TTFT and TPOT.


class Traffic(NamedTuple):
    """One row group: its title, and the relative duration of its runs."""

    title: str
    weight: float


TRAFFIC: Mapping[str, Traffic] = {
    "c=32": Traffic("c = 32", 8.0),
    "c=512": Traffic("c = 512", 1.0),
    "c=2048": Traffic("c = 2048", 2.0),
    "distribution_shift": Traffic("distribution shift", 6.0),
    "concurrency_shift": Traffic("concurrency shift", 2.0),
}
PUBLISHED_POLICIES = ("v1", "eb", "ebplus")
_METRICS3 = ("total_tokens_per_s", "ttft_s", "tpot_ms")


@cache
def deferred_policy(device: str, model: str, max_num_seqs: int) -> str:
    """``deferred:k=K`` with the K that the exact chain finds best for the device's costs and mean output length."""
    from ebbench.devices.loader import load_device

    costs = load_device(device, model).calibration
    chain = exact_chain(DeferredModel(max_num_seqs, 1 / MEAN_OUTPUT, costs.alpha_p, costs.alpha_d))
    return f"deferred:k={chain.best_k}"


def table3_cells(options: PaperOptions, device: str, model: str, name: str, policy: str) -> tuple[RunSpec, ...]:
    """The cells of one row and policy; the table shows the mean of their figures."""
    protocol = table3_protocol(name, policy, device)
    if policy == "deferred":
        protocol = replace(protocol, policy=deferred_policy(device, model, protocol.max_num_seqs))
    return protocol_cells(protocol, device, model, options.num_prompts, TRAFFIC[name].weight)


def _settings(options: PaperOptions, *default: str) -> list[tuple[str, str]]:
    return list(product(options.devices or default, options.models or (MAIN_MODEL,)))


def _further3(options: PaperOptions) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("v0", "deferred", *options.further(*PUBLISHED_POLICIES))))


def _section3(options: PaperOptions, store: RunStore, device: str, model: str) -> Section:
    policies = (*PUBLISHED_POLICIES, *_further3(options))
    rows: list[tuple[Value, ...]] = []
    for name, traffic in TRAFFIC.items():
        cells = {policy: table3_cells(options, device, model, name, policy) for policy in policies}
        for metric in _METRICS3:
            title, key, scale = METRICS[metric]
            ours = {policy: mean_figure(store, repeats, key, scale) for policy, repeats in cells.items()}
            rows.append((traffic.title, title, *policy_row(_published3(device, model, name, metric), ours, gain=False)))
    columns = labels("scenario", "metric") + policy_columns(PUBLISHED_POLICIES, _further3(options), gain="")
    return Section(f"{gpu_title(device)}, {model}", columns, tuple(rows))


def _published3(device: str, model: str, name: str, metric: str) -> dict[str, float | None]:
    where = {"scenario": name, "metric": metric, "gpu": gpu_title(device)}
    table = "table3_traffic_and_nonstationary"
    return {policy: pick(table, policy, **where) if model == MAIN_MODEL else None for policy in PUBLISHED_POLICIES}


def _gains(options: PaperOptions, store: RunStore, device: str, model: str) -> Section:
    pairs = (("eb", "v1"), ("ebplus", "v1"), ("ebplus", "better of v1, eb"))
    columns = (*labels("scenario"), *(column for policy, base in pairs for column in changes(f"{policy} vs {base}")))
    rows = []
    for name, traffic in TRAFFIC.items():
        cells = {policy: table3_cells(options, device, model, name, policy) for policy in PUBLISHED_POLICIES}
        ours = {policy: mean_figure(store, chosen, "total_token_throughput") for policy, chosen in cells.items()}
        rates = (_published3(device, model, name, "total_tokens_per_s"), ours)
        bests = [{**known, "better of v1, eb": of_all(max, (known["v1"], known["eb"]))} for known in rates]
        rows.append((traffic.title, *(relative(best[policy], best[base]) for policy, base in pairs for best in bests)))
    return Section(f"{gpu_title(device)}, {model}: throughput of one policy over another", columns, tuple(rows))


TABLE3 = PaperTable(
    "table3", ("device", "model", "policy", "num_prompts"), lambda options, store: [
        make(options, store, *setting) for setting in _settings(options, *GPUS) for make in (_section3, _gains)
    ],
    published_on=Published(tuple(GPUS), (MAIN_MODEL,)),
)  # fmt: skip


# Table 18 of the EB paper: joint TTFT and TPOT attainment at concurrency 512, for any targets.

TTFT_S = (2.0, 5.0, 10.0)
TPOT_MS = (50.0, 100.0)
_RANKS = ("strict", "relaxed")


def _section18(options: PaperOptions, store: RunStore, device: str, model: str) -> Section:
    ttft_s, tpot_ms = sorted(options.ttft_s or TTFT_S), sorted(options.tpot_ms or TPOT_MS)
    printed = not options.ttft_s and not options.tpot_ms and (device, model) == ("rtx-pro-6000", MAIN_MODEL)
    further = options.further(*PUBLISHED_POLICIES)
    surfaces: dict[str, Surface | None] = {}
    for policy in (*PUBLISHED_POLICIES, *further):
        measured = store.get(table3_cells(options, device, model, "c=512", policy)[0])
        ttft_ms = [1e3 * limit_s for limit_s in ttft_s]
        surfaces[policy] = None if measured is None else run_surfaces(measured.run, ttft_ms, tpot_ms)[0]
    rows = []
    for (i, ttft), (j, tpot) in product(enumerate(ttft_s), enumerate(tpot_ms)):
        ours = {p: None if surface is None else 100 * surface.attainment[i][j] for p, surface in surfaces.items()}
        shares: dict[str, float | None] = dict.fromkeys(PUBLISHED_POLICIES)
        if printed:
            target = {"ttft_target": str(i + 1), "tpot_target_rank": _RANKS[j]}
            shares = {policy: pick("table18_goodput_percent", policy, **target) for policy in shares}
        rows.append((f"{ttft:g} s", f"{tpot:g} ms", *policy_row(shares, ours, gain=False, points=True)))
    columns = labels("TTFT ≤", "TPOT ≤") + policy_columns(PUBLISHED_POLICIES, further, gain="", points=True)
    return Section(f"{gpu_title(device)}, {model}", columns, tuple(rows))


TABLE18 = PaperTable(
    "table18", ("device", "model", "policy", "num_prompts", "ttft", "tpot"),
    each(_section18, lambda options: _settings(options, "rtx-pro-6000")),
    published_on=Published(("rtx-pro-6000",), (MAIN_MODEL,)),
)  # fmt: skip


# How policies adapt to shifts inside one run: throughput, TTFT, time to adapt and regret in each phase.
#
# The EB paper has no such table: the distribution shift of its table 3 is one shuffled mixture, the concurrency shift
# five separate runs.

SCENARIOS: Mapping[str, str] = {
    "load-falls": "1,024 open requests, then 16",
    "load-rises": "16 open requests, then 1,024",
    "prompts-to-answers": "512 open; long prompts, long answers, long prompts",
    "day-and-night": "open loop with a quiet night and a noon at 110 %",
}
OPEN_LOOP = ("day-and-night",)
"""Here the arrivals set the throughput, so that latency tells the policies apart."""
COMPARED = ("v1", "eb", "ebplus", "marginal")
FIXED = ("v1", "v0", "eb:theta=0.1", "eb:theta=0.2", "eb:theta=0.4", "eb:theta=0.6")
"""Policies whose rule never changes: the best of them in a phase is what regret is measured against."""
RATES_PER_S: Mapping[str, float] = {"rtx-pro-6000": 17.0, "h200": 33.0}
"""100 % of the day: sessions/s of 512/256 tokens that the better of v1 and eb carries (steady, 1,024 open)."""
BUDGET, SEQS = 8192, 1024
ADAPTATION_OUTPUT = 256
_WORKLOAD = "balanced"


class Phase(NamedTuple):
    """One phase of one run: its recovery, and the median TTFT (ms) and mean E2EL (s) of its requests."""

    recovery: Recovery
    ttft_ms: float | None
    e2el_s: float | None

    def figure(self, scenario: str) -> float | None:
        """What a policy is judged by: tokens/s, or E2EL in s in an open loop."""
        return self.e2el_s if scenario in OPEN_LOOP else self.recovery.mean_tokens_per_s


def _adaptation_cell(options: PaperOptions, device: str, model: str, scenario: str, policy: str) -> RunSpec:
    output_len = None if scenario == "prompts-to-answers" else ADAPTATION_OUTPUT
    rate = RATES_PER_S[device] if scenario == "day-and-night" else None
    return simulated(_WORKLOAD, policy, device, model, SEQS, BUDGET, scenario, request_rate=rate, output_len=output_len)


def _adaptation_devices(options: PaperOptions) -> tuple[str, ...]:
    for device in options.devices:
        if device not in RATES_PER_S:
            raise UsageError(f"adaptation knows the load of a day on {' and '.join(RATES_PER_S)}, not on {device}")
    return options.devices or tuple(GPUS)


def _compared(options: PaperOptions) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*COMPARED, *options.policies)))


def _phases(run: Run) -> Mapping[str, Phase]:
    metrics = {summary.phase: summary.metrics for summary in summarise_phases(run)}
    phases = {}
    for recovery in recoveries(run):
        own = metrics[recovery.phase]
        e2el_s = None if own.e2el.mean is None else own.e2el.mean / 1e3
        phases[recovery.phase] = Phase(recovery, own.ttft.median, e2el_s)
    return phases


def _runs(options: PaperOptions, store: RunStore, device: str, scenario: str) -> dict[str, Mapping[str, Phase]]:
    policies = dict.fromkeys((*_compared(options), *FIXED))
    measured = {
        policy: store.get(_adaptation_cell(options, device, options.model(), scenario, policy)) for policy in policies
    }
    return {policy: _phases(cell.run) for policy, cell in measured.items() if cell is not None}


def _adaptation_section(options: PaperOptions, store: RunStore, device: str, scenario: str) -> Section:
    policies = _compared(options)
    unit = "E2EL s" if scenario in OPEN_LOOP else "tokens/s"
    columns = (
        *labels("phase"), *ours(*policies, group=unit), Column("policy", "label", "best fixed"),
        Column(unit, group="best fixed"), *(Column(policy, "change", "regret", ours=True) for policy in policies),
        Column("better of v1, eb", "change", "ebplus against the", ours=True), *ours(*policies, group="TTFT ms"),
        Column("ebplus", "label", "adapted", ours=True),
    )  # fmt: skip
    runs = _runs(options, store, device, scenario)
    rows = [_row(runs, policies, scenario, phase) for phase in runs.get("v1", {})]
    return Section(f"{scenario} on {gpu_title(device)}: {SCENARIOS[scenario]}", columns, tuple(rows))


def _row(
    runs: Mapping[str, Mapping[str, Phase]], policies: tuple[str, ...], scenario: str, phase: str
) -> tuple[Value, ...]:
    figures = {policy: phases[phase].figure(scenario) if phase in phases else None for policy, phases in runs.items()}

    def best_of(candidates: tuple[str, ...]) -> str | None:
        known = {policy: value for policy in candidates if (value := figures.get(policy)) is not None}
        return (min if scenario in OPEN_LOOP else max)(known, key=lambda policy: known[policy]) if known else None

    def regret(policy: str, than: str | None) -> float | None:
        change = relative(figures.get(policy), figures.get(than or ""))
        return change if change is None or scenario in OPEN_LOOP else 0.0 - change

    best = best_of(FIXED)
    row: list[Value] = [phase, *(figures.get(policy) for policy in policies), best, figures.get(best or "")]
    row += [regret(policy, best) for policy in policies]
    row.append(relative(figures.get("ebplus"), figures.get(best_of(("v1", "eb")) or "")))
    row += [runs[policy][phase].ttft_ms if phase in runs.get(policy, {}) else None for policy in policies]
    return (*row, _adapted(runs.get("ebplus", {}).get(phase)))


def _adapted(phase: Phase | None) -> str | None:
    if phase is None:
        return None
    controller = phase.recovery
    if not controller.switches:
        return "–"
    return f"{controller.controller_s:.1f} s ({controller.controller_requests:,}; {controller.switches})"


ADAPTATION = PaperTable(
    "adaptation", ("device", "model", "policy"),
    each(_adaptation_section, lambda options: product(_adaptation_devices(options), SCENARIOS)),
    published_on=Published(tuple(RATES_PER_S), (MAIN_MODEL,)),
)  # fmt: skip
