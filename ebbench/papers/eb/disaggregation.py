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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ebbench.analysis.documents import Column, Section, Value, compared, comparison, labels, relative
from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.installation import REFERENCE
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import FIXED_THETA, SERVER_BUDGET, SERVER_SEQS, Protocol, ebplus_as_run, protocol_cells
from ebbench.papers.published import GPUS, MAIN_MODEL, SYNTHETIC, gpu_title, pick
from ebbench.papers.table import PaperTable, Published, Sections
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
_METRICS = (
    ("total_tokens_per_s", "tokens/s", _RATE, 1.0),
    ("ttft_s", "TTFT s", "mean_ttft_ms", 1e-3),
    ("tpot_ms", "TPOT ms", "mean_tpot_ms", 1.0),
)
_METRICS20 = (_METRICS[0], ("ttft_ms", "TTFT ms", "mean_ttft_ms", 1.0), _METRICS[2])


def _cell(options: PaperOptions, device: str, protocol: Protocol) -> RunSpec:
    weight = float(protocol.plan["max_concurrency"])
    return protocol_cells(protocol, device, options.model(), options.num_prompts, weight)[0]


def _further_policies(options: PaperOptions, ranks: int) -> dict[str, PolicyOnTopology]:
    """The policies that were asked for in addition to v1 and EB+, on data-parallel ranks like those."""
    return {p: replicas(f"{p}, DP={ranks}", ranks, p) for p in options.further("v1", "ebplus")}


def _columns(choices: Mapping[str, PolicyOnTopology], further: Mapping[str, PolicyOnTopology]) -> tuple[Column, ...]:
    """Columns of the published settings, then those of further policies, which are held against v1."""
    columns = [column for choice in choices.values() for column in compared(choice.title)]
    for choice in further.values():
        columns += [Column("ours", group=choice.title, ours=True), Column("vs v1", "change", choice.title)]
    return tuple(columns)


def _against(base: Value, ours: Value) -> tuple[Value, Value]:
    """A further policy's figure and its change against v1's."""
    if isinstance(ours, float) and isinstance(base, float):
        return ours, relative(ours, base)
    return ours, None


def value_or_oom(measured: Measured | None, key: str, scale: float = 1.0) -> Value:
    """A figure, or OOM if the run ended with one."""
    if measured is None:
        return None
    return "OOM" if measured.figures.get("dead") else measured.get(key, scale)


# Table 19: two GPUs.

_ALL_TWO = TWO | {"early": EARLY}


def _cell19(options: PaperOptions, device: str, choice: PolicyOnTopology, concurrency: int) -> RunSpec:
    return _cell(options, device, two_gpus(choice, device, concurrency))


def _cells19(options: PaperOptions) -> list[RunSpec]:
    settings = product(options.devices or GPUS, (_ALL_TWO | _further_policies(options, 2)).values(), REQUESTS19)
    return [_cell19(options, *setting) for setting in settings]


def _section19(options: PaperOptions, store: RunStore, device: str) -> Section:
    further = _further_policies(options, 2)
    rows = []
    for concurrency in REQUESTS19:
        by_name = {
            name: store.get(_cell19(options, device, choice, concurrency))
            for name, choice in (_ALL_TWO | further).items()
        }
        for metric, title, key, scale in _METRICS:
            row: list[Value] = [str(concurrency), title]
            for name in _ALL_TWO:
                where = {"concurrency": str(concurrency), "metric": metric, "gpu": gpu_title(device)}
                published = pick("table19_two_gpu", name, **where)
                ours = value_or_oom(by_name[name], key, scale)
                row += _published_and_ours(published, ours, failed=name == "disagg_1p1d" and device in GPUS)
            base = value_or_oom(by_name["v1_dp2"], key, scale)
            for name in further:
                row += _against(base, value_or_oom(by_name[name], key, scale))
            rows.append(tuple(row))
    return Section(gpu_title(device), labels("c", "metric") + _columns(_ALL_TWO, further), tuple(rows))


def _sections19(options: PaperOptions, store: RunStore) -> Sections:
    return [_section19(options, store, device) for device in options.devices or GPUS]


