"""How the EB paper's tables 19 and 20 were run: data-parallel servers, and prefill with decode pools.

Facts of the authors' scripts (weifang231/eb-vllm, reproduce/disagg: run_2gpu_comparison.sh, run_4gpu_comparison.sh,
their ``paper_sweep`` wrappers, disagg_multi_proxy.py):

- Four GPUs: 2,000 requests per setting (also in the paper). Two GPUs: 1,000, the script's default, which the authors'
  own repetition at 64 open has too; with 2,048 open 4,000 are taken, as in all their other runs at that concurrency,
  since 1,000 do not fill it and the printed mean TTFT is longer than 2,000 would allow. (A wrapper of later date has
  2,000 everywhere.) None to warm up; prompts of the mean length, outputs within 25 % of the mean.
- Data parallelism is one ``vllm serve --data-parallel-size``. No script sets B or N, so they are vLLM's defaults.
- Pools take 0.8 of the memory on both sides, and a proxy sends requests to the servers of each in turn. On four GPUs
  chunked prefill is off, for which vLLM raises B to the model's length. The rest of a decode server's memory receives
  KV; beyond ``kv_buffer_size`` (20 GB) the connector uses the host's memory, which is not modelled.
- EB+ has a fixed threshold of 0.8 and no memory-safe N (the first version of the scripts; a later one has Algorithm 1).
  They set neither the cost of mixed batches nor the margin. Without them EB+ never leaves mixed batches, and with 2,048
  open requests on RTX PRO 6000 it did; so both are taken to be those of table 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ebbench.analysis.documents import Section, Value, labels
from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.installation import REFERENCE
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import FIXED_THETA, SERVER_BUDGET, SERVER_SEQS, Protocol, ebplus_as_run, protocol_cells
from ebbench.papers.published import GPUS, MAIN_MODEL, METRICS, SYNTHETIC, gpu_title, pick
from ebbench.papers.table import PaperTable, Published, Sections, policy_columns, policy_row
from ebbench.records.warnings import shown_text
from ebbench.runs.store import Measured, RunStore
from ebbench.spec.run import RunSpec

BALANCED = "round-robin"
"""Dispatch to data-parallel ranks. vLLM's front end balances by counts up to 100 ms old (v1/engine/coordinator.py) and
counts what it has sent since, so requests that come within a step or two are spread evenly."""
UNCHUNKED_BUDGET = 40_960
"""vLLM's B for Qwen3-8B without chunked prefill: the model's length."""
POOL_UTILIZATION = 0.8
REQUESTS19 = {64: 1000, 512: 1000, 2048: 4000}
"""Requests by number of open ones."""
REQUESTS20 = 2000
CONCURRENCY20 = (128, 256, 512)
MIXES = ("prefill-heavy", "balanced", "decode-heavy")
FIXED_THRESHOLD = {"theta_min": FIXED_THETA, "initial_theta": FIXED_THETA, "memory_safe": False}


@dataclass(frozen=True)
class PolicyOnTopology:
    """A setting: a topology, the policy of its instances, their token budget, and the dispatch to them.

    ``policy`` "ebplus" is EB+ as these tables' scripts set it.
    """

    title: str
    topology: TopologySpec
    policy: str
    budget: int = SERVER_BUDGET

    def protocol(self, device: str, plan: dict[str, Any]) -> Protocol:
        """The protocol of a run with these arguments of the plan."""
        policy = ebplus_as_run(device, **FIXED_THRESHOLD) if self.policy == "ebplus" else self.policy
        pooled = self.topology.disaggregated
        return Protocol(
            policy, plan | {"source": "profile"}, SERVER_SEQS, self.budget, warmup=0,
            topology=self.topology, dispatch=BALANCED, decode_dispatch=BALANCED if pooled else None,
        )  # fmt: skip


def replicas(title: str, ranks: int, policy: str) -> PolicyOnTopology:
    """A policy on the ranks of one data-parallel server.

    A vLLM without asynchronous scheduling is 0.13 or older, whose ranks of a dense model agree on every forward pass.
    """
    return PolicyOnTopology(title, parse_topology(f"dp={ranks},lockstep=on"), policy)


def _pools(prefill: int, decode: int, transfer: TransferSpec | None = None) -> TopologySpec:
    return TopologySpec(
        name=f"{prefill}p{decode}d",
        prefill=PoolSpec(instances=prefill, gpu_memory_utilization=POOL_UTILIZATION),
        decode=PoolSpec(instances=decode, gpu_memory_utilization=POOL_UTILIZATION),
        transfer=transfer or TransferSpec(),
    )


def _four(prefill: int, decode: int) -> PolicyOnTopology:
    topology = _pools(prefill, decode)
    return PolicyOnTopology(f"{prefill}P+{decode}D", topology, "v1", UNCHUNKED_BUDGET)


TWO = {
    "v1_dp2": replicas("v1, DP=2", 2, "v1"),
    "ebplus_dp2": replicas("EB+, DP=2", 2, "ebplus"),
    "disagg_1p1d": PolicyOnTopology("1P+1D", _pools(1, 1), "v1"),
}
EARLY = PolicyOnTopology("1P+1D, copies dropped early", _pools(1, 1, TransferSpec(held_until="admission")), "v1")
"""Frees received KV once it is in the cache; not in the paper."""
FOUR = {
    "v1_dp4": replicas("v1, DP=4", 4, "v1"),
    "ebplus_dp4": replicas("EB+, DP=4", 4, "ebplus"),
    "1p3d": _four(1, 3),
    "2p2d": _four(2, 2),
    "3p1d": _four(3, 1),
}


def two_gpus(setting: PolicyOnTopology, device: str, concurrency: int) -> Protocol:
    """A run of table 19: prompts of 512 tokens, outputs of 256 on average."""
    workload = f"{REFERENCE}workloads/concurrency-shift-run.toml"
    count = REQUESTS19[concurrency]
    return setting.protocol(device, {"workload": workload, "num_prompts": count, "max_concurrency": concurrency})


def four_gpus(setting: PolicyOnTopology, device: str, mix: str, concurrency: int) -> Protocol:
    """A run of table 20."""
    workload = f"{REFERENCE}workloads/disaggregation-{mix}.toml"
    plan = {"workload": workload, "num_prompts": REQUESTS20, "max_concurrency": concurrency}
    return setting.protocol(device, plan)


# Appendix F.4 of the EB paper: data parallelism against prefill and decode pools, on two and four GPUs.

_RATE = "total_token_throughput"


def value_or_oom(measured: Measured | None, key: str, scale: float = 1.0) -> Value:
    """A figure, or OOM if the run ended with one."""
    if measured is None:
        return None
    return "OOM" if measured.figures.get("dead") else measured.get(key, scale)


@dataclass(frozen=True)
class _Comparison:
    """Table 19 or 20. ``choices``: the settings by their names in print, v1 on all ``gpus`` first.

    ``loads``: what ``protocol`` takes after setting and device; ``labels``: its columns. ``printed``: the published
    figure of a GPU, load, setting and metric. ``failing``: settings that ran out of memory where nothing is printed.
    """

    choices: dict[str, PolicyOnTopology]
    gpus: int
    labels: tuple[str, ...]
    loads: tuple[tuple[Any, ...], ...]
    protocol: Callable[..., Protocol]
    metrics: tuple[str, ...]
    printed: Callable[[str, tuple[Any, ...], str, str], float | None]
    failing: Collection[str]

    def further(self, options: PaperOptions) -> dict[str, PolicyOnTopology]:
        """The policies that were asked for in addition to v1 and EB+, on data-parallel ranks like those."""
        return {p: replicas(f"{p}, DP={self.gpus}", self.gpus, p) for p in options.further("v1", "ebplus")}

    def cell(self, options: PaperOptions, device: str, choice: PolicyOnTopology, load: tuple[Any, ...]) -> RunSpec:
        """One run."""
        protocol = self.protocol(choice, device, *load)
        weight = float(protocol.plan["max_concurrency"])
        return protocol_cells(protocol, device, options.model(), options.num_prompts, weight)[0]

    def by_name(
        self, options: PaperOptions, store: RunStore, device: str, load: tuple[Any, ...]
    ) -> dict[str, Measured | None]:
        """What was measured under one load."""
        choices = self.choices | self.further(options)
        return {name: store.get(self.cell(options, device, choice, load)) for name, choice in choices.items()}

    def sections(self, options: PaperOptions, store: RunStore) -> Sections:
        """One table per device."""
        return [self._section(options, store, device) for device in options.devices or GPUS]

    def _section(self, options: PaperOptions, store: RunStore, device: str) -> Section:
        titles, further = ([c.title for c in cs.values()] for cs in (self.choices, self.further(options)))
        columns = labels(*self.labels, "metric") + policy_columns(titles, further, gain="", vs_v1=True)
        rows: list[tuple[Value, ...]] = []
        v1 = next(iter(self.choices))
        for load in self.loads:
            by_name = self.by_name(options, store, device, load)
            for metric in self.metrics:
                title, key, scale = METRICS[metric]
                ours = {name: value_or_oom(measured, key, scale) for name, measured in by_name.items()}
                published = {name: self.published(device, load, name, metric) for name in self.choices}
                at = (SYNTHETIC.get(value, str(value)) for value in load)
                rows.append((*at, title, *policy_row(published, ours, vs=v1, gain=False)))
        return Section(gpu_title(device), columns, tuple(rows))

    def published(self, device: str, load: tuple[Any, ...], name: str, metric: str) -> Value:
        """A figure as printed, or OOM where a setting that ran out of memory has none."""
        printed = self.printed(gpu_title(device), load, name, metric)
        return "OOM" if printed is None and name in self.failing and device in GPUS else printed


_TWO = _Comparison(
    TWO | {"early": EARLY}, 2, ("c",), tuple((c,) for c in REQUESTS19), two_gpus,
    ("total_tokens_per_s", "ttft_s", "tpot_ms"),
    lambda gpu, load, name, metric: pick(
        "table19_two_gpu", name, concurrency=str(load[0]), metric=metric, gpu=gpu
    ),
    ("disagg_1p1d",),
)  # fmt: skip
_FOUR = _Comparison(
    FOUR, 4, ("mix", "c"), tuple(product(MIXES, CONCURRENCY20)), four_gpus,
    ("total_tokens_per_s", "ttft_ms", "tpot_ms"),
    lambda gpu, load, name, metric: pick(
        "table20_four_gpus", "value", gpu=gpu, workload=load[0], concurrency=str(load[1]), setting=name, metric=metric
    ),
    tuple(FOUR),
)  # fmt: skip


def _deaths(options: PaperOptions, store: RunStore, _sections: Sections) -> Iterator[str]:
    for device, load in product(options.devices or GPUS, _TWO.loads):
        measured = store.get(_TWO.cell(options, device, TWO["disagg_1p1d"], load))
        if measured is not None and measured.figures.get("dead"):
            yield f"{gpu_title(device)}, c = {load[0]}: {shown_text(measured.figures['dead'])}."


NEAR = 0.98
STARVED = 0.9  # a prefill pool that is busy for a smaller share of the time waits for requests


def _ranked(measured_by_name: Mapping[str, Measured]) -> list[tuple[str, float]]:
    rates = [(name, value_or_oom(measured, _RATE)) for name, measured in measured_by_name.items()]
    return sorted(((name, rate) for name, rate in rates if isinstance(rate, float)), key=lambda item: -item[1])


def explained(measured_by_name: Mapping[str, Measured]) -> str:
    """The fastest topology of table 20, and why the others were slower, from the runs' figures."""
    ranked = _ranked(measured_by_name)
    if not ranked:
        return "no topology finished."
    name, rate = ranked[0]
    best = measured_by_name[name]
    reason = "all GPUs do whatever there is to do"
    if FOUR[name].topology.disaggregated:
        reason = f"prefill GPUs busy {_busy(best):.0f} %, so that neither side waits long for the other"
    remarks = [
        f"{FOUR[other].title} {100 * (other_rate / rate - 1):+.1f} %{_why(other, measured_by_name[other], best)}"
        for other, other_rate in ranked[1:]
    ]
    remarks += [
        f"{FOUR[other].title} ran out of memory" for other, m in measured_by_name.items() if m.figures.get("dead")
    ]
    return f"{FOUR[name].title} with {rate:,.0f} tokens/s: {reason}; {'; '.join(remarks)}."


