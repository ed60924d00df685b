"""EB+ combined with staggered dispatch: policies inside the instances, dispatch in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

from ebbench.analysis.documents import Column, Section, Value, labels, relative
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import VLLM
from ebbench.papers.published import GPUS, MAIN_MODEL, gpu_title
from ebbench.papers.staggered import deployed
from ebbench.papers.table import PaperTable, Published, Sections, each, figure, ours
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

TOPOLOGY, INSTANCES = "dp=4", 4
BUDGET, SEQS = 8192, 1024
POLICIES = ("v1", "eb", "ebplus")
DISPATCH = {"immediate": "least-outstanding", "sbs": "sbs"}
LOADS = (0.3, 0.5, 0.7, 0.85)
SATURATED = 1024 * INSTANCES  # requests open in the closed loop
_WORKLOADS = {"prefill-heavy": (1024, 128), "balanced": (512, 512), "decode-heavy": (128, 1024)}
_METRICS = {
    "TTFT s": ("mean_ttft_ms", 1e-3),
    "TTFT p99 s": ("p99_ttft_ms", 1e-3),
    "TPOT ms": ("mean_tpot_ms", 1.0),
    "tokens/s": ("total_token_throughput", 1.0),
}


_Row = tuple[str, str, float | None]
"""Device, workload and load."""


@cache
def capacity_rps(device: str, model: str, workload: str) -> float:
    """Requests/s of all instances by the linear costs: prompts, then outputs in batches of 256 sequences."""
    from ebbench.devices.loader import load_device

    costs = load_device(device, model).calibration
    inputs, outputs = _WORKLOADS[workload]
    batch = 256
    return INSTANCES / (costs.beta_p * inputs + outputs * (costs.alpha_d / batch + costs.beta_d))


def _cell(options: PaperOptions, device: str, workload: str, load: float | None, policy: str, dispatch: str) -> RunSpec:
    """One run; ``load`` None is a closed loop that keeps every instance full."""
    count = options.num_prompts or (4000 if load is not None else 12_000)
    plan: dict[str, Any] = {"num_prompts": count}
    if load is None:
        plan["max_concurrency"] = SATURATED
    else:
        plan["request_rate"] = round(load * capacity_rps(device, options.model(), workload), 3)
    return simulated(
        workload, policy, device, options.model(), SEQS, BUDGET, scenario=None if load is None else "poisson",
        topology=deployed(TOPOLOGY, network_ms=0.5), dispatch=DISPATCH[dispatch],
        vllm_version=VLLM, **plan,
    )  # fmt: skip


def _pairs(options: PaperOptions) -> list[tuple[str, str]]:
    return list(product(dict.fromkeys(options.devices or GPUS), dict.fromkeys(options.workloads or _WORKLOADS)))


def _section(options: PaperOptions, store: RunStore, device: str, workload: str) -> Section:
    columns = labels("load", "policy")
    for name in _METRICS:
        columns += (*ours(*DISPATCH, group=name), Column("diff", "change", name))
    rows = []
    for load, policy in product((*LOADS, None), POLICIES):
        row: list[Value] = ["saturated" if load is None else f"{100 * load:.0f} %", policy]
        cells = [_cell(options, device, workload, load, policy, dispatch) for dispatch in DISPATCH]
        for key, scale in _METRICS.values():
            immediate, staggered = (figure(store, cell, key, scale) for cell in cells)
            row += [immediate, staggered, relative(staggered, immediate)]
        rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, {workload}", columns, tuple(rows))


def _mean(changes: Iterable[float | None]) -> str:
    known = [change for change in changes if change is not None]
    return f"{100 * fmean(known):+.1f} %" if known else "–"


def _findings(options: PaperOptions, store: RunStore, sections: Sections) -> Iterator[str]:
    """What was run; effect of staggering on each policy and of each policy under each dispatch, averaged over
    settings."""
    yield (
        f"Nothing is published on this. Ours: Qwen3-8B, {TOPOLOGY}, N = {SEQS}, B = {BUDGET}, 0.5 ms each way; Poisson "
        f"arrivals, {options.num_prompts or 4000:,} requests; load as a share of what the linear costs give with 256 "
        "sequences a batch, which lies near but not at the measured saturation; saturated: a closed loop of "
        f"{SATURATED:,} requests."
    )
    yield (
        "Immediate dispatch is to the instance with the fewest open requests. Instances that serve prompts and answers "
        "pass after pass never stand still, so there is no wait on the device to save; the staggered dispatcher takes "
        "them to generate until their signals say otherwise and sends requests out at once, as immediate dispatch does."
    )
    if any(None in row[2:4] for section in sections for row in section.rows):
        return
    settings = [(*pair, load) for pair in _pairs(options) for load in (*LOADS, None)]

    def rate(setting: _Row, policy: str, dispatch: str, key: str = "total_token_throughput") -> float | None:
        return figure(store, _cell(options, *setting, policy, dispatch), key)

    def staggering(setting: _Row, policy: str, *key: str) -> float | None:
        return relative(rate(setting, policy, "sbs", *key), rate(setting, policy, "immediate", *key))

    below, full = ([s for s in settings if (s[2] is None) == saturated] for saturated in (False, True))
    by_policy = {policy: _mean(staggering(s, policy, "mean_ttft_ms") for s in below) for policy in POLICIES}
    changes = ", ".join(f"{change} under {policy}" for policy, change in by_policy.items())
    yield f"Staggering changes the mean TTFT, averaged over the settings below saturation, by {changes}."
    tokens = _mean(staggering(s, "ebplus") for s in full)
    gain = {d: _mean(relative(rate(s, "ebplus", d), rate(s, "v1", d)) for s in full) for d in DISPATCH}
    yield (
        f"EB+ changes the throughput of saturated instances over v1 by {gain['immediate']} under immediate dispatch "
        f"and {gain['sbs']} under sbs; staggering changes that of EB+ by {tokens}."
    )
    rates = [[rate(s, "ebplus", dispatch) or 0.0 for dispatch in DISPATCH] for s in settings]
    kept = sum(staggered >= 0.99 * immediate for immediate, staggered in rates)
    yield (
        f"EB+ with sbs keeps the throughput of EB+ with immediate dispatch (within 1 %) in {kept} of {len(settings)} "
        "settings."
    )


COMPOSITION = PaperTable(
    "cluster-policies", ("device", "model", "workload", "num_prompts"), each(_section, _pairs),
    findings=_findings, whole=False, workloads=tuple(_WORKLOADS), published_on=Published(tuple(GPUS), (MAIN_MODEL,)),
)  # fmt: skip