def _deaths(options: PaperOptions, store: RunStore, _sections: Sections) -> Iterator[str]:
    for device, concurrency in product(options.devices or GPUS, REQUESTS19):
        measured = store.get(_cell19(options, device, TWO["disagg_1p1d"], concurrency))
        if measured is not None and measured.figures.get("dead"):
            yield f"{gpu_title(device)}, c = {concurrency}: {shown_text(measured.figures['dead'])}."


# Table 20: four GPUs.

NEAR = 0.98
STARVED = 0.9  # a prefill pool that is busy for a smaller share of the time waits for requests


def _cell20(options: PaperOptions, device: str, choice: PolicyOnTopology, mix: str, concurrency: int) -> RunSpec:
    return _cell(options, device, four_gpus(choice, device, mix, concurrency))


def _cells20(options: PaperOptions) -> list[RunSpec]:
    return [
        _cell20(options, device, choice, mix, c)
        for device in (options.devices or GPUS)
        for mix in MIXES
        for c in CONCURRENCY20
        for choice in (FOUR | _further_policies(options, 4)).values()
    ]


def _section20(options: PaperOptions, store: RunStore, device: str) -> Section:
    rows = [row for setting in product(MIXES, CONCURRENCY20) for row in _rows20(options, store, device, *setting)]
    columns = labels("mix", "c", "metric") + _columns(FOUR, _further_policies(options, 4))
    return Section(gpu_title(device), columns, tuple(rows))


def _rows20(
    options: PaperOptions, store: RunStore, device: str, mix: str, concurrency: int
) -> Iterator[tuple[Value, ...]]:
    """One row per metric."""
    further = _further_policies(options, 4)
    by_name = {
        name: store.get(_cell20(options, device, choice, mix, concurrency)) for name, choice in (FOUR | further).items()
    }
    for metric, title, key, scale in _METRICS20:
        row: list[Value] = [SYNTHETIC[mix], str(concurrency), title]
        for name in FOUR:
            published = pick(
                "table20_four_gpus", "value", gpu=gpu_title(device), concurrency=str(concurrency),
                workload=mix, setting=name, metric=metric,
            )  # fmt: skip
            row += _published_and_ours(published, value_or_oom(by_name[name], key, scale), failed=device in GPUS)
        base = value_or_oom(by_name["v1_dp4"], key, scale)
        for name in further:
            row += _against(base, value_or_oom(by_name[name], key, scale))
        yield tuple(row)


def _published_and_ours(published: float | None, ours: Value, *, failed: bool) -> tuple[Value, Value, Value]:
    """A published figure beside ours. ``failed``: a figure that was not published is that of a run without memory."""
    left: Value = "OOM" if published is None and failed else published
    if isinstance(ours, float) and published is not None:
        return comparison(published, ours)
    return left, ours, None


def _ranked(by_title: Mapping[str, Measured | None]) -> list[tuple[str, float]]:
    """Titles and rates of the finished runs, best first."""
    rates = [
        (title, measured.get(_RATE))
        for title, measured in by_title.items()
        if measured and not measured.figures.get("dead")
    ]
    return sorted(((title, rate) for title, rate in rates if rate is not None), key=lambda item: -item[1])


def explained(by_title: Mapping[str, Measured]) -> str:
    """The fastest topology, and why the others were slower, from the runs' figures."""
    ranked = _ranked(by_title)
    if not ranked:
        return "no topology finished."
    best, rate = ranked[0]
    remarks = [f"{best} with {rate:,.0f} tokens/s"]
    for title, other_rate in ranked[1:]:
        remarks.append(f"{title} {100 * (other_rate / rate - 1):+.1f} %{_why(title, by_title[title], by_title[best])}")
    remarks += [f"{title} ran out of memory" for title, measured in by_title.items() if measured.figures.get("dead")]
    return f"{remarks[0]}{_why_best(best, by_title[best])}; {'; '.join(remarks[1:])}."


