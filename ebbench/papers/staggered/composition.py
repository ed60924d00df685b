"""EB+ combined with staggered dispatch: policies inside the instances, dispatch in front of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from ebbench.analysis.documents import Column, Section, Value, labels, relative
from ebbench.papers.protocols import VLLM
from ebbench.papers.published import GPUS, MAIN_MODEL, gpu_title
from ebbench.papers.staggered.prefill import deployed
from ebbench.papers.table import Content, PaperOptions, PaperTable, Published, figure
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


@cache
def capacity_rps(device: str, model: str, workload: str) -> float:
    """Requests/s of all instances by the linear costs: prompts, then outputs in batches of 256 sequences."""
    from ebbench.devices import load_device

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


def _rows(options: PaperOptions) -> list[tuple[str, str, float | None]]:
    devices, workloads = options.devices or tuple(GPUS), options.workloads or tuple(_WORKLOADS)
    return [(d, w, load) for d in devices for w in workloads for load in (*LOADS, None)]


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        _cell(options, *row, policy, dispatch) for row in _rows(options) for policy in POLICIES for dispatch in DISPATCH
    ]


def _section(options: PaperOptions, store: RunStore, device: str, workload: str) -> Section:
    columns = (*labels("load", "policy"),)
    for name in _METRICS:
        columns += (
            *(Column(dispatch, group=name, ours=True) for dispatch in DISPATCH),
            Column("diff", "change", name),
        )
    rows = []
    for load in (*LOADS, None):
        for policy in POLICIES:
            row: list[Value] = ["saturated" if load is None else f"{100 * load:.0f} %", policy]
            for key, scale in _METRICS.values():
                immediate, staggered = (
                    figure(store, _cell(options, device, workload, load, policy, d), key, scale) for d in DISPATCH
                )
                row += [immediate, staggered, relative(staggered, immediate)]
            rows.append(tuple(row))
    return Section(f"{gpu_title(device)}, {workload}", columns, tuple(rows))


def _ttft(
    options: PaperOptions, store: RunStore, row: tuple[str, str, float | None], policy: str, dispatch: str
) -> float | None:
    return figure(store, _cell(options, *row, policy, dispatch), "mean_ttft_ms")


def _rate(
    options: PaperOptions, store: RunStore, row: tuple[str, str, float | None], policy: str, dispatch: str
) -> float | None:
    return figure(store, _cell(options, *row, policy, dispatch), "total_token_throughput")


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):+.1f} %" if known else "–"


def _conclusion(options: PaperOptions, store: RunStore) -> tuple[str, ...]:
    """Effect of staggering on each policy and of each policy under each dispatch, averaged over settings."""
    rows = _rows(options)
    if store.missing(_cells(options)):
        return ()
    below, full = [row for row in rows if row[2] is not None], [row for row in rows if row[2] is None]
    by_policy = {
        policy: _mean(
            [
                relative(_ttft(options, store, r, policy, "sbs"), _ttft(options, store, r, policy, "immediate"))
                for r in below
            ]
        )
        for policy in POLICIES
    }
    gain = {
        dispatch: _mean(
            [
                relative(_rate(options, store, r, "ebplus", dispatch), _rate(options, store, r, "v1", dispatch))
                for r in full
            ]
        )
        for dispatch in DISPATCH
    }
    tokens = _mean(
        [
            relative(_rate(options, store, r, "ebplus", "sbs"), _rate(options, store, r, "ebplus", "immediate"))
            for r in full
        ]
    )
    kept = sum(
        (_rate(options, store, r, "ebplus", "sbs") or 0.0)
        >= 0.99 * (_rate(options, store, r, "ebplus", "immediate") or 0.0)
        for r in rows
    )
    return (
        "Staggering changes the mean TTFT, averaged over the settings below saturation, by "
        + ", ".join(f"{change} under {policy}" for policy, change in by_policy.items())
        + ".",
        f"EB+ changes the throughput of saturated instances over v1 by {gain['immediate']} under immediate dispatch "
        f"and {gain['sbs']} under sbs; staggering changes that of EB+ by {tokens}.",
        f"EB+ with sbs keeps the throughput of EB+ with immediate dispatch (within 1 %) in {kept} of {len(rows)} "
        "settings.",
    )


def _document(options: PaperOptions, store: RunStore) -> Content:
    notes = (
        f"Nothing is published on this. Ours: Qwen3-8B, {TOPOLOGY}, N = {SEQS}, B = {BUDGET}, 0.5 ms each way; Poisson "
        f"arrivals, {options.num_prompts or 4000:,} requests; load as a share of what the linear costs give with 256 "
        "sequences a batch, which lies near but not at the measured saturation; saturated: a closed loop of "
        f"{SATURATED:,} requests.",
        "Immediate dispatch is to the instance with the fewest open requests. Instances that serve prompts and answers "
        "pass after pass never stand still, so there is no wait on the device to save; the staggered dispatcher takes "
        "them to generate until their signals say otherwise and sends requests out at once, as immediate dispatch "
        "does.",
        *_conclusion(options, store),
    )
    pairs = dict.fromkeys((device, workload) for device, workload, _ in _rows(options))
    sections = tuple(_section(options, store, device, workload) for device, workload in pairs)
    return sections, notes


COMPOSITION = PaperTable(
    "cluster-policies", "EB+ and staggered dispatch together", "EB+ and staggered dispatch together", _cells, _document,
    ("device", "model", "workload", "num_prompts"), whole=False, workloads=tuple(_WORKLOADS),
    published_on=Published(tuple(GPUS), (MAIN_MODEL,)),
)  # fmt: skip