def _why(name: str, measured: Measured, best: Measured) -> str:
    """Why ``measured`` was slower, if its figures show it."""
    if not FOUR[name].topology.disaggregated:
        tpot, best_tpot = measured.get("mean_tpot_ms") or 0.0, best.get("mean_tpot_ms") or 0.0
        if tpot > best_tpot:
            return f" (prompts among the decodes: TPOT {tpot:.1f} ms against {best_tpot:.1f})"
        if _ttft(measured) > _ttft(best):
            return f" (decodes while prompts wait: first token after {_ttft(measured):.1f} s against {_ttft(best):.1f})"
        return ""
    if _busy(measured) >= 100 * STARVED:
        return f" (prefill is the bottleneck: busy {_busy(measured):.0f} %, first token after {_ttft(measured):.1f} s)"
    return f" (decode is the bottleneck: prefill GPUs idle {100 - _busy(measured):.0f} %)"


def _busy(measured: Measured) -> float:
    return measured.get("front_busy", 100) or 0.0


def _ttft(measured: Measured) -> float:
    return measured.get("mean_ttft_ms", 1e-3) or 0.0


def _verdicts(options: PaperOptions, store: RunStore, _sections: Sections) -> Iterator[str]:
    """Per setting, the fastest topology and the fastest of all policies on DP=4, if further ones were asked for; within
    1 % of v1 nothing matters."""
    further = _FOUR.further(options)
    for device in options.devices or GPUS:
        near = total = 0
        for mix, concurrency in _FOUR.loads:
            measured = _FOUR.by_name(options, store, device, (mix, concurrency))
            own = {name: measured[name] for name in FOUR}
            known = {name: run for name, run in measured.items() if run is not None}
            if None in own.values():
                continue
            total += 1
            ranked = _ranked({name: known[name] for name in FOUR})
            near += bool(ranked) and dict(ranked).get("ebplus_dp4", 0.0) >= NEAR * ranked[0][1]
            setting = f"{gpu_title(device)}, {SYNTHETIC[mix]}, c = {concurrency}"
            yield f"{setting}: {explained({name: known[name] for name in FOUR})}"
            if further and len(known) == len(measured):
                rates = _ranked({name: known[name] for name in ("v1_dp4", "ebplus_dp4", *further)})
                name, rate = rates[0]
                gain = 100 * (rate / dict(rates).get("v1_dp4", rate) - 1)
                best = f"of the policies, {(FOUR | further)[name].title} is best ({gain:+.1f} % over v1)"
                yield f"{setting}: {best if gain >= 1 else 'no policy gains 1 % over v1'}."
        if total:
            yield f"{gpu_title(device)}: EB+ is best or within {100 * (1 - NEAR):.0f} % of it in {near} of {total}."


_READS = ("device", "model", "policy", "num_prompts")
_PUBLISHED = Published(tuple(GPUS), (MAIN_MODEL,))
TABLE19 = PaperTable(
    "table19", _READS, _TWO.sections, findings=_deaths, whole=False, published_on=_PUBLISHED,
    facts=globals(),
)  # fmt: skip
TABLE20 = PaperTable(
    "table20", _READS, _FOUR.sections, findings=_verdicts, whole=False, published_on=_PUBLISHED,
    facts=globals(),
)  # fmt: skip