def _why_best(title: str, best: Measured) -> str:
    if title not in _POOLS:
        return ": all GPUs do whatever there is to do"
    return f": prefill GPUs busy {_busy(best):.0f} %, so that neither side waits long for the other"


def _why(title: str, measured: Measured, best: Measured) -> str:
    """Why ``measured`` was slower, if its figures show it."""
    if title not in _POOLS:
        tpot, best_tpot = measured.get("mean_tpot_ms") or 0.0, best.get("mean_tpot_ms") or 0.0
        if tpot > best_tpot:
            return f" (prompts among the decodes: TPOT {tpot:.1f} ms against {best_tpot:.1f})"
        if _ttft(measured) > _ttft(best):
            return f" (decodes while prompts wait: first token after {_ttft(measured):.1f} s against {_ttft(best):.1f})"
        return ""
    if _busy(measured) >= 100 * STARVED:
        return f" (prefill is the bottleneck: busy {_busy(measured):.0f} %, first token after {_ttft(measured):.1f} s)"
    return f" (decode is the bottleneck: prefill GPUs idle {100 - _busy(measured):.0f} %)"


_POOLS = frozenset(choice.title for choice in FOUR.values() if choice.topology.disaggregated)
"""Titles of settings whose prefill and decode are apart."""


def _busy(measured: Measured) -> float:
    return measured.get("front_busy", 100) or 0.0


def _ttft(measured: Measured) -> float:
    return measured.get("mean_ttft_ms", 1e-3) or 0.0


def _sections20(options: PaperOptions, store: RunStore) -> Sections:
    return [_section20(options, store, device) for device in options.devices or GPUS]


def _verdicts(options: PaperOptions, store: RunStore, _sections: Sections) -> Sequence[str]:
    remarks = []
    for device in options.devices or GPUS:
        near = total = 0
        for mix, concurrency in product(MIXES, CONCURRENCY20):
            by_title = {c.title: store.get(_cell20(options, device, c, mix, concurrency)) for c in FOUR.values()}
            known = {title: measured for title, measured in by_title.items() if measured is not None}
            if len(known) < len(FOUR):
                continue
            total += 1
            ranked = _ranked(known)
            near += bool(ranked) and dict(ranked).get("EB+, DP=4", 0.0) >= NEAR * ranked[0][1]
            setting = f"{gpu_title(device)}, {SYNTHETIC[mix]}, c = {concurrency}"
            remarks.append(f"{setting}: {explained(known)}")
            remarks += [f"{setting}: {best}." for best in _best_policy(options, store, device, mix, concurrency)]
        if total:
            remarks.append(
                f"{gpu_title(device)}: EB+ is best or within {100 * (1 - NEAR):.0f} % of it in {near} of {total}."
            )
    return remarks


def _best_policy(options: PaperOptions, store: RunStore, device: str, mix: str, concurrency: int) -> Iterator[str]:
    """The fastest of all policies on DP=4, if further ones were asked for; within 1 % of v1 nothing matters."""
    further = _further_policies(options, 4)
    if not further:
        return
    choices = [FOUR["v1_dp4"], FOUR["ebplus_dp4"], *further.values()]
    by_title = {choice.title: store.get(_cell20(options, device, choice, mix, concurrency)) for choice in choices}
    if any(measured is None for measured in by_title.values()):
        return
    ranked = _ranked(by_title)
    (best, rate), base = ranked[0], dict(ranked)[FOUR["v1_dp4"].title]
    gain = 100 * (rate / base - 1)
    yield f"of the policies, {best} is best ({gain:+.1f} % over v1)" if gain >= 1 else "no policy gains 1 % over v1"


_READS = ("device", "model", "policy", "num_prompts")
_PUBLISHED = Published(tuple(GPUS), (MAIN_MODEL,))
TABLE19 = PaperTable(
    "table19", _cells19, _READS, _sections19, findings=_deaths, whole=False, published_on=_PUBLISHED, facts=globals()
)
TABLE20 = PaperTable(
    "table20", _cells20, _READS, _sections20, findings=_verdicts, whole=False, published_on=_PUBLISHED, facts=globals()
)
